"""`PipelineStrategy`: variables that live in stages, and steps that go through them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from phalanx.core import context as ctx
from phalanx.core.strategy import Strategy
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import InitialValue, VariableSpec
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.execution.eager import run_replicas
from phalanx.parallel.laid_out_extended import LaidOutExtended
from phalanx.parallel.laid_out_variable import LaidOutVariable, initial_parts, initial_shape
from phalanx.parallel.pipelines.optimizing import PipelineOptimizer
from phalanx.parallel.pipelines.staged_updates import StagedUpdate
from phalanx.parallel.pipelines.stages import DATA_AXIS, StagePlace, places
from phalanx.parallel.storing import is_named
from phalanx.runtime.devices import DeviceLike, device_name
from phalanx.runtime.formatting import shown

__all__ = ["PipelineStrategy", "places_in_scope"]


class PipelineStrategy(Strategy):
    """Variables that live in the stages of a pipeline, each on the devices of its stage only.

    There is one replica, which sees whole batches. In the scope, `px.parallel.pipeline` takes the
    devices of the stages. A step, given to `run`, calls `Pipelined.value_and_grad` with variables, and
    `px.train.Optimizer.apply_gradients` with the gradients: each stage keeps and updates what belongs
    to its variables, and single numbers only, such as a global norm, go from stage to stage.

    Args:
        stages: how many there are.
        devices: equal numbers of neighbours are a stage; by default all accelerators, or all CPU
            devices where there is none.
        mesh: with an axis "stage" and perhaps others, in place of devices.
        data_axis: the axis of the mesh along which micro batches are cut.
        layouts: of variables by name, as `PartitionSpec`. Others are whole on each device of
            their stage.
        shard: "states" if the devices of a stage divide the optimizer's state among them.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, phalanx as px
        >>> strategy = px.parallel.PipelineStrategy(2, devices=["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     variables = []
        ...     for number in range(2):
        ...         with strategy.stage(number):
        ...             variables.append(px.Variable(lambda: jnp.eye(3)))
        ...     layer = lambda w, x: jnp.tanh(x @ w)
        ...     mse = lambda y, target: jnp.mean((y - target) ** 2)
        ...     pipe = px.parallel.pipeline([layer, layer], "1f1b", 4, loss=mse)
        ...     optimizer = px.train.Optimizer(optax.sgd(0.1))
        >>> def step(x, target):
        ...     loss, gradients = pipe.value_and_grad(variables, x, target)
        ...     optimizer.apply_gradients(zip(gradients, variables))
        ...     return loss
        >>> batch = jnp.ones((8, 3)), jnp.zeros((8, 3))
        >>> [round(float(strategy.run(step, batch)), 3) for _ in range(2)]
        [0.412, 0.369]
        >>> [v.sharding.mesh.devices.item().id for v in variables]
        [0, 1]
    """

    def __init__(
        self,
        stages: int,
        *,
        devices: Sequence[DeviceLike] | None = None,
        mesh: Mesh | None = None,
        data_axis: str = DATA_AXIS,
        layouts: Mapping[str, Any] | None = None,
        shard: str | None = None,
    ) -> None:
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            raise InvalidTypeError(f"stages must be a positive number. Received: {shown(stages)}")
        found = places(stages, devices, mesh, data_axis)
        super().__init__(PipelineExtended(self, found, dict(layouts or {}), shard))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.stages} stages of {self.meshes[0].size} devices>"

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self._staged.places)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The devices of each stage."""
        return tuple(place.mesh for place in self._staged.places)

    @contextlib.contextmanager
    def stage(self, number: int) -> Iterator[None]:
        """A context manager in which variables are made on the devices of a stage.

        Without it they are made at the first stage.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self.stages:
            raise InvalidValueError(
                f"The stages have the numbers 0 to {self.stages - 1}. Received: {shown(number)}"
            )
        if ctx.get_strategy() is not self:
            raise ContextError(
                "strategy.stage is for `with strategy.scope():`. Received: a stage outside of the scope"
            )
        token = self._staged.current.set(number)
        try:
            yield
        finally:
            self._staged.current.reset(token)

    @property
    def _staged(self) -> PipelineExtended:
        extended = self.extended
        assert isinstance(extended, PipelineExtended)
        return extended


class PipelineExtended(LaidOutExtended):
    """What `PipelineStrategy` does."""

    def __init__(
        self,
        container_strategy: Strategy,
        found: Sequence[StagePlace],
        layouts: Mapping[str, Any],
        shard: str | None,
    ) -> None:
        super().__init__(container_strategy)
        self.places = tuple(found)
        self.current: contextvars.ContextVar[int] = contextvars.ContextVar("stage", default=0)
        self._layouts, self._shard = layouts, shard
        self._updates = StagedUpdate(dict(enumerate(self.places)))

    def _stage_of(self, x: Any) -> int | None:
        """The stage whose devices an array is on."""
        mesh = x.sharding.mesh if isinstance(getattr(x, "sharding", None), NamedSharding) else None
        return next((i for i, place in enumerate(self.places) if place.mesh == mesh), None)

    # -- one replica ---------------------------------------------------------------------------------

    @property
    def _replica_devices(self) -> tuple[jax.Device]:
        return (self.places[0].mesh.devices.flat[0],)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of all stages, as canonical device strings."""
        return tuple(device_name(d) for place in self.places for d in place.mesh.devices.flat)

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        with jax.ensure_compile_time_eval():
            first = jnp.int32(0)
        return run_replicas(self._strategy, self._replica_devices, [first], fn, tuple(args), kwargs)

    def _input_place(self) -> Callable[[int, Any], Any]:
        return lambda number, rows: rows  # stages take their micro batches from the host

    # -- variables -----------------------------------------------------------------------------------

    def _create_variable_from(self, initial: InitialValue, kinds: tuple[Any, ...]) -> Variable:
        shape, initial = initial_shape(initial)
        sharding = self._sharding(initial.name, shape)
        value = initial_parts(initial, sharding)
        if initial.shape is not None and tuple(initial.shape) != value.shape:
            raise InvalidValueError(
                f"The initial value of variable {initial.name!r} does not have the shape that was "
                f"asked for. Received: shape={tuple(initial.shape)} and a value of {value.shape}"
            )
        return LaidOutVariable(VariableSpec(value, *kinds), self._strategy, sharding)

    def _sharding(self, name: str, value: Any) -> NamedSharding:
        """The layout of a variable: of its value, that of its neighbour, or by its stage and name."""
        if self._stage_of(value) is not None:
            found: NamedSharding = value.sharding
            return found
        neighbour: Any = ctx.colocated_with()
        stage = self._stage_of(neighbour)
        place = self.places[self.current.get() if stage is None else stage]
        if stage is not None and neighbour.shape == tuple(value.shape):
            return NamedSharding(place.mesh, neighbour.sharding.spec)
        known = [spec for given, spec in self._layouts.items() if is_named(name, given)]
        return NamedSharding(place.mesh, known[0]) if known else place.whole()

    # -- optimizers ----------------------------------------------------------------------------------

    def _computed(self, make: Callable[[Any], Any], values: list[Any]) -> Any:
        """Each stage makes what belongs to its values."""
        stages = [self._stage_of(x) or 0 for x in values]
        transform = optax.GradientTransformation(make, optax.identity().update)
        by_stage = dict(enumerate(self.places))
        try:
            return PipelineOptimizer(transform, by_stage, stages, self._shard).init(values)
        except jax.errors.ConcretizationTypeError:  # it looks at what it computes
            return make(values)

    def _updating(self, update: Callable[..., Any], compiled: Callable[..., Any]) -> Any:
        """Each stage computes the part that is about its variables."""
        del compiled

        def updating(grads: Any, state: Any, params: Any, *more: Any) -> Any:
            given = (grads, state, params, *more)
            homes = [self._stage_of(x) or 0 for x in jax.tree.leaves(given)]
            return self._updates(update, given, homes)

        return updating


def places_in_scope(stages: int) -> list[StagePlace] | None:
    """The stages of the strategy whose scope this is; None if it has none."""
    strategy = ctx.get_strategy()
    if not isinstance(strategy, PipelineStrategy):
        return None
    found = list(strategy._staged.places)
    if len(found) != stages:
        raise InvalidValueError(
            f"The strategy of this scope has {len(found)} stages. Received: a pipeline of {stages} "
            "stages, and no devices for it"
        )
    return found
