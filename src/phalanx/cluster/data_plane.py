"""The connections between CPU devices of different workers, and how to end them.

They belong to gloo, inside of XLA. A wait in there cannot be interrupted, but it fails when its
connection ends. A worker whose peer dies is freed in this way; a worker that waits for one that lives,
or for another device of its own process, is not. So when a job has failed, every worker ends its own.

Each process has one socket that listens for the devices of the others, and every connection has such a
socket's address at one of its ends.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Address", "cut", "listening"]

Address = tuple[str, int]

_DESCRIPTORS = "/proc/self/fd"


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


def _tcp_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, whoever opened them."""
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
