"""Nodes that cut global batches into the pieces of one worker's replicas, by the rules of `splitting`.

Both yield one element per piece, in the order of the replicas. They never look into rows, so they run
on row numbers where they can, and a worker then fetches only rows of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.distribute.splitting import cut, cut_for_worker, fill
from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import BlockCursor, Cursor, Run, read_exactly
from phalanx.data.plan.elements import Ragged, RaggedSpec, spec_of, with_rows
from phalanx.data.plan.nodes import UNKNOWN, PlanNode
from phalanx.data.plan.opening import open_plan, row_source
from phalanx.errors import InvalidArgumentError, UnbatchedDatasetError

Leaves = list[Any]


@dataclass(frozen=True)
class Position:
    """How far a worker has read: whole elements of the dataset, and rows of the next one."""

    elements: int = 0
    rows: int = 0


BEGINNING = Position()


class CutBatches(PlanNode):
    """Base of the nodes that cut the batches of their input."""

    groups = True

    @property
    def moves(self) -> bool:  # type: ignore[override]
        """Whether the rows of batches are rows of the source."""
        return are_batches_of_rows(self.inputs[0])

    @property
    def parts(self) -> int:
        """Into how many pieces a batch is cut."""
        raise NotImplementedError

    def rows_of_piece(self, rows: int) -> int | None:
        """How many rows each piece of a batch has, if all have as many."""
        raise NotImplementedError

    def spec(self, *inputs: Any) -> Any:
        """A batch's spec, with the size of a piece if all have one."""
        check_rows(inputs[0], self.parts)

        def of_piece(leaf: Any) -> Any:
            rows = leaf.shape[0]
            return with_rows(leaf, None if rows is None else self.rows_of_piece(rows))

        return tree_util.tree_map(of_piece, inputs[0])


@dataclass(frozen=True, eq=False)
class Pieces(CutBatches):
    """Cuts each batch by its actual size."""

    workers: int = 1
    replicas: int = 1  # of each worker
    worker: int = 0  # the one that the pieces are for
    dealt: bool = True  # whether each worker keeps its own pieces only; if not, all are for this one

    @property
    def parts(self) -> int:
        """One for each replica of all workers."""
        return self.workers * self.replicas

    @property
    def per_batch(self) -> int:
        """How many pieces of a batch this worker gets."""
        return self.replicas if self.dealt else self.parts

    def rows_of_piece(self, rows: int) -> int | None:
        """All have as many if the rows can be divided."""
        return rows // self.parts if rows % self.parts == 0 else None

    def size(self, *inputs: int) -> int:
        """A piece per replica for each batch."""
        return inputs[0] if inputs[0] < 0 else inputs[0] * self.per_batch

    def open(self, run: Run) -> Cursor:
        """Read batch by batch."""
        return _PiecesCursor(open_plan(self.inputs[0], run), self)


class PieceCursor(BlockCursor):
    """Base of the cursors that cut batches; knows how far it has read."""

    def __init__(self, input_: Cursor, batches: PlanNode) -> None:
        self.inputs = (input_,)
        self._of = batches

    @property
    def position(self) -> Position:
        """How far the pieces that were read reach."""
        raise NotImplementedError

    @property
    def structure(self) -> Any:
        """The structure of batches that only show it themselves; None if the plan knows it."""
        return getattr(self.inputs[0], "structure", None)

    def next_batch(self, pieces: int) -> Leaves | None:
        """The leaves of the next batch, which is to be cut into pieces."""
        chunk = self.inputs[0].read(1)
        if chunk is None:
            return None
        batch = chunk.element(0)
        if any(isinstance(leaf, str | bytes) or not leaf.shape for leaf in batch):
            raise unbatched(pieces, ", ".join(str(spec_of(leaf)) for leaf in batch))
        rows = [len(leaf) for leaf in batch]
        if rows.count(rows[0]) < len(rows):
            known = self._of.known_spec()
            check_equal_rows(self.structure if known is None else tree_util.tree_structure(known), rows)
        return batch


class _PiecesCursor(PieceCursor):
    def __init__(self, input_: Cursor, node: Pieces) -> None:
        super().__init__(input_, node.inputs[0])
        self._node = node
        self._batches = 0

    @property
    def position(self) -> Position:
        """A batch counts as read when its first piece is."""
        return Position(self._batches)

    def next_block(self, limit: int) -> Chunk | None:
        """The pieces of a batch. They are not stacked: that would copy them, and sizes may differ."""
        node = self._node
        batch = self.next_batch(node.per_batch)
        if batch is None:
            return None
        self._batches += 1
        rows = len(batch[0])
        if node.dealt:
            slices = cut_for_worker(rows, node.workers, node.replicas, node.worker)
        else:
            slices = cut(rows, node.parts)
        return Chunk([[leaf[s] for s in slices] for leaf in batch], node.per_batch)

    def skip_ahead(self, count: int) -> int:
        """Leave out whole batches without reading them where the input can."""
        batches = count // self._node.per_batch
        done = self.inputs[0].skip(batches) if batches else 0
        self._batches += done
        return done * self._node.per_batch


@dataclass(frozen=True, eq=False)
class SizedPieces(CutBatches):
    """Cuts the rows of all batches by a table of sizes, across the ends of batches."""

    steps: tuple[tuple[int, ...], ...] = ((1,),)  # from `splitting.sizes_per_step`
    start: Position = BEGINNING  # from where to begin
    first_step: int = 0  # which step of the table to begin with

    @property
    def parts(self) -> int:
        """One for each replica."""
        return len(self.steps[0])

    def rows_of_piece(self, rows: int) -> int | None:
        """All have as many if the table has one size only, and batches have the size that it is for."""
        sizes = {size for step in self.steps for size in step}
        whole = sum(map(sum, self.steps)) // len(self.steps)
        return sizes.pop() if rows == whole and len(sizes) == 1 else None

    def size(self, *inputs: int) -> int:
        """Not known: it depends on the sizes of the batches."""
        return inputs[0] if inputs[0] <= 0 else UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Read batches, keep what is left of them for the next piece."""
        return _SizedPiecesCursor(open_plan(self.inputs[0], run), self)


class _SizedPiecesCursor(PieceCursor):
    def __init__(self, input_: Cursor, node: SizedPieces) -> None:
        super().__init__(input_, node.inputs[0])
        first = node.first_step % len(node.steps)
        self._sizes = itertools.islice(itertools.cycle(node.steps), first, None)
        self._rows = _BatchRows(self, node.parts)
        start = node.start
        self._rows.batches = input_.skip(start.elements) if start.elements else 0
        if start.rows:
            self._rows.fill(start.rows)
            if self._rows.at_hand < start.rows:
                raise InvalidArgumentError(
                    f"The position to go on from is behind the end of the dataset. Received: {start}"
                )
            self._rows.read(start.rows)

    @property
    def position(self) -> Position:
        """Right only between steps, which is when it is asked for."""
        return self._rows.position

    def next_block(self, limit: int) -> Chunk | None:
        """The pieces of a step."""
        sizes = next(self._sizes)
        rows = read_exactly(self._rows, sum(sizes)) if sum(sizes) else self._rows.no_rows()
        if rows is None:
            return None
        slices = fill(rows.count, sizes)
        leaves = [
            [Ragged(list(column[s])) for s in slices] if is_ragged else [column[s] for s in slices]
            for column, is_ragged in zip(rows.columns, self._rows.are_ragged, strict=True)
        ]
        return Chunk(leaves, len(sizes))


class _BatchRows(BlockCursor):
    """The rows of batches, one after the other."""

    def __init__(self, cursor: PieceCursor, pieces: int) -> None:
        self._cursor, self._pieces = cursor, pieces
        self.batches = 0  # that were read
        self.are_ragged: list[bool] = []

    @property
    def position(self) -> Position:
        if self._block is None:
            return Position(self.batches)
        return Position(self.batches - 1, self._at)

    def next_block(self, limit: int) -> Chunk | None:
        while (batch := self._cursor.next_batch(self._pieces)) is not None:
            self.batches += 1
            if len(batch[0]):
                self.are_ragged = [isinstance(leaf, Ragged) for leaf in batch]
                columns = [list(leaf) if isinstance(leaf, Ragged) else leaf for leaf in batch]
                return Chunk(columns, len(batch[0]))
        return None

    def no_rows(self) -> Chunk | None:
        """None of the rows that follow; None if none follow."""
        return self._block.rows(0, 0) if self.fill(1) and self._block is not None else None


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
