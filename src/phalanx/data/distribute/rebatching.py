"""Nodes that cut global batches into the pieces of one worker's replicas, by the rules of `splitting`.

Both yield one element per piece, in the order of the replicas. They never look into rows, so they run
on row numbers where they can, and a worker then fetches only rows of its own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.distribute.splitting import cut, cut_for_worker, fill
from phalanx.data.plan.columns import Chunk, Column
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.elements import Ragged, RaggedSpec, spec_of
from phalanx.data.plan.nodes import PlanNode
from phalanx.data.plan.opening import open_plan, row_source
from phalanx.errors import DataLossError, InvalidArgumentError, UnbatchedDatasetError

Leaves = list[Any]


@dataclass(frozen=True)
class Position:
    """How far a worker has read: whole elements of the dataset, and rows of the next one."""

    elements: int = 0
    rows: int = 0


BEGINNING = Position()


@dataclass(frozen=True, eq=False)
class Pieces(PlanNode):
    """Cuts each batch by its actual size.

    Args:
        inputs: a node whose elements are batches.
        workers: how many workers there are.
        replicas: how many replicas each has.
        worker: which worker the pieces are for.
        dealt: whether each worker keeps its own pieces only. If not, all are for this one.
    """

    workers: int = 1
    replicas: int = 1
    worker: int = 0
    dealt: bool = True
    groups = True

    @property
    def moves(self) -> bool:  # type: ignore[override]
        """Whether the rows of batches are rows of the source."""
        return are_batches_of_rows(self.inputs[0])

    @property
    def per_batch(self) -> int:
        """How many pieces of a batch this worker gets."""
        return self.replicas if self.dealt else self.workers * self.replicas

    def spec(self, *inputs: Any) -> Any:
        """A batch's spec, with the size of a piece if all have one."""
        parts = self.workers * self.replicas
        check_rows(inputs[0], parts)

        def of_piece(rows: int | None) -> int | None:
            return rows // parts if rows is not None and rows % parts == 0 else None

        return tree_util.tree_map(lambda leaf: with_rows(leaf, of_piece(leaf.shape[0])), inputs[0])

    def size(self, *inputs: int) -> int:
        """A piece per replica for each batch."""
        return inputs[0] if inputs[0] < 0 else inputs[0] * self.per_batch

    def open(self, run: Run) -> Cursor:
        """Read batch by batch."""
        return _PiecesCursor(open_plan(self.inputs[0], run), self)


class PieceCursor(Cursor):
    """Base of the cursors that cut batches; knows how far it has read."""

    def __init__(self, input_: Cursor, batches: PlanNode) -> None:
        self.inputs = (input_,)
        self._of = batches
        self._ready: deque[Leaves] = deque()

    @property
    def position(self) -> Position:
        """How far the pieces that were read reach."""
        raise NotImplementedError

    @property
    def structure(self) -> Any:
        """The structure of batches that only show it themselves; None if the plan knows it."""
        return getattr(self.inputs[0], "structure", None)

    def _names(self) -> Any:
        """The structure of batches, for messages."""
        known = self._of.known_spec()
        return self.structure if known is None else tree_util.tree_structure(known)

    def _cut_more(self) -> bool:
        """Make more pieces ready; False at the end."""
        raise NotImplementedError

    def read(self, limit: int) -> Chunk | None:
        """The next pieces."""
        while len(self._ready) < limit and self._cut_more():
            pass
        count = min(limit, len(self._ready))
        if count == 0:
            return None
        pieces = [self._ready.popleft() for _ in range(count)]
        return Chunk([_column(leaves) for leaves in zip(*pieces, strict=True)], count)


class _PiecesCursor(PieceCursor):
    def __init__(self, input_: Cursor, node: Pieces) -> None:
        super().__init__(input_, node.inputs[0])
        self._node = node
        self._batches = 0

    @property
    def position(self) -> Position:
        """A batch counts as read when its first piece is."""
        return Position(self._batches)

    def _cut_more(self) -> bool:
        batch = _one(self.inputs[0], self._node.per_batch, self._names)
        if batch is None:
            return False
        self._batches += 1
        self._ready.extend(self._pieces(batch))
        return True

    def _pieces(self, batch: Leaves) -> list[Leaves]:
        node = self._node
        columns = []
        for leaf in batch:
            rows = len(leaf)
            if node.dealt:
                slices = cut_for_worker(rows, node.workers, node.replicas, node.worker)
            else:
                slices = cut(rows, node.workers * node.replicas)
            columns.append([leaf[s] for s in slices])
        return [list(leaves) for leaves in zip(*columns, strict=True)]

    def skip(self, count: int) -> int:
        """Leave out whole batches without reading them where the input can."""
        skipped = min(count, len(self._ready))
        for _ in range(skipped):
            self._ready.popleft()
        batches = (count - skipped) // self._node.per_batch
        done = self.inputs[0].skip(batches) if batches else 0
        self._batches += done
        skipped += done * self._node.per_batch
        return (
            skipped if done < batches or skipped == count else skipped + super().skip(count - skipped)
        )


@dataclass(frozen=True, eq=False)
class SizedPieces(PlanNode):
    """Cuts the rows of all batches by a table of sizes, across the ends of batches.

    Args:
        inputs: a node whose elements are batches.
        steps: a table from `splitting.sizes_per_step`.
        start: from where to begin.
        first_step: which step of the table to begin with.
    """

    steps: tuple[tuple[int, ...], ...] = ((1,),)
    start: Position = BEGINNING
    first_step: int = 0
    groups = True

    @property
    def moves(self) -> bool:  # type: ignore[override]
        """Whether the rows of batches are rows of the source."""
        return are_batches_of_rows(self.inputs[0])

    def spec(self, *inputs: Any) -> Any:
        """A batch's spec, with the size of a piece if all have one."""
        check_rows(inputs[0], len(self.steps[0]))
        sizes = {size for step in self.steps for size in step}
        whole = sum(map(sum, self.steps)) // len(self.steps)

        def of_piece(rows: int | None) -> int | None:
            return next(iter(sizes)) if rows == whole and len(sizes) == 1 else None

        return tree_util.tree_map(lambda leaf: with_rows(leaf, of_piece(leaf.shape[0])), inputs[0])

    def size(self, *inputs: int) -> int:
        """Not known: it depends on the sizes of the batches."""
        return inputs[0] if inputs[0] <= 0 else -2

    def open(self, run: Run) -> Cursor:
        """Read batches, keep what is left of them for the next piece."""
        return _SizedPiecesCursor(open_plan(self.inputs[0], run), self)


class _SizedPiecesCursor(PieceCursor):
    def __init__(self, input_: Cursor, node: SizedPieces) -> None:
        super().__init__(input_, node.inputs[0])
        self._sizes = itertools.cycle(node.steps)
        self._pieces = len(node.steps[0])
        for _ in range(node.first_step % len(node.steps)):
            next(self._sizes)
        self._elements = input_.skip(node.start.elements) if node.start.elements else 0
        self._rest: Leaves | None = None
        self._rows = 0  # how many rows of the batch that `_rest` belongs to are gone
        if node.start.rows:
            batch = _one(input_, self._pieces, self._names)
            if batch is None or _rows(batch) < node.start.rows:
                raise InvalidArgumentError(
                    "The position to go on from is behind the end of the dataset. "
                    f"Received: {node.start}"
                )
            self._keep(batch, node.start.rows)

    @property
    def position(self) -> Position:
        """Right only between steps, which is when it is asked for."""
        return Position(self._elements, self._rows)

    def _keep(self, batch: Leaves, gone: int) -> None:
        """Keep the rows of a batch that are left."""
        if gone == _rows(batch):
            self._rest, self._rows, self._elements = None, 0, self._elements + 1
        else:
            self._rest, self._rows = batch, gone

    def _cut_more(self) -> bool:
        sizes = next(self._sizes)
        wanted, have = sum(sizes), 0
        parts: list[Leaves] = []
        while have < wanted:
            try:
                batch = (
                    self._rest
                    if self._rest is not None
                    else _one(self.inputs[0], self._pieces, self._names)
                )
            except DataLossError:
                if not have:
                    raise
                break  # what comes before it is given first
            if batch is None:
                break
            start = self._rows if self._rest is not None else 0
            stop = min(_rows(batch), start + wanted - have)
            parts.append([leaf[start:stop] for leaf in batch])
            have += stop - start
            self._keep(batch, stop)
        if have == 0 and not (wanted == 0 and self._more_to_come()):
            return False
        if not parts:  # a step in which this worker has nothing to do
            assert self._rest is not None
            parts = [[leaf[:0] for leaf in self._rest]]
        rows = [_join(leaves) for leaves in zip(*parts, strict=True)]
        self._ready.extend([leaf[s] for leaf in rows] for s in fill(have, sizes))
        return True

    def _more_to_come(self) -> bool:
        if self._rest is None:
            self._rest = _one(self.inputs[0], self._pieces, self._names)
        return self._rest is not None


def are_batches_of_rows(node: PlanNode) -> bool:
    """Whether a plan puts rows of its source into batches, which row numbers can then cut."""
    source = row_source(node)
    if source is None:
        return False
    batch, row = tree_util.tree_leaves(node.known_spec()), tree_util.tree_leaves(source.known_spec())
    return bool(batch) and bool(row) and len(batch[0].shape) > len(row[0].shape)


def unbatched(pieces: int, received: Any) -> UnbatchedDatasetError:
    """The error for scalars where batches are needed."""
    return UnbatchedDatasetError(
        f"Only batches can be divided over {pieces} replicas, along their first dimension. Call "
        "dataset.batch(global_batch_size) before distributing it. "
        f"Received: elements of {received}"
    )


def check_rows(spec: Any, pieces: int) -> None:
    """Refuse elements that have no rows to divide."""
    leaves = tree_util.tree_leaves(spec)
    if not all(leaf.shape for leaf in leaves):
        raise unbatched(pieces, spec)
    check_equal_rows(tree_util.tree_structure(spec), [leaf.shape[0] for leaf in leaves])


def with_rows(spec: Any, rows: int | None) -> Any:
    """The spec of a batch with another number of rows."""
    return type(spec)((rows, *spec.shape[1:]), spec.dtype)


def empty_leaf(spec: TensorSpec | RaggedSpec) -> Any:
    """What a replica without rows gets: no rows, and nothing in dimensions that are not known."""
    if isinstance(spec, RaggedSpec):
        return Ragged([])
    return np.empty((0, *(dim or 0 for dim in spec.shape[1:])), spec.dtype)


def no_rows_like(leaf: Any) -> Any:
    """What a replica without rows gets, next to one that has the rows `leaf`."""
    if isinstance(leaf, Ragged):
        return leaf[:0]
    if isinstance(leaf, str | bytes):
        return np.empty(0, object)
    return np.empty((0, *leaf.shape[1:]), leaf.dtype)


def _one(cursor: Cursor, pieces: int, structure: Callable[[], Any]) -> Leaves | None:
    """The leaves of the next batch."""
    chunk = cursor.read(1)
    if chunk is None:
        return None
    batch = chunk.element(0)
    if any(isinstance(leaf, str | bytes) or not leaf.shape for leaf in batch):
        raise unbatched(pieces, ", ".join(str(spec_of(leaf)) for leaf in batch))
    rows = [len(leaf) for leaf in batch]
    if rows.count(rows[0]) < len(rows):
        check_equal_rows(structure(), rows)
    return batch


def check_equal_rows(structure: Any, rows: Sequence[int | None]) -> None:
    """Refuse a batch whose leaves have different numbers of rows.

    Args:
        structure: of the batch; None if it is unknown.
        rows: of each leaf; None if not known.
    """
    if len({count for count in rows if count is not None}) < 2:
        return
    names = [f"leaf {i}" for i in range(len(rows))]
    if structure is not None:
        paths = tree_util.tree_flatten_with_path(tree_util.tree_unflatten(structure, names))[0]
        names = [f"x{tree_util.keystr(path)}" for path, _ in paths]
    have = ", ".join(f"{name} with {rows}" for name, rows in zip(names, rows, strict=True))
    raise InvalidArgumentError(
        "A batch is divided over replicas along the first dimension of its leaves, so all need the "
        f"same number of rows. Received: a batch x, {have} rows"
    )


def _rows(batch: Leaves) -> int:
    return len(batch[0])


def _join(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Ragged):
        return Ragged([row for part in parts for row in part])
    return np.concatenate(parts)


def _column(leaves: Sequence[Any]) -> Column:
    """A column of pieces. They are not stacked: that would copy them, and sizes may differ."""
    return list(leaves)
