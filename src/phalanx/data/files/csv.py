"""CSV files: rows of fields, read as columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.files.formats import Format, strings
from phalanx.data.files.readers import LineReader
from phalanx.data.files.streams import too_large
from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import BlockCursor
from phalanx.errors import InvalidArgumentError, InvalidValueError, OpError
from phalanx.runtime.formatting import shown

Array = np.ndarray[Any, np.dtype[Any]]

_PARSERS: dict[np.dtype[Any], Callable[[bytes], Any]] = {
    np.dtype(np.float32): float,
    np.dtype(np.float64): float,
    np.dtype(np.int32): int,
    np.dtype(np.int64): int,
    np.dtype(object): bytes,
}


class BadRow(Exception):
    """A row cannot be read: which one of a block, and why."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


@dataclass(frozen=True)
class CsvColumn:
    """One column: its dtype, and what stands for an empty field (None: it must not be empty)."""

    dtype: np.dtype[Any]
    default: Any

    @property
    def name(self) -> str:
        """The dtype as a word."""
        return "string" if self.dtype.kind == "O" else str(self.dtype)


def as_column(default: Any) -> CsvColumn:
    """A column from an entry of `record_defaults`: a dtype, or a value that stands for empty fields."""
    dtype = _as_dtype(default)
    if dtype is not None:
        return CsvColumn(dtype, None)
    value = np.asarray(default)
    if value.size != 1:
        raise InvalidValueError(
            "Each of record_defaults must be a dtype (the field is required) or one value (it stands "
            f"for empty fields). Received: {shown(default)}"
        )
    item = value.reshape(-1)[0]
    if value.dtype.kind in "USO":
        if isinstance(item, str):
            item = item.encode()
        if not isinstance(item, bytes):
            raise InvalidValueError(
                f"A default must be a number or a string. Received: {shown(default)}"
            )
        return CsvColumn(np.dtype(object), bytes(item))
    typed = isinstance(default, np.generic | np.ndarray) or hasattr(default, "__jax_array__")
    dtype = value.dtype if typed else np.dtype(np.int32 if value.dtype.kind in "iu" else np.float32)
    return CsvColumn(_supported(dtype, default), dtype.type(item))


def _as_dtype(entry: Any) -> np.dtype[Any] | None:
    """The dtype that an entry stands for, if it is one."""
    if entry in (bytes, str) or (isinstance(entry, str) and entry == "string"):
        return np.dtype(object)
    if isinstance(entry, np.dtype) or (isinstance(entry, type) and issubclass(entry, np.generic)):
        return _supported(np.dtype(entry), entry)
    if entry in (float, int):
        return np.dtype(np.float32 if entry is float else np.int32)
    scalar = getattr(entry, "dtype", None)  # jnp.float32 and its kin
    if callable(entry) and isinstance(scalar, np.dtype):
        return _supported(scalar, entry)
    return None


def _supported(dtype: np.dtype[Any], entry: Any) -> np.dtype[Any]:
    if dtype not in _PARSERS:
        raise InvalidValueError(
            "CSV columns are float32, float64, int32, int64 or string (bytes). "
            f"Received: {shown(entry)}, which is {dtype}"
        )
    return dtype


# -- rules ------------------------------------------------------------------------------


def quoted_fields(delimiter: bytes) -> re.Pattern[bytes]:
    """Matches one field, quoted or not, and what ends it."""
    d = re.escape(delimiter)
    return re.compile(rb'(?:"((?:[^"]|"")*)"|([^"' + d + rb"]*))(" + d + rb"|\Z)", re.DOTALL)


def split_row(row: bytes, delimiter: bytes, pattern: re.Pattern[bytes] | None) -> list[bytes]:
    """The fields of a row.

    Examples:
        >>> split_row(b'1,"a ""b"", c",', b",", quoted_fields(b","))
        [b'1', b'a "b", c', b'']
    """
    if pattern is None or b'"' not in row:
        return row.split(delimiter)
    fields, at = [], 0
    while (match := pattern.match(row, at)) is not None:
        quoted, plain, end = match.groups()
        fields.append(plain if quoted is None else quoted.replace(b'""', b'"'))
        at = match.end()
        if not end:
            return fields
    raise ValueError(
        f"there is a quote in the middle of field {len(fields)}; quote the whole field, and double "
        "the quotes in it"
    )


def parse_columns(
    rows: Sequence[Sequence[bytes]], columns: Sequence[CsvColumn], na: bytes
) -> list[Array]:
    """The columns of rows that have one field for each."""
    fields = zip(*rows, strict=True) if rows else [()] * len(columns)
    return [
        parse_column(i, list(texts), column, na)
        for i, (texts, column) in enumerate(zip(fields, columns, strict=True))
    ]


def parse_column(index: int, texts: list[bytes], column: CsvColumn, na: bytes) -> Array:
    """One column from its fields."""
    empty = [i for i, text in enumerate(texts) if not text or text == na]
    if empty and column.default is None:
        raise BadRow(empty[0], f"field {index} is required, and empty")
    for i in empty:
        texts[i] = b"0"
    if column.dtype.kind == "O":
        values: Array = strings(texts)
    else:
        values = _numbers(index, texts, column)
    if empty:
        values[empty] = column.default
    return values


def _numbers(index: int, texts: list[bytes], column: CsvColumn) -> Array:
    parse = _PARSERS[column.dtype]
    try:
        if b"_" in b"".join(texts):  # Python reads 1_000, TensorFlow does not
            raise ValueError
        parsed = [parse(text) for text in texts]
        if column.dtype.kind == "f":
            with np.errstate(over="ignore"):
                return np.array(parsed, np.float64).astype(column.dtype)
        numbers = np.array(parsed, np.int64)
        limits = np.iinfo(column.dtype)
        if len(numbers) and not limits.min <= numbers.min() <= numbers.max() <= limits.max:
            raise ValueError
        return numbers.astype(column.dtype)
    except (ValueError, OverflowError):
        bad = next(i for i, text in enumerate(texts) if not _is_number(text, column))
        raise BadRow(bad, f"field {index} is not a valid {column.name}: {texts[bad][:40]!r}") from None


def _is_number(text: bytes, column: CsvColumn) -> bool:
    try:
        value = _PARSERS[column.dtype](text)
    except ValueError:
        return False
    if b"_" in text:
        return False
    if column.dtype.kind == "f":
        return True
    limits = np.iinfo(column.dtype)
    return bool(limits.min <= value <= limits.max)


# -- reading ------------------------------------------------------------------------------


@dataclass(frozen=True)
class CsvFormat(Format):
    """CSV files."""

    columns: tuple[CsvColumn, ...]  # what each selected field is
    selected: tuple[int, ...] | None  # the positions of the selected fields; None for all of them
    width: int | None  # how many fields a row has; None if it may have any number
    header: bool  # whether the first row is left out
    delimiter: bytes  # what separates fields
    quotes: bool  # whether fields may be quoted
    na: bytes  # besides nothing, what stands for an empty field
    compression: str  # of the files
    buffer_size: int  # how many bytes to read at once
    most: int | None = None  # how many bytes a row may have

    @property
    def spec(self) -> tuple[TensorSpec, ...]:
        """A tuple with one entry per column."""
        return tuple(TensorSpec((), column.dtype) for column in self.columns)

    def open(self, path: str) -> CsvCursor:
        """Start reading a file."""
        return CsvCursor(self, path)


class CsvCursor(BlockCursor):
    """The rows of one file."""

    def __init__(self, format_: CsvFormat, path: str) -> None:
        self._format, self._path = format_, path
        self._lines = LineReader(path, format_.compression, format_.buffer_size, format_.most)
        self._pattern = quoted_fields(format_.delimiter) if format_.quotes else None
        self._header = format_.header
        self._begun: list[bytes] = []  # lines of a quoted field that has not ended yet
        self._length = 0  # of these lines
        self._number = self._offset = 0  # of the next row, the header not counted
        self._error: OpError | None = None

    def next_block(self, limit: int) -> Chunk | None:
        """The next rows; those before a bad one come first."""
        while self._error is None:
            rows = self._rows()
            if rows is None:
                return None
            columns, count = self._parsed(rows)
            if count:
                return Chunk(columns, count)
        raise self._error

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _rows(self) -> list[bytes] | None:
        """Whole rows with the ends of lines that stand in quotes; None at the end."""
        lines = self._lines.read_block()
        if not lines:
            if self._begun:
                self._error = self._bad(self._number, self._offset, "a quoted field does not end")
                return []
            return None
        rows = self._joined(lines) if self._pattern is not None else lines
        if self._header and rows:
            self._offset += len(rows[0]) + 1
            self._header = False
            rows = rows[1:]
        return rows

    def _joined(self, lines: list[bytes]) -> list[bytes]:
        rows = []
        for line in lines:
            odd = line.count(b'"') % 2 == 1
            if not self._begun and not odd:
                rows.append(line)
                continue
            self._begun.append(line)
            self._length += len(line) + 1
            if self._format.most is not None and self._length > self._format.most:
                number = self._number + len(rows)
                self._error = too_large(self._path, "row", number, self._length, self._format.most)
                break
            if odd and len(self._begun) > 1:
                rows.append(b"\n".join(self._begun))
                self._begun, self._length = [], 0
        return rows

    def _parsed(self, rows: list[bytes]) -> tuple[list[Array], int]:
        """Columns of the rows up to the first bad one."""
        fields, reason = self._fields(rows)
        while True:
            try:
                columns = parse_columns(fields, self._format.columns, self._format.na)
                break
            except BadRow as bad:
                fields, reason = fields[: bad.row], str(bad)
        count = len(fields)
        offset = self._offset + sum(map(len, rows[:count])) + count
        if reason is not None:
            self._error = self._bad(self._number + count, offset, reason)
        self._number, self._offset = self._number + count, offset
        return columns, count

    def _fields(self, rows: list[bytes]) -> tuple[list[list[bytes]], str | None]:
        """The selected fields of the rows up to the first bad one, and what is bad about it."""
        selected, width = self._format.selected, self._format.width
        found: list[list[bytes]] = []
        for row in rows:
            try:
                fields = split_row(row.removesuffix(b"\r"), self._format.delimiter, self._pattern)
            except ValueError as error:
                return found, str(error)
            if width is not None and len(fields) != width:
                return found, f"{width} fields are expected, and there are {len(fields)}"
            if selected is not None:
                if len(fields) <= selected[-1]:
                    return (
                        found,
                        f"field {selected[-1]} is expected, and there are {len(fields)} fields",
                    )
                fields = [fields[i] for i in selected]
            found.append(fields)
        return found, None

    def _bad(self, number: int, offset: int, reason: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{Path(self._path).name} cannot be read at row {number}, which starts at byte {offset}: "
            f"{reason}. Everything before it was read. Received: {shown(self._path)}"
        )
