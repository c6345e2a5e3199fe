"""The connections between CPU devices of different workers, and how to end them.

They belong to gloo, inside XLA. A wait in there cannot be interrupted, but it fails when its
connection ends. A worker whose peer dies is freed in this way; a worker that waits for one that lives,
or for another device of its own process, is not. So when a job has failed, every worker ends its own.

Each process has one socket that listens for the devices of the others, and every connection has such a
socket's address at one of its ends.

gloo takes every connection that comes, keeps those of strangers for good, and aborts the process when
it has no descriptor left for the next one. So a `Gate` makes the kernel drop what knocks at that socket
once all devices are connected. Programs over other sets of devices connect again: who sees that its own
process tries to, asks all workers to open their gates for a moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

Address = tuple[str, int]

_DESCRIPTORS = "/proc/self/fd"
_CONNECTIONS = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_CONNECTING = "02"  # a connection that was asked for and is not there yet
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # of Linux; Python has no names for them
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction of the packet filter: keep 0 bytes
_OPEN = 5.0  # seconds that a gate stays open


def listening() -> set[Address]:
    """The addresses at which this process listens; empty where the system does not tell."""
    return {_address(s.getsockname()) for s in _tcp_sockets() if _listens(s)}


def cut(addresses: Iterable[Address | Sequence[object] | None]) -> int:
    """End all connections of this process from or to these addresses; returns how many there were.

    The descriptors stay open, so that their owner finds out in its own time.
    """
    known = {_address(a) for a in addresses if a is not None}
    count = 0
    for s in _tcp_sockets():
        try:
            ends = {_address(s.getsockname()), _address(s.getpeername())}
            if ends & known:
                s.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:  # it listens, or has ended already
            continue
    return count


def cut_all() -> int:
    """End all TCP connections of this process, as if its network were gone; returns how many."""
    count = 0
    for s in _tcp_sockets():
        if not _listens(s):  # which a lost network does not end, and which gloo cannot do without
            with contextlib.suppress(OSError):  # it has ended already
                s.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def tries_to_connect(addresses: Iterable[Address | Sequence[object] | None]) -> bool:
    """Whether this process tries in vain to connect to one of these addresses."""
    own = {os.fstat(s.fileno()).st_ino for s in _tcp_sockets() if _is_connecting(s)}
    if not own:  # as mostly; to list all connections of the machine takes milliseconds
        return False
    wanted = {_address(a) for a in addresses if a is not None}
    tried: set[int] = set()
    for path in _CONNECTIONS:
        with contextlib.suppress(OSError), open(path) as file:
            lines = (line.split() for line in file)
            tried |= {int(w[9]) for w in lines if w[3] == _CONNECTING and _from_hex(w[2]) in wanted}
    return bool(own & tried)


def _is_connecting(s: socket.socket) -> bool:
    """Whether a connection was asked for and is not there yet."""
    with contextlib.suppress(OSError):
        return s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == int(_CONNECTING)
    return False


class Gate:
    """Keeps the devices of this worker closed to connections, but for moments. Linux only; else open.

    `address` is where the devices are listened for, if that is known.
    """

    def __init__(self, address: Address | None) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._is_closed = False
        self._sock = None if address is None or sys.platform != "linux" else _listener_at(address)
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether no peer can connect."""
        return self._is_closed

    def open(self, seconds: float = _OPEN) -> None:
        """Let others connect for some time."""
        with self._lock:
            self._until = time.monotonic() + seconds
            if self._sock is not None and self._is_closed:
                self._sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
                self._is_closed = False

    def close(self) -> None:
        """Let no peer connect, unless the gate was opened a moment ago."""
        with self._lock:
            if self._sock is None or self._is_closed or time.monotonic() < self._until:
                return
            code = ctypes.create_string_buffer(_DROP_ALL)
            program = struct.pack("HL", len(_DROP_ALL) // 8, ctypes.addressof(code))
            with contextlib.suppress(OSError):  # a sandbox that has no packet filters
                self._sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
                self._is_closed = True

    def release(self) -> None:
        """Leave the gate open for good."""
        self.open()
        with self._lock:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def _listener_at(address: Address) -> socket.socket | None:
    """A copy of the socket that listens at an address."""
    for s in _tcp_sockets():
        if _listens(s) and _address(s.getsockname()) == _address(address):
            # Not s.dup(), which would make it blocking, for its owner too.
            return socket.socket(fileno=os.dup(s.fileno()))
    return None


def _from_hex(text: str) -> Address | None:
    """An address as the kernel writes it: words of four bytes, in the order of the machine.

    >>> _from_hex("0100007F:1F90")
    ('127.0.0.1', 8080)
    """
    found = re.fullmatch(r"([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4})", text)
    if found is None:
        return None
    host = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in re.findall(r".{8}", found[1]))
    family = socket.AF_INET if len(host) == 4 else socket.AF_INET6
    return _address((socket.inet_ntop(family, host), int(found[2], 16)))


def _tcp_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, whichever code opened them."""
    try:
        descriptors = [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:
        return
    for descriptor in descriptors:
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # closed in the meantime
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield copy


def _listens(s: socket.socket) -> bool:
    return bool(s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(name: Sequence[object]) -> Address:
    """Host and port, with IPv4 addresses in one spelling.

    >>> _address(("::ffff:127.0.0.1", 80, 0, 0))
    ('127.0.0.1', 80)
    """
    return str(name[0]).removeprefix("::ffff:"), int(str(name[1]))
