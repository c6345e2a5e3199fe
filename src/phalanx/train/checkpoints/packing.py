"""Writes arrays one after another, small ones together, with their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from phalanx.runtime import laboratory

__all__ = ["PIECE", "Packer", "Progress"]

Progress = Callable[[int], None]
"""Called with the number of bytes that were written since the last call."""

PIECE = 4 << 20  # bytes that are checked and written at a time
_ALIGNMENT = 64  # bytes
_SMALL = 64 << 10  # bytes


class Packer:
    """Puts arrays into a file.

    A thread that writes lets others run meanwhile, and then waits for its turn again. With a write for
    each of thousands of small arrays it would wait for most of the time, so they are written together.

    Args:
        file: where to write, from its beginning; unbuffered.
        progress: told of the bytes of arrays that were written.

    Examples:
        >>> import io, numpy
        >>> file = io.BytesIO()
        >>> packer = Packer(file)
        >>> packer.put(numpy.arange(3, dtype=numpy.uint8)), packer.put(numpy.ones(70_000, numpy.uint8))
        ((0, 139757951), (64, 57428353))
        >>> packer.flush()
        >>> len(file.getvalue())
        70064
    """

    def __init__(self, file: BinaryIO, progress: Progress | None = None) -> None:
        self._file, self._progress = file, progress
        self._pending = bytearray()
        self._pending_arrays = 0  # bytes without what lies between arrays
        self._end = 0

    def put(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[int, int]:
        """Add an array; returns where it lies and its checksum."""
        padding = -self._end % _ALIGNMENT
        self._pending += bytes(padding)
        offset = self._end + padding
        self._end = offset + len(data)
        if len(data) > _SMALL:
            self.flush()
            return offset, self._write_pieces(data)
        laboratory.reach("write")
        self._pending += data.data
        self._pending_arrays += len(data)
        checksum = zlib.crc32(data.data)
        if len(self._pending) >= PIECE:
            self.flush()
        return offset, checksum

    def flush(self) -> None:
        """Write what is still to be written."""
        pending, size = self._pending, self._pending_arrays
        self._pending, self._pending_arrays = bytearray(), 0
        self._write(memoryview(pending), size)

    def _write_pieces(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
        checksum = 0
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE].data
            checksum = zlib.crc32(piece, checksum)
            laboratory.reach("write")
            self._write(piece, len(piece))
        return checksum

    def _write(self, piece: memoryview, size: int) -> None:
        while piece:
            piece = piece[self._file.write(piece) :]
        if size and self._progress is not None:
            self._progress(size)
