"""`pipeline`: a model in stages on several devices, and the gradients of its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.pipelines.chunk_making import PipelineOptions
from phalanx.parallel.pipelines.hosts import LocalHosts, StageHosts, WorkerHosts
from phalanx.parallel.pipelines.micro_batches import REDUCTIONS
from phalanx.parallel.pipelines.named_schedules import schedule as make_schedule
from phalanx.parallel.pipelines.pipelined import Pipelined
from phalanx.parallel.pipelines.schedule import PipelineSchedule
from phalanx.parallel.pipelines.stages import DATA_AXIS, Stage, places
from phalanx.parallel.pipelines.strategy import places_in_scope
from phalanx.runtime.devices import DeviceLike
from phalanx.runtime.formatting import shown

__all__ = ["pipeline"]


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
    workers: bool = False,
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
        devices: equal numbers of neighbours are a stage; by default those of the `PipelineStrategy`
            in whose scope it is called, else all accelerators, or all CPU devices where there is none.
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
        workers: whether each worker of the job has stages of its own, in the order of their ranks. All
            workers call the same functions with the same batch, or with None for what their stages do
            not take; `devices` and `mesh` are those of this worker's stages. Activations travel as
            messages of `px.comm`.

    Examples:
        >>> import jax.numpy as jnp
        >>> stage = lambda w, x: jnp.tanh(x @ w)
        >>> mse = lambda y, target: jnp.mean((y - target) ** 2)
        >>> pipe = pipeline([stage, stage], "1f1b", 4, loss=mse, devices=["CPU:0", "CPU:1"])
        >>> params = pipe.place([jnp.eye(3), jnp.eye(3)])
        >>> value, gradients = pipe.value_and_grad(params, jnp.ones((8, 3)), jnp.zeros((8, 3)))
        >>> round(float(value), 4), [g.shape for g in gradients]
        (0.4122, [(3, 3), (3, 3)])
    """
    parts = [x if isinstance(x, Stage) else Stage(x) for x in _sequence("stages", stages)]
    if reduction not in REDUCTIONS:
        raise InvalidValueError(f"reduction must be 'mean' or 'sum'. Received: {shown(reduction)}")
    if loss is not None and not callable(loss):
        raise InvalidTypeError(f"loss must be a function. Received: {shown(loss)}")
    planned = _planned(schedule, len(parts), micro_batches, chunks, slices)
    if layouts is not None and len(layouts) != len(parts):
        raise InvalidValueError(f"There are {len(parts)} stages. Received: layouts for {len(layouts)}")
    options = PipelineOptions(
        loss, layouts, _shared(shared or {}, len(parts)), recompute, reduction, has_aux
    )
    hosts: StageHosts = WorkerHosts(planned.stages) if workers else LocalHosts()
    mine = [stage for stage in range(planned.stages) if hosts.is_here(stage)]
    chosen = places_in_scope(len(mine)) if devices is None and mesh is None else None
    chosen = chosen or places(len(mine), devices, mesh, data_axis)
    found = dict(zip(mine, chosen, strict=True))
    return Pipelined(tuple(parts), planned, found, options, hosts)


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
