"""A ring of shared memory beside a connection of one machine, for large buffers of requests.

A task writes large arrays there and sends where they are. The server reads them in place, which saves
two copies through the system. It has done so when it answers, so answers give the room back. Where
there is no such memory, buffers go over the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.net.framing import ProtocolError
from phalanx.parameter_server.shared_memory import SharedMemory

__all__ = ["LANED", "Lane", "restored"]

LANED = 100
"""The kind of a request of which some buffers are in the lane. The request itself follows."""

_SIZE = 16 << 20
_LARGE = 64 << 10  # bytes from which a buffer takes the lane
_LINE = 64  # where buffers begin, so that they are aligned
_ENTRY = struct.Struct("<IQQ")  # which buffer, where it is, its bytes


class Lane(SharedMemory):
    """The end that writes. For one thread.

    Args:
        size: bytes of the ring.
    """

    def __init__(self, size: int = _SIZE) -> None:
        super().__init__(size)
        self._head = self._tail = 0  # bytes that were given out, and that came back

    def fits(self, buffers: Sequence[Any]) -> bool:
        """Whether the large ones of some buffers can ever be in the lane together."""
        sizes = [len(b) for b in buffers if len(b) >= _LARGE]
        return bool(sizes) and sum(sizes) + _LINE * len(sizes) <= self.size // 2

    def place(self, buffers: Sequence[Any]) -> tuple[list[Any], int] | None:
        """Write large buffers into the lane.

        Returns:
            The request to send, and the mark to give back with `release`; None if there is no room now.
        """
        entries, rest = [], list(buffers)
        head = self._head
        for i, buffer in enumerate(buffers):
            size = len(buffer)
            if size < _LARGE:
                continue
            at = head % self.size
            if at + size > self.size:  # not around the end
                head += self.size - at
                at = 0
            if head + size - self._tail > self.size:
                return None
            self.bytes[at : at + size] = np.frombuffer(buffer, np.uint8)
            entries.append(_ENTRY.pack(i, at, size))
            rest[i] = b""
            head += -(-size // _LINE) * _LINE
        self._head = head
        return [bytes([LANED]) + b"".join(entries), *rest], head

    def release(self, mark: int) -> None:
        """The other end has answered, so everything up to a mark may be written again."""
        self._tail = max(self._tail, mark)


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
