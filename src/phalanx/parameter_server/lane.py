"""A ring of shared memory beside a connection of one machine, for large buffers of requests.

A task writes large arrays there and sends where they are. The server reads them in place, which saves
two copies through the system. It has done so when it answers, so answers give the room back.

The memory has no name, so nothing is left behind, and it cannot shrink under those who read it. The
server opens it by the descriptor of the task's process, which only processes of the same user can, and
looks for a number that only the right one has. Where any of that fails, buffers go over the connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.errors import UnavailableError
from phalanx.net.framing import ProtocolError

__all__ = ["LANED", "Lane", "offer", "open_lane", "restored"]

LANED = 100
"""The kind of a request of which some buffers are in the lane. The request itself follows."""

_SIZE = 16 << 20
_LARGE = 64 << 10  # bytes from which a buffer takes the lane
_LINE = 64  # where buffers begin, so that they are aligned
_NONCE = 32
_ENTRY = struct.Struct("<IQQ")  # which buffer, where it is, its bytes
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class Lane:
    """The end that writes. For one thread.

    Args:
        size: bytes of the ring.
    """

    def __init__(self, size: int = _SIZE) -> None:
        self._size = size
        self._nonce = secrets.token_bytes(_NONCE)
        self._descriptor = os.memfd_create("phalanx-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, size + _LINE)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _seals())
        self._bytes = np.frombuffer(mmap.mmap(self._descriptor, size + _LINE), np.uint8)
        self._bytes[:_NONCE] = np.frombuffer(self._nonce, np.uint8)
        self._head = self._tail = 0  # bytes that were given out, and that came back

    @property
    def description(self) -> dict[str, Any]:
        """Where the other end finds the memory."""
        return {
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "size": self._size,
            "nonce": self._nonce.hex(),
        }

    def close_descriptor(self) -> None:
        """The other end has opened the memory, or never will."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def fits(self, buffers: Sequence[Any]) -> bool:
        """Whether the large ones of some buffers can ever be in the lane together."""
        sizes = [len(b) for b in buffers if len(b) >= _LARGE]
        return bool(sizes) and sum(sizes) + _LINE * len(sizes) <= self._size // 2

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
            at = head % self._size
            if at + size > self._size:  # not around the end
                head += self._size - at
                at = 0
            if head + size - self._tail > self._size:
                return None
            self._bytes[_LINE + at : _LINE + at + size] = np.frombuffer(buffer, np.uint8)
            entries.append(_ENTRY.pack(i, at, size))
            rest[i] = b""
            head += -(-size // _LINE) * _LINE
        self._head = head
        return [bytes([LANED]) + b"".join(entries), *rest], head

    def release(self, mark: int) -> None:
        """The other end has answered, so everything up to a mark may be written again."""
        self._tail = max(self._tail, mark)


def offer() -> Lane | None:
    """A new lane, if the system has such memory."""
    if sys.platform != "linux" or not hasattr(fcntl, "F_ADD_SEALS"):
        return None
    with contextlib.suppress(OSError):
        return Lane()
    return None


def open_lane(fields: dict[str, Any]) -> memoryview:
    """The memory of the other end, to be read only."""
    try:
        process, descriptor = int(fields["process"]), int(fields["descriptor"])
        size, nonce = int(fields["size"]), bytes.fromhex(fields["nonce"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"A peer described a lane wrongly: {error}") from None
    try:
        found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_sealed = fcntl.fcntl(found, fcntl.F_GET_SEALS) & _seals() == _seals()
            whole = memoryview(mmap.mmap(found, size + _LINE, prot=mmap.PROT_READ))
        finally:
            os.close(found)
    except (OSError, ValueError, OverflowError) as error:
        raise UnavailableError(f"The memory of the peer cannot be opened: {error}") from None
    if not is_sealed or len(nonce) != _NONCE or whole[:_NONCE] != nonce:
        raise UnavailableError("The memory of the peer is another one.")
    return whole[_LINE:]


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


def _seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)
