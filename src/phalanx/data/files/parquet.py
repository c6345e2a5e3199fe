"""Parquet files, read with pyarrow a row group at a time, as columns."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.files.formats import STRING, Format, strings
from phalanx.data.files.streams import check_regular, named_error
from phalanx.data.plan.columns import Chunk, Column
from phalanx.data.plan.cursors import BlockCursor
from phalanx.errors import (
    DataLossError,
    InvalidArgumentError,
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
    PhalanxError,
)
from phalanx.runtime.formatting import shown

_ROWS = 1 << 14  # that are converted at once


def pyarrow(part: str = "") -> Any:
    """A module of pyarrow, which is only needed here."""
    try:
        return importlib.import_module(f"pyarrow{part}")
    except ImportError as error:
        raise MissingPackageError(
            "Parquet files are read with pyarrow, which is not installed. Install it with: "
            f"pip install 'phalanx[parquet]'. Received: {error}"
        ) from error


def open_parquet(path: str) -> Any:
    """Open a file and read what it says about itself."""
    reader = pyarrow(".parquet")
    check_regular(path)
    try:
        return reader.ParquetFile(path)
    except _faults() as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise named_error(path, error) from error
        raise DataLossError(f"A Parquet file is damaged: {error}. Received: {shown(path)}") from error


def _faults() -> tuple[type[Exception], ...]:
    """What reading a damaged file raises; strings that are none raise errors of Python."""
    return (OSError, ValueError, TypeError, LookupError, OverflowError, pyarrow().ArrowException)


# -- columns ------------------------------------------------------------------------------


def spec_of_field(field: Any) -> Any:
    """The spec of a column, given its field of the schema."""
    pa, kind = pyarrow(), field.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_string(kind):
        return STRING
    if pa.types.is_struct(kind):
        return {child.name: spec_of_field(child) for child in kind}
    if pa.types.is_fixed_size_list(kind):
        inner = _number_type(kind.value_type, field)
        return TensorSpec((kind.list_size,), inner)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if _is_string(kind.value_type):
            return TensorSpec((None,), np.dtype(object))
        return TensorSpec((None,), _number_type(kind.value_type, field))
    return TensorSpec((), _number_type(kind, field))


def _is_string(kind: Any) -> bool:
    types = pyarrow().types
    tests = (
        types.is_string,
        types.is_large_string,
        types.is_binary,
        types.is_large_binary,
        types.is_fixed_size_binary,
    )
    return any(test(kind) for test in tests)


def _number_type(kind: Any, field: Any) -> np.dtype[Any]:
    types = pyarrow().types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype())
    if types.is_timestamp(kind) or types.is_duration(kind):
        return np.dtype(f"{'M' if types.is_timestamp(kind) else 'm'}8[{kind.unit}]")
    raise InvalidTypeError(
        "Parquet columns can hold numbers, booleans, times, strings, lists of them and structs; leave "
        f"others out with columns=[...]. Received: {shown(field.name)} of type {kind}"
    )


def columns_of(array: Any, name: str) -> Iterator[Column]:
    """The columns that an array of pyarrow becomes: one, or one for each leaf of a struct."""
    pa = pyarrow()
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if array.null_count and not pa.types.is_floating(kind):
        row = array.is_null().index(pa.scalar(True)).as_py()
        raise InvalidArgumentError(
            f"Column {name!r} has no value in some row; only floats can do without (they become nan). "
            f"Fill or drop such rows when the file is written. Received: null in row {row} of a block"
        )
    if pa.types.is_struct(kind):
        # In the order of names, as dictionaries are flattened.
        for child in sorted(kind, key=lambda child: str(child.name)):
            yield from columns_of(array.field(child.name), f"{name}.{child.name}")
    elif _is_string(kind):
        yield strings(array.to_pylist())
    elif pa.types.is_fixed_size_list(kind):
        (values,) = columns_of(array.flatten(), name)
        yield np.asarray(values).reshape(len(array), kind.list_size)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        (flat,) = columns_of(array.flatten(), name)
        bounds = array.offsets.to_numpy() - array.offsets[0].as_py()
        yield [flat[a:b] for a, b in itertools.pairwise(bounds)]
    else:
        yield array.to_numpy(zero_copy_only=False)


# -- files ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParquetFormat(Format):
    """Parquet files."""

    columns: tuple[str, ...]  # which columns to read
    spec: dict[str, Any]  # a dictionary with one entry per column
    schema: dict[str, Any]  # the fields that each file must have, by name
    first: str  # the file that the schema was taken from

    def open(self, path: str) -> ParquetCursor:
        """Start reading a file."""
        return ParquetCursor(self, path)

    def count(self, path: str) -> int:
        """The number of rows, which stands at the end of the file."""
        with open_parquet(path) as file:
            return int(file.metadata.num_rows)


def parquet_format(path: str, columns: Sequence[str] | None) -> ParquetFormat:
    """The format of files like this one."""
    with open_parquet(path) as file:
        schema = {field.name: field for field in file.schema_arrow}
    chosen = tuple(schema) if columns is None else tuple(columns)
    unknown = [name for name in chosen if name not in schema]
    if unknown or not chosen:
        raise InvalidValueError(
            f"columns must name columns of the file, which has {', '.join(map(repr, schema))}. "
            f"Received: {list(chosen)}"
        )
    fields = {name: schema[name] for name in chosen}
    spec = {name: spec_of_field(field) for name, field in fields.items()}
    return ParquetFormat(chosen, spec, {name: f.type for name, f in fields.items()}, path)


class ParquetCursor(BlockCursor):
    """The rows of one file."""

    def __init__(self, format_: ParquetFormat, path: str) -> None:
        self._format, self._path = format_, path
        self._file = open_parquet(path)
        self._check_schema()
        groups = self._file.metadata.num_row_groups
        self._sizes = [self._file.metadata.row_group(i).num_rows for i in range(groups)]
        self._group = 0
        self._batches: Iterator[Any] = iter(())
        self._number = 0  # of the next row
        self._damage: DataLossError | None = None  # raised again and again

    def next_block(self, limit: int) -> Chunk | None:
        """Rows of one row group."""
        while True:
            batch = self._next_batch()
            if batch is not None and batch.num_rows:
                chunk = self._chunk(batch)
                self._number += batch.num_rows
                return chunk
            if batch is None:
                if self._group == len(self._sizes):
                    return None
                self._open_group()

    def _next_batch(self) -> Any:
        if self._damage is not None:
            raise self._damage
        try:
            return next(self._batches, None)
        except _faults() as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataLossError:
        self._damage = DataLossError(
            f"A Parquet file is damaged in row group {self._group - 1}, at or after row "
            f"{self._number}: {error}. Received: {shown(self._path)}"
        )
        return self._damage

    def skip_ahead(self, count: int) -> int:
        """Leave out whole row groups, as long as none is begun."""
        skipped = 0
        if (next_batch := self._next_batch()) is not None:
            self._batches = itertools.chain([next_batch], self._batches)
            return 0
        while self._group < len(self._sizes) and self._sizes[self._group] <= count - skipped:
            skipped += self._sizes[self._group]
            self._group += 1
        self._number += skipped
        return skipped

    def close(self) -> None:
        """Close the file."""
        self._batches = iter(())
        self._file.close()

    def _open_group(self) -> None:
        self._batches = self._file.iter_batches(
            batch_size=_ROWS, row_groups=[self._group], columns=list(self._format.columns)
        )
        self._group += 1

    def _chunk(self, batch: Any) -> Chunk:
        columns: list[Column] = []
        try:
            for name in sorted(self._format.columns):  # as dictionaries are flattened
                columns += columns_of(batch.column(name), name)
        except PhalanxError:
            raise
        except _faults() as error:
            raise self._damaged(error) from error
        return Chunk(columns, batch.num_rows)

    def _check_schema(self) -> None:
        have = {field.name: field.type for field in self._file.schema_arrow}
        for name, kind in self._format.schema.items():
            if have.get(name) != kind:
                raise InvalidArgumentError(
                    "All Parquet files of a dataset need the same columns, and "
                    f"{self._format.first!r} has {name!r} of type {kind}. "
                    f"Received: {shown(self._path)} with "
                    + (f"type {have[name]}" if name in have else f"the columns {sorted(have)}")
                )
