"""Functions over elements: map and filter, and numbering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.plan.columns import Builder, Chunk, Column, stack
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.elements import Ragged, with_rows
from phalanx.data.plan.functions import Form, Function, caller, function_error
from phalanx.data.plan.nodes import UNKNOWN, ParallelNode, PlanNode, Rows, SameElements
from phalanx.data.plan.opening import first_element, open_plan
from phalanx.data.run.parallel_map import MappedChunk, ParallelCursor
from phalanx.data.run.thread_pool import threads_for
from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown


@dataclass(frozen=True, eq=False)
class Map(ParallelNode):
    """The results of a function, called for each element (or for many at once, if it is vectorized)."""

    fn: Function
    parallel_calls: int | None = None
    deterministic: bool | None = None
    vectorized: bool = False
    signature: Any = None
    form: Form = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", Form("map", self.signature))

    def known_spec(self) -> Any | None:
        """What the user gave, or what was seen."""
        spec = self.form.spec
        return spec if spec is None or self.signature is not None else self._of_any_size(spec)

    def has_sure_shapes(self) -> bool:
        """Only if the user said so."""
        return self.signature is not None

    @property
    def element_spec(self) -> Any:
        """Found out by calling the function for the first element."""
        if self.form.spec is None:
            self.apply()(first_element(self.inputs[0]), 0)
        return self.known_spec()

    def _of_any_size(self, spec: Any) -> Any:
        """What was seen of one batch, for batches of any size: the last one may be smaller."""
        known = self.inputs[0].known_spec()
        if not any(getattr(leaf, "shape", ())[:1] == (None,) for leaf in tree_util.tree_leaves(known)):
            return spec

        def widen(leaf: Any) -> Any:
            fixed = isinstance(leaf, TensorSpec) and len(leaf.shape) > 0
            return with_rows(leaf, None) if fixed else leaf

        return tree_util.tree_map(widen, spec)

    def apply(
        self, on_failure: Callable[[Exception], None] | None = None
    ) -> Callable[[Chunk, int], MappedChunk]:
        """The function over a chunk of elements, of which the first has the given number.

        Args:
            on_failure: what to call with the error of an element that is left out; None if none is.
        """
        return _Apply(self, on_failure)

    def open(self, run: Run) -> Cursor:
        """Call the function, here or in threads."""
        input_, apply = open_plan(self.inputs[0], run), self.apply(run.on_failure)
        keeps_all = run.on_failure is None
        if self.parallel_calls is None:
            return _MapCursor(input_, apply, keeps_all)
        ordered = self.is_ordered(run.deterministic)
        block = None if self.vectorized else 64
        threads = threads_for(self.parallel_calls)
        return ParallelCursor(input_, apply, threads, ordered, block, keeps_all)


class _Apply:
    """Calls a function for the elements of chunks."""

    def __init__(self, node: Map, on_failure: Callable[[Exception], None] | None) -> None:
        self._node, self._form, self._fn = node, node.form, node.fn
        self._on_failure = on_failure
        self._call: Callable[[Sequence[Any]], Any] | None = None

    def __call__(self, chunk: Chunk, start: int) -> MappedChunk:
        """The results; if a call fails, those before it and the error."""
        if self._call is None:
            self._call = caller(self._fn, self._node.inputs[0].structure)
        if self._node.vectorized:
            return self._whole(chunk, start, self._call)
        return self._each(chunk, start, self._call)

    def _each(self, chunk: Chunk, start: int, call: Callable[[Sequence[Any]], Any]) -> MappedChunk:
        done = Builder(chunk.count, expected=True)
        failure: Exception | None = None
        for index, leaves in enumerate(zip(*chunk.columns, strict=True), start):
            try:
                value = call(leaves)
            except Exception as error:  # noqa: BLE001 - raised after what came before
                failure = function_error("map", f"element {index}", error)
                if self._on_failure is None:
                    break
                self._on_failure(failure)
                failure = None
                continue
            try:
                done.add(self._form.leaves_of(value, f"element {index}"))
            except Exception as error:  # noqa: BLE001 - raised after what came before
                failure = error
                break
        return MappedChunk(done.chunk(), failure)

    def _whole(self, chunk: Chunk, start: int, call: Callable[[Sequence[Any]], Any]) -> MappedChunk:
        where = f"elements {start} to {start + chunk.count - 1}"
        try:
            value = call([_as_argument(column) for column in chunk.columns])
        except Exception as error:  # noqa: BLE001 - raised after what came before
            failure = function_error("map", where, error)
            if self._on_failure is None:
                return MappedChunk(None, failure)
            return self._in_parts(chunk, start, call, failure)
        try:
            leaves = self._form.leaves_of(value, where, chunk.count)
        except Exception as error:  # noqa: BLE001 - raised after what came before
            return MappedChunk(None, error)
        columns = [list(leaf) if isinstance(leaf, Ragged) else leaf for leaf in leaves]
        return MappedChunk(Chunk(columns, chunk.count), None)

    def _in_parts(
        self,
        chunk: Chunk,
        start: int,
        call: Callable[[Sequence[Any]], Any],
        failure: Exception,
    ) -> MappedChunk:
        """One element at a time, to leave out those that fail, however many are read at once."""
        assert self._on_failure is not None
        if chunk.count == 1:
            self._on_failure(failure)
            return MappedChunk(None, None)
        parts = []
        for i in range(chunk.count):
            part, wrong = self._whole(chunk.rows(i, i + 1), start + i, call)
            parts += [] if part is None else [part]
            if wrong is not None:
                return MappedChunk(Chunk.concat(parts) if parts else None, wrong)
        return MappedChunk(Chunk.concat(parts) if parts else None, None)


def _as_argument(column: Column) -> Any:
    """A column as functions get it: an array if all elements have one shape."""
    column = stack(column) if isinstance(column, list) else column
    return Ragged(column) if isinstance(column, list) else column


class _MapCursor(Cursor):
    def __init__(
        self, input_: Cursor, apply: Callable[[Chunk, int], MappedChunk], keeps_all: bool
    ) -> None:
        self.inputs = (input_,)
        self._apply, self._keeps_all = apply, keeps_all
        self._index = 0
        self._failure: Exception | None = None

    def read(self, limit: int) -> Chunk | None:
        while self._failure is None:
            chunk = self.inputs[0].read(limit)
            if chunk is None:
                return None
            done, self._failure = self._apply(chunk, self._index)
            self._index += chunk.count
            if done is not None:
                return done
        raise self._failure

    def skip(self, count: int) -> int:
        if not self._keeps_all:
            return super().skip(count)
        skipped = self.inputs[0].skip(count)
        self._index += skipped
        return skipped


@dataclass(frozen=True, eq=False)
class Filter(SameElements):
    """The elements for which a function is true."""

    predicate: Function

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return 0 if inputs[0] == 0 else UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Ask for each element."""
        return _FilterCursor(self, open_plan(self.input, run), run.on_failure)


class _FilterCursor(Cursor):
    def __init__(
        self, node: Filter, input_: Cursor, on_failure: Callable[[Exception], None] | None
    ) -> None:
        self.inputs = (input_,)
        self._node, self._on_failure = node, on_failure
        self._call: Callable[[Sequence[Any]], Any] | None = None
        self._index = 0
        self._failure: Exception | None = None

    def read(self, limit: int) -> Chunk | None:
        while self._failure is None:
            chunk = self.inputs[0].read(limit)
            if chunk is None:
                return None
            kept = self._ask(chunk)
            self._index += chunk.count
            if kept:
                return chunk.take(np.array(kept))
        raise self._failure

    def _ask(self, chunk: Chunk) -> list[int]:
        if self._call is None:
            self._call = caller(self._node.predicate, self._node.structure)
        kept = []
        for i, leaves in enumerate(zip(*chunk.columns, strict=True)):
            try:
                if truth(self._call(leaves), "filter"):
                    kept.append(i)
            except Exception as error:  # noqa: BLE001 - raised after what came before
                failure = function_error("filter", f"element {self._index + i}", error)
                if self._on_failure is None:
                    self._failure = failure
                    break
                self._on_failure(failure)
        return kept


def truth(answer: Any, what: str) -> bool:
    """The bool that a function returned."""
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    if np.shape(answer) != () or np.asarray(answer).dtype != np.bool_:
        raise InvalidTypeError(
            f"The function given to {what} must return a bool. Received: {shown(answer)}"
        )
    return bool(answer)


@dataclass(frozen=True, eq=False)
class Enumerate(PlanNode):
    """Pairs of a number and an element."""

    start: int = 0

    def spec(self, *inputs: Any) -> Any:
        """A pair."""
        return TensorSpec((), np.dtype(np.int64)), inputs[0]

    def rows(self) -> Rows | None:
        """The rows of the input and their numbers."""
        rows = self.inputs[0].rows()
        if rows is None:
            return None
        numbers = np.arange(self.start, self.start + rows.count)
        return Rows((numbers, *rows.columns), rows.count)

    def open(self, run: Run) -> Cursor:
        """Count."""
        return _EnumerateCursor(open_plan(self.inputs[0], run), self.start)


class _EnumerateCursor(Cursor):
    def __init__(self, input_: Cursor, start: int) -> None:
        self.inputs = (input_,)
        self._next = start

    def read(self, limit: int) -> Chunk | None:
        chunk = self.inputs[0].read(limit)
        if chunk is None:
            return None
        start, self._next = self._next, self._next + chunk.count
        return Chunk((np.arange(start, self._next), *chunk.columns), chunk.count)

    def skip(self, count: int) -> int:
        skipped = self.inputs[0].skip(count)
        self._next += skipped
        return skipped
