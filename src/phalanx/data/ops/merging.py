"""Several datasets as one: side by side, one after the other, or mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import tree_util
from numpy.typing import NDArray

from phalanx.data.plan.columns import Chunk, Column, Indices
from phalanx.data.plan.cursors import ChainCursor, Cursor, Run, read_exactly
from phalanx.data.plan.elements import merge_specs
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, PlanNode, Rows
from phalanx.data.plan.opening import EmptyDatasetError, open_plan
from phalanx.errors import DataLossError, InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Zip(PlanNode):
    """Elements made of one element of each input."""

    nest: Any

    def spec(self, *inputs: Any) -> Any:
        """The nest of datasets with their specs in it."""
        return tree_util.tree_unflatten(self.nest, inputs)

    def size(self, *inputs: int) -> int:
        """The shortest."""
        finite = [size for size in inputs if size >= 0]
        if 0 in finite:
            return 0
        if UNKNOWN in inputs:
            return UNKNOWN
        return min(finite, default=INFINITE)

    def rows(self) -> Rows | None:
        """The columns of all inputs, if each has rows."""
        parts = [node.rows() for node in self.inputs]
        columns: list[Column] = []
        count: int | None = None
        for part in parts:
            if part is None:
                return None
            columns += part.columns
            count = part.count if count is None else min(count, part.count)
        return Rows(tuple(columns), count or 0)

    def open(self, run: Run) -> Cursor:
        """Read all inputs at the same pace."""
        return _ZipCursor([open_plan(n, run.in_branch(i)) for i, n in enumerate(self.inputs)])


class _ZipCursor(Cursor):
    def __init__(self, inputs: Sequence[Cursor]) -> None:
        self.inputs = inputs
        self._short: Cursor | None = None  # one that gave less than was asked for
        self._ended = False

    def read(self, limit: int) -> Chunk | None:
        if self._short is not None:
            self._short.read(1)  # fails if it was damage that ended it
            self._ended = True
        if self._ended:
            return None
        chunks, count = [], limit
        for i, cursor in enumerate(self.inputs):
            chunk = cursor.read(count) if i == 0 else read_exactly(cursor, count)
            if chunk is None:
                self._ended = True
                return None
            if i > 0 and chunk.count < count:
                self._short = cursor
            count = chunk.count
            chunks.append(chunk)
        return Chunk([c for chunk in chunks for c in chunk.rows(0, count).columns], count)

    def skip(self, count: int) -> int:
        skipped = [cursor.skip(count) for cursor in self.inputs]
        self._ended = self._ended or min(skipped) < count
        return min(skipped)


class OneForm(PlanNode):
    """Base of nodes whose inputs must all yield elements of one structure and one dtype."""

    what = ""

    def spec(self, *inputs: Any) -> Any:
        """What fits the elements of all inputs."""
        merged = inputs[0]
        for spec in inputs[1:]:
            merged = merge_specs(merged, spec, self.what)
        return merged

    def sources(self) -> tuple[PlanNode, ...]:
        """The inputs that elements come from."""
        return self.inputs

    def known_spec(self) -> Any | None:
        """What fits the inputs of which something is known."""
        known = [spec for node in self.sources() if (spec := node.known_spec()) is not None]
        return self.spec(*known) if known else None

    @property
    def element_spec(self) -> Any:
        """What fits all inputs; empty ones fit everything."""
        specs: list[Any] = []
        empty: EmptyDatasetError | None = None
        for node in self.sources():
            try:
                specs.append(node.element_spec)
            except EmptyDatasetError as error:
                empty = error
        if not specs and empty is not None:
            raise empty
        return self.spec(*specs)


@dataclass(frozen=True, eq=False)
class Concatenate(OneForm):
    """The elements of the first input, then those of the second."""

    what = "concatenate"

    def size(self, *inputs: int) -> int:
        """The sum."""
        if INFINITE in inputs:
            return INFINITE
        return UNKNOWN if UNKNOWN in inputs else sum(inputs)

    def open(self, run: Run) -> Cursor:
        """Open one input after the other."""
        return _ConcatenateCursor(self, run)


class _ConcatenateCursor(ChainCursor):
    def __init__(self, node: Concatenate, run: Run) -> None:
        self._node = node
        self._left = ((input_, run.in_branch(i)) for i, input_ in enumerate(node.inputs))
        self._checked = False

    def open_next(self) -> Cursor | None:
        self._checked = False
        found = next(self._left, None)
        return None if found is None else open_plan(*found)

    def read(self, limit: int) -> Chunk | None:
        chunk = super().read(limit)
        if chunk is not None and not self._checked:
            self._checked = True
            self._node.known_spec()  # fails if the inputs do not fit together
        return chunk


# -- mixing ---------------------------------------------------------------------------------------


class _Draws:
    """Chooses inputs at random, by weight."""

    def __init__(self, weights: NDArray[np.float64], rng: np.random.Generator) -> None:
        self._weights, self._rng = weights, rng
        self._drawn = np.empty(0)

    def peek(self, limit: int, alive: NDArray[np.bool_]) -> Indices:
        """The next choices among the inputs that are alive; none at the end."""
        missing = limit - len(self._drawn)
        if missing > 0:
            self._drawn = np.concatenate([self._drawn, self._rng.random(missing)])
        ends = np.cumsum(self._weights * alive)
        if not ends[-1] > 0:
            return np.empty(0, np.int64)
        return np.searchsorted(ends, self._drawn[:limit] * ends[-1], side="right")

    def drop(self, count: int) -> None:
        """The first choices were carried out."""
        self._drawn = self._drawn[count:]


class _Given:
    """Chooses the inputs whose numbers a dataset yields."""

    def __init__(self, cursor: Cursor, count: int) -> None:
        self._cursor, self._count = cursor, count
        self._pending = np.empty(0, np.int64)

    def peek(self, limit: int, alive: NDArray[np.bool_]) -> Indices:
        while alive.any():
            self._pending = self._pending[alive[self._pending]]
            if len(self._pending):
                return self._pending[:limit]
            chunk = read_exactly(self._cursor, limit)
            if chunk is None:
                break
            numbers = np.asarray(chunk.columns[0], np.int64)
            wrong = numbers[(numbers < 0) | (numbers >= self._count)]
            if len(wrong):
                raise InvalidArgumentError(
                    "choose_from_datasets needs numbers of datasets, from 0 to "
                    f"{self._count - 1}. Received: {wrong[0]}"
                )
            self._pending = numbers
        return np.empty(0, np.int64)

    def drop(self, count: int) -> None:
        self._pending = self._pending[count:]


class _Held:
    """A cursor of which more was read than could be used yet."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self._chunks: list[Chunk] = []
        self._count = 0
        self.damage: DataLossError | None = None

    def fill(self, count: int) -> int:
        """Have up to `count` elements at hand; how many there are. Damage is kept for later."""
        try:
            while self._count < count and (chunk := self.cursor.read(count - self._count)) is not None:
                self._chunks.append(chunk)
                self._count += chunk.count
        except DataLossError as error:
            self.damage = error
        return min(count, self._count)

    def take(self, count: int) -> Chunk:
        taken, rest = Chunk.concat(self._chunks).split(count)
        self._count -= count
        self._chunks = [] if rest is None else [rest]
        return taken


class _MixCursor(Cursor):
    """Takes elements from its inputs as it is told."""

    def __init__(
        self, node: OneForm, inputs: Sequence[Cursor], choices: _Draws | _Given, stop_on_empty: bool
    ) -> None:
        self._node = node
        self._held = [_Held(cursor) for cursor in inputs]
        self._choices, self._stop = choices, stop_on_empty
        self._alive = np.ones(len(inputs), bool)
        self._seen: set[int] = set()
        self.inputs = inputs

    def read(self, limit: int) -> Chunk | None:
        while self._alive.any():
            chosen = self._choices.peek(limit, self._alive)
            if not len(chosen):
                return None
            ready = self._ready(chosen)
            self._choices.drop(ready)
            damage = self._held[chosen[ready]].damage if ready < len(chosen) else None
            if damage is not None and not ready:
                raise damage
            if ready < len(chosen) and damage is None:
                self._alive[chosen[ready]] = False
                if self._stop:
                    self._alive[:] = False
            if ready:
                return self._collect(chosen[:ready])
        return None

    def _ready(self, chosen: Indices) -> int:
        """How many of the choices can be carried out before an input has ended."""
        ready = len(chosen)
        for number in np.unique(chosen).tolist():
            places = np.flatnonzero(chosen == number)
            have = self._held[number].fill(len(places))
            if have < len(places):
                ready = min(ready, int(places[have]))
        return ready

    def _collect(self, chosen: Indices) -> Chunk:
        counts = np.bincount(chosen)
        numbers = np.flatnonzero(counts).tolist()
        parts = [self._held[i].take(int(counts[i])) for i in numbers]
        if not self._seen.issuperset(numbers):
            self._seen.update(numbers)
            self._node.known_spec()  # fails if the inputs do not fit together
        if len(parts) == 1:
            return parts[0]
        place = np.empty(len(chosen), np.int64)
        place[np.argsort(chosen, kind="stable")] = np.arange(len(chosen))
        return Chunk.concat(parts).take(place)


@dataclass(frozen=True, eq=False)
class Sample(OneForm):
    """Elements of inputs that are drawn at random."""

    weights: tuple[float, ...]
    seed: int | None
    stop_on_empty: bool
    each_pass: bool = True
    what = "sample_from_datasets"

    def size(self, *inputs: int) -> int:
        """Known only if the draws do not matter."""
        if all(size == INFINITE for size in inputs):
            return INFINITE
        if not self.stop_on_empty and min(inputs) >= 0 and min(self.weights) > 0:
            return sum(inputs)
        return UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Draw."""
        inputs = [open_plan(n, run.in_branch(i)) for i, n in enumerate(self.inputs)]
        rng = run.in_branch(len(inputs)).generator(self.seed, 0, self.each_pass)
        draws = _Draws(np.array(self.weights, np.float64), rng)
        return _MixCursor(self, inputs, draws, self.stop_on_empty)


@dataclass(frozen=True, eq=False)
class Choose(OneForm):
    """Elements of inputs that another dataset, the last input, names by number."""

    stop_on_empty: bool
    what = "choose_from_datasets"

    def sources(self) -> tuple[PlanNode, ...]:
        """All inputs but the last."""
        return self.inputs[:-1]

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return 0 if inputs[-1] == 0 else UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Read numbers and elements."""
        *inputs, choices = [open_plan(n, run.in_branch(i)) for i, n in enumerate(self.inputs)]
        cursor = _MixCursor(self, inputs, _Given(choices, len(inputs)), self.stop_on_empty)
        cursor.inputs = (*inputs, choices)
        return cursor
