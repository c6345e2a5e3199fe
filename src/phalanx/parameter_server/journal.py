"""A log of requests in a file: records with a checksum, each a list of buffers.

A file begins with a number of its own, which counts in all checksums. A record is a checksum, the count
and the sizes of its buffers, and the buffers. A process that dies in the middle of a record leaves a
torn one, which reading cuts off: no task was told that it is done.

Fresh pages of a file cost as much as the copy into them, so a log may be written over an older one that
is not needed any more. What is left of that at the end has the checksums of another file.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import DataLossError

__all__ = ["Journal", "read_journal"]

_START = struct.Struct("<II")  # a mark, and the number of the file
_HEAD = struct.Struct("<III")  # checksum of what follows, the count of buffers, a mark
_FILE_MARK = 0x706C7832
_MARK = 0x706C7831
_MOST = 1 << 16  # buffers of a record
_MOST_PIECES = 512  # of one call of the system
_LARGE = 64 << 10  # bytes of a buffer of which the sums of its pages are checked
_PAGE = 4 << 10


class Journal:
    """Appends records to a file.

    Args:
        path: of the file; it is made if there is none.
        spare: a file that is not needed any more, and becomes this one if there is none.
        sync: whether what is done to the file as such shall survive the death of the machine.

    Attributes:
        size: bytes of the file that count.
    """

    def __init__(self, path: Path, spare: Path | None = None, *, sync: bool = False) -> None:
        self._path, self._sync = path, sync
        if spare is not None and spare.exists() and not path.exists():
            _begin(spare, sync)  # before it has the name of a log
            spare.replace(path)
            self.size = _START.size
        elif not path.exists() or path.stat().st_size < _START.size:
            _begin(path, sync)
            self.size = _START.size
        else:
            self.size = path.stat().st_size
        self._file = os.open(path, os.O_RDWR)
        self._seed = _seed_of(os.pread(self._file, _START.size, 0))

    def append(self, buffers: Sequence[Any]) -> None:
        """Write a record of bytes.

        It survives the death of this process, and after `sync` that of the machine.
        """
        views = [memoryview(b) for b in buffers]
        sizes = struct.pack(f"<{len(views)}Q", *map(len, views))
        body = struct.pack("<II", len(views), _MARK) + sizes
        checksum = _checksum(views, zlib.crc32(body, self._seed))
        self._write([struct.pack("<I", checksum) + body, *(v for v in views if len(v))])

    def sync(self) -> None:
        """Let the disk have everything."""
        os.fdatasync(self._file)

    def trim(self) -> None:
        """Let the file end with the last record."""
        os.ftruncate(self._file, self.size)
        if self._sync:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file; it ends with the last record."""
        try:
            self.trim()
        finally:
            os.close(self._file)

    def _write(self, pieces: list[Any]) -> None:
        at = self.size
        try:
            while pieces:
                written = os.pwritev(self._file, pieces[:_MOST_PIECES], at)
                at += written
                while pieces and written >= len(pieces[0]):
                    written -= len(pieces.pop(0))
                if written:
                    pieces[0] = pieces[0][written:]
        except OSError as error:
            raise DataLossError(
                f"A parameter server cannot write its log: {error.strerror}. Received: {self._path}"
            ) from error
        self.size = at


def _begin(path: Path, sync: bool) -> None:
    """Give a file a number of its own, so that no record in it counts."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.pwrite(file, _START.pack(_FILE_MARK, secrets.randbits(32)), 0)
        if sync:
            os.fdatasync(file)
    finally:
        os.close(file)


def _seed_of(start: bytes) -> int:
    return zlib.crc32(start)


def _checksum(buffers: Sequence[Any], checksum: int) -> int:
    """A checksum that goes on from another one.

    Of large buffers the sums of pages are checked, which takes a tenth of the time. What is torn or
    stale is whole sectors, so the order of the words in one does not matter.
    """
    for buffer in buffers:
        if len(buffer) >= _LARGE:
            whole = len(buffer) // _PAGE * _PAGE
            words = np.frombuffer(buffer, np.uint64, whole // 8).reshape(-1, _PAGE // 8)
            checksum = zlib.crc32(np.add.reduce(words, axis=1), checksum)
            buffer = memoryview(buffer)[whole:]  # noqa: PLW2901 - what is left of it
        checksum = zlib.crc32(buffer, checksum)
    return checksum


def read_journal(path: Path, *, may_be_torn: bool = True) -> Iterator[list[bytes]]:
    """The records of a file, one after another.

    Args:
        path: of the file.
        may_be_torn: whether the end may be torn. Then it is cut off, else it is a `DataLossError`.
    """
    with open(path, "r+b" if may_be_torn else "rb") as file:
        start = file.read(_START.size)
        end = 0
        if len(start) == _START.size and _START.unpack(start)[0] == _FILE_MARK:
            end, seed = _START.size, _seed_of(start)
            while (record := _record(file, seed)) is not None:
                end = file.tell()
                yield record
        size = file.seek(0, os.SEEK_END)
        if size > end:
            if not may_be_torn:
                raise DataLossError(
                    f"The file is damaged after {end} of {size} bytes. Received: {path}"
                )
            file.truncate(end)


def _record(file: Any, seed: int) -> list[bytes] | None:
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
    found = _checksum(buffers, zlib.crc32(packed, zlib.crc32(head[4:], seed)))
    return buffers if found == checksum else None
