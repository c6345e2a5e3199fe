"""Lines of text, and records of one length."""

from __future__ import annotations

from phalanx.data.files.formats import BytesCursor
from phalanx.data.files.streams import too_large


class LineReader(BytesCursor):
    r"""Reads the lines of one file. They end with ``\n``, which is left out; so may the last one."""

    part = "line"

    def __init__(self, path: str, compression: str, buffer_size: int, most: int | None = None) -> None:
        super().__init__(path, compression, buffer_size, most)
        self._begun: list[bytes] = []  # pieces of a line that has not ended yet
        self._length = 0  # of these pieces

    def read_block(self) -> list[bytes]:
        r"""The next lines as they are, a ``\r`` at their ends included."""
        while piece := self._read_bytes(self._buffer_size):
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


class TextReader(LineReader):
    r"""Reads the lines of one file without their ends, ``\n`` or ``\r\n``."""

    def read_block(self) -> list[bytes]:
        """The next lines."""
        return [line.removesuffix(b"\r") for line in super().read_block()]


class FixedReader(BytesCursor):
    """Reads records of one length, between a header and a footer."""

    def __init__(
        self, path: str, compression: str, buffer_size: int, sizes: tuple[int, int, int]
    ) -> None:
        super().__init__(path, compression, buffer_size)
        self._size, self._header, self._footer = sizes
        self._offset = self._header
        self._at_once = max(1, buffer_size // self._size) * self._size
        self._buffer: bytes | None = None  # None before the header was passed

    def read_block(self) -> list[bytes]:
        """The next records."""
        buffer = self._pass_header()
        while True:
            count = max(0, len(buffer) - self._footer) // self._size
            if count:
                self._advance(count, buffer[count * self._size :])
                starts = range(0, count * self._size, self._size)
                return [buffer[i : i + self._size] for i in starts]
            data = self._read_bytes(self._at_once + self._footer)
            if not data:
                break
            buffer = self._buffer = buffer + data
        if len(buffer) != self._footer:
            raise self._fault(
                f"{len(buffer)} bytes are left, and the footer should have {self._footer}"
            )
        return []

    def skip_ahead(self, count: int) -> int:
        """Leave out records; all that a file without compression has."""
        buffer = self._pass_header()
        if self._stream.size is None:
            return 0
        left = self._stream.size - self._offset - self._footer
        count = max(0, min(count, left // self._size))
        size = count * self._size
        if size > len(buffer):
            self._stream.skip(size - len(buffer))
        self._advance(count, buffer[size:])
        return count

    def _advance(self, count: int, buffer: bytes) -> None:
        self._number += count
        self._offset += count * self._size
        self._buffer = buffer

    def _pass_header(self) -> bytes:
        """What was read and not used yet."""
        if self._buffer is None:
            passed = self._skip_bytes(self._header)
            if passed < self._header:
                raise self._fault(f"the header should have {self._header} bytes, not {passed}")
            self._buffer = b""
        return self._buffer
