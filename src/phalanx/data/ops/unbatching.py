"""Taking batches apart, cutting them anew, and windows over elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.ops.batching import Batch, BatchCursor, batched_size, stack_leaf
from phalanx.data.plan.columns import Chunk, Column, read_only
from phalanx.data.plan.cursors import BlockCursor, Cursor, Run, read_exactly
from phalanx.data.plan.elements import DatasetSpec, Ragged
from phalanx.data.plan.nodes import UNKNOWN, PlanNode
from phalanx.data.plan.opening import open_plan
from phalanx.data.plan.sources import Slices
from phalanx.errors import InvalidArgumentError, InvalidValueError


def row_spec(spec: Any, what: str) -> TensorSpec:
    """The spec of the rows of a leaf."""
    shape = getattr(spec, "shape", ())
    if not shape:
        raise InvalidValueError(f"{what} needs elements with a first dimension. Received: {spec}")
    return TensorSpec(tuple(shape[1:]), spec.dtype)


def rows_in(node: PlanNode) -> int:
    """How many rows the batches of a plan have together, or INFINITE or UNKNOWN."""
    size = node.cardinality
    if size <= 0:
        return size
    if isinstance(node, Batch):
        below = node.inputs[0].cardinality
        return below - below % node.batch_size if node.drop_remainder and below > 0 else below
    spec = node.known_spec() if node.has_sure_shapes() else None
    first = None if spec is None else tree_util.tree_leaves(spec)[0].shape[0]
    return UNKNOWN if first is None else size * int(first)


@dataclass(frozen=True, eq=False)
class Unbatch(PlanNode):
    """The rows of each element."""

    def spec(self, *inputs: Any) -> Any:
        """Without the first dimension."""
        return tree_util.tree_map(lambda leaf: row_spec(leaf, "unbatch"), inputs[0])

    def size(self, *inputs: int) -> int:
        """The sum over all batches, where it is known."""
        return rows_in(self.inputs[0])

    def open(self, run: Run) -> Cursor:
        """Read batch by batch."""
        return UnbatchCursor(open_plan(self.inputs[0], run))


class UnbatchCursor(BlockCursor):
    """Yields the rows of batches, as views."""

    def __init__(self, input_: Cursor) -> None:
        self.inputs = (input_,)
        self._index = 0

    def next_block(self, limit: int) -> Chunk | None:
        """The next batch that has any rows."""
        while (batch := self.inputs[0].read(1)) is not None:
            rows = _apart(batch, self._index)
            self._index += 1
            if rows.count:
                return rows
        return None


def _apart(batch: Chunk, index: int) -> Chunk:
    """One batch as a chunk of its rows."""
    leaves = batch.element(0)
    counts = {len(leaf) if isinstance(leaf, Ragged) or np.ndim(leaf) else -1 for leaf in leaves}
    if len(counts) != 1 or -1 in counts:
        raise InvalidArgumentError(
            "unbatch needs arrays with equal first dimensions. "
            f"Received: shapes {[np.shape(leaf) for leaf in leaves]} in element {index}"
        )
    columns: list[Column] = [list(leaf) if isinstance(leaf, Ragged) else leaf for leaf in leaves]
    return Chunk(columns, counts.pop())


@dataclass(frozen=True, eq=False)
class Rebatch(PlanNode):
    """The rows of batches, cut into batches of other sizes, which are used in turn."""

    sizes: tuple[int, ...]
    drop_remainder: bool = False

    def spec(self, *inputs: Any) -> Any:
        """The first dimension is the new size, where all have it."""
        first = self.sizes[0] if self.drop_remainder and len(set(self.sizes)) == 1 else None

        def cut(leaf: Any) -> TensorSpec:
            row = row_spec(leaf, "rebatch")
            return TensorSpec((first, *row.shape), row.dtype)

        return tree_util.tree_map(cut, inputs[0])

    def size(self, *inputs: int) -> int:
        """Known if the number of rows is."""
        rows = rows_in(self.inputs[0])
        if rows <= 0:
            return rows
        cycles, left = divmod(rows, sum(self.sizes))
        count = cycles * len(self.sizes)
        for size in itertools.cycle(self.sizes):
            if left < size:
                return count + (left > 0 and not self.drop_remainder)
            left -= size
            count += 1
        raise AssertionError  # sizes are never empty

    def open(self, run: Run) -> Cursor:
        """Read rows, make batches."""
        rows = UnbatchCursor(open_plan(self.inputs[0], run))
        if len(self.sizes) == 1:
            return BatchCursor(rows, self.sizes[0], self.drop_remainder)
        return _RebatchCursor(rows, self.sizes, self.drop_remainder)


class _RebatchCursor(Cursor):
    def __init__(self, rows: UnbatchCursor, sizes: tuple[int, ...], drop_remainder: bool) -> None:
        self.inputs = (rows,)
        self._sizes = itertools.cycle(sizes)
        self._drop = drop_remainder
        self._held: Chunk | None = None
        self._nothing: Chunk | None = None  # a batch of no rows
        self._ended = False

    def read(self, limit: int) -> Chunk | None:
        """One batch. Batches of no rows may follow the last full one, as in TensorFlow."""
        size = 1 if self._ended else next(self._sizes)
        if size == 0 and self._nothing is not None:
            return self._nothing
        chunk = read_exactly(self.inputs[0], max(size, 1), self._held)
        if chunk is None:
            self._ended = True
            return None
        if self._nothing is None:
            self._nothing = _as_batch(chunk.rows(0, 0))
        chunk, self._held = chunk.split(size)
        self._ended = chunk.count < size
        if self._ended and self._drop:
            return self.read(limit)  # behind what is left out is the end, or what is wrong
        return _as_batch(chunk)


def _as_batch(rows: Chunk) -> Chunk:
    """Rows as one element."""
    leaves = [stack_leaf(column) for column in rows.columns]
    return Chunk([leaf.reshape(1, *leaf.shape) for leaf in leaves], 1)


# -- windows --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Window(PlanNode):
    """Datasets of `length` elements each, which begin `shift` elements apart."""

    length: int
    shift: int
    stride: int
    drop_remainder: bool
    make: Callable[[PlanNode], Any]

    @property
    def span(self) -> int:
        """How many elements lie between the first and the last of a window, both included."""
        return (self.length - 1) * self.stride + 1

    def spec(self, *inputs: Any) -> Any:
        """A dataset for each leaf."""
        return tree_util.tree_map(DatasetSpec, inputs[0])

    def size(self, *inputs: int) -> int:
        """One window per shift, as long as there are elements."""
        (size,) = inputs
        if size < 0:
            return size
        if self.drop_remainder:
            return max(0, (size - self.span) // self.shift + 1)
        return batched_size(size, self.shift, False)

    def open(self, run: Run) -> Cursor:
        """Keep the elements that a later window needs again."""
        return _WindowCursor(self, open_plan(self.inputs[0], run))


class _WindowCursor(Cursor):
    def __init__(self, node: Window, input_: Cursor) -> None:
        self.inputs = (input_,)
        self._node = node
        self._held: Chunk | None = None
        self._gap = 0  # elements between windows that are not needed

    def read(self, limit: int) -> Chunk | None:
        windows = list(itertools.islice(self._windows(), limit))
        if not windows:
            return None
        return Chunk([list(leaves) for leaves in zip(*windows, strict=True)], len(windows))

    def _windows(self) -> Iterator[list[Any]]:
        node = self._node
        while self._fill():
            held = self._held
            assert held is not None
            if node.drop_remainder and held.count < node.span:
                self.inputs[0].read(1)  # fails if it was damage that ended it
                return
            window = held.take(np.arange(0, min(held.count, node.span), node.stride))
            self._advance(held)
            yield self._datasets(window)

    def _fill(self) -> bool:
        """Have all elements of the next window at hand, as far as there are any."""
        if self._gap:
            self.inputs[0].skip(self._gap)
            self._gap = 0
        self._held = read_exactly(self.inputs[0], self._node.span, self._held)
        return self._held is not None

    def _advance(self, held: Chunk) -> None:
        shift = self._node.shift
        self._gap = max(0, shift - held.count) if held.count >= self._node.span else 0
        _, self._held = held.split(shift)

    def _datasets(self, window: Chunk) -> list[Any]:
        known = self._node.inputs[0].known_spec()
        specs = tree_util.tree_leaves(self._node.inputs[0].element_spec if known is None else known)
        return [
            self._node.make(Slices((), (read_only(column),), window.count, spec))
            for column, spec in zip(window.columns, specs, strict=True)
        ]
