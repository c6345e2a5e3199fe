"""A log of requests in a file: records with a checksum, each a list of buffers.

A record is a checksum, the count and the sizes of its buffers, and the buffers. A process that dies in
the middle of a record leaves a torn one, which reading cuts off: no task was told that it is done.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import DataLossError

__all__ = ["Journal", "read_journal"]

_HEAD = struct.Struct("<III")  # checksum of what follows, the count of buffers, a mark
_MARK = 0x706C7831
_MOST = 1 << 16  # buffers of a record
_MOST_PIECES = 512  # of one call of the system


class Journal:
    """Appends records to a file.

    Args:
        path: of the file; it is made if there is none.

    Attributes:
        size: bytes of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.size = os.fstat(self._file).st_size

    def append(self, buffers: Sequence[Any]) -> None:
        """Write a record of bytes.

        It survives the death of this process, and after `sync` that of the machine.
        """
        views = [memoryview(b) for b in buffers]
        sizes = struct.pack(f"<{len(views)}Q", *map(len, views))
        body = struct.pack("<II", len(views), _MARK) + sizes
        checksum = zlib.crc32(body)
        for view in views:
            checksum = zlib.crc32(view, checksum)
        self._write([struct.pack("<I", checksum) + body, *(v for v in views if len(v))])

    def sync(self) -> None:
        """Let the disk have everything."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, pieces: list[Any]) -> None:
        total = sum(len(p) for p in pieces)
        try:
            while pieces:
                written = os.writev(self._file, pieces[:_MOST_PIECES])
                while pieces and written >= len(pieces[0]):
                    written -= len(pieces.pop(0))
                if written:
                    pieces[0] = pieces[0][written:]
        except OSError as error:
            raise DataLossError(
                f"A parameter server cannot write its log: {error.strerror}. Received: {self._path}"
            ) from error
        self.size += total


def read_journal(path: Path, *, may_be_torn: bool = True) -> Iterator[list[bytes]]:
    """The records of a file, one after another.

    Args:
        path: of the file.
        may_be_torn: whether the end may be torn. Then it is cut off, else it is a `DataLossError`.
    """
    with open(path, "r+b" if may_be_torn else "rb") as file:
        end = 0
        while (record := _record(file)) is not None:
            end = file.tell()
            yield record
        size = file.seek(0, os.SEEK_END)
        if size > end:
            if not may_be_torn:
                raise DataLossError(
                    f"The file is damaged after {end} of {size} bytes. Received: {path}"
                )
            file.truncate(end)


def _record(file: Any) -> list[bytes] | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    checksum, count, mark = _HEAD.unpack(head)
    if mark != _MARK or count > _MOST:
        return None
    packed = file.read(8 * count)
    if len(packed) < 8 * count:
        return None
    sizes = struct.unpack(f"<{count}Q", packed)
    left = os.fstat(file.fileno()).st_size - file.tell()
    if sum(sizes) > left:
        return None
    buffers = [file.read(size) for size in sizes]
    found = zlib.crc32(packed, zlib.crc32(head[4:]))
    for buffer in buffers:
        found = zlib.crc32(buffer, found)
    return buffers if found == checksum else None
