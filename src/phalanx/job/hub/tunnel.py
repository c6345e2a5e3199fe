"""Carries the connection between JAX's processes and their coordination service through the hub.

The service admits all, and JAX aborts a process whose connection to it ends. So the service listens
at a socket in the file system that only its user can open, and so does a worker for its own JAX; in
between the bytes travel over a connection that has shown the job's token. When the hub is gone, the
worker's end just falls silent, and the program can raise an error instead of being aborted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.job.hub.connect import COORDINATION, connect_to_hub
from phalanx.net.event_loop import EventLoop
from phalanx.net.listener import Acceptor
from phalanx.net.relay import Relay
from phalanx.runtime.processes import is_alive

_PREFIX = "phalanx-socket-"
_LONGEST_PATH = 90  # bytes; systems allow about a hundred
_PATIENCE = 10.0  # seconds for the hub to open its end


class PrivateSocket:
    """A path for a Unix socket in a new folder that only this user can enter.

    A file in it is locked as long as this process lives. What others have left behind when they were
    killed is removed.
    """

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        place = place if len(place) < _LONGEST_PATH - 40 else "/tmp"
        remove_left_behind(place)
        self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place)
        fresh = os.path.join(self.folder, "new")
        self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(fresh, os.path.join(self.folder, "lock"))  # locked before others see it
        self.path = os.path.join(self.folder, "jax")
        self.address = f"unix://{self.path}"

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def remove_left_behind(place: str) -> None:
    """Remove the folders in a place whose processes have ended without doing so."""
    for folder in Path(place).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or just removed
            try:
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:  # just made, or its process was killed before it had the lock
                if not is_alive(_owner_of(folder.name)):
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _owner_of(name: str) -> int:
    """The process that has made a folder.

    >>> _owner_of("phalanx-socket-31-x7-y")
    31
    """
    pid = name.removeprefix(_PREFIX).partition("-")[0]
    return int(pid) if pid.isdigit() else os.getpid()  # of a version that did not say


class Tunnel:
    """A worker's way to the coordination service; JAX connects to `address`."""

    def __init__(self, hub: str, token: str) -> None:
        self._hub, self._token = hub, token
        self._place = PrivateSocket()
        self.address = self._place.address
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._place.path)
        listener.listen(8)
        self._loop = EventLoop("phalanx-tunnel")
        self._relay = Relay(self._loop)
        self._acceptor = Acceptor(self._loop, listener, self._accept)
        self._openers: list[threading.Thread] = []
        self._kept: list[socket.socket] = []
        self._loop.start()

    def close(self) -> None:
        """Close everything. JAX must have left its service, or be about to end with the process."""
        if not self._loop.is_alive:
            return
        self._loop.call(self._acceptor.close)
        for thread in self._openers:
            thread.join(_PATIENCE + 1.0)
        self._loop.close()
        self._relay.close()
        for sock in self._kept:
            sock.close()
        self._place.remove()

    def _accept(self, local: socket.socket) -> None:
        """Connect to the hub in a thread of its own, as that may take a while."""
        self._openers = [t for t in self._openers if t.is_alive()]
        thread = threading.Thread(
            target=self._open, args=(local,), name="phalanx-tunnel-opener", daemon=True
        )
        thread.start()
        self._openers.append(thread)

    def _open(self, local: socket.socket) -> None:
        try:
            self._relay.add(local, open_tunnel(self._hub, self._token, _PATIENCE), lasting=True)
        except (OSError, PhalanxError):
            self._kept.append(local)  # silent, so that JAX does not abort


def open_tunnel(hub: str, token: str, timeout: float) -> socket.socket:
    """A connection through a hub to its coordination service."""
    return connect_to_hub(hub, token, timeout, COORDINATION)
