"""Files of byte strings: lines of text, and records of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.files.records import RecordReader
from phalanx.data.files.streams import ByteStream, StreamFault, data_loss, open_stream, too_large
from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.nodes import UNKNOWN
from phalanx.errors import DataLossError

STRING = TensorSpec((), np.dtype(object))


class BytesReader(Protocol):
    """Reads byte strings from one file."""

    def read_block(self) -> list[bytes]:
        """The next strings; none at the end."""

    def skip(self, count: int) -> int:
        """Leave out up to `count` strings; how many there were."""

    def close(self) -> None:
        """Close the file."""


class BytesBlocks:
    """Byte strings as chunks of one column."""

    def __init__(self, reader: BytesReader) -> None:
        self._reader = reader
        self.skip, self.close = reader.skip, reader.close

    def next(self) -> Chunk | None:
        """The next strings."""
        items = self._reader.read_block()
        return Chunk((strings(items),), len(items)) if items else None


def strings(items: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A column of strings."""
    column = np.empty(len(items), object)
    column[:] = items
    return column


class LineReader:
    r"""Reads the lines of one file. They end with ``\n``, which is left out; so may the last one."""

    def __init__(self, path: str, compression: str, buffer_size: int, most: int | None = None) -> None:
        self._path = path
        self._most = most
        self._stream = open_stream(path, compression)
        self._buffer_size = buffer_size
        self._begun: list[bytes] = []  # pieces of a line that has not ended yet
        self._length = 0  # of these pieces
        self._number = 0
        self._offset = 0

    def read_block(self) -> list[bytes]:
        r"""The next lines as they are, a ``\r`` at their ends included."""
        while piece := self._read():
            first, *others = piece.split(b"\n")
            self._begun.append(first)
            self._length += len(first)
            if self._most is not None and self._length > self._most:
                raise too_large(self._path, "line", self._number, self._length, self._most)
            if others:
                lines = [b"".join(self._begun), *others]
                self._begun = [lines.pop()]
                self._length = len(self._begun[0])
                self._number += len(lines)
                self._offset += sum(map(len, lines)) + len(lines)
                return lines
        last, self._begun = b"".join(self._begun), []
        return [last] if last else []

    def skip(self, count: int) -> int:
        """Lines cannot be skipped without reading them."""
        return 0

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _read(self) -> bytes:
        try:
            return self._stream.read(self._buffer_size)
        except StreamFault as fault:
            raise data_loss(self._path, "line", self._number, self._offset, str(fault)) from fault


class TextReader(LineReader):
    r"""Reads the lines of one file without their ends, ``\n`` or ``\r\n``."""

    def read_block(self) -> list[bytes]:
        """The next lines."""
        return [line.removesuffix(b"\r") for line in super().read_block()]


class FixedReader:
    """Reads records of one length, between a header and a footer."""

    def __init__(
        self, path: str, compression: str, buffer_size: int, sizes: tuple[int, int, int]
    ) -> None:
        self._path = path
        self._size, self._header, self._footer = sizes
        self._stream: ByteStream = open_stream(path, compression)
        self._at_once = max(1, buffer_size // self._size) * self._size
        self._buffer: bytes | None = None  # None before the header was passed
        self._number = 0

    def read_block(self) -> list[bytes]:
        """The next records."""
        self._pass_header()
        while True:
            assert self._buffer is not None
            count = max(0, len(self._buffer) - self._footer) // self._size
            if count:
                size, data = self._size, self._buffer
                self._buffer = data[count * size :]
                self._number += count
                return [data[i : i + size] for i in range(0, count * size, size)]
            if not self._fill():
                break
        if len(self._buffer) != self._footer:
            raise self._fault(
                f"{len(self._buffer)} bytes are left, and the footer should have {self._footer}"
            )
        return []

    def skip(self, count: int) -> int:
        """Leave out records; all that a file without compression has."""
        self._pass_header()
        if self._stream.size is None or not count:
            return 0
        assert self._buffer is not None
        left = self._stream.size - self._header - self._footer - self._number * self._size
        count = max(0, min(count, left // self._size))
        size = count * self._size
        if size <= len(self._buffer):
            self._buffer = self._buffer[size:]
        else:
            self._stream.skip(size - len(self._buffer))
            self._buffer = b""
        self._number += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _pass_header(self) -> None:
        if self._buffer is None:
            try:
                passed = self._stream.skip(self._header)
            except StreamFault as fault:
                raise self._fault(str(fault)) from fault
            if passed < self._header:
                raise self._fault(f"the header should have {self._header} bytes, not {passed}")
            self._buffer = b""

    def _fill(self) -> bool:
        assert self._buffer is not None
        try:
            data = self._stream.read(self._at_once + self._footer)
        except StreamFault as fault:
            raise self._fault(str(fault)) from fault
        self._buffer += data
        return bool(data)

    def _fault(self, reason: str) -> DataLossError:
        offset = self._header + self._number * self._size
        return data_loss(self._path, "record", self._number, offset, reason)


@dataclass(frozen=True)
class BytesFormat:
    """Files of byte strings.

    Args:
        kind: "records", "lines" or "fixed".
        compression: of the files.
        buffer_size: how many bytes to read at once.
        sizes: of a fixed record, and of what stands before and after them all.
        most: how many bytes a record or line may have.
    """

    kind: str
    compression: str
    buffer_size: int
    sizes: tuple[int, int, int] = (1, 0, 0)
    most: int | None = None
    spec = STRING

    def open(self, path: str) -> BytesBlocks:
        """Start reading a file."""
        reader: BytesReader
        if self.kind == "records":
            reader = RecordReader(path, self.compression, self.buffer_size, self.most)
        elif self.kind == "lines":
            reader = TextReader(path, self.compression, self.buffer_size, self.most)
        else:
            reader = FixedReader(path, self.compression, self.buffer_size, self.sizes)
        return BytesBlocks(reader)

    def count(self, path: str) -> int:
        """Only reading tells."""
        return UNKNOWN
