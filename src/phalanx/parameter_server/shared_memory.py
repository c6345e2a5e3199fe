"""Memory that a task shares with a parameter server of the same machine.

The memory has no name, so nothing is left behind, and it cannot shrink under those who use it. The
server opens it by the descriptor of the task's process, which only processes of the same user can, and
looks for a number that only the right one has.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from phalanx.errors import UnavailableError
from phalanx.net.framing import ProtocolError

__all__ = ["SharedMemory", "offer", "open_shared"]

_FIRST = mmap.PAGESIZE  # where the memory begins, after the number
_NONCE = 32
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")

T = TypeVar("T")


class SharedMemory:
    """The task's end.

    Args:
        size: bytes; those that are never used take no memory.

    Attributes:
        bytes: the memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._nonce = secrets.token_bytes(_NONCE)
        self._descriptor = os.memfd_create("phalanx-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, _FIRST + size)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _seals())
        whole = mmap.mmap(self._descriptor, _FIRST + size)
        whole[:_NONCE] = self._nonce
        self.bytes: np.ndarray[Any, Any] = np.frombuffer(whole, np.uint8, size, _FIRST)

    @property
    def description(self) -> dict[str, Any]:
        """Where the other end finds the memory."""
        return {
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "size": self.size,
            "nonce": self._nonce.hex(),
        }

    def close_descriptor(self) -> None:
        """The other end has opened the memory, or never will."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def offer(make: Callable[[], T]) -> T | None:
    """What is made of such memory, if the system has any."""
    if sys.platform != "linux" or not hasattr(fcntl, "F_ADD_SEALS"):
        return None
    with contextlib.suppress(OSError):
        return make()
    return None


def open_shared(fields: dict[str, Any], *, writable: bool = False) -> memoryview:
    """The memory of the other end."""
    try:
        process, descriptor = int(fields["process"]), int(fields["descriptor"])
        size, nonce = int(fields["size"]), bytes.fromhex(fields["nonce"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"A peer described a lane wrongly: {error}") from None
    mode, protection = os.O_RDONLY, mmap.PROT_READ
    if writable:
        mode, protection = os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        found = os.open(f"/proc/{process}/fd/{descriptor}", mode | os.O_CLOEXEC)
        try:
            is_sealed = fcntl.fcntl(found, fcntl.F_GET_SEALS) & _seals() == _seals()
            whole = memoryview(mmap.mmap(found, _FIRST + size, prot=protection))
        finally:
            os.close(found)
    except (OSError, ValueError, OverflowError) as error:
        raise UnavailableError(f"The memory of the peer cannot be opened: {error}") from None
    if not is_sealed or len(nonce) != _NONCE or whole[:_NONCE] != nonce:
        raise UnavailableError("The memory of the peer is another one.")
    return whole[_FIRST:]


def _seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)
