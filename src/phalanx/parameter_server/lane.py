"""Shared memory beside a connection of one machine, for large buffers of requests.

A task writes large arrays there and sends where they are. The server reads them in place, which saves
two copies through the system. It has done so when it answers, so answers give the room back. Where
there is no such memory, buffers go over the connection.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.net.framing import ProtocolError
from phalanx.parameter_server.shared_memory import SharedMemory

__all__ = ["LANED", "Lane", "Placed", "restored"]

LANED = 100
"""The kind of a request of which some buffers are in the lane. The request itself follows."""

_SIZE = 16 << 20
_LARGE = 64 << 10  # bytes from which a buffer takes the lane
_ENTRY = struct.Struct("<IQQ")  # which buffer, where it is, its bytes


class Lane(SharedMemory):
    """The end that writes. For one thread.

    A request gets the place that came back last, which is still in the caches of the processors.

    Args:
        size: bytes of the memory.

    >>> lane = Lane(1 << 20)
    >>> large = bytes(100_000)
    >>> (_, first), (_, second) = lane.place([large]), lane.place([large])
    >>> first.places, second.places
    ([0], [102400])
    >>> lane.release(second)
    >>> lane.place([large])[1].places
    [102400]
    """

    def __init__(self, size: int = _SIZE) -> None:
        super().__init__(size)
        self._given = 0  # bytes, from the beginning on
        self._used = 0  # places that are in use
        self._free: dict[int, list[int]] = {}  # places that came back, by their pages

    def fits(self, buffers: Sequence[Any]) -> bool:
        """Whether the large ones of some buffers can ever be in the lane together."""
        sizes = [_in_pages(len(b)) for b in buffers if len(b) >= _LARGE]
        return bool(sizes) and sum(sizes) <= self.size

    def place(self, buffers: list[Any]) -> tuple[list[Any], Placed] | None:
        """Write large buffers into the lane, where `buffers` has them afterwards.

        So the arrays that they were can be freed, and the next ones take the same memory.

        Returns:
            The request to send, and what to give back with `release`; None if there is no room now.
        """
        large = [i for i, buffer in enumerate(buffers) if len(buffer) >= _LARGE]
        sizes = [_in_pages(len(buffers[i])) for i in large]
        places = self._take(sizes)
        if places is None and not self._used:  # all of it is free, in pieces of other sizes
            self._given = 0
            self._free.clear()
            places = self._take(sizes)
        if places is None:
            return None
        entries, rest = [], list(buffers)
        for i, at in zip(large, places, strict=True):
            size = len(buffers[i])
            written = self.bytes[at : at + size]
            written[:] = np.frombuffer(buffers[i], np.uint8)
            entries.append(_ENTRY.pack(i, at, size))
            rest[i] = b""
            buffers[i] = written.data
        return [bytes([LANED]) + b"".join(entries), *rest], Placed(places, sizes)

    def release(self, placed: Placed) -> None:
        """The other end has answered, so what was placed may be written over."""
        for at, size in zip(*placed, strict=True):
            self._free.setdefault(size, []).append(at)
            self._used -= 1

    def _take(self, sizes: Sequence[int]) -> list[int] | None:
        places: list[int] = []
        for size in sizes:
            if free := self._free.get(size):
                at = free.pop()
            elif self._given + size <= self.size:
                at = self._given
                self._given += size
            else:
                self.release(Placed(places, list(sizes[: len(places)])))
                return None
            self._used += 1
            places.append(at)
        return places


class Placed(NamedTuple):
    """What a request has in the lane.

    Args:
        places: where its buffers begin.
        sizes: the bytes that each of them takes.
    """

    places: list[int]
    sizes: list[int]


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def restored(buffers: Sequence[Any], lane: memoryview | None) -> list[Any]:
    """The request whose large buffers are in the lane, not copied."""
    request = list(buffers[1:])
    try:
        for i, at, size in _ENTRY.iter_unpack(buffers[0][1:]):
            if lane is None or at + size > len(lane) or len(request[i]):
                raise ProtocolError("A peer said that a buffer is where there is none.")
            request[i] = lane[at : at + size]
    except (struct.error, IndexError) as error:
        raise ProtocolError(f"A peer said wrongly where its buffers are: {error}") from None
    return request
