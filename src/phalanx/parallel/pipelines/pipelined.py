"""`Pipelined`: the stages of a model, or some of them, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidValueError
from phalanx.execution.throttle import THROTTLE, token
from phalanx.parallel.pipelines.chunk_making import ChunkMaker, PipelineOptions
from phalanx.parallel.pipelines.hosts import HostExchange, StageHosts, outline
from phalanx.parallel.pipelines.micro_batches import CutBatch, cut_batch
from phalanx.parallel.pipelines.optimizing import PipelineOptimizer
from phalanx.parallel.pipelines.recording import Timeline, recorded
from phalanx.parallel.pipelines.schedule import PipelineSchedule
from phalanx.parallel.pipelines.stage_steps import LossPart, StageStep, as_weights
from phalanx.parallel.pipelines.stages import Stage, StagePlace
from phalanx.parallel.wide_sums import is_narrow
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown

__all__ = ["Pipelined"]


class Pipelined:
    """A model in stages. `pipeline` makes it.

    Parameters and gradients are lists with a nest for each of the stages that were given (for each
    chunk, if stages have several). Where workers have stages of their own, those of other workers are
    nests of `jax.ShapeDtypeStruct`.
    """

    def __init__(
        self,
        parts: tuple[Stage, ...],
        schedule: PipelineSchedule,
        places: Mapping[int, StagePlace],
        options: PipelineOptions,
        hosts: StageHosts,
    ) -> None:
        self._parts, self._schedule, self._places, self._options = parts, schedule, places, options
        self._hosts = hosts
        self._maker = ChunkMaker(parts, schedule, places, options)
        self._totals = jax.jit(_totals)
        self._peaks: dict[int, int] = {}
        self._agreed: dict[Any, dict[tuple[int, int, int], Any]] = {}

    # -- what it is --------------------------------------------------------------------------------

    @property
    def schedule(self) -> PipelineSchedule:
        """What each stage does, in which order."""
        return self._schedule

    @property
    def stages(self) -> tuple[int, ...]:
        """The numbers of the stages that are in this process."""
        return tuple(sorted(self._places))

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The devices of each stage that is in this process."""
        return tuple(self._places[stage].mesh for stage in self.stages)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """How many forward results each stage held at most in the last step."""
        return tuple(self._peaks[stage] for stage in self.stages if stage in self._peaks)

    def takes(self, arguments: int) -> tuple[int, ...]:
        """The numbers of the arguments of a batch that the stages in this process take.

        With one worker per stage and a batch of inputs and targets, the first worker takes (0,), the
        last one (1,), and all others (). What a worker does not take may be None.

        Args:
            arguments: how many a batch has.
        """
        mine = [i for i in range(len(self._parts)) if self._is_here(i)]
        return tuple(sorted({n for i in mine for n in self._maker.runner(i, arguments).takes}))

    def grouped(self, layers: Sequence[Any]) -> list[Any]:
        """The parameters of layers, as `split` has cut them: for each stage a list.

        Args:
            layers: the parameters of each layer, in the order of the model.
        """
        counts = [part.layers for part in self._parts]
        if None in counts or sum(n or 0 for n in counts) != len(layers):
            raise InvalidValueError(
                "grouped is for stages that px.parallel.split has made, and takes parameters for each "
                f"of their layers, which are {counts}. Received: parameters for {len(layers)} layers"
            )
        rest = iter(layers)
        return [[next(rest) for _ in range(n or 0)] for n in counts]

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
        return [
            self._place_of(i).put(nest, self._layouts(i)) if self._is_here(i) else outline(nest)
            for i, nest in enumerate(params)
        ]

    def create(self, makers: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make the parameters of each stage on its own devices, so that none holds the whole model.

        Args:
            makers: for each of the stages, a function that returns its parameters.
        """
        self._check_params(makers)
        found = []
        for i, make in enumerate(makers):
            shapes = jax.eval_shape(make)
            if not self._is_here(i):
                found.append(shapes)
                continue
            shardings = self._place_of(i).shardings(shapes, self._layouts(i))

            def program(make: Callable[[], Any] = make) -> Any:
                return make(), token(False)

            found.append(THROTTLE.dispatch(jax.jit(program, out_shardings=(shardings, None))))
        return found

    def optimizer(
        self, transform: Any, shard: str | None = None, donate: bool = False
    ) -> PipelineOptimizer:
        """An optimizer for the parameters of all stages.

        It has ``init(params)``, which returns a state, and ``update(gradients, state, params)``, which
        returns new parameters and a new state.

        Args:
            transform: an `optax.GradientTransformation`, or a `px.train.Optimizer`, whose one is taken.
            shard: "states" if the devices of a stage divide the optimizer's state among them.
            donate: whether new parameters and states may take the memory of the old ones, which cannot
                be used any more then, nor what `place` made them of.
        """
        placement = self._schedule.placement
        return PipelineOptimizer(transform, self._places, placement, shard, self._hosts, donate)

    def _is_here(self, position: int) -> bool:
        return self._hosts.is_here(self._schedule.placement[position])

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
            params: a nest of arrays or variables for each stage, copied to the
                stage's devices.
            *batch: nests of arrays with the examples along the first dim. A worker may give None for
                what its stages do not take; see `takes`.
        """
        params = _values(params)
        with self._hosts.naming():
            steps, exchange, weights = self._prepared(params, batch)
            made = {stage: self._step(stage, exchange, *steps) for stage in self.stages}
            for stage, action in self._schedule.issue_order:
                if stage in made:
                    made[stage].perform(action)
            return self._finished(made, weights, params)

    def recorded(self, params: Sequence[Any], *batch: Any) -> tuple[tuple[Any, list[Any]], Timeline]:
        """The same, and when each action began and ended.

        Each stage has a thread, which waits for the end of one action before it begins the next.
        """
        params = _values(params)
        with self._hosts.naming():
            steps, exchange, weights = self._prepared(params, batch)

            def step(stage: int, **how: Any) -> StageStep:
                return self._step(stage, how["exchange"], *steps, start=how["start"])

            made, timeline = recorded(self._schedule, self.stages, step, exchange)
            return self._finished(made, weights, params), timeline

    def __call__(self, params: Sequence[Any], *batch: Any) -> Any:
        """The loss of a batch, without gradients."""
        with self._hosts.naming():
            return self._value(self._forward(params, batch, has_loss=True))

    def predict(self, params: Sequence[Any], *batch: Any, broadcast: bool = False) -> Any:
        """What the last stage returns for all examples, in order; needs a `loss` of its own.

        Args:
            params: a nest for each stage.
            *batch: the arguments of stages; those of the loss are not needed.
            broadcast: whether to return a list with a copy on the devices of each stage that is here.
                Without it, a worker that does not have the last stage gets None.
        """
        if self._options.loss is None:
            raise InvalidValueError(
                "The last stage returns the loss. Give the loss apart, as pipeline(…, loss=…), to get "
                "what the model predicts. Received: loss=None"
            )
        with self._hosts.naming():
            parts = [x.loss for x in self._forward(params, batch, has_loss=False)]
            slices = self._schedule.slices
            if slices > 1:
                rows = [parts[i : i + slices] for i in range(0, len(parts), slices)]
                parts = [jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), *row) for row in rows]
            whole = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts) if parts else None
            if not broadcast:
                return whole
            last = self._schedule.placement[-1]
            held = None if whole is None else jax.tree.map(np.asarray, whole)
            copy = held if len(self.stages) == self._schedule.stages else self._hosts.told(held, last)
            return [self._places[stage].put_rows(copy) for stage in self.stages]

    # -- parts of steps ----------------------------------------------------------------------------

    def _prepared(
        self, params: Sequence[Any], batch: tuple[Any, ...], has_loss: bool = True
    ) -> tuple[tuple[Any, Any, CutBatch], HostExchange, dict[int, Any]]:
        """The chunks, parameters and batch of a step, how stages meet, and the parameters again."""
        self._check_params(params)
        if compat.is_staging():
            raise ContextError(
                "A pipeline is many programs on different devices, so it cannot be a part of one. Call "
                "it outside of jax.jit, px.function and jax.grad; value_and_grad has the gradients."
            )
        s = self._schedule
        batch = self._hosts.completed(batch)
        cut = cut_batch(batch, s.micro_batches, s.slices, self._options.reduction)
        mine = [i for i in range(len(self._parts)) if self._is_here(i)]
        runners = {i: self._maker.runner(i, len(batch), has_loss) for i in mine}
        _check_given(runners, batch)
        shapes = self._shapes(params, cut, runners, has_loss)
        weights = self._weights(params)
        exchange = HostExchange(s, self._places, self._hosts, shapes, cut.rows)
        return (runners, weights, cut), exchange, weights

    def _step(
        self, stage: int, exchange: Any, runners: Any, weights: Any, cut: CutBatch, start: Any = None
    ) -> StageStep:
        mine = self._schedule.homes[stage]
        chosen, given = {i: runners[i] for i in mine}, {i: weights[i] for i in mine}
        return StageStep(stage, self._schedule, chosen, given, cut, exchange, start)

    def _shapes(
        self, params: Sequence[Any], cut: CutBatch, runners: Mapping[int, Any], has_loss: bool
    ) -> dict[tuple[int, int, int], Any]:
        """What positions in different processes hand over; all processes must be about the same."""
        s = self._schedule
        if len(self.stages) == s.stages:
            return {}
        key = has_loss, jax.tree.structure(cut.args), str(outline(cut.args)), str(outline(params))
        if key not in self._agreed:
            self._hosts.agree(
                {
                    "schedule": s,
                    "placement": s.placement,
                    "batch": outline(cut.args),
                    "parameters": outline(list(params)),
                    "options": (self._options.shared, self._options.reduction, self._options.has_aux),
                }
            )
            found: dict[tuple[int, int, int], Any] = {}
            rows = sorted({n for n in cut.rows if n})
            for position in range(1, s.positions):
                before = position - 1
                mine: dict[tuple[int, int, int], Any] = {}
                if self._is_here(before):
                    weights = outline(self._with_shared(params, before, params))
                    for n in rows:
                        mine |= runners[before].outlined(weights, cut, n, before, found, s.slices)
                stage = s.placement[before]
                found |= self._hosts.told(mine, stage)
            self._agreed[key] = found
        return self._agreed[key]

    def _finished(
        self, steps: Mapping[int, StageStep], weights: Mapping[int, Any], params: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        self._peaks = {stage: step.live for stage, step in steps.items()}
        last = self._schedule.placement[-1]
        value = self._value(steps[last].losses if last in steps else [])
        sums = {i: total for step in steps.values() for i, total in step.sums.items()}
        return value, self._gradients(sums, weights, params)

    def _forward(self, params: Sequence[Any], batch: tuple[Any, ...], has_loss: bool) -> list[LossPart]:
        parts, exchange, _ = self._prepared(_values(params), batch, has_loss)
        s, cut = self._schedule, parts[2]
        steps = {stage: self._step(stage, exchange, *parts) for stage in self.stages}
        for micro in range(s.micro_batches):
            for part in range(s.slices if not cut.is_empty(micro) else 0):
                for position, stage in enumerate(s.placement):
                    if stage in steps:
                        steps[stage].evaluate(micro, s.homes[stage].index(position), part)
        return steps[s.placement[-1]].losses if s.placement[-1] in steps else []

    def _with_shared(self, own: Sequence[Any], position: int, params: Sequence[Any]) -> Any:
        """The parameters of a stage, and those of others that it shares."""
        found = own[position]
        for name, (owner, *others) in self._options.shared.items():
            if not isinstance(params[owner], Mapping) or name not in params[owner]:
                raise InvalidValueError(
                    f"The parameters of stage {owner} must be a dictionary with {name!r}, which it "
                    f"shares. Received: {shown(params[owner])}"
                )
            if position in others:
                found = {**found, name: params[owner][name]}
        return found

    def _weights(self, params: Sequence[Any]) -> dict[int, Any]:
        """The parameters of stages where they are used, shared ones included."""
        given = list(params)
        placement, hosts = self._schedule.placement, self._hosts
        complete = {i: self._with_shared(given, i, params) for i in range(len(given))}
        for number, (name, (owner, *others)) in enumerate(sorted(self._options.shared.items())):
            for i in others:
                if self._is_here(owner) and not self._is_here(i):
                    hosts.send(given[owner][name], placement[i], "shared", number, i)
                elif self._is_here(i) and not self._is_here(owner):
                    shapes = outline(params[owner][name])
                    copy = hosts.receive(shapes, placement[owner], "shared", number, i)
                    complete[i] = {**complete[i], name: copy}
        return {i: self._place_of(i).put(complete[i]) for i in complete if self._is_here(i)}

    def _gradients(
        self, sums: dict[int, Any], weights: Mapping[int, Any], params: Sequence[Any]
    ) -> list[Any]:
        placement, hosts = self._schedule.placement, self._hosts
        for number, (name, (owner, *others)) in enumerate(sorted(self._options.shared.items())):
            for i in others:
                part: Any = None
                if i in sums:
                    own = dict(sums[i])
                    part = own.pop(name)
                    sums[i] = own
                    if not self._is_here(owner):
                        hosts.send(part, placement[owner], "sum", number, i)
                if owner not in sums:
                    continue
                total = sums[owner][name]
                if part is None:
                    part = hosts.receive(outline(total), placement[i], "sum", number, i)
                moved = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), part, total)
                sums[owner] = {**sums[owner], name: jax.tree.map(jnp.add, total, moved)}
        return [
            as_weights(sums[i], nest) if i in sums else outline(nest) for i, nest in enumerate(params)
        ]

    def _value(self, losses: Sequence[LossPart]) -> Any:
        """The loss of a batch, in all processes."""
        value: Any = None
        if losses:
            weights = np.asarray([x.weight for x in losses], np.float32)
            value, metrics = self._totals(weights, [(x.loss, x.metrics) for x in losses])
            value = (value, metrics) if self._options.has_aux else value
        if len(self.stages) == self._schedule.stages:
            return value
        held = None if value is None else jax.tree.map(np.asarray, value)
        return jax.tree.map(jnp.asarray, self._hosts.told(held, self._schedule.placement[-1]))


def _check_given(runners: Mapping[int, Any], batch: Sequence[Any]) -> None:
    """Require that stages have the arguments that they take."""
    for position, runner in runners.items():
        for n in runner.takes:
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch[n])):
                raise InvalidValueError(
                    f"Stage {position}, which is here, takes argument {n} of the batch; see "
                    "Pipelined.takes. Received: None, or a shape in place of an array"
                )


def _values(params: Any) -> Any:
    """Parameters with the values of variables in place of the variables."""

    def value(x: Any) -> Any:
        return x.value() if isinstance(x, Variable) else x

    return jax.tree.map(value, params, is_leaf=lambda x: isinstance(x, Variable))


def _totals(weights: Any, parts: Sequence[Any]) -> Any:
    """The loss and the metrics of a batch, from those of its micro batches."""

    def total(*xs: Any) -> Any:
        wide = [x.astype(jnp.float32) if is_narrow(x) else jnp.asarray(x) for x in xs]
        summed = sum(w * x for w, x in zip(weights, wide, strict=True))
        kind = jnp.result_type(xs[0])
        return summed.astype(kind) if jnp.issubdtype(kind, jnp.inexact) else summed

    return jax.tree.map(total, *parts)
