"""Elements in files, for `cache(filename)`.

A cache is a directory: a manifest, and a file per column. Columns of numbers of one shape are stored as
they are in memory and are mapped when read, so any row can be fetched at once. All others are stored
row by row. A cache is written under another name and renamed when it is complete, so it is never seen
half-written.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from phalanx.data.plan.columns import Chunk, Column, stack
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.elements import Ragged
from phalanx.data.plan.nodes import Rows
from phalanx.data.plan.opening import GatherCursor, row_numbers
from phalanx.errors import DataLossError, InvalidTypeError

VERSION = 1
_LENGTH = struct.Struct("<Q")

RowForm = tuple[np.dtype[Any], tuple[int, ...]]
"""The dtype and the shape of the rows of a column of plain numbers."""


# -- one row as bytes -----------------------------------------------------------------------------


def encode(leaf: Any) -> bytes:
    """A leaf as bytes.

    Examples:
        >>> decode(encode("déjà vu")), decode(encode(np.array([[1, 2]], np.int16)))
        ('déjà vu', array([[1, 2]], dtype=int16))
    """
    if isinstance(leaf, str):
        return b"s" + leaf.encode()
    if isinstance(leaf, bytes):
        return b"b" + leaf
    if isinstance(leaf, Ragged):
        return b"r" + _frames(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        header = json.dumps([leaf.dtype.name, list(leaf.shape)]).encode() + b"\n"
        if leaf.dtype == object:
            return b"o" + header + _frames(leaf.flat)
        return b"n" + header + leaf.tobytes()
    raise InvalidTypeError(
        f"Only arrays and strings can be written to a cache file. Received: {type(leaf).__name__}"
    )


def _frames(leaves: Any) -> bytes:
    return b"".join(_LENGTH.pack(len(code)) + code for code in map(encode, leaves))


def decode(code: bytes) -> Any:
    """The leaf that `encode` made bytes of."""
    kind, body = code[:1], code[1:]
    if kind == b"s":
        return body.decode()
    if kind == b"b":
        return body
    if kind == b"r":
        return Ragged(list(_unframe(body)))
    header, _, body = body.partition(b"\n")
    name, shape = json.loads(header)
    if kind == b"n":
        return np.frombuffer(body, np.dtype(name)).reshape(shape)[()]
    array = np.empty(math.prod(shape), object)
    array[:] = list(_unframe(body))
    return array.reshape(shape)


def _unframe(body: bytes) -> Iterator[Any]:
    at = 0
    while at < len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size + length
        yield decode(body[at - length : at])


# -- writing --------------------------------------------------------------------------------------


class ColumnWriter:
    """Writes one column: as plain numbers as long as all rows have one shape, row by row afterwards."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("w+b")
        self._form: RowForm | None = None
        self._plain = True
        self._count = 0

    def add(self, column: Column) -> None:
        """Append rows."""
        if self._plain and not self._fits(column):
            self._go_row_by_row()
        if self._plain:
            assert isinstance(column, np.ndarray)
            self._file.write(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
        else:
            self._write_rows(column)
        self._count += len(column)

    def _fits(self, column: Column) -> bool:
        if isinstance(column, list) or column.dtype == object:
            return False
        form = column.dtype, column.shape[1:]
        if self._form is None:
            self._form = form
        return form == self._form and np.dtype(column.dtype.name) == column.dtype

    def _write_rows(self, column: Column) -> None:
        for leaf in column:
            code = encode(leaf)
            self._file.write(_LENGTH.pack(len(code)) + code)

    def _go_row_by_row(self) -> None:
        """Write what is there again, in the other form."""
        self._plain = False
        if self._form is None or self._count == 0:
            return
        old = self._file
        old.flush()
        dtype, shape = self._form
        rows = map_column(self._path, dtype, (self._count, *shape))
        fresh = self._path.with_suffix(".rows")
        self._file = fresh.open("w+b")
        self._write_rows(rows)
        old.close()
        fresh.replace(self._path)

    def finish(self) -> dict[str, Any]:
        """Make sure all is on the disk; what the manifest says about this column."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if not self._plain or self._form is None:
            return {"plain": False}
        dtype, shape = self._form
        return {"plain": True, "dtype": dtype.name, "shape": list(shape)}

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


class FileWriter:
    """Writes a cache under a name of its own, until it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        self._columns: list[ColumnWriter] | None = None
        self._count = 0
        self._done = False

    def add(self, chunk: Chunk) -> None:
        """Append elements."""
        if self._columns is None:
            self._partial.mkdir(parents=True)
            self._columns = [
                ColumnWriter(self._partial / f"{i}.column") for i in range(len(chunk.columns))
            ]
        for writer, column in zip(self._columns, chunk.columns, strict=True):
            writer.add(column)
        self._count += chunk.count

    def commit(self) -> None:
        """Give the cache its name. If there is one already, another run was faster: keep that."""
        self._partial.mkdir(parents=True, exist_ok=True)
        columns = [writer.finish() for writer in self._columns or ()]
        manifest = {"version": VERSION, "count": self._count, "columns": columns}
        (self._partial / "manifest.json").write_text(json.dumps(manifest))
        try:
            self._partial.rename(self._path)
        except OSError:
            if not (self._path / "manifest.json").is_file():
                raise
            shutil.rmtree(self._partial)
        self._done = True

    def abort(self) -> None:
        """Remove what was written, unless it is complete."""
        if self._done:
            return
        self._done = True
        for writer in self._columns or ():
            writer.close()
        shutil.rmtree(self._partial, ignore_errors=True)


def map_column(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """A column of plain numbers, mapped into memory."""
    if math.prod(shape) == 0:  # empty files cannot be mapped
        return np.empty(shape, dtype)
    return np.asarray(np.memmap(path, dtype, "r", shape=shape))


# -- reading --------------------------------------------------------------------------------------


def _damaged(path: Path, reason: str) -> DataLossError:
    return DataLossError(f"The cache file {str(path)!r} is damaged: {reason}. Remove it.")


@dataclass(frozen=True)
class _Manifest:
    """What a cache holds: the number of elements, and a form for each column."""

    count: int
    forms: list[RowForm | None]  # None if a column is stored row by row


def _as_manifest(found: dict[str, Any]) -> _Manifest:
    """A manifest from JSON; a ValueError, TypeError or LookupError if it is none."""
    count = _as_size(found["count"])
    if not isinstance(found["columns"], list):
        raise TypeError
    return _Manifest(count, [_as_form(column) for column in found["columns"]])


def _as_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError
    return value


def _as_form(column: dict[str, Any]) -> RowForm | None:
    if column["plain"] is False:
        return None
    name, shape = column["dtype"], column["shape"]
    if column["plain"] is not True or not isinstance(name, str) or not isinstance(shape, list):
        raise TypeError
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise TypeError
    return dtype, tuple(_as_size(size) for size in shape)


class FileStore:
    """Keeps elements in a directory."""

    def __init__(self, filename: str) -> None:
        self._path = Path(f"{filename}.cache")

    def _manifest(self) -> _Manifest | None:
        try:
            text = (self._path / "manifest.json").read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise _damaged(self._path, f"its manifest cannot be read ({error})") from error
        try:
            found = json.loads(text)
            version = found["version"]
            if version == VERSION:
                return _as_manifest(found)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise _damaged(self._path, "its manifest is none") from error
        raise DataLossError(
            f"The cache file {str(self._path)!r} has another format; remove it. "
            f"Received: version {str(version)[:40]}"
        )

    def rows(self) -> Rows | None:
        """The columns mapped into memory, if all are plain numbers."""
        manifest = self._manifest()
        if manifest is None or None in manifest.forms:
            return None
        return Rows(tuple(self._columns(manifest)), manifest.count)

    def open(self) -> Cursor | None:
        """Read the cache from the beginning, if it is complete."""
        manifest = self._manifest()
        if manifest is None:
            return None
        columns = self._columns(manifest)
        if None in manifest.forms:
            return _RowsCursor(columns, manifest.count)
        return GatherCursor(row_numbers(manifest.count).open(Run()), columns)

    def writer(self) -> FileWriter:
        """Begin to write."""
        return FileWriter(self._path)

    def _columns(self, manifest: _Manifest) -> list[Any]:
        """Mapped arrays, and open files of columns that are stored row by row."""
        columns: list[Any] = []
        for number, form in enumerate(manifest.forms):
            path = self._path / f"{number}.column"
            if form is None:
                if not path.is_file():
                    raise _damaged(path, "it is missing")
                columns.append(path.open("rb"))
                continue
            dtype, shape = form[0], (manifest.count, *form[1])
            size = dtype.itemsize * math.prod(shape)
            if not path.is_file() or path.stat().st_size != size:
                raise _damaged(path, f"it should have {size} bytes")
            columns.append(map_column(path, dtype, shape))
        return columns


class _RowsCursor(Cursor):
    """Reads a cache of which some columns are stored row by row."""

    def __init__(self, columns: list[Any], count: int) -> None:
        self._columns, self._count, self._next = columns, count, 0
        self._close = weakref.finalize(self, _close_files, columns)

    def read(self, limit: int) -> Chunk | None:
        start, stop = self._next, min(self._next + limit, self._count)
        if start == stop:
            return None
        self._next = stop
        columns = [self._part(column, start, stop) for column in self._columns]
        return Chunk(columns, stop - start)

    def _part(self, column: Any, start: int, stop: int) -> Column:
        if isinstance(column, np.ndarray):
            return column[start:stop]
        try:
            return stack([decode(column.read(_length(column))) for _ in range(start, stop)])
        except (ValueError, TypeError, LookupError, struct.error, RecursionError) as error:
            raise _damaged(Path(column.name), "a row of it is none") from error

    def skip(self, count: int) -> int:
        start, self._next = self._next, min(self._next + count, self._count)
        for column in self._columns:
            if not isinstance(column, np.ndarray):
                for _ in range(start, self._next):
                    column.seek(_length(column), os.SEEK_CUR)
        return self._next - start

    def close(self) -> None:
        self._next = self._count
        self._close()


def _close_files(columns: list[Any]) -> None:
    for column in columns:
        if not isinstance(column, np.ndarray):
            column.close()


def _length(file: BinaryIO) -> int:
    head = file.read(_LENGTH.size)
    (length,) = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (2**64,)
    if length > os.fstat(file.fileno()).st_size - file.tell():
        raise _damaged(Path(file.name), "it ends too early")
    return int(length)
