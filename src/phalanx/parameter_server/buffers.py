"""Memory for large buffers, used again once nothing refers to it.

Fresh memory costs a page fault for each 4 KB, more than what is then done with it. What is taken from a
pool goes back to it by itself: the pool looks whether anything still refers to it.
"""

from __future__ import annotations

import mmap
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["BufferPool", "is_shared"]

_LARGE = 64 << 10  # bytes; smaller ones are cheaper to make than to look for
_PAGE = 4 << 10
_TRIES = 8  # to find one that is free, among thousands that may be in use


def _references(kept: Sequence[Any], i: int) -> int:
    return sys.getrefcount(kept[i])


_ALONE = _references([object()], 0)
_IS_EXACT = not sysconfig.get_config_var("Py_GIL_DISABLED")  # else some references are not counted


def is_shared(kept: Sequence[Any], i: int = 0) -> bool:
    """Whether anything but a list, or the like, refers to one of its items.

    >>> kept = [bytearray(1)]
    >>> is_shared(kept)
    False
    >>> view = memoryview(kept[0])
    >>> is_shared(kept)
    True
    """
    return not _IS_EXACT or _references(kept, i) > _ALONE


class BufferPool:
    """Gives memory, and gives it again once it is free. For one thread.

    Args:
        most: bytes that may be kept for later; of more, what was asked for longest ago goes first.

    >>> pool = BufferPool()
    >>> first = pool.take(1 << 20)
    >>> address = np.frombuffer(first, np.uint8).ctypes.data
    >>> second = pool.take(1 << 20)  # the first is in use
    >>> np.frombuffer(second, np.uint8).ctypes.data == address
    False
    >>> del first
    >>> np.frombuffer(pool.take(1 << 20), np.uint8).ctypes.data == address
    True
    """

    def __init__(self, most: int = 256 << 20) -> None:
        self._most = most
        self._kept: OrderedDict[int, deque[np.ndarray[Any, Any]]] = OrderedDict()
        self._size = 0

    def take(self, size: int) -> memoryview:
        """Memory for so many bytes, whatever they are now."""
        if size < _LARGE:
            return memoryview(bytearray(size))
        return self._memory(size)[:size].data

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An array, whatever its values are now."""
        size = dtype.itemsize
        for n in shape:
            size *= n
        if size < _LARGE:
            return np.empty(shape, dtype)
        return self._memory(size)[:size].view(dtype).reshape(shape)

    def _memory(self, size: int) -> np.ndarray[Any, Any]:
        size = -(-size // _PAGE) * _PAGE
        kept = self._kept.setdefault(size, deque())
        self._kept.move_to_end(size)
        for _ in range(min(_TRIES, len(kept))):
            kept.rotate(-1)
            if not is_shared(kept, -1):
                return kept[-1]
        # Pages begin where JAX takes memory without a copy.
        memory: np.ndarray[Any, Any] = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        if size <= self._most:
            kept.append(memory)
            self._size += size
            while self._size > self._most:
                self._forget()
        return memory

    def _forget(self) -> None:
        """Let the system have memory back that is free, or stop to care for some that is used."""
        size, kept = next(iter(self._kept.items()))
        if kept:
            kept.popleft()
            self._size -= size
        if not kept:
            del self._kept[size]
