"""Nodes that remember: scan, take_while, random numbers, and batches of elements of similar length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.ops.batching import Batch, PaddedBatch, padded_columns, stack_batches
from phalanx.data.ops.mapping import truth
from phalanx.data.plan.columns import Builder, Chunk
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.functions import Form, Function, caller, function_error
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, PlanNode, SameElements
from phalanx.data.plan.opening import first_element, open_plan
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


@dataclass(frozen=True, eq=False)
class Scan(PlanNode):
    """What a function makes of a state and each element, while it changes the state."""

    state: Any
    fn: Function
    form: Form = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", Form("scan"))

    def known_spec(self) -> Any | None:
        """What was seen."""
        return self.form.spec

    def has_sure_shapes(self) -> bool:
        """Never: a function makes the elements."""
        return False

    @property
    def element_spec(self) -> Any:
        """Found out by calling the function for the first element."""
        if self.form.spec is None:
            first_element(self)
        return self.form.spec

    def size(self, *inputs: int) -> int:
        """As many as before."""
        return inputs[0]

    def open(self, run: Run) -> Cursor:
        """Begin with the first state."""
        return _ScanCursor(self, open_plan(self.inputs[0], run))


class _ScanCursor(Cursor):
    def __init__(self, node: Scan, input_: Cursor) -> None:
        self.inputs = (input_,)
        self._node, self._state = node, node.state
        self._index = 0
        self._failure: Exception | None = None

    def read(self, limit: int) -> Chunk | None:
        if self._failure is not None:
            raise self._failure
        chunk = self.inputs[0].read(limit)
        if chunk is None:
            return None
        done = Builder(chunk.count, expected=True)
        structure = self._node.inputs[0].structure
        for leaves in zip(*chunk.columns, strict=True):
            where = f"element {self._index}"
            element = tree_util.tree_unflatten(structure, leaves)
            try:
                result = self._node.fn(self._state, element)
            except Exception as error:  # noqa: BLE001 - raised after what came before
                self._failure = function_error("scan", where, error)
                break
            try:
                if not isinstance(result, tuple) or len(result) != 2:
                    raise InvalidTypeError(
                        "The function given to scan must return a pair: the new state, and an element. "
                        f"Received: {shown(result)}"
                    )
                self._state, value = result
                done.add(self._node.form.leaves_of(value, where))
            except Exception as error:  # noqa: BLE001 - raised after what came before
                self._failure = error
                break
            self._index += 1
        made = done.chunk()
        if made is None and self._failure is not None:
            raise self._failure
        return made


@dataclass(frozen=True, eq=False)
class TakeWhile(SameElements):
    """The elements before the first one for which a function is false."""

    predicate: Function

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return 0 if inputs[0] == 0 else UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Ask for each element."""
        return _TakeWhileCursor(self, open_plan(self.input, run))


class _TakeWhileCursor(Cursor):
    def __init__(self, node: TakeWhile, input_: Cursor) -> None:
        self.inputs = (input_,)
        self._node = node
        self._call: Callable[[Sequence[Any]], Any] | None = None
        self._index = 0
        self._ended = False
        self._failure: Exception | None = None

    def read(self, limit: int) -> Chunk | None:
        if self._failure is not None:
            raise self._failure
        chunk = None if self._ended else self.inputs[0].read(limit)
        if chunk is None:
            return None
        if self._call is None:
            self._call = caller(self._node.predicate, self._node.structure)
        kept = 0
        for leaves in zip(*chunk.columns, strict=True):
            try:
                self._ended = not truth(self._call(leaves), "take_while")
            except Exception as error:  # noqa: BLE001 - raised after what came before
                self._failure = function_error("take_while", f"element {self._index}", error)
            if self._ended or self._failure is not None:
                break
            kept += 1
            self._index += 1
        if kept:
            return chunk.rows(0, kept)
        return self.read(limit)


@dataclass(frozen=True, eq=False)
class RandomNumbers(PlanNode):
    """Random numbers from 0 to 2**32 - 1, without end."""

    seed: int | None = None
    each_pass: bool = False

    def spec(self, *inputs: Any) -> Any:
        """One number."""
        return TensorSpec((), np.dtype(np.int64))

    def size(self, *inputs: int) -> int:
        """They never end."""
        return INFINITE

    def open(self, run: Run) -> Cursor:
        """Draw."""
        return _RandomCursor(run.generator(self.seed, 0, self.each_pass))


class _RandomCursor(Cursor):
    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def read(self, limit: int) -> Chunk | None:
        # Doubles are drawn one by one, so the numbers do not depend on how many are asked for at once.
        count = min(limit, 1 << 16)
        numbers = (self._rng.random(count) * 2.0**32).astype(np.int64)
        return Chunk((numbers,), count)


@dataclass(frozen=True, eq=False)
class Buckets(PlanNode):
    """Batches of elements whose lengths lie between the same two boundaries."""

    length: Function
    boundaries: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    padded_shapes: Any = None
    padding_values: Any = None
    to_boundary: bool = False
    no_padding: bool = False
    drop_remainder: bool = False

    def batching(self, bucket: int) -> Batch:
        """How the batches of a bucket are made."""
        size, drop = self.batch_sizes[bucket], self.drop_remainder
        if self.no_padding:
            return Batch(self.inputs, size, drop)
        return PaddedBatch(self.inputs, size, drop, self._shapes(bucket), self.padding_values)

    def _shapes(self, bucket: int) -> Any:
        """The shapes that the elements of a bucket are filled up to."""
        if not self.to_boundary:
            return self.padded_shapes
        if bucket == len(self.boundaries):
            raise InvalidValueError(
                "With pad_to_bucket_boundary no element may be as long as the last boundary. "
                f"Received: an element of at least {self.boundaries[-1]}"
            )
        most = self.boundaries[bucket] - 1
        known = self.inputs[0].known_spec()
        spec = self.inputs[0].element_spec if known is None else known
        structure: Any = tree_util.tree_structure(spec)
        leaves = tree_util.tree_leaves(spec)
        given = (
            [tuple(leaf.shape) for leaf in leaves]
            if self.padded_shapes is None
            else structure.flatten_up_to(self.padded_shapes)
        )
        # What the first element had stands for all where a function makes them.
        sure = self.padded_shapes is not None or self.inputs[0].has_sure_shapes()
        return tree_util.tree_unflatten(
            structure,
            [tuple(most if d in (None, -1) or not sure else d for d in shape) for shape in given],
        )

    def spec(self, *inputs: Any) -> Any:
        """Batches of any size."""
        if self.no_padding:
            return Batch(self.inputs, 1, False).spec(*inputs)
        return PaddedBatch(self.inputs, 1, False, self.padded_shapes, self.padding_values).spec(*inputs)

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Fill the buckets."""
        return _BucketCursor(self, open_plan(self.inputs[0], run))


class _BucketCursor(Cursor):
    def __init__(self, node: Buckets, input_: Cursor) -> None:
        self.inputs = (input_,)
        self._node = node
        self._waiting: list[list[Sequence[Any]]] = [[] for _ in node.batch_sizes]
        self._call: Callable[[Sequence[Any]], Any] | None = None
        self._index = 0
        self._ended = False

    def read(self, limit: int) -> Chunk | None:
        while not self._ended:
            chunk = self.inputs[0].read(1)  # so that a batch is made as soon as it is full
            if chunk is None:
                self._ended = True
                break
            leaves = chunk.element(0)
            bucket = self._bucket(leaves)
            waiting = self._waiting[bucket]
            waiting.append(leaves)
            if len(waiting) == self._node.batch_sizes[bucket]:
                self._waiting[bucket] = []
                return self._batch(bucket, waiting)
        for bucket, waiting in enumerate(self._waiting):
            if waiting and not self._node.drop_remainder:
                self._waiting[bucket] = []
                return self._batch(bucket, waiting)
        return None

    def _bucket(self, leaves: Sequence[Any]) -> int:
        if self._call is None:
            self._call = caller(self._node.length, self._node.inputs[0].structure)
        try:
            length = int(self._call(leaves))
        except Exception as error:  # whatever the user's function does
            raise function_error(
                "bucket_by_sequence_length", f"element {self._index}", error
            ) from error
        self._index += 1
        return bisect_right(self._node.boundaries, length)

    def _batch(self, bucket: int, elements: list[Sequence[Any]]) -> Chunk:
        batching, chunk = self._node.batching(bucket), Chunk.of_elements(elements)
        if isinstance(batching, PaddedBatch):
            return padded_columns(batching, chunk)
        return Chunk([stack_batches(column, 1) for column in chunk.columns], 1)
