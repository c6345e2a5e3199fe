"""Connections between workers, of which both ends have proved that they belong to the job.

A connection begins with a random number from each end. Both show with a keyed hash (SHA-256) of both
numbers, and of what the connection is for, that they know the job's secret. Nothing is looked into
before that, and nothing is unpickled here.

Workers on one machine meet at Unix sockets, which move more than twice as much as TCP does. Linux has
them without files, in a name space that ends with the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.core.errors import UnauthenticatedError

_GREETING = b"phalanx-comm 1\n"
_NONCE = 32
_PROOF = hashlib.sha256().digest_size
_LONGEST_PURPOSE = 4096
_BACKLOG = 128
_HANDSHAKE = 10.0  # seconds for both ends to prove themselves
_MOST_STRANGERS = 64  # connections that have not proved themselves yet
_PAUSE = 0.1  # seconds after a connection that could not be accepted
_BUFFER = 4 << 20  # bytes that the system may hold of a connection, in each direction


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
    """The place where a worker can be reached by the others, and from where it reaches them.

    Args:
        rank: the rank of this worker.
        host: the address to listen at.
        key: the job's secret.
    """

    def __init__(self, rank: int, host: str, key: bytes) -> None:
        self._rank, self._key = rank, key
        self._changed = threading.Condition()
        self._arrived: dict[Purpose, socket.socket] = {}
        self._takers: dict[str, Callable[[int, socket.socket], None]] = {}
        self._all: list[socket.socket] = []
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listeners = [socket.create_server((host, 0), family=family, backlog=_BACKLOG)]
        self.address = Address(host, int(self._listeners[0].getsockname()[1]))
        """Where this worker listens."""
        if sys.platform == "linux":
            self.address = self.address._replace(local=f"phalanx-{secrets.token_hex(16)}")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(_unnamed(self.address))
            listener.listen(_BACKLOG)
            self._listeners.append(listener)
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="phalanx-links", daemon=True
            ).start()

    def dial(self, address: Address, channel: str, seconds: float) -> socket.socket:
        """Connect to another worker, for a channel that both know."""
        sock = _connect(address, seconds)
        try:
            _prove_to_listener(sock, self._key, Purpose(self._rank, channel))
            _prepare(sock)
        except BaseException:
            sock.close()
            raise
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
        """Call `take`, in a thread of its own, with each connection that is made for a channel."""
        self._takers[channel] = take

    def cut(self) -> None:
        """End all connections, so that whoever waits for one stops waiting."""
        with self._changed:
            for sock in self._all:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        self.cut()
        with self._changed:
            for sock in (*self._all, *self._strangers):
                sock.close()

    # -- inside ----------------------------------------------------------------------------------

    def _note(self, sock: socket.socket) -> None:
        """Remember a connection, so that it is ended with the others."""
        with self._changed:
            self._all = [s for s in self._all if s.fileno() >= 0] + [sock]
            if self._closed:
                sock.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError:  # the peer is gone already, or this process has no descriptor left
                if not self._closed:
                    time.sleep(_PAUSE)
                continue
            self._make_room(sock)
            thread = threading.Thread(
                target=self._admit, args=(sock,), name="phalanx-links-peer", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # this process can have no more threads
                self._turn_away(sock)

    def _make_room(self, newcomer: socket.socket) -> None:
        """Let a stranger in; the oldest goes if there are too many, so that none keeps others out."""
        with self._changed:
            self._strangers[newcomer] = None
            crowd = list(self._strangers)[:-_MOST_STRANGERS]
        for sock in crowd:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # its thread closes it
            with self._changed:
                self._strangers.pop(sock, None)

    def _turn_away(self, sock: socket.socket) -> None:
        with self._changed:
            self._strangers.pop(sock, None)
        sock.close()

    def _admit(self, sock: socket.socket) -> None:
        try:
            purpose = _prove_to_dialler(sock, self._key)
            _prepare(sock)
        except (OSError, UnauthenticatedError, ValueError, TypeError, OverflowError):
            self._turn_away(sock)
            return
        with self._changed:
            self._strangers.pop(sock, None)
        self._note(sock)
        take = self._takers.get(purpose.channel)
        if take is not None:
            take(purpose.rank, sock)
            return
        with self._changed:
            self._arrived[purpose] = sock
            self._changed.notify_all()


def _unnamed(address: Address) -> bytes:
    """The name of a Unix socket that has no file."""
    return b"\0" + address.local.encode()


def _connect(address: Address, seconds: float) -> socket.socket:
    if address.local:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(seconds)
        try:
            sock.connect(_unnamed(address))
        except OSError:  # another container of the same machine
            sock.close()
        else:
            return sock
    return socket.create_connection((address.host, address.port), seconds)


def _prepare(sock: socket.socket) -> None:
    sock.settimeout(None)
    is_local = sock.family == socket.AF_UNIX
    if not is_local:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_local or _largest_buffer() >= _BUFFER:  # else TCP's own choice is better
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)


def _largest_buffer() -> int:
    """How large a buffer of a connection may be; 0 if the system does not tell."""
    sizes = []
    for name in ("rmem_max", "wmem_max"):
        try:
            with open(f"/proc/sys/net/core/{name}") as file:
                sizes.append(int(file.read()))
        except (OSError, ValueError):
            return 0
    return min(sizes)


# -- proofs ------------------------------------------------------------------------------------------


def _prove_to_dialler(sock: socket.socket, key: bytes) -> Purpose:
    """The listener's side; returns what the other end wants, which has proved itself."""
    reader = _Reader(sock)
    nonce = secrets.token_bytes(_NONCE)
    sock.settimeout(_HANDSHAKE)
    sock.sendall(_GREETING + nonce)
    other, proof = reader.read(_NONCE), reader.read(_PROOF)
    length = int.from_bytes(reader.read(4), "big")
    if length > _LONGEST_PURPOSE:
        raise UnauthenticatedError("A peer does not speak as a worker of this job.")
    purpose = reader.read(length)
    if not hmac.compare_digest(proof, _proof(key, b"dials", nonce, other, purpose)):
        raise UnauthenticatedError("A peer does not know the job's token.")
    sock.sendall(_proof(key, b"listens", nonce, other, purpose))
    rank, channel = json.loads(purpose)
    return Purpose(int(rank), str(channel))


def _prove_to_listener(sock: socket.socket, key: bytes, purpose: Purpose) -> None:
    reader = _Reader(sock)
    if reader.read(len(_GREETING)) != _GREETING:
        raise UnauthenticatedError("What listens there is not a worker of this job.")
    other, nonce = reader.read(_NONCE), secrets.token_bytes(_NONCE)
    text = json.dumps(purpose).encode()
    proof = _proof(key, b"dials", other, nonce, text)
    sock.sendall(nonce + proof + len(text).to_bytes(4, "big") + text)
    if not hmac.compare_digest(reader.read(_PROOF), _proof(key, b"listens", other, nonce, text)):
        raise UnauthenticatedError("What listens there does not know the job's token.")


def _proof(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, side + b"".join(parts), hashlib.sha256).digest()


class _Reader:
    """Reads exactly so many bytes, all of them before the handshake's time is over."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._end = sock, time.monotonic() + _HANDSHAKE

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._sock.settimeout(max(0.01, self._end - time.monotonic()))
            more = self._sock.recv(size - len(data))
            if not more:
                raise UnauthenticatedError("A peer closes the connection instead of a proof.")
            data += more
        return data


def receive_exactly(sock: Any, view: memoryview) -> None:
    """Fill a buffer from a connection that blocks."""
    while len(view):
        count = sock.recv_into(view)
        if not count:
            raise ConnectionResetError("connection closed")
        view = view[count:]
