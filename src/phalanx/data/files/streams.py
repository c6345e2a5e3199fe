"""Byte streams of files, plain or compressed, and names for what goes wrong in them."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from phalanx.errors import (
    DataLossError,
    InvalidValueError,
    NotFoundError,
    OpError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnknownError,
)
from phalanx.runtime.formatting import shown

BUFFER_BYTES = 1 << 19
"""How much is read at once if nothing else was asked for."""

MOST_BYTES = 1 << 28
"""How many bytes a record or a line of a compressed file may have, if nothing else was asked for."""

_WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}
_PIECE = 1 << 16
_AT_ONCE = 1 << 24


class StreamFault(Exception):
    """A stream cannot be read further; a reader adds where, and makes an error for the user of it."""


def check_compression(compression_type: str | None) -> str:
    """The name of a compression: ``""``, ``"GZIP"`` or ``"ZLIB"``."""
    if compression_type in (None, ""):
        return ""
    if compression_type not in _WINDOW_BITS:
        raise InvalidValueError(
            "compression_type must be None, '' (both: none), 'GZIP' or 'ZLIB'. "
            f"Received: {shown(compression_type)}"
        )
    return compression_type


def open_stream(path: str, compression: str) -> PlainStream | InflatedStream:
    """Open a file for reading.

    Args:
        path: its name.
        compression: what `check_compression` returned.
    """
    return InflatedStream(path, compression) if compression else PlainStream(path)


def open_file(path: str, mode: str) -> IO[bytes]:
    """`open` with errors of ours; without a buffer for reading."""
    if mode == "rb":
        check_regular(path)
    try:
        return open(path, mode, buffering=0 if mode == "rb" else -1)
    except OSError as error:
        raise named_error(path, error) from error


def check_regular(path: str) -> None:
    """Refuse what is no plain file: opening a pipe waits for a writer, and a device may have no end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # opening it says what is wrong
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
        raise InvalidValueError(f"A file is needed, not {kind}. Received: {shown(path)}")


def named_error(path: str, error: OSError) -> OpError:
    """The error of ours for an error of the operating system."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"There is no file of this name. Received: {shown(path)}")
    kind = PermissionDeniedError if isinstance(error, PermissionError) else UnknownError
    return kind(f"A file cannot be used: {error.strerror or error}. Received: {shown(path)}")


def too_large(path: str, what: str, number: int, size: int, most: int) -> ResourceExhaustedError:
    """The error for a part of a file that would need more memory than it may.

    Args:
        path: the file.
        what: what its parts are called, for example "record".
        number: which part it is, counted from 0.
        size: how many bytes it has at least.
        most: how many it may have.
    """
    return ResourceExhaustedError(
        f"{Path(path).name} has a {what} of {size} bytes or more, number {number}. A few compressed "
        f"bytes can stand for very many, so the limit is {most}. If the file is right, give a larger "
        f"max_record_bytes. Received: {shown(path)}"
    )


def data_loss(path: str, what: str, number: int, offset: int, reason: str) -> DataLossError:
    """The error for a file that is damaged at some place.

    Args:
        path: the file.
        what: what its parts are called, for example "record".
        number: which part it is, counted from 0.
        offset: the byte at which the part starts, in a compressed file: of what was compressed.
        reason: what is wrong with it.
    """
    return DataLossError(
        f"{Path(path).name} is damaged at {what} {number}, which starts at byte {offset}: {reason}. "
        f"Everything before it was read. Received: {shown(path)}"
    )


class PlainStream:
    """The bytes of a file as they are."""

    def __init__(self, path: str) -> None:
        self._file = open_file(path, "rb")
        self.size = os.fstat(self._file.fileno()).st_size
        self._at = 0

    def read(self, size: int) -> bytes:
        """The next `size` bytes; less only at the end or before a fault, which the next call raises."""
        pieces = []
        try:
            while size > 0 and (piece := self._file.read(min(size, _AT_ONCE))):
                pieces.append(piece)
                size -= len(piece)
        except OSError as error:
            if error.errno is None:
                raise  # of a signal handler, not of the file
            raise StreamFault(f"it cannot be read ({error.strerror or error})") from error
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._at += len(data)
        return data

    def skip(self, size: int) -> int:
        """Move ahead by up to `size` bytes; how far it went."""
        size = max(0, min(size, self.size - self._at))
        self._at = self._file.seek(size, os.SEEK_CUR)
        return size

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class InflatedStream:
    """What a file holds in compressed form, in one compressed stream or several in a row."""

    size = None  # only reading tells

    def __init__(self, path: str, compression: str) -> None:
        self._file = PlainStream(path)
        self._compression = compression
        self._inflater = self._new_inflater()
        self._input = b""
        self._started = False  # whether the current member has begun
        self._fault: str | None = None

    def read(self, size: int) -> bytes:
        """The next bytes."""
        pieces: list[bytes] = []
        try:
            while size > 0 and (piece := self._next(min(size, _AT_ONCE))):
                pieces.append(piece)
                size -= len(piece)
        except StreamFault as fault:
            self._fault = str(fault)
            if not pieces:
                raise
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self, size: int) -> int:
        """Move ahead."""
        skipped = 0
        while skipped < size and (piece := self.read(min(size - skipped, BUFFER_BYTES))):
            skipped += len(piece)
        return skipped

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _new_inflater(self) -> zlib._Decompress:
        return zlib.decompressobj(_WINDOW_BITS[self._compression])

    def _next(self, size: int) -> bytes:
        """Between 1 and about `size` bytes; nothing at the end."""
        if self._fault is not None:
            raise StreamFault(self._fault)
        while True:
            if self._inflater.eof and not self._next_member():
                return b""
            if not self._input:
                self._input = self._file.read(_PIECE)
            exhausted = not self._input
            if exhausted and not self._started:
                return b""
            self._started = True
            if data := self._inflate(size):
                return data
            if exhausted and not self._inflater.eof:
                raise StreamFault("the compressed data ends too early")

    def _next_member(self) -> bool:
        """Go on to what follows the end of a compressed stream, if anything does."""
        rest = self._inflater.unused_data + self._input
        while not (rest := rest.lstrip(b"\0")):  # padding
            if not (rest := self._file.read(_PIECE)):
                return False
        self._inflater, self._input, self._started = self._new_inflater(), rest, False
        return True

    def _inflate(self, size: int) -> bytes:
        before = self._inflater.copy()
        try:
            data = self._inflater.decompress(self._input, size)
        except zlib.error as error:
            self._fault = f"the compressed data is corrupt ({error})"
            data = _salvage(before.decompress, self._input)
            if not data:
                raise StreamFault(self._fault) from error
            return data
        self._input = self._inflater.unconsumed_tail
        return data


def _salvage(inflate: Callable[[bytes], bytes], piece: bytes) -> bytes:
    """What can be inflated before the fault in a piece."""
    saved = []
    try:
        for i in range(len(piece)):
            saved.append(inflate(piece[i : i + 1]))
    except zlib.error:
        pass
    return b"".join(saved)
