"""The compiled executor: one SPMD program for all replicas.

Inside traced code `Strategy.run` becomes one `shard_map` over the mesh axis "replica". The step is
traced once and stands for every replica: its id is `lax.axis_index`, per-replica arguments are its
shards, and collectives are part of the program. Merge functions are inlined; what they see of per-
replica values is `SpmdPerReplica`. The rules are the eager executor's, because both go through the
same merge points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from phalanx.core import context as ctx
from phalanx.core.replica_context import MergePoint, ReplicaContext, Wait
from phalanx.core.spmd import SpmdPerReplica, shared_by_all, wrap_arguments
from phalanx.core.structure import leaves, map_nest, replace_leaves
from phalanx.core.values import Mirrored, PerReplica, ReplicaLayout, select_replica
from phalanx.core.variables import traced_variables
from phalanx.core.variables.distributed_variables import SyncOnReadVariable
from phalanx.core.variables.sliced_variables import SlicedVariable
from phalanx.core.variables.variable import ResourceVariable, Variable
from phalanx.errors import ContextError, InvalidArgumentError, MergeMismatchError, UnsupportedError
from phalanx.execution.staging import explained
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.host_memory import expect_model
from phalanx.runtime.placement import REPLICA_AXIS, replica_mesh, without_mesh

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy

SPLIT, WHOLE = PartitionSpec(REPLICA_AXIS), PartitionSpec()


def run_inlined(
    strategy: Strategy,
    count: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run `fn` from a merge function of a compiled run: the program is on all replicas already."""
    mine = select_replica(0, (args, dict(kwargs)))
    with _replica_context(strategy, count, []):
        result = fn(*mine[0], **mine[1])
    return wrap_arguments(result, count, always=False)


def in_compiled_run(strategy: Strategy) -> bool:
    """Whether the code that is being traced stands for all replicas of a strategy."""
    return any(
        isinstance(x, SpmdVariableTrace) and x.strategy is strategy
        for x in traced_variables.enclosing()
    )


def _replica_context(strategy: Strategy, count: int, shared: list[Any]) -> ReplicaContext:
    return ReplicaContext(
        strategy,
        lax.axis_index(REPLICA_AXIS),
        rendezvous=CompiledRendezvous(count, shared),
        index=0,
        compiled=True,
    )


class CompiledRendezvous:
    """Replicas of one program are always together, so they meet by inlining the merge function.

    Args:
        count: how many replicas there are.
        shared: collects the plain arrays that merge functions returned. They are one object for all
            replicas, so a run that returns one of them returns it plain.
    """

    def __init__(self, count: int, shared: list[Any]) -> None:
        self._count = count
        self._shared = shared

    def meet(self, context: ReplicaContext, point: MergePoint) -> Any:
        """See `Rendezvous.meet`."""
        given = (point.args, dict(point.kwargs))
        nest = wrap_arguments(given, self._count, point.always_wrap, self._shared)
        with ctx.push(ctx.Mode(context.strategy)):
            result = shared_by_all(point.fn(context.strategy, *nest[0], **nest[1]))
        self._shared += [x for x in leaves(result) if isinstance(x, jax.Array)]
        return select_replica(0, result)

    def wait_until(self, context: ReplicaContext, wait: Wait) -> None:
        """See `Rendezvous.wait_until`: nothing happens later than now."""
        del context
        if not wait.ready():
            raise MergeMismatchError(
                f"One program stands for all replicas, so it cannot wait for {wait.what} that comes "
                "later in it: move that before the wait."
            )


class SpmdVariableTrace(traced_variables.VariableTrace):
    """Variables inside a compiled run.

    Mirrored variables are captured from the program around it. Variables that are synchronized on read
    or kept in slices come in as shards, because each replica must see its own.
    """

    def __init__(
        self,
        parent: traced_variables.VariableTrace | None,
        strategy: Strategy,
        local: Mapping[Any, Any],
    ) -> None:
        super().__init__(local)
        self._parent = parent
        self.strategy = strategy

    def held(self, variable: Any) -> Any:
        """What a variable holds on this replica."""
        if variable in self.written or variable in self._held:
            return super().held(variable)
        if self._parent is None:
            raise ContextError(
                f"Variable {variable.name!r} was read inside jax.jit, which would freeze its present "
                "value into the program. Give the value to the step as an argument, or use px.function "
                "in place of jax.jit."
            )
        value = self._parent.held(variable)
        if isinstance(value, PerReplica):  # another strategy's, or made while tracing
            rows = jnp.stack([jnp.asarray(x) for x in value.values])
            return SpmdPerReplica(rows[lax.axis_index(REPLICA_AXIS)], value.count)
        if isinstance(value, Mirrored) and value._global is not None:
            # It may come from an earlier run, with a sharding that code of this one cannot use.
            return Mirrored.of_global(without_mesh(value._global), value.count)
        return value

    def set(self, variable: Any, value: Any) -> None:
        """Write a variable on all replicas, or this replica's copy of it."""
        if self._parent is None:
            raise ContextError(
                f"Variable {variable.name!r} was written inside jax.jit, where its new value cannot "
                "leave the program. Use px.function in place of jax.jit."
            )
        if isinstance(variable, ResourceVariable):
            raise UnsupportedError(
                f"Variable {variable.name!r} was made outside of the strategy's scope, so it has one "
                "copy that all replicas would write at once. Create it inside strategy.scope()."
            )
        super().set(variable, value)

    def can_ask_for(self, indices: Any) -> bool:
        """Never: what a replica computes is known to the program of all replicas only."""
        del indices
        return False


class CompiledRun:
    """One call of `Strategy.run` in traced code."""

    def __init__(
        self,
        strategy: Strategy,
        devices: tuple[jax.Device, ...],
        fn: Callable[..., Any],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        self._strategy, self._fn, self._inputs = strategy, fn, inputs
        self._devices, self._count = devices, len(devices)
        self._mesh = replica_mesh(devices)
        self._parent = traced_variables.current()
        # Found while tracing:
        self._result: Any = None
        self._plain: dict[int, Any] = {}
        self._shared: list[int] = []
        self._scalars: list[bool] = []
        self._mirrored: list[Any] = []
        self._copied: list[Any] = []
        self.changes: list[tuple[Any, Any]] = []
        """Variables of other processes, and what the step does to them."""

    def _on_replicas(self, body: Callable[..., Any], arrays: Any, copies: Any) -> Any:
        """Let replicas run the body, each with its parts of arrays and its copies of variables."""
        mapped = jax.shard_map(
            body,
            mesh=self._mesh,
            in_specs=(SPLIT, SPLIT),
            out_specs=(SPLIT, WHOLE, WHOLE, SPLIT),
            check_vma=False,
        )
        with explained():
            return mapped(arrays, copies)

    def add(self) -> Any:
        """Trace the step and return its results."""
        leaf_values = leaves(self._inputs)
        split = [i for i, x in enumerate(leaf_values) if isinstance(x, PerReplica)]
        arrays = [global_array(leaf_values[i]) for i in split]
        expect_model([x for x in leaf_values if isinstance(x, Mirrored | jax.Array)])
        layouts = [leaf_values[i].layout for i in split]
        variables = self._on_read_variables()
        held = [self._parent.held(v) for v in variables] if self._parent else []
        copies = [global_array(value) for value in held]

        def body(arrays: list[jax.Array], copies: list[jax.Array]) -> Any:
            mine = list(leaf_values)
            for i, x, layout in zip(split, arrays, layouts, strict=True):
                mine[i] = local_part(x, layout)
            local = {
                v: SpmdPerReplica(local_part(x, h.layout), self._count)
                for v, x, h in zip(variables, copies, held, strict=True)
            }
            return self._body(replace_leaves(self._inputs, mine), local)

        results, common, mirrored, copied = self._on_replicas(body, arrays, copies)
        self._plain |= dict(zip(self._shared, common, strict=True))
        remaining = iter(mirrored)
        for variable in self._mirrored:
            self._write_back(variable, next(remaining))
        with traced_variables.recording(self._parent):
            for variable, change in self.changes:
                operand = jax.tree.map(lambda _: next(remaining), change.operand)
                variable.record(change._replace(operand=operand))
        for variable, value in zip(self._copied, copied, strict=True):
            layout = ReplicaLayout(self._count, not variable.part_shape)
            self._write_back(variable, PerReplica.from_global(value, layout))
        return self._joined(results)

    def _on_read_variables(self) -> list[Any]:
        if self._parent is None:
            return []
        return [
            v
            for v in self._parent.known()
            if isinstance(v, SyncOnReadVariable | SlicedVariable)
            and v.distribute_strategy is self._strategy
        ]

    def _body(self, inputs: Any, local: dict[Any, Any]) -> Any:
        """The step, as every replica runs it."""
        inner = SpmdVariableTrace(self._parent, self._strategy, local)
        here = compat.current_trace()
        shared: list[Any] = []
        with traced_variables.recording(inner), _replica_context(self._strategy, self._count, shared):
            args, kwargs = inputs
            self._result = map_nest(lambda x: _own(x, here), self._fn(*args, **kwargs))
        outputs, common = [], []
        for i, leaf in enumerate(leaves(self._result)):
            if any(leaf is x for x in shared):
                self._shared.append(i)
                common.append(leaf)
                continue
            if isinstance(leaf, SpmdPerReplica | Mirrored):
                leaf = leaf.component(0)  # noqa: PLW2901
            if isinstance(leaf, jax.Array) and compat.belongs_to(leaf, here):
                self._scalars.append(leaf.ndim == 0)
                outputs.append(leaf[None] if leaf.ndim == 0 else leaf)
            else:
                self._plain[i] = leaf
        mirrored, copied = [], []
        for variable, value in inner.written.items():
            if variable.home is not None:
                continue
            if isinstance(value, SpmdPerReplica):
                self._copied.append(variable)
                copied.append(value.local[None] if not variable.part_shape else value.local)
            else:
                self._mirrored.append(variable)
                mirrored.append(value.component(0) if isinstance(value, Mirrored) else value)
        self.changes = list(inner.changes)
        mirrored += [x for _, change in self.changes for x in jax.tree.leaves(change.operand)]
        return outputs, common, mirrored, copied

    def _write_back(self, variable: Variable, value: Any) -> None:
        assert self._parent is not None
        mirrored = not isinstance(value, PerReplica) and isinstance(variable._value, Mirrored)
        self._parent.set(variable, Mirrored.of_global(value, self._count) if mirrored else value)

    def _joined(self, results: list[jax.Array]) -> Any:
        per_replica = iter(
            PerReplica.from_global(x, ReplicaLayout(self._count, scalar))
            for x, scalar in zip(results, self._scalars, strict=True)
        )
        new = [
            self._plain[i] if i in self._plain else next(per_replica)
            for i in range(len(leaves(self._result)))
        ]
        return replace_leaves(self._result, new)


def _own(x: Any, here: Any) -> Any:
    """A replica's own component of a value that was made in this program for all replicas."""
    if not isinstance(x, PerReplica) or x.is_local:
        return x
    return jnp.asarray(x) if any(compat.belongs_to(y, here) for y in x.values) else x


def global_array(value: PerReplica) -> jax.Array:
    """The array over all devices of an argument."""
    array = value.array
    if array is None:
        raise InvalidArgumentError(
            "Compiled code needs arrays of one rank and dtype on every replica. Use the eager executor "
            f"for others: call strategy.run outside of px.function. Received: {shown(value)}"
        )
    return array


def local_part(x: jax.Array, layout: ReplicaLayout) -> jax.Array:
    """What a replica sees of its part of such an array."""
    return x[0] if layout.scalar else x
