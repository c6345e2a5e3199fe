"""Columns and chunks: how many elements travel together.

A column is one leaf of many elements: an array with a leading dimension where all elements have one
shape, a list where they have not. A chunk is some consecutive elements as columns. Nothing here changes
an array that was handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = "NDArray[Any] | list[Any]"
MOST_BYTES = 2**24
"""How many bytes of a column are allocated before it is known how many elements there are."""

Indices: TypeAlias = "NDArray[np.int64]"


class Chunk:
    """Some consecutive elements, as flat columns in leaf order.

    Examples:
        >>> chunk = Chunk((np.arange(6).reshape(3, 2), np.array(["a", "b", "c"], object)), 3)
        >>> chunk.element(1)
        [array([2, 3]), 'b']
        >>> chunk.take(np.array([2, 0])).columns[1].tolist()
        ['c', 'a']
    """

    __slots__ = ("columns", "count")

    def __init__(self, columns: Iterable[Column], count: int) -> None:
        self.columns: tuple[Column, ...] = tuple(columns)
        self.count = count

    def rows(self, start: int, stop: int) -> Chunk:
        """The elements from `start` to `stop`, as views."""
        stop = min(stop, self.count)
        if start == 0 and stop == self.count:
            return self
        return Chunk([column[start:stop] for column in self.columns], stop - start)

    def split(self, count: int) -> tuple[Chunk, Chunk | None]:
        """The first `count` elements, and the others; None if there are no more."""
        if count >= self.count:
            return self, None
        return self.rows(0, count), self.rows(count, self.count)

    def take(self, indices: Indices) -> Chunk:
        """The elements at `indices`; contiguous ones are views, others are copied into fresh arrays."""
        return Chunk(gather_all(self.columns, indices), len(indices))

    def element(self, index: int) -> list[Any]:
        """The leaves of one element."""
        return [column[index] for column in self.columns]

    @staticmethod
    def concat(chunks: Sequence[Chunk]) -> Chunk:
        """The elements of one or more chunks behind each other."""
        if len(chunks) == 1:
            return chunks[0]
        columns = zip(*(chunk.columns for chunk in chunks), strict=True)
        return Chunk([join(parts) for parts in columns], sum(chunk.count for chunk in chunks))

    @staticmethod
    def in_turns(chunks: Sequence[Chunk], block: int = 1) -> Chunk:
        """The elements of chunks of one size, `block` of each in turn."""
        numbers = np.arange(len(chunks) * chunks[0].count).reshape(len(chunks), -1, block)
        return Chunk.concat(chunks).take(numbers.swapaxes(0, 1).reshape(-1))

    @staticmethod
    def of_elements(elements: Sequence[Sequence[Any]]) -> Chunk:
        """A chunk from the leaves of each element; at least one element."""
        return Chunk([stack(leaves) for leaves in zip(*elements, strict=True)], len(elements))

    def __repr__(self) -> str:
        kinds = [
            f"list of {len(c)}" if isinstance(c, list) else f"{c.dtype}{c.shape}" for c in self.columns
        ]
        return f"Chunk({self.count}: {', '.join(kinds)})"


class Builder:
    """Collects elements one by one in a chunk.

    Arrays are copied at once, because functions and generators may use theirs again.

    Args:
        limit: how many elements to collect at most.
        expected: whether so many will come. If not, large elements are collected in several chunks.
    """

    def __init__(self, limit: int, expected: bool) -> None:
        self._limit, self._expected = limit, expected
        self._columns: list[Column] = []
        self.count = 0

    @property
    def full(self) -> bool:
        """Whether no more elements fit."""
        return self.count >= self._limit

    def add(self, leaves: Sequence[Any]) -> None:
        """Append one element."""
        if self.count == 0:
            if not self._expected:
                most = max((leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray)), default=8)
                self._limit = min(self._limit, max(64, MOST_BYTES // max(8, most)))
            self._columns = [self._column(leaf) for leaf in leaves]
        for number, leaf in enumerate(leaves):
            column = self._columns[number]
            if not isinstance(column, list):
                if leaf.shape == column.shape[1:]:
                    column[self.count] = leaf
                    continue
                column = self._columns[number] = list(column[: self.count])
            column.append(leaf.copy() if isinstance(leaf, np.ndarray) else leaf)
        self.count += 1

    def _column(self, leaf: Any) -> Column:
        if isinstance(leaf, np.ndarray | np.generic):
            return np.empty((self._limit, *leaf.shape), leaf.dtype)
        return []

    def chunk(self) -> Chunk | None:
        """What was collected; None if that is nothing."""
        if self.count == 0:
            return None
        columns: list[Column] = []
        for column in self._columns:
            if isinstance(column, list):
                columns.append(stack(column) if isinstance(column[0], str | bytes) else column)
            else:
                columns.append(column[: self.count])
        return Chunk(columns, self.count)


def stack(leaves: Sequence[Any]) -> Column:
    """One column from the leaves of several elements; they must have one dtype."""
    first = leaves[0]
    if isinstance(first, str | bytes):
        column = np.empty(len(leaves), object)
        column[:] = leaves
        return column
    if isinstance(first, np.ndarray | np.generic):
        shape = first.shape
        if all(leaf.shape == shape for leaf in leaves):
            column = np.empty((len(leaves), *shape), first.dtype)
            for i, leaf in enumerate(leaves):
                column[i] = leaf
            return column
    return list(leaves)


def join(parts: Sequence[Column]) -> Column:
    """Columns behind each other."""
    first = parts[0]
    if all(not isinstance(part, list) for part in parts):
        shape = first.shape[1:]  # type: ignore[union-attr]
        if all(part.shape[1:] == shape for part in parts):  # type: ignore[union-attr]
            return np.concatenate(parts)
    return [leaf for part in parts for leaf in part]


def gather_all(columns: Sequence[Column], indices: Indices) -> list[Column]:
    """The rows of columns at `indices`: views if they are consecutive, fresh columns if not."""
    where = as_slice(indices)
    if where is not None:
        return [column[where] for column in columns]
    return [
        [column[i] for i in indices.tolist()]
        if isinstance(column, list)
        else column.take(indices, axis=0, mode="clip")
        for column in columns
    ]


def as_slice(indices: Indices) -> slice | None:
    """The slice that stands for consecutive indices, or None."""
    count = len(indices)
    if count == 0:
        return slice(0, 0)
    start = int(indices[0])
    if int(indices[-1]) - start != count - 1 or not (indices[1:] - indices[:-1] == 1).all():
        return None
    return slice(start, start + count)


def read_only(column: Column) -> Column:
    """The same column, but what is handed out of it cannot be written to."""
    if isinstance(column, list):
        return [read_only(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in column]
    view = column.view()
    view.flags.writeable = False
    return view
