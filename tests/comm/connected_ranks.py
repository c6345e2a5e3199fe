"""Ranks as threads of one process, with real connections: operations without workers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from typing import Any

from phalanx.collectives.channels import Channel, Notice
from phalanx.collectives.workers_on_host import OnHost

DEADLINE = 20.0


class ConnectedRanks:
    """Some ranks that are connected with each other.

    Args:
        size: how many.
        buffer: bytes that the system may hold of a connection.
    """

    def __init__(self, size: int, buffer: int | None = None) -> None:
        self.size = size
        sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for i, j in combinations(range(size), 2):
            sockets[i][j], sockets[j][i] = socket.socketpair()
            for sock in (sockets[i][j], sockets[j][i]):
                if buffer is not None:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        self.sockets = sockets
        self.channels = [Channel(i, sockets[i], lambda: None) for i in range(size)]
        self._pool = ThreadPoolExecutor(size)
        self._lock = threading.Lock()

    def operation(
        self,
        rank: int,
        same: str,
        value: Any = None,
        seconds: float = DEADLINE,
        order: tuple[int, ...] | None = None,
    ) -> OnHost:
        """One rank's view of an operation."""
        ranks = tuple(range(self.size)) if order is None else order
        return OnHost(self.channels[rank], ranks, Notice(same, f"line {rank}", value), seconds)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank gives, or the error that it raises."""

        def one(rank: int) -> Any:
            try:
                result = work(rank)
            except Exception as error:  # noqa: BLE001 - is looked at
                return error
            self.channels[rank].finish()
            return result

        return list(self._pool.map(one, range(self.size), timeout=2 * DEADLINE))

    def die(self, rank: int) -> None:
        """Close what a process that is killed leaves behind."""
        for sock in self.sockets[rank].values():
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        for rank in range(self.size):
            for sock in self.sockets[rank].values():
                sock.close()
        self._pool.shutdown()


@contextmanager
def connected_ranks(size: int, buffer: int | None = None) -> Iterator[ConnectedRanks]:
    """Connected ranks, which are closed in the end."""
    made = ConnectedRanks(size, buffer)
    try:
        yield made
    finally:
        made.close()
