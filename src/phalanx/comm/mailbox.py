"""Messages from worker to worker, over connections of which both ends have proved that they belong.

Every worker listens, and connects to another when it first sends something to it. Both ends prove with
a keyed hash of a random challenge that they know the job's token before anything else is read. A
message is a small JSON header and plain bytes; nothing is unpickled here.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, NamedTuple

_LONGEST_HEADER = 1 << 20


class Message(NamedTuple):
    """What came: from whom, about what, and the bytes."""

    source: int
    about: dict[str, Any]
    data: bytes


class Mailbox:
    """Where the messages for one worker arrive.

    Args:
        rank: the rank of this worker.
        host: the address to listen at.
        token: the job's secret.
        find: gives the address of another worker's mailbox; may wait for it.
    """

    def __init__(
        self, rank: int, host: str, token: bytes, find: Callable[[int], tuple[str, int]]
    ) -> None:
        self._rank, self._token, self._find = rank, token, find
        self._lock = threading.Lock()
        self._arrived: dict[tuple[str, int], deque[Message]] = {}
        self._wanted: dict[str, list[tuple[int | None, Future[Message]]]] = {}
        self._out: dict[int, tuple[Connection, threading.Lock]] = {}
        self._closed = False
        family = "AF_INET6" if ":" in host else "AF_INET"
        self._listener = Listener((host, 0), family, backlog=64)
        self.port = int(self._listener.address[1])
        threading.Thread(target=self._accept, name="phalanx-mailbox", daemon=True).start()

    # -- sending ---------------------------------------------------------------------------------

    def post(self, rank: int, topic: str, about: dict[str, Any], data: Any = b"") -> None:
        """Send a message; returns when it is on its way."""
        if rank == self._rank:
            self._deliver(topic, Message(rank, about, bytes(data)))
            return
        connection, lock = self._connection(rank)
        size = memoryview(data).nbytes
        header = json.dumps({"topic": topic, "about": about, "size": size}).encode()
        with lock:
            connection.send_bytes(header)
            if size:
                connection.send_bytes(memoryview(data).cast("B"))

    def _connection(self, rank: int) -> tuple[Connection, threading.Lock]:
        with self._lock:
            known = self._out.get(rank)
        if known is not None:
            return known
        address = self._find(rank)
        connection: Connection = Client(address, authkey=self._token)
        connection.send_bytes(str(self._rank).encode())
        with self._lock:
            if rank in self._out:  # another thread was quicker
                connection.close()
            else:
                self._out[rank] = (connection, threading.Lock())
            return self._out[rank]

    # -- receiving -------------------------------------------------------------------------------

    def expect(self, topic: str, source: int | None) -> Future[Message]:
        """The next message on a topic from a rank, or from any; those that ask first get it first."""
        future: Future[Message] = Future()
        with self._lock:
            boxes = [k for k in self._arrived if k[0] == topic and source in (None, k[1])]
            if not boxes:
                self._wanted.setdefault(topic, []).append((source, future))
                return future
            message = self._arrived[boxes[0]].popleft()
            if not self._arrived[boxes[0]]:
                del self._arrived[boxes[0]]
        future.set_result(message)
        return future

    def _deliver(self, topic: str, message: Message) -> None:
        with self._lock:
            waiting = self._wanted.get(topic, [])
            chosen = next((w for w in waiting if w[0] in (None, message.source)), None)
            if chosen is None:
                self._arrived.setdefault((topic, message.source), deque()).append(message)
                return
            waiting.remove(chosen)
            if not waiting:
                del self._wanted[topic]
        chosen[1].set_result(message)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._receive, args=(connection,), name="phalanx-mailbox-peer", daemon=True
            ).start()

    def _receive(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError, ValueError, KeyError):
            deliver_challenge(connection, self._token)
            answer_challenge(connection, self._token)
            source = int(connection.recv_bytes(64))
            while True:
                header = json.loads(connection.recv_bytes(_LONGEST_HEADER))
                data = connection.recv_bytes() if header["size"] else b""
                self._deliver(header["topic"], Message(source, header["about"], data))
        connection.close()

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closed = True
        self._listener.close()
        with self._lock:
            for connection, _ in self._out.values():
                connection.close()
            self._out.clear()
