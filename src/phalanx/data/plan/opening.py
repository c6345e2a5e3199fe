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
class RowNumbers(PlanNode):
    """The numbers 0 … count-1."""

    count: int = 0

    def spec(self, *inputs: Any) -> Any:
        """One row number."""
        return TensorSpec((), number_dtype(self.count))

    def size(self, *inputs: int) -> int:
        """How many rows there are."""
        return self.count

    def open(self, run: Run) -> Cursor:
        """Count."""
        return CountingCursor(self.count)


def number_dtype(count: int) -> Any:
    """The smaller type that can number so many rows: a shuffle may hold a number for each of them."""
    return np.int32 if count <= 2**31 else np.int64


class CountingCursor(Cursor):
    """Counts from 0."""

    def __init__(self, count: int) -> None:
        self.position, self._count = 0, count
        self._dtype = number_dtype(count)

    def read(self, limit: int) -> Chunk | None:
        """The next numbers."""
        start, stop = self.position, min(self.position + limit, self._count)
        if start == stop:
            return None
        self.position = stop
        return Chunk((np.arange(start, stop, dtype=self._dtype),), stop - start)

    def skip(self, count: int) -> int:
        """Add."""
        start = self.position
        self.position = min(start + count, self._count)
        return self.position - start


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
    plan: PlanNode = RowNumbers((), rows.count)
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
