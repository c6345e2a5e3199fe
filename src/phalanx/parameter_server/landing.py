"""Shared memory beside a connection of one machine, for large values that a task reads.

A task says in its request where a value shall be. The server writes it there, in one copy, and the task
uses it in place. A part of the memory is free again when nothing refers to it any more.

After a loss of the connection a task takes other memory: a server may still write what it was asked for
before. Where there is no such memory, values come over the connection.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np

from phalanx.net.framing import ProtocolError
from phalanx.parameter_server.buffers import is_shared
from phalanx.parameter_server.shared_memory import SharedMemory

__all__ = ["LARGE", "Landing", "Room", "put"]

LARGE = 256 << 10
"""Bytes from which a value is worth it."""

_SIZE = 256 << 20


class Room(NamedTuple):
    """Where a value can be written.

    Args:
        landing: the memory that it is a part of.
        place: where it begins.
        memory: itself.
    """

    landing: Landing
    place: int
    memory: np.ndarray[Any, Any]


class Landing(SharedMemory):
    """The end that reads. For one thread.

    Args:
        size: bytes of the memory.

    >>> landing = Landing(1 << 20)
    >>> first = landing.room(400_000)
    >>> second = landing.room(400_000)
    >>> first.place, second.place, landing.room(400_000)
    (0, 401408, None)
    >>> del first
    >>> landing.room(400_000).place
    0
    """

    def __init__(self, size: int = _SIZE) -> None:
        super().__init__(size)
        self._given = 0  # bytes, from the beginning on
        self._parts: dict[int, list[np.ndarray[Any, Any]]] = {}  # those of a size
        self._places: dict[int, list[int]] = {}

    def room(self, size: int) -> Room | None:
        """Where a value of so many bytes can be; None if nothing is free."""
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        parts, places = self._parts.setdefault(pages, []), self._places.setdefault(pages, [])
        for i, place in enumerate(places):
            if not is_shared(parts, i):
                return Room(self, place, parts[i][:size])
        if self._given + pages > self.size:
            return None
        place = self._given
        self._given += pages
        # An object of its own, so that it is known what refers to it.
        parts.append(np.frombuffer(self.bytes.data, np.uint8, pages, place))
        places.append(place)
        return Room(self, place, parts[-1][:size])


def put(value: Any, landing: memoryview, place: int) -> None:
    """Write the bytes of a value where a task wants them."""
    room = landing[place : place + len(value)]
    if len(room) < len(value):
        raise ProtocolError("A peer wants a value where there is no room for it.")
    np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(value, np.uint8))
