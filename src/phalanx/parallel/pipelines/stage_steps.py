"""One step of one stage: it does its actions, holds what gradients need, and sums gradients.

Where inputs come from and results go to is the matter of a `StageExchange`: the other stages may be in
this process or in others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.execution.throttle import THROTTLE, token
from phalanx.parallel.pipelines.chunk_programs import (
    ChunkPrograms,
    Differentiated,
    ModelChunk,
    is_inexact,
)
from phalanx.parallel.pipelines.micro_batches import CutBatch
from phalanx.parallel.pipelines.schedule import BACKWARD, FORWARD, PipelineAction, PipelineSchedule
from phalanx.parallel.wide_sums import is_narrow
from phalanx.runtime import compat

__all__ = ["ChunkRunner", "LossPart", "StageExchange", "StageStep", "as_weights", "zeros"]


class StageExchange(Protocol):
    """How stages hand over activations and gradients."""

    def give(self, kind: str, micro: int, position: int, part: int, value: Any) -> None:
        """Hand a value over to the chunk at a position."""

    def take(self, kind: str, micro: int, position: int, part: int) -> Any:
        """What was handed over to the chunk at a position."""


class ChunkRunner:
    """A chunk, and its programs for all shapes that came so far.

    Args:
        chunk: what it computes.
        takes: the numbers of the arguments of the batch that it takes.
    """

    def __init__(self, chunk: ModelChunk, takes: tuple[int, ...]) -> None:
        self.chunk, self.takes = chunk, takes
        self._programs: dict[Any, ChunkPrograms] = {}

    def prepared(self, weights: Any, x: Any, carry: Any, batch: Any) -> tuple[ChunkPrograms, Any, int]:
        """The programs for arguments, the arguments in parts, and how many parts are of the input.

        The parts are leaves with gradients, of which those of the input come first.
        """
        leaves, structure = jax.tree.flatten((x, carry, batch))
        own = len(jax.tree.leaves((x, carry)))
        kinds = tuple(i < own and is_inexact(leaf) for i, leaf in enumerate(leaves))
        inputs = tuple(leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind)
        fixed = tuple(leaf for leaf, kind in zip(leaves, kinds, strict=True) if not kind)
        known = jax.tree.flatten(weights)
        key = (structure, kinds, known[1], *(_signature(leaf) for leaf in (*leaves, *known[0])))
        if key not in self._programs:

            def unflatten(given: Differentiated) -> Any:
                ones, others = iter(given.inputs), iter(given.fixed)
                found = [next(ones) if kind else next(others) for kind in kinds]
                return jax.tree.unflatten(structure, found)

            self._programs[key] = ChunkPrograms(self.chunk, unflatten)
        count = sum(is_inexact(leaf) for leaf in jax.tree.leaves(x))
        return self._programs[key], Differentiated(weights, inputs, fixed), count

    def outlined(
        self,
        weights: Any,
        cut: CutBatch,
        rows: int,
        position: int,
        given: Mapping[tuple[int, int, int], Any],
        slices: int,
    ) -> dict[tuple[int, int, int], Any]:
        """The shapes of what the next position gets for micro batches of some rows, by slice."""
        found: dict[tuple[int, int, int], Any] = {}
        carry = None
        micro = cut.rows.index(rows)
        for part in range(slices):
            x = given[position, rows, part] if position else None
            batch = cut.taken(self.takes, micro, part)
            output, carry, _ = jax.eval_shape(self.chunk.function, weights, x, carry, batch)
            found[position + 1, rows, part] = output
        return found


def _signature(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.weak_type
    return np.shape(x), jnp.result_type(x), bool(getattr(x, "weak_type", False))


@dataclass
class HeldResult:
    """What a stage holds for a gradient."""

    programs: ChunkPrograms
    given: Differentiated
    own: int
    kept: Any
    carried: Any
    above: Any = None
    left: Any = None


@dataclass(frozen=True)
class LossPart:
    """The loss and the metrics of one slice of one micro batch, and how much they count."""

    weight: float
    loss: Any
    metrics: Any


class StageStep:
    """One step of one stage.

    Args:
        stage: its number.
        schedule: what it does.
        runners: its chunks, by position.
        weights: of its chunks, by position, where they run.
        batch: what the model is given.
        exchange: how it meets the other stages.
        start: runs a program and returns its result; by default without waiting for it.
    """

    def __init__(
        self,
        stage: int,
        schedule: PipelineSchedule,
        runners: Mapping[int, ChunkRunner],
        weights: Mapping[int, Any],
        batch: CutBatch,
        exchange: StageExchange,
        start: Callable[..., Any] | None = None,
    ) -> None:
        self._stage, self._schedule, self._batch, self._exchange = stage, schedule, batch, exchange
        self._runners, self._weights = runners, weights
        self._start = start or THROTTLE.dispatch
        self._held: dict[tuple[int, int, int], HeldResult] = {}
        self._carries: dict[tuple[int, int, int], Any] = {}
        self._carry_gradients: dict[tuple[int, int, int], Any] = {}
        self.sums: dict[int, Any] = {}
        self.losses: list[LossPart] = []
        self.live = 0
        """How many forward results are held for gradients, at most."""

    def perform(self, action: PipelineAction) -> None:
        """Do an action, whose inputs are there or on their way."""
        if self._batch.is_empty(action.micro):
            return
        position = self._schedule.position(self._stage, action.chunk)
        place = action.micro, position, action.slice
        if action.kind == FORWARD:
            self._forward(place)
        elif action.kind == BACKWARD:
            self._backward(place)
        else:
            self._weight_gradient(place)

    def evaluate(self, micro: int, chunk: int, part: int) -> Any:
        """Go forward without a gradient; returns what the last position returns."""
        position = self._schedule.position(self._stage, chunk)
        programs, given, _ = self._prepared((micro, position, part))
        output, carried, metrics = self._start(
            programs.evaluate, given.weights, given.inputs, given.fixed
        )
        return self._passed_on((micro, position, part), output, carried, metrics)

    def _prepared(self, place: tuple[int, int, int]) -> tuple[ChunkPrograms, Differentiated, int]:
        micro, position, part = place
        runner = self._runners[position]
        x = self._exchange.take(FORWARD, *place) if position else None
        carry = self._carries.pop((micro, position, part - 1), None)
        batch = runner.chunk.place.put_rows(self._batch.taken(runner.takes, micro, part))
        return runner.prepared(self._weights[position], x, carry, batch)

    def _forward(self, place: tuple[int, int, int]) -> None:
        programs, given, own = self._prepared(place)
        output, carried, metrics, kept = self._start(
            programs.forward, given.weights, given.inputs, given.fixed
        )
        shapes = [
            compat.shape_of(x) for x in jax.tree.leaves(carried) if is_inexact(x)
        ]  # of the gradients that will come
        self._held[place] = held = HeldResult(programs, given, own, kept, shapes)
        if programs.chunk.is_last:
            held.above = [np.asarray(self._batch.share(place[2]), output.dtype)]
        self.live = max(self.live, len(self._held))
        self._passed_on(place, output, carried, metrics)

    def _passed_on(self, place: tuple[int, int, int], output: Any, carried: Any, metrics: Any) -> Any:
        micro, position, part = place
        if part + 1 < self._schedule.slices:
            self._carries[place] = carried
        if position + 1 < self._schedule.positions:
            self._exchange.give(FORWARD, micro, position + 1, part, output)
            return None
        weight = self._batch.weight(micro) * self._batch.share(part)
        self.losses.append(LossPart(weight, output, metrics))
        return output

    def _backward(self, place: tuple[int, int, int]) -> None:
        micro, position, part = place
        held = self._held[place]
        chunk = self._runners[position].chunk
        above = held.above if chunk.is_last else self._exchange.take(BACKWARD, *place)
        after = self._carry_gradients.pop(place, None)
        if after is None:
            after = [np.zeros(x.shape, x.dtype) for x in held.carried]
        given, above = held.given, [*above, *after]
        if chunk.splits:
            rows, held.left = self._start(
                held.programs.backward_input,
                given.weights,
                given.inputs,
                given.fixed,
                held.kept,
                above,
            )
            held.above = above
        else:
            rows, self.sums[position] = self._start(
                held.programs.backward,
                given.weights,
                given.inputs,
                given.fixed,
                held.kept,
                above,
                self._sums(position),
                self._weight(micro),
            )
            del self._held[place]
        if part:
            self._carry_gradients[micro, position, part - 1] = rows[held.own :]
        if position:
            self._exchange.give(BACKWARD, micro, position - 1, part, rows[: held.own])

    def _weight_gradient(self, place: tuple[int, int, int]) -> None:
        held, position = self._held.pop(place), place[1]
        chosen, program = held.programs.backward_weight(held.given, held.kept, held.above)
        self.sums[position] = self._start(
            program, chosen, held.left, self._sums(position), self._weight(place[0])
        )

    def _weight(self, micro: int) -> Any:
        return np.float32(self._batch.weight(micro))

    def _sums(self, position: int) -> Any:
        if position not in self.sums:
            return zeros(self._weights[position])
        return self.sums[position]


def zeros(weights: Any) -> Any:
    """Sums of gradients before the first: in 32 bits at least, laid out as the weights are."""
    leaves, structure = jax.tree.flatten(weights)
    shapes = tuple((x.shape, jnp.dtype("float32") if is_narrow(x) else x.dtype) for x in leaves)
    program = _zeros_program(shapes, tuple(x.sharding for x in leaves))
    return jax.tree.unflatten(structure, THROTTLE.dispatch(program))


@functools.lru_cache(maxsize=256)
def _zeros_program(shapes: tuple[Any, ...], shardings: tuple[Any, ...]) -> Callable[[], Any]:
    def program() -> Any:
        return [jnp.zeros(shape, dtype) for shape, dtype in shapes], token(False)

    return jax.jit(program, out_shardings=(list(shardings), None))


def as_weights(sums: Any, weights: Any) -> Any:
    """Gradients in the dtypes of the weights."""
    return jax.tree.map(lambda g, w: g if g.dtype == w.dtype else g.astype(w.dtype), sums, weights)
