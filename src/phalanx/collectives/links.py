"""Connections between workers, of which both ends have proved that they belong to the job."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.net.addresses import enlarge, listen, listen_nearby, reach
from phalanx.net.client import authenticate
from phalanx.net.event_loop import EventLoop
from phalanx.net.listener import Listener

_HANDSHAKE = 10.0  # seconds for both ends to prove themselves


class Purpose(NamedTuple):
    """What a connection is for: who asks for it, and which channel of theirs it belongs to."""

    rank: int
    channel: str


class Address(NamedTuple):
    """Where a worker can be reached: over the network, and from its own machine if that differs."""

    host: str
    port: int
    local: str = ""


class Links:
    """The place where a worker can be reached by the others, and from where it reaches them."""

    def __init__(self, rank: int, host: str, key: bytes) -> None:
        self._rank, self._key = rank, key
        self._changed = threading.Condition()
        self._arrived: dict[Purpose, socket.socket] = {}
        self._takers: dict[str, Callable[[int, socket.socket], None]] = {}
        self._all: list[socket.socket] = []
        self._closed = False
        sockets = [listen(host, 0)]
        self.address = Address(host, int(sockets[0].getsockname()[1]))
        """Where this worker listens."""
        name = f"phalanx-{secrets.token_hex(16)}"
        nearby = listen_nearby(name)
        if nearby is not None:
            self.address = self.address._replace(local=name)
            sockets.append(nearby)
        self.loop = EventLoop("phalanx-links")
        """Waits for what others send; its thread must not wait for anything else."""
        self._listener = Listener(self.loop, sockets, key, self._admit, _is_purpose)
        self.loop.start()

    def dial(self, address: Address, channel: str, seconds: float) -> socket.socket:
        """Connect to another worker, for a channel that both know."""
        sock = reach(*address, seconds)
        purpose = Purpose(self._rank, channel)._asdict()
        authenticate(sock, self._key, purpose, min(seconds, _HANDSHAKE), "worker")
        self._note(sock)
        return sock

    def wait(self, channel: str, rank: int, seconds: float) -> socket.socket | None:
        """The connection that another worker has made for a channel; None if it does not come."""
        purpose = Purpose(rank, channel)
        with self._changed:
            self._changed.wait_for(lambda: purpose in self._arrived, seconds)
            return self._arrived.pop(purpose, None)

    def has(self, channel: str, rank: int) -> bool:
        """Whether another worker has made a connection for a channel."""
        return Purpose(rank, channel) in self._arrived

    def give(self, channel: str, take: Callable[[int, socket.socket], None]) -> None:
        """Call `take`, in the thread of the loop, with each connection that is made for a channel."""
        self._takers[channel] = take

    def cut(self) -> None:
        """End all connections, so that those who wait for one stop waiting."""
        with self._changed:
            for sock in self._all:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed = True
        self.loop.call(self._listener.close)
        self.loop.close()
        self.cut()
        with self._changed:
            for sock in self._all:
                sock.close()

    # -- inside ----------------------------------------------------------------------------------

    def _note(self, sock: socket.socket) -> None:
        """Remember a connection, so that it is ended with the others."""
        enlarge(sock)
        with self._changed:
            self._all = [s for s in self._all if s.fileno() >= 0] + [sock]
            if self._closed:
                sock.close()

    def _admit(self, sock: socket.socket, about: dict[str, Any]) -> None:
        purpose = Purpose(**about)
        sock.setblocking(True)
        self._note(sock)
        take = self._takers.get(purpose.channel)
        if take is not None:
            take(purpose.rank, sock)
            return
        with self._changed:
            self._arrived[purpose] = sock
            self._changed.notify_all()


def _is_purpose(about: dict[str, Any]) -> bool:
    is_whole = set(about) == set(Purpose._fields)
    return is_whole and isinstance(about["rank"], int) and isinstance(about["channel"], str)
