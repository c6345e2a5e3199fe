"""Where elements come from: arrays, ranges, generators and lists of files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.core.errors import InvalidTypeError, InvalidValueError
from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.columns import Chunk, Column, read_only
from phalanx.data.elements import Ragged, flatten, spec_of, unflatten
from phalanx.data.node import Cursor, GatherCursor, Node, RowNumbers, Run


@dataclass(frozen=True)
class ArrayRows:
    """Rows that are columns in memory."""

    count: int
    held: tuple[Column, ...]

    def columns(self) -> Sequence[Column]:
        """The columns."""
        return self.held


@dataclass(frozen=True, eq=False)
class Slices(Node):
    """The rows of columns."""

    columns: tuple[Column, ...]
    count: int
    slice_spec: Any

    def spec(self, *inputs: Any) -> Any:
        """The spec of one row."""
        return self.slice_spec

    def size(self, *inputs: int) -> int:
        """The number of rows."""
        return self.count

    def rows(self) -> ArrayRows:
        """The columns themselves."""
        return ArrayRows(self.count, self.columns)

    def open(self, run: Run) -> Cursor:
        """Read row by row."""
        return GatherCursor(RowNumbers((), self.count).open(run), self.columns)


def slices(tensors: Any, what: str = "from_tensor_slices") -> Slices:
    """The rows of a nest of arrays."""
    leaves, structure = flatten(tensors)
    if not leaves:
        raise InvalidValueError(f"{what} needs at least one array. Received: {tensors!r}")
    counts = []
    for leaf in leaves:
        if not isinstance(leaf, Ragged) and np.ndim(leaf) == 0:
            raise InvalidValueError(
                f"{what} cuts arrays along their first dimension, so each needs one; use from_tensors for "
                f"a single element. Received: {leaf!r}"
            )
        counts.append(len(leaf))
    if len(set(counts)) > 1:
        raise InvalidValueError(
            f"{what} needs arrays with equal first dimensions. Received: first dimensions {counts}"
        )
    specs = [_row_spec(leaf) for leaf in leaves]
    columns = tuple(read_only(list(x) if isinstance(x, Ragged) else x) for x in leaves)
    return Slices((), columns, counts[0], unflatten(structure, specs))


def _row_spec(leaf: Any) -> TensorSpec:
    return TensorSpec(tuple(leaf.shape[1:]), leaf.dtype)


def single(tensors: Any) -> Slices:
    """One element."""
    leaves, structure = flatten(tensors)
    if not leaves:
        raise InvalidValueError(f"from_tensors needs at least one array. Received: {tensors!r}")
    specs = [spec_of(leaf) for leaf in leaves]
    columns = Chunk.of_elements([leaves]).columns
    return Slices((), tuple(read_only(c) for c in columns), 1, unflatten(structure, specs))


@dataclass(frozen=True, eq=False)
class Range(Node):
    """The numbers of a range."""

    numbers: range
    dtype: Any = np.int64

    def spec(self, *inputs: Any) -> Any:
        """One number."""
        return TensorSpec((), np.dtype(self.dtype))

    def size(self, *inputs: int) -> int:
        """The length of the range."""
        return len(self.numbers)

    def open(self, run: Run) -> Cursor:
        """Count."""
        return _RangeCursor(self.numbers, self.dtype)


class _RangeCursor(Cursor):
    def __init__(self, numbers: range, dtype: Any) -> None:
        self._left, self._dtype = numbers, dtype

    def read(self, limit: int) -> Chunk | None:
        now, self._left = self._left[:limit], self._left[limit:]
        if not now:
            return None
        return Chunk((np.arange(now.start, now.stop, now.step, self._dtype),), len(now))

    def skip(self, count: int) -> int:
        skipped = len(self._left[:count])
        self._left = self._left[count:]
        return skipped


@dataclass(frozen=True, eq=False)
class FileNames(Slices):
    """The names of files, one per element."""

    names: tuple[str, ...] = ()

    @property
    def is_file_source(self) -> bool:
        """Always."""
        return True

    @property
    def files(self) -> tuple[str, ...]:
        """The names."""
        return self.names

    def with_files(self, files: Sequence[str]) -> Node:
        """Other names."""
        return file_names(files)


def file_names(names: Sequence[str]) -> FileNames:
    """A source of file names."""
    column = np.empty(len(names), object)
    column[:] = list(names)
    spec = TensorSpec((), np.dtype(object))
    return FileNames((), (read_only(column),), len(names), spec, tuple(names))
