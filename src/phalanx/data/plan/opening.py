"""Opening plans: on row numbers where that is possible.

Nodes that only move elements (`moves = True`) are run on row numbers where their source can gather any
rows (`rows()`); one gather on top then fetches them. Their code is the same in both cases, because row
numbers are just another column. `open_plan` decides; cursors open their inputs with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.plan.columns import Chunk, Column, Indices, gather_all
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.nodes import PlanNode
from phalanx.errors import InvalidValueError


@dataclass(frozen=True, eq=False)
class RangeSource(PlanNode):
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
        return CountingCursor(self.numbers, self.dtype)


def row_numbers(count: int) -> RangeSource:
    """The numbers 0 … count-1, as small as they can be: a shuffle may hold a number for each row."""
    return RangeSource((), range(count), np.int32 if count <= 2**31 else np.int64)


class CountingCursor(Cursor):
    """Reads the numbers of a range."""

    def __init__(self, numbers: range, dtype: Any = np.int64) -> None:
        self._start, self._step, self._count = numbers.start, numbers.step, len(numbers)
        self._dtype = dtype
        fits = dtype is np.int32 and numbers.start >= 0 and numbers.stop <= 2**31
        self._counts_in: Any = np.int32 if fits else np.int64  # numbers that do not fit wrap around
        self._at = 0

    def read(self, limit: int) -> Chunk | None:
        """The next numbers."""
        count = min(limit, self._count - self._at)
        if count == 0:
            return None
        first = self._start + self._at * self._step
        self._at += count
        column = np.arange(first, first + count * self._step, self._step, dtype=self._counts_in)
        if self._counts_in is not self._dtype:
            column = column.astype(self._dtype, copy=False)
        return Chunk((column,), count)

    def skip(self, count: int) -> int:
        """Add."""
        count = min(count, self._count - self._at)
        self._at += count
        return count


class GatherCursor(Cursor):
    """Fetches the rows whose numbers it reads."""

    def __init__(self, numbers: Cursor, columns: Sequence[Column]) -> None:
        self.inputs = (numbers,)
        self.columns = columns

    def read(self, limit: int) -> Chunk | None:
        """Elements made of rows: single ones, or batches where the numbers are batched."""
        numbers = self.inputs[0].read(limit)
        if numbers is None:
            return None
        (column,) = numbers.columns
        if isinstance(column, list):  # batches of different sizes
            parts = [_fetch(self.columns, batch) for batch in column]
            return Chunk([list(leaves) for leaves in zip(*parts, strict=True)], numbers.count)
        return Chunk(_fetch(self.columns, column), numbers.count)

    def skip(self, count: int) -> int:
        """Leave out rows without fetching them."""
        return self.inputs[0].skip(count)


def _fetch(columns: Sequence[Column], numbers: Any) -> list[Column]:
    """Rows by number, in the shape that the numbers have."""
    flat: Indices = numbers.reshape(-1)
    parts = gather_all(columns, flat)
    if numbers.ndim == 1:
        return parts
    return [part.reshape(*numbers.shape, *part.shape[1:]) for part in parts]  # type: ignore[union-attr]


def row_source(node: PlanNode) -> PlanNode | None:
    """The source whose rows a plan only moves; None if there is none, or not any row can be fetched."""
    while node.rows() is None and node.moves:
        (node,) = node.inputs
    return None if node.rows() is None else node


def open_plan(node: PlanNode, run: Run) -> Cursor:
    """Open a plan for reading: on row numbers where that is possible, as it stands elsewhere."""
    steps: list[PlanNode] = []
    source = node
    rows = source.rows()
    while rows is None and source.moves:
        steps.append(source)
        (source,) = source.inputs
        rows = source.rows()
    if rows is None:
        return node.open(run)
    columns = rows.columns
    if any(isinstance(column, list) for column in columns) and any(step.groups for step in steps):
        return node.open(run)  # only arrays can be regrouped by their row numbers
    plan: PlanNode = row_numbers(rows.count)
    for step in reversed(steps):
        plan = step.with_inputs((plan,))
    return GatherCursor(plan.open(dataclasses.replace(run, on_row_numbers=True)), columns)


class EmptyDatasetError(InvalidValueError):
    """The form of the elements cannot be found out, because there are none."""


def first_element(node: PlanNode) -> Chunk:
    """The first element of a plan, read as cheaply as possible."""
    while node.probe_below:
        node = node.inputs[0]
    cursor = open_plan(node, Run())
    try:
        chunk = cursor.read(1)
    finally:
        cursor.close()
    if chunk is None:
        raise EmptyDatasetError(
            "What a function makes of a dataset is found out with its first element, and this dataset "
            "has none; give an output_signature. Received: an empty dataset"
        )
    return chunk
