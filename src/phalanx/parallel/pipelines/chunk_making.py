"""The chunks of a pipeline, made of the functions that the user gave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from phalanx.errors import InvalidValueError
from phalanx.parallel.pipelines.chunk_programs import ModelChunk
from phalanx.parallel.pipelines.schedule import PipelineSchedule
from phalanx.parallel.pipelines.stage_steps import ChunkRunner
from phalanx.parallel.pipelines.stages import Stage, StagePlace

__all__ = ["ChunkMaker", "PipelineOptions"]


@dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline computes; see `pipeline`."""

    loss: Callable[..., Any] | None
    layouts: Sequence[Mapping[str, Any]] | None
    shared: Mapping[str, tuple[int, ...]]
    recompute: bool | Callable[..., Any]
    reduction: str
    has_aux: bool


class ChunkMaker:
    """Makes chunks when they are first needed, and keeps them.

    Args:
        parts: the functions, by position.
        schedule: what the stages do.
        places: of the stages that are here.
        options: how they compute.
    """

    def __init__(
        self,
        parts: Sequence[Stage],
        schedule: PipelineSchedule,
        places: Mapping[int, StagePlace],
        options: PipelineOptions,
    ) -> None:
        self._parts, self._schedule, self._places = parts, schedule, places
        self._options = options
        self._lock = threading.Lock()
        self.made: dict[tuple[int, int, bool], ChunkRunner] = {}

    def runner(self, position: int, arguments: int, has_loss: bool = True) -> ChunkRunner:
        """The chunk at a position, for batches of some arguments, with or without the loss."""
        key = position, arguments, has_loss
        with self._lock:
            if key not in self.made:
                self.made[key] = self._make(position, arguments, has_loss)
            return self.made[key]

    def _make(self, position: int, arguments: int, has_loss: bool) -> ChunkRunner:
        part, last = self._parts[position], position == len(self._parts) - 1
        loss = self._options.loss if has_loss else None
        first = (0,) if position == 0 else ()
        others = tuple(range(1, arguments)) if last and has_loss else ()
        own = part.takes
        if own is None:
            own = first if loss is not None or not last else (*first, *others)
        if any(not 0 <= n < arguments for n in own):
            raise InvalidValueError(
                f"Stage {position} takes arguments {own} of the batch. Received: {arguments} arguments"
            )
        takes = (*own, *others) if last and loss is not None else own
        function = _chunk_function(part, position, len(own), loss if last else None)
        has_aux = self._options.has_aux and last and has_loss

        def complete(weights: Any, x: Any, carry: Any, batch: tuple[Any, ...]) -> Any:
            output, carried = function(weights, x, carry, batch)
            return (output[0], carried, output[1]) if has_aux else (output, carried, None)

        again = self._options.recompute
        if again:
            complete = jax.checkpoint(complete, policy=again if callable(again) else None)
        place = self._places[self._schedule.placement[position]]
        splits = self._schedule.splits_backward
        return ChunkRunner(ModelChunk(position, complete, place, last and has_loss, splits), takes)


def _chunk_function(
    part: Stage, position: int, own: int, loss: Callable[..., Any] | None
) -> Callable[..., tuple[Any, Any]]:
    def function(weights: Any, x: Any, carry: Any, batch: tuple[Any, ...]) -> tuple[Any, Any]:
        given = [*([x] if position else []), *batch[:own]]
        if part.carries:
            output, carried = part.function(weights, *given, carry)
        else:
            output, carried = part.function(weights, *given), None
        return (output if loss is None else loss(output, *batch[own:])), carried

    return function
