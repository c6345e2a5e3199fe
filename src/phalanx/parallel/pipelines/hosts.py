"""Who runs which stage: this process all of them, or each worker of a job some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.collectives import groups, worker_messages
from phalanx.comm import objects
from phalanx.errors import InvalidValueError, PhalanxError
from phalanx.parallel.pipelines.schedule import PipelineSchedule
from phalanx.parallel.pipelines.stages import StagePlace

__all__ = ["HostExchange", "LocalHosts", "StageHosts", "WorkerHosts", "outline"]

_KINDS = {"F": 0, "B": 1, "shared": 2, "sum": 3, "value": 4}


def outline(nest: Any) -> Any:
    """A nest with shapes in place of arrays: what there is of it in other processes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), nest)


class StageHosts(Protocol):
    """Who runs which stage."""

    def is_here(self, stage: int) -> bool:
        """Whether a stage is in this process."""

    def send(self, nest: Any, stage: int, kind: str, *numbers: int) -> None:
        """Send arrays to the process of a stage."""

    def hand_over(self, nest: Any, stage: int, kind: str, *numbers: int) -> None:
        """Send arrays to the process of a stage when they are computed, and do not wait for that.

        They must not be changed, nor their memory be given away.
        """

    def receive(self, shapes: Any, stage: int, kind: str, *numbers: int) -> Any:
        """Receive arrays of known shapes from the process of a stage."""

    def told(self, value: Any, stage: int) -> Any:
        """An object that the process of a stage has, in all of them."""

    def agree(self, what: Mapping[str, Any]) -> None:
        """Require that all processes say the same."""

    def completed(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """A batch with shapes in place of what other processes alone have."""

    def naming(self) -> contextlib.AbstractContextManager[None]:
        """Tell all processes of an error in the block, which names the stages of this one."""


@dataclass(frozen=True)
class LocalHosts:
    """All stages are in this process."""

    def is_here(self, stage: int) -> bool:
        """See `StageHosts`."""
        return True

    def send(self, nest: Any, stage: int, kind: str, *numbers: int) -> None:
        """See `StageHosts`; all stages are here."""
        raise AssertionError(stage)

    def hand_over(self, nest: Any, stage: int, kind: str, *numbers: int) -> None:
        """See `StageHosts`; all stages are here."""
        raise AssertionError(stage)

    def receive(self, shapes: Any, stage: int, kind: str, *numbers: int) -> Any:
        """See `StageHosts`; all stages are here."""
        raise AssertionError(stage)

    def told(self, value: Any, stage: int) -> Any:
        """See `StageHosts`."""
        return value

    def agree(self, what: Mapping[str, Any]) -> None:
        """See `StageHosts`."""

    def completed(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """See `StageHosts`; all of it is here."""
        return batch

    def naming(self) -> contextlib.AbstractContextManager[None]:
        """See `StageHosts`."""
        return contextlib.nullcontext()


class WorkerHosts:
    """Each worker of a job has as many stages as the others, in the order of their ranks.

    Arrays travel as messages of `px.comm`, which are checked, wait at their receiver, and name who is
    missing.
    """

    def __init__(self, stages: int) -> None:
        if not groups.is_initialized():
            groups.init()
        self.rank, self.size = groups.world().rank, groups.world_size()
        if stages % self.size:
            raise InvalidValueError(
                "Each worker has the same number of stages, so their number must be a multiple of the "
                f"number of workers. Received: {stages} stages, {self.size} workers"
            )
        self._each = stages // self.size
        self._has_parts: bool | None = None
        self._failed: Exception | None = None  # of a computation whose result should have been sent

    def worker(self, stage: int) -> int:
        """The rank of the worker that has a stage."""
        return stage // self._each

    def is_here(self, stage: int) -> bool:
        """See `StageHosts`."""
        return self.worker(stage) == self.rank

    def send(self, nest: Any, stage: int, kind: str, *numbers: int) -> None:
        """See `StageHosts`; returns when the arrays are on their way."""
        for i, x in enumerate(jax.tree.leaves(nest)):
            worker_messages.isend(np.asarray(x), self.worker(stage), None, _tag(kind, numbers, i))

    def hand_over(self, nest: Any, stage: int, kind: str, *numbers: int) -> None:
        """See `StageHosts`; the thread that sends waits for the arrays, not the caller."""
        for i, x in enumerate(jax.tree.leaves(nest)):
            x.copy_to_host_async()
            tag = _tag(kind, numbers, i)
            worker_messages.isend(x, self.worker(stage), None, tag, self._computed)

    def _computed(self, x: jax.Array) -> np.ndarray[Any, Any]:
        try:
            return np.asarray(x)
        except Exception as error:
            self._failed = self._failed or error
            self._tell(error)
            raise

    def receive(self, shapes: Any, stage: int, kind: str, *numbers: int) -> Any:
        """See `StageHosts`."""
        leaves, structure = jax.tree.flatten(shapes)
        handles = [
            worker_messages.irecv(
                np.empty(x.shape, x.dtype), self.worker(stage), None, _tag(kind, numbers, i)
            )
            for i, x in enumerate(leaves)
        ]
        found = [handle.result() for handle in handles if handle is not None]
        return jax.tree.unflatten(structure, found)

    def told(self, value: Any, stage: int) -> Any:
        """See `StageHosts`."""
        box = [value]
        objects.broadcast_object_list(box, src=self.worker(stage))
        return box[0]

    def completed(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """See `StageHosts`.

        Whether workers have parts of batches only is found out in the first step. If so, they tell each
        other the shapes of what they have in every step.
        """
        is_part = not batch or any(arg is None for arg in batch)
        if self._has_parts is None:
            everyone = objects.all_gather_object((is_part, len(batch))) or []
            parts, counts = zip(*everyone, strict=True)
            self._has_parts = any(parts) or len(set(counts)) > 1
        if not self._has_parts:
            if is_part:
                raise InvalidValueError(
                    "All workers had whole batches in the first step. Give None for what a worker's "
                    "stages do not take from the first step on. Received: None"
                )
            return batch
        everyone = objects.all_gather_object([None if x is None else outline(x) for x in batch]) or []
        count = max(map(len, everyone))
        found = []
        for n in range(count):
            said = {i: one[n] for i, one in enumerate(everyone) if n < len(one) and one[n] is not None}
            texts = {i: str(shape) for i, shape in said.items()}
            if len(set(texts.values())) > 1:
                listed = "; ".join(f"rank {i}: {_short(text)}" for i, text in texts.items())
                raise groups.world().fail(
                    "mismatch",
                    f"The workers of a pipeline disagree about argument {n} of its batch. "
                    f"Received: {listed}",
                )
            if not said:
                raise groups.world().fail(
                    "mismatch",
                    f"No worker of a pipeline has argument {n} of its batch. Received: None",
                )
            own = batch[n] if n < len(batch) else None
            found.append(next(iter(said.values())) if own is None else own)
        return tuple(found)

    def agree(self, what: Mapping[str, Any]) -> None:
        """See `StageHosts`; what differs is named, with what each worker says."""
        everyone = objects.all_gather_object(dict(what)) or []
        for name in what:
            said = [str(one.get(name)) for one in everyone]
            if len(set(said)) > 1:
                texts = "; ".join(f"rank {i}: {_short(text)}" for i, text in enumerate(said))
                raise groups.world().fail(
                    "mismatch",
                    f"The workers of a pipeline disagree about its {name}. Received: {texts}",
                )

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """See `StageHosts`."""
        try:
            yield
        except Exception as error:
            if isinstance(error, PhalanxError) and groups.world().has_failed:
                if self._failed is not None:  # what the others were told of
                    raise self._failed from None
                raise
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        """Tell all workers of an error of this one."""
        first = self.rank * self._each
        listed = ", ".join(map(str, range(first, first + self._each)))
        text = f"Stage {listed} of a pipeline failed on rank {self.rank}: "
        groups.world().fail("raised", f"{text}{type(error).__name__}: {_short(str(error))}")


def _short(text: str) -> str:
    return text if len(text) < 300 else f"{text[:140]} … {text[-140:]}"


def _tag(kind: str, numbers: Sequence[int], leaf: int) -> int:
    """A number for each array that travels in a step."""
    found = _KINDS[kind]
    for number in (*numbers, *[0] * (3 - len(numbers))):
        found = (found << 16) + number
    return (found << 10) + leaf


class HostExchange:
    """Activations and gradients between stages, in this process or in others.

    Args:
        schedule: which stage has which position.
        places: of the stages that are here.
        hosts: who runs which stage.
        shapes: of what a position gets from the one before it, by position, rows and slice.
        rows: of each micro batch.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        places: Mapping[int, StagePlace],
        hosts: StageHosts,
        shapes: Mapping[tuple[int, int, int], Any],
        rows: Sequence[int],
    ) -> None:
        self._placement, self._places, self._hosts = schedule.placement, places, hosts
        self._shapes, self._rows = shapes, rows
        self.box: dict[Any, Any] = {}

    def give(self, kind: str, micro: int, position: int, part: int, value: Any) -> None:
        """See `StageExchange`; the copy is begun, and not waited for."""
        stage = self._placement[position]
        if self._hosts.is_here(stage):
            self.box[kind, micro, position, part] = self._places[stage].put_rows(value)
        else:
            self._hosts.hand_over(value, stage, kind, micro, position, part)

    def is_from_here(self, kind: str, position: int) -> bool:
        """Whether what a position takes is made in this process."""
        return self._hosts.is_here(self._source(kind, position))

    def _source(self, kind: str, position: int) -> int:
        return self._placement[position - 1 if kind == "F" else position + 1]

    def take(self, kind: str, micro: int, position: int, part: int) -> Any:
        """See `StageExchange`; what comes from another process is waited for."""
        key = kind, micro, position, part
        if self.is_from_here(kind, position):
            return self.box.pop(key)
        from_stage = self._source(kind, position)
        shapes = self._shapes[position if kind == "F" else position + 1, self._rows[micro], part]
        if kind == "B":
            shapes = [x for x in jax.tree.leaves(shapes) if jnp.issubdtype(x.dtype, jnp.inexact)]
        found = self._hosts.receive(shapes, from_stage, kind, micro, position, part)
        return self._places[self._placement[position]].put_rows(found)
