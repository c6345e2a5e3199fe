"""Putting elements together into batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import tree_util
from numpy.typing import NDArray

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.plan.columns import Chunk, Column, stack
from phalanx.data.plan.cursors import Cursor, Run, read_exactly
from phalanx.data.plan.elements import Ragged, RaggedSpec, dtype_of, pad_rows
from phalanx.data.plan.nodes import PlanNode
from phalanx.data.plan.opening import open_plan
from phalanx.errors import InvalidArgumentError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

Group = Callable[[int, Column], Column]
"""From the number of a column, and the column of one batch's elements, to a leaf of the batch."""


def batched_size(size: int, batch: int, drop_remainder: bool) -> int:
    """The number of batches that `size` elements make."""
    if size < 0:
        return size
    return size // batch if drop_remainder else -(-size // batch)


def check_array_spec(spec: Any, what: str) -> TensorSpec:
    """Require an array, not a ragged value or a dataset."""
    if not isinstance(spec, TensorSpec):
        raise InvalidTypeError(
            f"{what} stacks arrays; ragged values and datasets cannot be stacked. Received: {spec}"
        )
    return spec


@dataclass(frozen=True, eq=False)
class Batch(PlanNode):
    """`batch_size` consecutive elements stacked into one."""

    batch_size: int
    drop_remainder: bool = False
    moves = True
    groups = True
    what = "batch"

    def spec(self, *inputs: Any) -> Any:
        """A new first dimension."""
        return tree_util.tree_map(self.batched_spec, inputs[0])

    def batched_spec(self, spec: Any) -> Any:
        """The spec of a batch of leaves."""
        spec = check_array_spec(spec, self.what)
        return TensorSpec((self.first_dim, *spec.shape), spec.dtype)

    @property
    def first_dim(self) -> int | None:
        """How many elements a batch has, if all have as many."""
        return self.batch_size if self.drop_remainder else None

    def size(self, *inputs: int) -> int:
        """A part of the input's."""
        return batched_size(inputs[0], self.batch_size, self.drop_remainder)

    def open(self, run: Run) -> Cursor:
        """Read whole batches."""
        input_ = open_plan(self.inputs[0], run)
        return BatchCursor(input_, self.batch_size, self.drop_remainder)


class BatchCursor(Cursor):
    """Reads many elements at once and puts them together.

    Args:
        input_: what to read.
        size: how many elements make a batch.
        drop_remainder: whether to leave out a last, smaller batch.
        group: makes a leaf of a batch; None to stack.
    """

    def __init__(
        self, input_: Cursor, size: int, drop_remainder: bool, group: Group | None = None
    ) -> None:
        self.inputs = (input_,)
        self._size, self._drop, self._group = size, drop_remainder, group
        self._rest: Chunk | None = None  # the last, smaller batch

    def read(self, limit: int) -> Chunk | None:
        """Up to `limit` batches."""
        if self._rest is None:
            chunk = read_exactly(self.inputs[0], limit * self._size)
        else:
            chunk, self._rest = self._rest, None
        if chunk is None:
            return None
        full = chunk.count // self._size
        if full == 0:
            # Behind what is left out is the end, or what is wrong with the input.
            return self.read(limit) if self._drop else self._batches(chunk, 1)
        chunk, self._rest = chunk.split(full * self._size)
        return self._batches(chunk, full)

    def _batches(self, chunk: Chunk, count: int) -> Chunk:
        if self._group is None:
            return Chunk([stack_batches(column, count) for column in chunk.columns], count)
        size = chunk.count // count
        columns: list[Column] = []
        for number, column in enumerate(chunk.columns):
            parts = [column[i * size : (i + 1) * size] for i in range(count)]
            columns.append(stack([self._group(number, part) for part in parts]))
        return Chunk(columns, count)

    def skip(self, count: int) -> int:
        """Skip the elements of whole batches."""
        if self._rest is not None:
            return super().skip(count)
        skipped = self.inputs[0].skip(count * self._size)
        return batched_size(skipped, self._size, self._drop)


def stack_batches(column: Column, batches: int) -> Column:
    """A column of elements as a column of batches."""
    size = len(column) // batches
    if not isinstance(column, list):
        return column.reshape(batches, size, *column.shape[1:])
    return stack([stack_leaf(column[i * size : (i + 1) * size]) for i in range(batches)])


def stack_leaf(leaves: Column) -> NDArray[Any]:
    """The leaf of one batch; its elements must have one shape."""
    batch = stack(leaves) if isinstance(leaves, list) and leaves else leaves
    if not isinstance(batch, list):
        return batch
    if not all(isinstance(leaf, np.ndarray | np.generic) for leaf in batch):
        raise InvalidTypeError(
            "batch stacks arrays; ragged values and datasets cannot be stacked. "
            f"Received: {type(batch[0]).__name__}"
        )
    shapes = sorted({np.shape(leaf) for leaf in batch})
    raise InvalidArgumentError(
        "batch needs elements of one shape; use padded_batch to fill them up, or ragged_batch to "
        f"keep them as they are. Received: shapes {', '.join(map(str, shapes))}"
    )


# -- elements of different shapes -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RaggedBatch(Batch):
    """Consecutive elements put together as they are: arrays become ragged, numbers are stacked."""

    moves = False
    groups = False
    what = "ragged_batch"

    def batched_spec(self, spec: Any) -> Any:
        """Ragged, except for numbers and strings."""
        spec = check_array_spec(spec, self.what)
        if spec.shape == ():
            return TensorSpec((self.first_dim,), spec.dtype)
        return RaggedSpec((self.first_dim, *[None] * len(spec.shape)), spec.dtype)

    def open(self, run: Run) -> Cursor:
        """Read whole batches."""
        input_ = open_plan(self.inputs[0], run)
        return BatchCursor(input_, self.batch_size, self.drop_remainder, _ragged)


def _ragged(_: int, column: Column) -> Any:
    return Ragged(list(column)) if isinstance(column, list) or column.ndim > 1 else column


@dataclass(frozen=True, eq=False)
class PaddedBatch(Batch):
    """Consecutive elements stacked after each was filled up to a common shape."""

    padded_shapes: Any = None
    padding_values: Any = None
    moves = False
    groups = False
    what = "padded_batch"

    def spec(self, *inputs: Any) -> Any:
        """The shapes to pad to, behind the batch's dimension."""
        specs, structure = tree_util.tree_leaves(inputs[0]), tree_util.tree_structure(inputs[0])
        paddings = self.paddings(structure, specs)
        return tree_util.tree_unflatten(
            structure,
            [
                TensorSpec((self.first_dim, *shape), check_array_spec(spec, self.what).dtype)
                for spec, (shape, _) in zip(specs, paddings, strict=True)
            ],
        )

    def paddings(self, structure: Any, specs: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The shape to pad to, and the value to pad with, for each leaf."""
        shapes = _spread(structure, self.padded_shapes, "padded_shapes")
        values = _spread(structure, self.padding_values, "padding_values")
        return [
            (_check_shape(shape, spec), _check_value(value, spec))
            for shape, value, spec in zip(shapes, values, specs, strict=True)
        ]

    def open(self, run: Run) -> Cursor:
        """Read whole batches."""
        input_ = open_plan(self.inputs[0], run)
        return BatchCursor(input_, self.batch_size, self.drop_remainder, _Pad(self))


def padded_columns(node: PaddedBatch, chunk: Chunk) -> Chunk:
    """One batch of elements, filled up to a common shape."""
    pad = _Pad(node)
    return Chunk([stack([pad(i, column)]) for i, column in enumerate(chunk.columns)], 1)


class _Pad:
    """Pads the leaves of batches."""

    def __init__(self, node: PaddedBatch) -> None:
        self._node = node
        self._paddings: list[tuple[Any, Any]] | None = None

    def __call__(self, number: int, column: Column) -> Column:
        if self._paddings is None:
            known = self._node.inputs[0].known_spec()
            spec = self._node.inputs[0].element_spec if known is None else known
            self._paddings = self._node.paddings(
                tree_util.tree_structure(spec), tree_util.tree_leaves(spec)
            )
        shape, value = self._paddings[number]
        if not isinstance(column, list) and all(d is None for d in shape):
            return column
        if value is None:
            value = _nothing(column[0])
        return pad_rows(list(column), shape, value)


def _spread(structure: Any, given: Any, name: str) -> list[Any]:
    """What is given for each leaf: None, one value for all, or a nest like the element."""
    count = structure.num_leaves
    if given is None or (
        name == "padding_values" and np.ndim(given) == 0 and not isinstance(given, dict)
    ):
        return [given] * count
    try:
        return list(structure.flatten_up_to(given))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidValueError(
            f"{name} of padded_batch must have the structure of the elements, {structure}. "
            f"Received: {shown(given)}"
        ) from error


def _check_shape(shape: Any, spec: TensorSpec) -> tuple[int | None, ...]:
    rank = len(check_array_spec(spec, "padded_batch").shape)
    if shape is None:
        return (None,) * rank
    shape = getattr(shape, "shape", shape)
    dims: tuple[Any, ...]
    dims = tuple(shape) if isinstance(shape, Sequence | np.ndarray) else (shape,)
    if len(dims) != rank or not all(map(_is_dim, dims)):
        raise InvalidValueError(
            f"padded_shapes of padded_batch needs {rank} dimensions for {spec}, each a size, or None "
            f"or -1 for the longest. Received: {shown(shape)}"
        )
    for want, have in zip(dims, spec.shape, strict=True):
        if want is not None and want >= 0 and have is not None and have > want:
            raise InvalidValueError(
                f"padded_batch cannot make elements smaller: {spec.shape} does not fit into the padded "
                f"shape. Received: {shown(shape)}"
            )
    return tuple(None if d is None or d < 0 else int(d) for d in dims)


def _is_dim(size: Any) -> bool:
    return size is None or (isinstance(size, int | np.integer) and abs(int(size)) <= sys.maxsize)


def _check_value(value: Any, spec: TensorSpec) -> Any:
    if value is None:
        return None
    if np.ndim(value):
        raise InvalidValueError(
            f"A padding value must be one number or string. Received: {shown(value)}"
        )
    text = isinstance(value, str | bytes)
    if text != (np.dtype(spec.dtype) == object):
        raise InvalidTypeError(
            f"A padding value must fit the elements, {spec}. Received: {shown(value)}"
        )
    if text:
        return value
    try:
        return np.asarray(value).astype(spec.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidTypeError(
            f"A padding value must fit the elements, {spec}. Received: {shown(value)}"
        ) from error


def _nothing(leaf: Any) -> Any:
    """What a leaf is filled up with if nothing else is said: zeros, or empty strings."""
    if dtype_of(leaf).kind != "O":
        return 0
    first = next(iter(np.ravel(leaf)), "")
    return b"" if isinstance(first, bytes) else ""
