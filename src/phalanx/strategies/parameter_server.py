"""`ParameterServerStrategy`: variables on parameter servers, steps on workers, each at its own pace."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.cluster import roles
from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.resolvers.tfconfig import resolver_or_tf_config
from phalanx.cluster.spec import ClusterSpec
from phalanx.core import context as ctx
from phalanx.core.checks import first_by_name
from phalanx.core.options import check_dtype
from phalanx.core.strategy import Strategy
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import InitialValue, VariableSpec
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parameter_server.client import ServerConnections
from phalanx.parameter_server.closure import current_closure
from phalanx.parameter_server.home import Freed, ServersHome
from phalanx.parameter_server.options import ParameterServerOptions
from phalanx.parameter_server.placement import (
    Placement,
    VariablePlacer,
    check_partitioner,
    known_shape,
    parts_of,
    shard_count,
)
from phalanx.parameter_server.remote_variable import RemoteVariable
from phalanx.parameter_server.requests import VariableDefinition
from phalanx.parameter_server.session import Session, new_run
from phalanx.parameter_server.sharded_variable import ShardedVariable, shard_sizes
from phalanx.parameter_server.watch import ServerWatch
from phalanx.runtime.devices import DeviceLike, default_devices, device_kind, resolve_devices
from phalanx.runtime.formatting import shown
from phalanx.runtime.pickling import OnePerProcess
from phalanx.strategies.replicated import ReplicatedExtended


class ParameterServerStrategy(OnePerProcess, Strategy):
    """Asynchronous training: parameter servers hold the variables, workers run steps on their own.

    The coordinator's program makes the strategy and its variables, and gives steps to workers with
    `px.coordinator.ClusterCoordinator`. Each variable is on one server, or divided among several if the
    partitioner says so. A step reads what it needs when it begins, and its updates count as a whole.

    Args:
        cluster_resolver: finds the tasks: at least one 'worker' and one 'ps', and perhaps a 'chief'; by
            default the environment variable TF_CONFIG, which `phalanx run` also sets.
        variable_partitioner: says how many shards a variable has, as those of `px.partitioners` do.
            Only rows are divided. None: no variable is.
        placement: which server gets the next variable or shard: None or "round_robin" for one after
            the other, "by_size" for the one that holds the fewest bytes, or a function that returns
            the index of a server. It gets an object with `name`, `shape`, `dtype`, `nbytes` and `held`,
            the bytes on each server.
        compute_devices: where the replicas of one worker run; None for all its accelerators, or its
            first CPU device.
        options: `px.experimental.ParameterServerOptions`: how updates count, and what happens when
            tasks fail.

    Examples:
        >>> import phalanx as px
        >>> cluster = px.train.ClusterSpec({"worker": ["host0:1"], "ps": ["host1:1", "host2:1"]})
        >>> resolver = px.cluster_resolver.SimpleClusterResolver(cluster)
        >>> px.ParameterServerStrategy(resolver, px.partitioners.FixedShardsPartitioner(2))
        <ParameterServerStrategy: 1 worker, 2 parameter servers>
    """

    _extended_type: ClassVar[type[ParameterServerExtended]]

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        placement: Placement = None,
        compute_devices: Sequence[DeviceLike] | None = None,
        options: ParameterServerOptions | None = None,
    ) -> None:
        cluster_resolver = resolver_or_tf_config(cluster_resolver)
        if not isinstance(options, ParameterServerOptions | None):
            raise InvalidTypeError(
                "options must be px.experimental.ParameterServerOptions or None. "
                f"Received: {shown(options)}"
            )
        spec = _checked_cluster(cluster_resolver)
        self._cluster_resolver = cluster_resolver
        self._options = options or ParameterServerOptions()
        self._compute_devices = None if compute_devices is None else tuple(map(str, compute_devices))
        super().__init__(
            self._extended_type(
                self,
                spec,
                _devices(compute_devices),
                check_partitioner(variable_partitioner),
                placement,
            )
        )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Who the tasks are."""
        return self._cluster_resolver

    @property
    def extended(self) -> ParameterServerExtended:
        """The strategy's `StrategyExtended`, for code that must know about distribution."""
        assert isinstance(self._extended, ParameterServerExtended)
        return self._extended

    @property
    def options(self) -> ParameterServerOptions:
        """How updates count, and what happens when tasks fail."""
        return self._options

    def __repr__(self) -> str:
        workers, servers = self.extended.num_workers, self.extended.num_servers
        return (
            f"<ParameterServerStrategy: {workers} worker{'s' * (workers != 1)}, "
            f"{servers} parameter server{'s' * (servers != 1)}>"
        )

    def recipe(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What makes the strategy in another process that unpickles it."""
        spec = self._cluster_resolver.cluster_spec().as_dict()
        return _remade, (type(self), spec, self._compute_devices, self._options, self.extended.home.run)

    def close(self) -> None:
        """End the run: the coordinator stops, and parameter servers free all variables.

        Functions that have not run never will. Without it servers hold the variables until they are
        stopped, or another program begins.
        """
        self.extended.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        return self  # there is one for all processes of the job


class ParameterServerExtended(ReplicatedExtended):
    """What `ParameterServerStrategy` does."""

    def __init__(
        self,
        container_strategy: Strategy,
        spec: ClusterSpec,
        devices: tuple[jax.Device, ...],
        partitioner: Callable[..., Sequence[int]] | None,
        placement: Placement,
    ) -> None:
        super().__init__(container_strategy, devices)
        self.num_workers = roles.task_count(spec, "worker")
        """How many workers run steps."""
        self.num_servers = roles.task_count(spec, "ps")
        """How many servers hold variables."""
        self._variable_partitioner = partitioner
        self._servers = VariablePlacer(self.num_servers, placement)
        self._cluster = spec
        self._session: Session | None = None
        self._begins = True
        self._ids, self._optimizers = itertools.count(), itertools.count(1)
        self._first: weakref.ref[RemoteVariable] | None = None
        self._alive: weakref.WeakValueDictionary[int, RemoteVariable] = weakref.WeakValueDictionary()
        self._freeing: dict[int, weakref.finalize[Any, Any]] = {}
        self.home = ServersHome(new_run(), self._reach)
        """Where the variables are."""
        self.watch: ServerWatch | None = None
        """Looks after the servers, once they have been reached."""
        self.when_closed: list[Callable[[], None]] = []
        """Called before the run ends."""
        self.next_closure = 1
        """The number of the first closure of the next coordinator; servers know those before."""

    @property
    def session(self) -> Session:
        """What tasks need to know to take part in this run."""
        if self._session is None:
            self._session = Session.of(self._cluster, self._options, self.home.run)
        return self._session

    @property
    def _options(self) -> ParameterServerOptions:
        assert isinstance(self._strategy, ParameterServerStrategy)
        return self._strategy.options

    def go_on_from(self, runs: Sequence[str]) -> Session:
        """The session, after a checkpoint of earlier runs was loaded."""
        self._session = dataclasses.replace(self.session, earlier=tuple(runs))
        return self._session

    def _reach(self) -> ServerConnections:
        servers = self.session.connect(begin=self._begins)
        self.watch = self._new_watch().start()
        return servers

    def _new_watch(self) -> ServerWatch:
        return ServerWatch(self.session, weakref.ref(self.home))

    def connect(self) -> ServerConnections:
        """The connections of this process to the servers, made when they are first needed."""
        servers = self.home.servers()
        assert isinstance(servers, ServerConnections)
        return servers

    def take_part(self, run: str) -> None:
        """Let this process take part in a run that another one has begun."""
        self.home.run, self._begins, self._session = run, False, None

    def check_coordinates(self) -> None:
        """Require that a coordinator may run here."""

    def close(self) -> None:
        """End the run."""
        for call in list(self.when_closed):
            call()
        gone: list[int] = []
        if self.watch is not None:
            gone = self.watch.missing
            self.watch.close()
        self.home.close(gone)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The parameter servers, as device strings."""
        return tuple(f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(self.num_servers))

    @property
    def experimental_between_graph(self) -> bool:
        """False, as in TensorFlow: one coordinator has the whole program."""
        return False

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """The first variable by name."""
        return first_by_name(var_list)

    # -- variables -------------------------------------------------------------------------------

    def _create_variable_from(self, initial: InitialValue, kinds: tuple[Any, ...]) -> Variable:
        if current_closure() is not None:
            raise InvalidValueError(
                "Variables on parameter servers are made by the coordinator's program, not by "
                "functions that it schedules: those may run several times. Make it in strategy.scope() "
                f"and let the function capture it. Received: a new variable {shown(initial.name)}"
            )
        near = _server_of(ctx.colocated_with())
        known = known_shape(initial)
        value = None if known is not None else initial.array()
        shape, dtype = known if value is None else (value.shape, value.dtype)  # type: ignore[misc]
        spec = VariableSpec(jax.ShapeDtypeStruct(shape, dtype), *kinds)  # type: ignore[arg-type]
        if self._num_replicas_in_sync > 1:
            check_dtype(spec.aggregation, dtype, spec.name)
        count = 1 if near is not None else shard_count(self._variable_partitioner, shape, dtype)
        sizes = [shape[0]] if count == 1 and shape else shard_sizes(shape[0], count) if shape else []
        if value is not None:
            values = iter([value] if count == 1 else jnp.split(value, np.cumsum(sizes)[:-1]))
        else:
            values = parts_of(initial, shape, sizes or [1])
        if count == 1:
            return self._create_on_server(spec, next(values), near)
        shards = [
            self._create_on_server(_named(spec, f"{spec.name}/part_{i}", part), part, None)
            for i, part in enumerate(values)
        ]
        return ShardedVariable(shards, spec, self._strategy)

    def _create_variable(self, spec: VariableSpec) -> Variable:
        initial = InitialValue(spec.value, None, None, spec.name)
        kinds = (spec.trainable, spec.name, spec.synchronization, spec.aggregation, spec.constraint)
        return self._create_variable_from(initial, kinds)

    def _create_on_server(self, spec: VariableSpec, value: Any, near: int | None) -> RemoteVariable:
        host = np.asarray(value)
        server = self._servers.choose(spec.name, host.shape, host.dtype, near)
        definition = VariableDefinition(next(self._ids), spec.name, host.shape, str(host.dtype), server)
        self._create(definition, host)
        variable = RemoteVariable(definition, spec, self._strategy)
        if self._first is None:
            self._first = weakref.ref(variable)
        self.free_with(variable)
        return variable

    def _create(self, definition: VariableDefinition, value: Any) -> None:
        self.home.let_go(definition.server)
        with self.home.in_turn() as servers:
            servers.create(definition, value)

    def free_with(self, variable: RemoteVariable, optimizer: int = 0) -> None:
        """Let servers free a variable, and an optimizer, when no code refers to the variable."""
        number = variable.definition.id
        if number in self._freeing:
            self._freeing[number].detach()
        finalizer = weakref.finalize(variable, self._free, variable.definition, optimizer)
        finalizer.atexit = False
        self._freeing[number], self._alive[number] = finalizer, variable

    def _free(self, variable: VariableDefinition, optimizer: int) -> None:
        """No code refers to a variable any more. The garbage collector calls it, so it never waits."""
        self._freeing.pop(variable.id, None)
        self._servers.release(variable.server, variable.nbytes)
        self.home.free(variable.server, Freed([variable.id]))
        if optimizer:
            for server in range(self.num_servers):
                self.home.free(server, Freed([], [optimizer]))

    @property
    def variables(self) -> list[RemoteVariable]:
        """The variables that are still there."""
        return list(self._alive.values())

    def next_optimizer(self) -> int:
        """The id of the next optimizer."""
        return next(self._optimizers)

    @property
    def first_variable(self) -> RemoteVariable | None:
        """The first variable that was made, if it is still there."""
        return None if self._first is None else self._first()

    # -- input -----------------------------------------------------------------------------------

    def _distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return WorkersDataset(self._strategy, dataset, None, options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        return WorkersDataset(self._strategy, None, dataset_fn, options)

    def distribute_here(self, dataset: Any, dataset_fn: Callable[..., Any] | None, options: Any) -> Any:
        """Distribute a dataset among the replicas of this worker."""
        if dataset_fn is None:
            return super()._distribute_dataset(dataset, options)
        return super()._distribute_datasets_from_function(dataset_fn, options)


ParameterServerStrategy._extended_type = ParameterServerExtended


class WorkersDataset:
    """A dataset that each worker reads on its own, given to `create_per_worker_dataset`.

    It is a dataset, or a function that makes one on the worker.
    """

    def __init__(
        self, strategy: Strategy, dataset: Any, dataset_fn: Callable[..., Any] | None, options: Any
    ) -> None:
        self._given = strategy, dataset, dataset_fn, options

    def on_worker(self) -> Any:
        """The dataset of this worker, as `px.DistributedDataset`."""
        strategy, *given = self._given
        extended = strategy.extended
        assert isinstance(extended, ParameterServerExtended)
        return extended.distribute_here(*given)

    def __iter__(self) -> Any:
        """Only workers read it."""
        if current_closure() is None:
            raise InvalidValueError(
                "Under ParameterServerStrategy workers read input, each on its own. Give the dataset "
                "to ClusterCoordinator.create_per_worker_dataset. Received: iter() of a distributed "
                "dataset in the coordinator's program"
            )
        return iter(self.on_worker())


def _remade(
    kind: type[ParameterServerStrategy],
    spec: Any,
    compute_devices: tuple[str, ...] | None,
    options: ParameterServerOptions,
    run: str,
) -> ParameterServerStrategy:
    resolver = SimpleClusterResolver(ClusterSpec(spec))
    strategy = kind(resolver, compute_devices=compute_devices, options=options)
    strategy.extended.take_part(run)
    return strategy


def _checked_cluster(resolver: ClusterResolver) -> ClusterSpec:
    spec = resolver.cluster_spec()
    if not spec:
        raise InvalidValueError(
            "ParameterServerStrategy needs a cluster. Set TF_CONFIG, run the program with "
            f"`phalanx run --ps`, or give a cluster_resolver. Received: {spec!r}"
        )
    roles.validate_cluster_spec(spec, resolver.task_type, resolver.task_id)
    for job in ("ps", "worker"):
        if roles.task_count(spec, job) < 1:
            raise InvalidValueError(
                f"ParameterServerStrategy needs at least one task in job {job!r}. Received: {spec!r}"
            )
    return spec


def _devices(compute_devices: Sequence[DeviceLike] | None) -> tuple[jax.Device, ...]:
    if compute_devices is not None:
        return resolve_devices(compute_devices)
    devices = default_devices()
    return devices[:1] if device_kind(devices[0]) == "CPU" else devices


def _server_of(variable: Any) -> int | None:
    if isinstance(variable, ShardedVariable):
        variable = variable.variables[0]
    return variable.definition.server if isinstance(variable, RemoteVariable) else None


def _named(spec: VariableSpec, name: str, value: Any) -> VariableSpec:
    like: Any = jax.ShapeDtypeStruct(value.shape, value.dtype)
    return VariableSpec(
        like, spec.trainable, name, spec.synchronization, spec.aggregation, spec.constraint
    )
