"""Carries the connection between JAX's processes and their coordination service through the hub.

The service checks nobody, and JAX aborts a process whose connection to it ends. So the service listens
at a socket in the file system that only its user can open, and so does a worker for its own JAX; in
between the bytes travel over a connection that has shown the job's token. When the hub is gone, the
worker's end just falls silent, and the program can raise an error instead of being aborted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.cluster.hub.dialling import dial
from phalanx.cluster.hub.frames import ProtocolError, encode
from phalanx.core.errors import PhalanxError

__all__ = ["REQUEST", "PrivateSocket", "Pump", "Tunnel"]

REQUEST = {"type": "tunnel"}
"""What a peer asks for and a hub answers; then the connection is JAX's."""

_PREFIX = "phalanx-socket-"
_CHUNK = 64 * 1024
_LARGEST_BUFFER = 1024 * 1024
_LONGEST_PATH = 90  # bytes; systems allow about a hundred
_PATIENCE = 10.0  # seconds for the hub to open its end
_PAUSE = 0.1  # seconds after a connection that could not be accepted


class PrivateSocket:
    """A path for a Unix socket in a new folder that only this user can enter.

    A file in it is locked as long as this process lives. What others have left behind when they were
    killed is removed.
    """

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        place = place if len(place) < _LONGEST_PATH - 30 else "/tmp"
        _remove_left_behind(place)
        self.folder = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        fresh = os.path.join(self.folder, "new")
        self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(fresh, os.path.join(self.folder, "lock"))  # locked before anybody sees it
        self.path = os.path.join(self.folder, "jax")
        self.address = f"unix://{self.path}"

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _remove_left_behind(place: str) -> None:
    for folder in Path(place).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or just made, or just removed
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@dataclass
class _End:
    """One end of a pair: what waits to be written to it, and the other end."""

    socket: socket.socket
    outgoing: bytearray = field(default_factory=bytearray)
    other: _End | None = None
    is_lasting: bool = False  # stays open, and silent, when the other end is gone
    is_closing: bool = False  # to be closed once everything has been written


class Pump:
    """Copies bytes between pairs of sockets, in one thread."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._new: list[_End] = []
        self._open: set[socket.socket] = set()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, first: socket.socket, second: socket.socket, *, lasting: bool = False) -> None:
        """Copy between two sockets until one ends; then close both, but not a lasting `first`."""
        one, two = _End(first, is_lasting=lasting), _End(second)
        one.other, two.other = two, one
        with self._lock:
            self._new += [one, two]
        self._wake_in.send(b"!")

    def close(self) -> None:
        """Close all sockets and end the thread."""
        if self._stop:
            return
        self._stop = True
        self._wake_in.send(b"!")
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stop:
            for key, mask in self._selector.select(1.0):
                if key.data is None:
                    self._take_new()
                    continue
                end: _End = key.data
                if mask & selectors.EVENT_WRITE:
                    self._write(end)
                if mask & selectors.EVENT_READ:
                    self._read(end)
        self._take_new()
        self._selector.close()
        for s in (*self._open, self._wake_in, self._wake_out):
            s.close()

    def _take_new(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        with self._lock:
            new, self._new = self._new, []
        for end in new:
            end.socket.setblocking(False)
            self._open.add(end.socket)
            self._selector.register(end.socket, selectors.EVENT_READ, end)

    def _read(self, end: _End) -> None:
        other = end.other
        if other is None or end.socket.fileno() < 0:
            return
        try:
            data = end.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._finish(end)
            return
        other.outgoing += data
        self._write(other)

    def _write(self, end: _End) -> None:
        if end.socket.fileno() < 0:
            return
        try:
            while end.outgoing:
                del end.outgoing[: end.socket.send(end.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            end.outgoing.clear()
            self._finish(end)
            return
        if end.is_closing and not end.outgoing:
            self._close(end)
            return
        self._watch(end)
        if end.other is not None:
            self._watch(end.other)

    def _watch(self, end: _End) -> None:
        """Wait for what is possible: reading only while the other end takes what was read."""
        reads = end.other is not None and len(end.other.outgoing) < _LARGEST_BUFFER
        mask = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if end.outgoing else 0)
        known = end.socket.fileno() in self._selector.get_map()
        if mask and known:
            self._selector.modify(end.socket, mask, end)
        elif mask:
            self._selector.register(end.socket, mask, end)
        elif known:
            self._selector.unregister(end.socket)

    def _finish(self, end: _End) -> None:
        """An end has ended: let the other one have what is on its way, and then end it too."""
        other, end.other = end.other, None
        self._close(end)
        if other is not None:
            other.other = None
            other.is_closing = True
            self._write(other)

    def _close(self, end: _End) -> None:
        if end.socket.fileno() in self._selector.get_map():
            self._selector.unregister(end.socket)
        if not (end.is_lasting and end.is_closing):
            self._open.discard(end.socket)
            end.socket.close()


class Tunnel:
    """A worker's way to the coordination service; JAX connects to `address`.

    Args:
        hub: the hub's ``host:port``.
        token: the job's secret.
    """

    def __init__(self, hub: str, token: str) -> None:
        self._hub, self._token = hub, token
        self._place = PrivateSocket()
        self.address = self._place.address
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._place.path)
        self._listener.listen(8)
        self._pump = Pump("phalanx-tunnel")
        self._stop = False
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, name="phalanx-tunnels", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close everything. JAX must have left its service, or be about to end with the process."""
        if self._stop:
            return
        self._stop = True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.connect(self._place.path)
            self._thread.join(_PATIENCE + 1.0)
        self._pump.close()
        for s in (self._listener, *self._kept):
            s.close()
        self._place.remove()

    def _accept(self) -> None:
        while True:
            try:
                local, _ = self._listener.accept()
            except OSError:  # JAX has gone before it was heard, or there are too many open files
                time.sleep(_PAUSE)
                continue
            if self._stop:
                local.close()
                return
            try:
                self._pump.add(local, open_tunnel(self._hub, self._token, _PATIENCE), lasting=True)
            except (OSError, PhalanxError):
                self._kept.append(local)  # silent, so that JAX does not abort


def open_tunnel(hub: str, token: str, timeout: float) -> socket.socket:
    """A connection through a hub to its coordination service."""
    end = time.monotonic() + timeout
    sock, stream = dial(hub, token, timeout)
    try:
        stream.send(REQUEST)
        sock.sendall(stream.take())
        answer, expected = b"", encode(REQUEST)
        while len(answer) < len(expected):  # and not a byte more: what follows is JAX's
            sock.settimeout(max(0.01, end - time.monotonic()))
            data = sock.recv(len(expected) - len(answer))
            answer += data
            if not data or not expected.startswith(answer):
                raise ProtocolError(f"The hub at {hub} has no coordination service for this job.")
    except BaseException:
        sock.close()
        raise
    return sock
