"""`pipeline`: a model in stages on several devices, and the gradients of its loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.execution.throttle import THROTTLE, token
from phalanx.parallel.pipelines.chunk_programs import Chunk
from phalanx.parallel.pipelines.micro_batches import REDUCTIONS, CutBatch, cut_batch
from phalanx.parallel.pipelines.named_schedules import schedule as make_schedule
from phalanx.parallel.pipelines.recording import Timeline, recorded
from phalanx.parallel.pipelines.schedule import PipelineSchedule
from phalanx.parallel.pipelines.stage_steps import (
    ChunkRunner,
    LocalExchange,
    LossPart,
    StageStep,
    as_weights,
)
from phalanx.parallel.pipelines.stages import DATA_AXIS, Stage, StagePlace, places
from phalanx.parallel.wide_sums import is_narrow
from phalanx.runtime.devices import DeviceLike
from phalanx.runtime.formatting import shown

__all__ = ["Pipelined", "pipeline"]


def pipeline(
    stages: Sequence[Callable[..., Any] | Stage],
    schedule: str | PipelineSchedule = "1f1b",
    micro_batches: int = 8,
    *,
    loss: Callable[..., Any] | None = None,
    chunks: int | None = None,
    slices: int = 1,
    devices: Sequence[DeviceLike] | None = None,
    mesh: Mesh | None = None,
    data_axis: str = DATA_AXIS,
    layouts: Sequence[Mapping[str, Any]] | None = None,
    shared: Mapping[str, Sequence[int]] | None = None,
    recompute: bool | Callable[..., Any] = False,
    reduction: str = "mean",
    has_aux: bool = False,
) -> Pipelined:
    """A model whose parts run on different devices, one micro batch after the other.

    Each stage has its own devices, and holds its own parameters only. `Pipelined.value_and_grad` cuts a
    batch into micro batches, lets them go through the stages as the schedule says, and returns the loss
    and the gradients of the whole batch.

    Args:
        stages: functions of parameters and of what the stage before returns, in the order of the model;
            or `Stage`. With several chunks per stage, all chunks in the order of the model. `split`
            cuts a row of layers.
        schedule: a name (see `px.parallel.schedule`), or a `PipelineSchedule`.
        micro_batches: into how many a batch is cut. If it cannot be divided evenly, the last ones are
            smaller or empty, and the loss is still that of the batch.
        loss: of what the last stage returns, and of the other arguments of the batch. None if the last
            stage is the loss itself.
        chunks: how many of the `stages` share devices; by default as few as the schedule needs.
        slices: into how many sequences are cut, along the second dim of the batch. Functions that
            look at other positions are `Stage(…, carries=True)`.
        devices: equal numbers of neighbours are a stage; by default all accelerators, or all CPU
            devices where there is none.
        mesh: with an axis "stage" and perhaps others, in place of devices.
        data_axis: the axis of the mesh along which micro batches are cut.
        layouts: for each of the `stages`, the layouts of parameters by name, as `PartitionSpec`. Others
            are whole on each device of their stage.
        shared: the names of parameters that several of the `stages` use, and which. The first one
            has the parameter; the others find it in their dictionary under the same name.
        recompute: whether to keep only the inputs of stages and to compute the rest again for
            gradients; or a policy of `jax.checkpoint`.
        reduction: what the loss of a micro batch is: the "mean" over its examples, or their "sum".
        has_aux: whether the loss returns a pair, of which the second are metrics. They are combined
            like losses.

    Examples:
        >>> import jax.numpy as jnp
        >>> stage = lambda w, x: jnp.tanh(x @ w)
        >>> mse = lambda y, target: jnp.mean((y - target) ** 2)
        >>> pipe = pipeline([stage, stage], "1f1b", 4, loss=mse, devices=["CPU:0", "CPU:1"])
        >>> params = pipe.place([jnp.eye(3), jnp.eye(3)])
        >>> value, gradients = pipe.value_and_grad(params, jnp.ones((8, 3)), jnp.zeros((8, 3)))
        >>> round(float(value), 4), [g.shape for g in gradients]
        (0.4115, [(3, 3), (3, 3)])
    """
    parts = [x if isinstance(x, Stage) else Stage(x) for x in _sequence("stages", stages)]
    if reduction not in REDUCTIONS:
        raise InvalidValueError(f"reduction must be 'mean' or 'sum'. Received: {shown(reduction)}")
    if loss is not None and not callable(loss):
        raise InvalidTypeError(f"loss must be a function. Received: {shown(loss)}")
    planned = _planned(schedule, len(parts), micro_batches, chunks, slices)
    if layouts is not None and len(layouts) != len(parts):
        raise InvalidValueError(f"There are {len(parts)} stages. Received: layouts for {len(layouts)}")
    return Pipelined(
        tuple(parts),
        planned,
        tuple(places(planned.stages, devices, mesh, data_axis)),
        PipelineOptions(
            loss, layouts, _shared(shared or {}, len(parts)), recompute, reduction, has_aux
        ),
    )


@dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline computes; see `pipeline`."""

    loss: Callable[..., Any] | None
    layouts: Sequence[Mapping[str, Any]] | None
    shared: Mapping[str, tuple[int, ...]]
    recompute: bool | Callable[..., Any]
    reduction: str
    has_aux: bool


def _sequence(what: str, given: Any) -> Sequence[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise InvalidTypeError(f"{what} must be a list of at least one. Received: {shown(given)}")
    return given


def _planned(
    schedule: str | PipelineSchedule,
    parts: int,
    micro_batches: int,
    chunks: int | None,
    slices: int,
) -> PipelineSchedule:
    least = 2 if schedule in ("interleaved", "seqvpp", "seqsmartvpp", "zero_bubble_v") else 1
    count = (
        (schedule.chunks if isinstance(schedule, PipelineSchedule) else least)
        if chunks is None
        else chunks
    )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or parts % count:
        raise InvalidValueError(
            f"Each stage has the same number of chunks, so their number must divide that of the "
            f"functions. Received: {parts} functions, chunks={shown(count)}"
        )
    return make_schedule(schedule, parts // count, micro_batches, count, slices)


def _shared(given: Mapping[str, Sequence[int]], parts: int) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, numbers in given.items():
        if any(not -parts <= n < parts for n in numbers) or len(numbers) < 2:
            raise InvalidValueError(
                f"shared has the numbers of two or more of the {parts} stages for each name. "
                f"Received: {name!r}: {shown(numbers)}"
            )
        found[name] = tuple(n % parts for n in numbers)
    return found


class Pipelined:
    """A model in stages. `pipeline` makes it.

    Parameters and gradients are lists with a nest for each of the stages that were given (for each
    chunk, if stages have several).
    """

    def __init__(
        self,
        parts: tuple[Stage, ...],
        schedule: PipelineSchedule,
        places: tuple[StagePlace, ...],
        options: PipelineOptions,
    ) -> None:
        self._parts, self._schedule, self._places, self._options = parts, schedule, places, options
        self._runners: dict[tuple[int, int], ChunkRunner] = {}
        self._predictors: dict[tuple[int, int], ChunkRunner] = {}
        self._totals = jax.jit(_totals)
        self._lock = threading.Lock()
        self._peaks: tuple[int, ...] = ()

    # -- what it is --------------------------------------------------------------------------------

    @property
    def schedule(self) -> PipelineSchedule:
        """What each stage does, in which order."""
        return self._schedule

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The devices of each stage."""
        return tuple(place.mesh for place in self._places)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """How many forward results each stage held at most in the last step; see `PipelineSchedule`."""
        return self._peaks

    def __repr__(self) -> str:
        s = self._schedule
        return (
            f"<px.parallel.Pipelined {s.name}: {s.stages} stages, {s.micro_batches} micro batches, "
            f"{sum(mesh.size for mesh in self.meshes)} devices>"
        )

    # -- parameters --------------------------------------------------------------------------------

    def place(self, params: Sequence[Any]) -> list[Any]:
        """Parameters on the devices of their stages."""
        self._check_params(params)
        return [self._place_of(i).put(nest, self._layouts(i)) for i, nest in enumerate(params)]

    def create(self, makers: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make the parameters of each stage on its own devices, so that none holds the whole model.

        Args:
            makers: for each of the stages, a function that returns its parameters.
        """
        self._check_params(makers)
        found = []
        for i, make in enumerate(makers):
            place, shapes = self._place_of(i), jax.eval_shape(make)
            shardings = place.shardings(shapes, self._layouts(i))

            def program(make: Callable[[], Any] = make) -> Any:
                return make(), token(False)

            found.append(THROTTLE.dispatch(jax.jit(program, out_shardings=(shardings, None))))
        return found

    def _place_of(self, position: int) -> StagePlace:
        return self._places[self._schedule.placement[position]]

    def _layouts(self, position: int) -> Mapping[str, Any] | None:
        return None if self._options.layouts is None else self._options.layouts[position]

    def _check_params(self, params: Any) -> None:
        if not isinstance(params, Sequence) or len(params) != len(self._parts):
            count = len(params) if isinstance(params, Sequence) else shown(params)
            raise InvalidValueError(
                f"Parameters are a list with a nest for each of the {len(self._parts)} stages. "
                f"Received: {count}"
            )

    # -- steps -------------------------------------------------------------------------------------

    def value_and_grad(self, params: Sequence[Any], *batch: Any) -> tuple[Any, list[Any]]:
        """The loss of a batch, and its gradients for the parameters of all stages.

        Args:
            params: a nest for each stage; those that are elsewhere are copied to the stage's devices.
            *batch: nests of arrays with the examples along the first dim.
        """
        return self._step(params, batch)[0]

    def recorded(self, params: Sequence[Any], *batch: Any) -> tuple[tuple[Any, list[Any]], Timeline]:
        """The same, and when each action began and ended.

        Each stage has a thread, which waits for the end of one action before it begins the next.
        """
        return self._step(params, batch, record=True)

    def __call__(self, params: Sequence[Any], *batch: Any) -> Any:
        """The loss of a batch, without gradients."""
        losses = self._forward(params, batch, self._runner)
        return self._value(losses)

    def predict(self, params: Sequence[Any], *batch: Any, broadcast: bool = False) -> Any:
        """What the last stage returns for all examples, in order; needs a `loss` of its own.

        Args:
            params: a nest for each stage.
            *batch: the arguments of stages; those of the loss are not needed.
            broadcast: whether to return a list with a copy on the devices of each stage.
        """
        if self._options.loss is None:
            raise InvalidValueError(
                "The last stage returns the loss. Give the loss apart, as pipeline(…, loss=…), to get "
                "what the model predicts. Received: loss=None"
            )
        parts = [x.loss for x in self._forward(params, batch, self._predictor)]
        slices = self._schedule.slices
        if slices > 1:
            rows = [parts[i : i + slices] for i in range(0, len(parts), slices)]
            parts = [jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), *row) for row in rows]
        whole = jax.tree.map(lambda *xs: jnp.concatenate(xs) if len(xs) > 1 else xs[0], *parts)
        if not broadcast:
            return whole
        return [place.put_rows(whole) for place in self._places]

    def _cut(self, batch: tuple[Any, ...]) -> CutBatch:
        s = self._schedule
        return cut_batch(batch, s.micro_batches, s.slices, self._options.reduction)

    def _step(self, params: Sequence[Any], batch: tuple[Any, ...], record: bool = False) -> Any:
        self._check_params(params)
        s, cut = self._schedule, self._cut(batch)
        weights = self._weights(params)
        runners = [self._runner(i, len(batch)) for i in range(len(self._parts))]
        exchange = LocalExchange(s, self._places)

        def step(stage: int, **how: Any) -> StageStep:
            mine = s.homes[stage]
            chosen = {i: runners[i] for i in mine}
            given = {i: weights[i] for i in mine}
            return StageStep(stage, s, chosen, given, cut, how.pop("exchange", exchange), **how)

        timeline = None
        if record:
            steps, timeline = recorded(s, step, exchange)
        else:
            steps = [step(i) for i in range(s.stages)]
            for stage, action in s.issue_order:
                steps[stage].perform(action)
        self._peaks = tuple(x.live for x in steps)
        value = self._value(steps[s.placement[-1]].losses)
        sums = {i: total for x in steps for i, total in x.sums.items()}
        found = (value, self._gradients(sums, params))
        return found, timeline

    def _forward(
        self, params: Sequence[Any], batch: tuple[Any, ...], runner: Callable[[int, int], ChunkRunner]
    ) -> list[LossPart]:
        self._check_params(params)
        s, cut = self._schedule, self._cut(batch)
        weights = self._weights(params)
        runners = [runner(i, len(batch)) for i in range(len(self._parts))]
        exchange = LocalExchange(s, self._places)
        steps = [
            StageStep(
                stage,
                s,
                {i: runners[i] for i in s.homes[stage]},
                {i: weights[i] for i in s.homes[stage]},
                cut,
                exchange,
            )
            for stage in range(s.stages)
        ]
        for micro in range(s.micro_batches):
            for part in range(s.slices if not cut.is_empty(micro) else 0):
                for position, stage in enumerate(s.placement):
                    steps[stage].evaluate(micro, s.homes[stage].index(position), part)
        return steps[s.placement[-1]].losses

    def _weights(self, params: Sequence[Any]) -> list[Any]:
        """The parameters of all stages where they are used, shared ones included."""
        found = [self._place_of(i).put(nest, None) for i, nest in enumerate(params)]
        for name, (owner, *others) in self._options.shared.items():
            if not isinstance(found[owner], Mapping) or name not in found[owner]:
                raise InvalidValueError(
                    f"The parameters of stage {owner} must be a dictionary with {name!r}, which "
                    f"it shares. Received: {shown(params[owner])}"
                )
            for i in others:
                copy = self._place_of(i).put(found[owner][name], None)
                found[i] = {**found[i], name: copy}
        return found

    def _gradients(self, sums: dict[int, Any], params: Sequence[Any]) -> list[Any]:
        found = [sums[i] for i in range(len(self._parts))]
        for name, (owner, *others) in self._options.shared.items():
            for i in others:
                own = dict(found[i])
                total = jax.tree.map(
                    lambda x, like: jax.device_put(x, like.sharding), own.pop(name), found[owner][name]
                )
                found[i] = own
                found[owner] = {
                    **found[owner],
                    name: jax.tree.map(jnp.add, found[owner][name], total),
                }
        return [as_weights(total, nest) for total, nest in zip(found, params, strict=True)]

    def _value(self, losses: Sequence[LossPart]) -> Any:
        weights = np.asarray([x.weight for x in losses], np.float32)
        value, metrics = self._totals(weights, [(x.loss, x.metrics) for x in losses])
        return (value, metrics) if self._options.has_aux else value

    # -- chunks ------------------------------------------------------------------------------------

    def _runner(self, position: int, arguments: int) -> ChunkRunner:
        key = position, arguments
        with self._lock:
            if key not in self._runners:
                self._runners[key] = self._made(position, arguments, self._options.loss, True)
            return self._runners[key]

    def _predictor(self, position: int, arguments: int) -> ChunkRunner:
        key = position, arguments
        with self._lock:
            if key not in self._predictors:
                self._predictors[key] = self._made(position, arguments, None, False)
            return self._predictors[key]

    def _made(
        self, position: int, arguments: int, loss: Callable[..., Any] | None, has_loss: bool
    ) -> ChunkRunner:
        part, last = self._parts[position], position == len(self._parts) - 1
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
            policy = again if callable(again) else None
            complete = jax.checkpoint(complete, policy=policy)
        place = self._place_of(position)
        is_loss = last and has_loss
        return ChunkRunner(
            Chunk(position, complete, place, is_loss, self._schedule.splits_backward), takes
        )


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


def _totals(weights: Any, parts: Sequence[Any]) -> Any:
    """The loss and the metrics of a batch, from those of its micro batches."""

    def total(*xs: Any) -> Any:
        wide = [x.astype(jnp.float32) if is_narrow(x) else jnp.asarray(x) for x in xs]
        summed = sum(w * x for w, x in zip(weights, wide, strict=True))
        kind = jnp.result_type(xs[0])
        return summed.astype(kind) if jnp.issubdtype(kind, jnp.inexact) else summed

    return jax.tree.map(total, *parts)
