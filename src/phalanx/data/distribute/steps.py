"""What one worker's replicas get, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import tree_util
from numpy.typing import NDArray

from phalanx.data.distribute.rebatching import PieceCursor, Position, no_rows_like
from phalanx.data.plan.columns import Chunk, Column, as_slice
from phalanx.data.plan.cursors import Cursor, Run, read_exactly
from phalanx.data.plan.nodes import PlanNode
from phalanx.data.plan.opening import GatherCursor, open_plan

Shape = tuple[int, ...]


class RowsOf:
    """Rows of a column that have not been fetched yet: they are fetched to where they are needed.

    Args:
        column: where the rows are.
        numbers: which rows, in the shape that they are to have.
        where: the same as a slice, if the numbers are consecutive.
    """

    __slots__ = ("_column", "_numbers", "_where", "dtype", "shape")

    def __init__(self, column: NDArray[Any], numbers: NDArray[Any], where: slice | None) -> None:
        self._column, self._numbers, self._where = column, numbers, where
        self.shape: tuple[int, ...] = (*numbers.shape, *column.shape[1:])
        self.dtype: np.dtype[Any] = column.dtype

    def copy_to(self, out: NDArray[Any]) -> None:
        """Fetch the rows into an array of their shape."""
        if not out.size:
            return
        rows = out.reshape(-1, *self._column.shape[1:])
        if self._where is not None:
            np.copyto(rows, self._column[self._where], casting="unsafe")
        elif out.dtype == self.dtype:
            self._column.take(self._numbers.reshape(-1), axis=0, out=rows, mode="clip")
        else:
            np.copyto(rows, self._column.take(self._numbers.reshape(-1), axis=0), casting="unsafe")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        rows = self._column.take(self._numbers, axis=0)
        return rows if dtype is None else rows.astype(dtype)


@dataclass(frozen=True)
class Step:
    """One step: for each leaf of an element, the part of each replica; and how far that reaches."""

    parts: list[list[Any]]
    structure: Any
    position: Position

    def shapes(self) -> list[list[list[int]]]:
        """The shape of each leaf's part on each replica."""
        return [[list(getattr(part, "shape", ())) for part in parts] for parts in self.parts]

    def without_rows(self) -> Step:
        """A step like this one that has no rows."""
        rows = [[no_rows_like(parts[0])] * len(parts) for parts in self.parts]
        return Step(rows, self.structure, self.position)

    def with_shapes(self, shapes: Sequence[Shape]) -> Step:
        """A step without rows whose leaves have these shapes, which other workers expect of it."""
        columns = []
        for parts, shape in zip(self.parts, shapes, strict=True):
            first = parts[0]
            fits = not isinstance(first, np.ndarray) or first.dtype.kind == "O"
            columns.append(parts if fits else [np.empty(shape, first.dtype)] * len(parts))
        return Step(columns, self.structure, self.position)


def shapes_on_all(said: Sequence[Any]) -> list[list[Shape]] | None:
    """The shape of each leaf on the replicas of all workers; None if there are no rows.

    Args:
        said: of each worker, the `shapes` of its step, or how many replicas of it have no rows.
    """
    some = next((shapes for shapes in said if isinstance(shapes, list)), None)
    if some is None:
        return None
    found = []
    for i, leaf in enumerate(some):
        nothing = [0, *leaf[0][1:]]
        columns = [shapes[i] if isinstance(shapes, list) else [nothing] * shapes for shapes in said]
        found.append([tuple(shape) for column in columns for shape in column])
    return found


class StepReader:
    """Reads a plan of pieces, one per replica and step. Missing pieces of the last step are empty.

    Args:
        node: the plan. With `Pieces` or `SizedPieces` on top the position is in batches; otherwise
            elements count as pieces.
        replicas: how many pieces a step takes.
        run: the run of the plan.
        skip: how many pieces to leave out.
    """

    def __init__(self, node: PlanNode, replicas: int, run: Run, skip: int = 0) -> None:
        self._node, self._replicas = node, replicas
        self._cursor = open_plan(node, run)
        # Rows are fetched straight to where they are needed.
        gathers = isinstance(self._cursor, GatherCursor)
        self._columns: Sequence[Column] | None = self._cursor.columns if gathers else None  # type: ignore[attr-defined]
        self._pieces: Cursor = self._cursor.inputs[0] if gathers else self._cursor
        self._structure: Any = None
        self._elements = skip
        if skip:
            self._pieces.skip(skip)

    def next(self) -> Step | None:
        """The next step; None at the end."""
        chunk = read_exactly(self._pieces, self._replicas)
        if chunk is None:
            return None
        self._elements += chunk.count
        columns = chunk.columns if self._columns is None else self._fetched(chunk)
        parts = [list(column) for column in columns]
        for column in parts:
            column.extend(no_rows_like(column[0]) for _ in range(self._replicas - chunk.count))
        return Step(parts, self._structure_now(), self._position())

    def _fetched(self, chunk: Chunk) -> list[list[Any]]:
        assert self._columns is not None
        (numbers,) = chunk.columns
        pieces = [(np.asarray(x), as_slice(np.asarray(x).reshape(-1))) for x in numbers]
        return [[_rows_of(column, *piece) for piece in pieces] for column in self._columns]

    def _structure_now(self) -> Any:
        if self._structure is None:
            found = getattr(self._pieces, "structure", None)
            self._structure = (
                tree_util.tree_structure(self._node.element_spec) if found is None else found
            )
        return self._structure

    def _position(self) -> Position:
        if isinstance(self._pieces, PieceCursor):
            return self._pieces.position
        return Position(self._elements)

    def cancel(self) -> None:
        """Wake the thread that waits in this reader; may be called by any thread."""
        self._cursor.cancel()

    def close(self) -> None:
        """Give back threads and files."""
        self._cursor.close()


class PerReplicaStepReader:
    """Several readers side by side, one per replica."""

    def __init__(self, readers: Sequence[StepReader]) -> None:
        self._readers = list(readers)

    def next(self) -> Step | None:
        """One step of each; those that have ended give no rows."""
        steps = [reader.next() for reader in self._readers]
        there = next((step for step in steps if step is not None), None)
        if there is None:
            return None
        columns: list[list[Any]] = []
        for i, parts in enumerate(there.parts):
            nothing = no_rows_like(parts[0])
            columns.append([nothing if step is None else step.parts[i][0] for step in steps])
        longest = max((step.position for step in steps if step is not None), key=lambda p: p.elements)
        return Step(columns, there.structure, longest)

    def cancel(self) -> None:
        """Wake the threads that wait in them."""
        for reader in self._readers:
            reader.cancel()

    def close(self) -> None:
        """Give back threads and files of all."""
        with contextlib.ExitStack() as stack:
            for reader in self._readers:
                stack.callback(reader.close)


def _rows_of(column: Column, numbers: NDArray[Any], where: slice | None) -> Any:
    if isinstance(column, list):
        return column[int(numbers)]
    if column.dtype.kind == "O":
        return column.take(numbers, axis=0)
    return RowsOf(column, numbers, where)
