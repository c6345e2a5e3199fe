"""The kinds of variables that strategies with several replicas make.

`MirroredVariable` keeps one equal copy per replica and aggregates writes. `SyncOnReadVariable` lets
copies differ and aggregates reads. `AggregatingVariable` is one copy for all replicas. What replicas
write is combined by the rules of `phalanx.core.options`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx, cross_replica
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.options import (
    VariableAggregation,
    VariableSynchronization,
    check_scatter,
    copy_value_for_read_sum,
    share_of_read_sum,
)
from phalanx.core.reduction import ReduceOp
from phalanx.core.regrouping import same_value
from phalanx.core.replica_context import MergePoint, index_of, meet, replica_device
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.structure import map_nest
from phalanx.core.values import DistributedValues, Mirrored, PerReplica
from phalanx.core.variables import traced_variables
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import VariableSpec, apply_update
from phalanx.errors import DivergenceError, InvalidValueError, UnsupportedError
from phalanx.runtime import compat
from phalanx.runtime.devices import short_name
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import place

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy


class ReplicaVariable(Variable):
    """One copy of a variable that has several: a view, for reading and updating that copy."""

    def __init__(self, container: CopiedVariable, index: int) -> None:
        self.replica_container = container
        self._describe(container._spec, container._strategy, container._devices[index])
        self._value = None  # the container holds it
        self._index = index

    @property
    def name(self) -> str:
        """The name of the variable, with the replica for all copies but the first."""
        suffix = f"/replica_{self._index}" if self._index else ""
        return f"{self._spec.name}{suffix}:0"

    def _read(self) -> jax.Array:
        return self.replica_container._copy(self._index)

    def _store(self, new: jax.Array) -> None:
        self.replica_container._store_copy(self._index, new)


class CopiedVariable(Variable, DistributedValues):
    """Base of the variables that have a copy on each replica's device."""

    _holder: type[Mirrored] | type[PerReplica]

    def __init__(self, spec: VariableSpec, strategy: Strategy, devices: tuple[jax.Device, ...]) -> None:
        self._describe(spec, strategy, devices[0])
        self._devices = devices
        span = strategy.extended._span
        self._value = self._holder([place(spec.value, d) for d in devices], span)

    @functools.cached_property
    def _views(self) -> tuple[ReplicaVariable, ...]:
        return tuple(ReplicaVariable(self, i) for i in range(len(self._devices)))

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies, as variables of their own."""
        return self._views

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what each replica holds."""
        return self.shape

    def distributed(self) -> Any:
        """The value of the variable with a component for each replica."""
        return self._held()

    @property
    def handle(self) -> Variable:
        """The copy of the current replica; there is none in cross-replica context."""
        index = self._here()
        if index is None:
            raise InvalidValueError(
                "A variable with several copies has no single handle in cross-replica context. Use "
                f"variable.values to get at the copies. Received: {shown(self.name)}"
            )
        return self._views[index]

    def _here(self) -> int | None:
        """The copy that the current context belongs to; None where all are seen at once."""
        mode = ctx.current_mode()
        if mode.strategy is not self._strategy:
            return None
        return mode.update_index if mode.replica_context is None else index_of(mode.replica_context)

    def _copy(self, index: int) -> jax.Array:
        value: jax.Array = self._held().component(index)
        return value

    def _store_copy(self, index: int, new: jax.Array) -> None:
        self._set(self._held().with_component(index, place(new, self._devices[index])))

    def _on_copies(self, method: str, operand: Any) -> None:
        """Update every copy, each with its own component of the operand."""
        update = functools.partial(apply_update, method)
        self._set(self._held().map_components(update, operand))

    def _check_access(self, what: str) -> None:
        assert self._strategy is not None
        ctx.require_same_strategy(self._strategy, what)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        clone = super().__deepcopy__(memo)
        clone.__dict__.pop("_views", None)
        return clone

    def __repr__(self) -> str:
        body = ",\n".join(f"  {i}: {v!r}" for i, v in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{body}\n}}"

    __str__ = __repr__


class MirroredVariable(CopiedVariable):
    """A variable with one equal copy per replica.

    In replica context it is read locally and written together: all replicas meet, and the
    aggregation makes one value of theirs. In cross-replica context it is the first copy when read,
    and writes go to all copies.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     x = px.Variable(1.0)
        >>> x
        MirroredVariable:{
          0: <px.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>,
          1: <px.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>
        }
    """

    _holder = Mirrored

    @property
    def synchronization(self) -> VariableSynchronization:
        """Always ON_WRITE."""
        return VariableSynchronization.ON_WRITE

    def _read(self) -> jax.Array:
        return self._copy(self._here() or 0)

    def _update(self, method: str, operand: Any) -> Any:
        replica = ctx.active_replica()
        if replica is not None:
            return update_together(self, replica, method, operand)
        here = self._here()
        if here is not None:  # inside StrategyExtended.update
            self._store_copy(here, apply_update(method, self._copy(here), _component(operand, here)))
            return self
        self._write(method, self._checked_operand(method, operand))
        return self._held()

    def _write(self, method: str, operand: Any) -> None:
        self._on_copies(method, operand)

    def replace(self, new: Any) -> None:
        """Write a value that is known to be the same on all workers; in cross-replica context."""
        self._write("assign", new)

    def _checked_operand(self, method: str, operand: Any) -> Any:
        if isinstance(operand, Mirrored) and len(operand.values) == len(self._devices):
            self._checked(method, operand.values[0])
            return operand
        if isinstance(operand, DistributedValues):
            return self._checked(method, require_same(operand, self, method))
        assert self._strategy is not None
        self._strategy.extended._require_agreement(operand, f"{method} of variable {self.name!r}")
        return operand


class SyncOnReadVariable(CopiedVariable):
    """A variable whose copies belong to the replicas, and are combined when it is read.

    In replica context reads and writes are local. In cross-replica context reading aggregates the
    copies, and assigning spreads a value so that reading gives it back.
    """

    _holder = PerReplica

    @property
    def synchronization(self) -> VariableSynchronization:
        """Always ON_READ."""
        return VariableSynchronization.ON_READ

    def _read(self) -> jax.Array:
        here = self._here()
        if here is not None:
            return self._copy(here)
        kind = self.aggregation
        if kind is VariableAggregation.ONLY_FIRST_REPLICA:
            assert self._strategy is not None
            return _component(self._strategy.extended._from_first(self._held()), 0)
        if kind is VariableAggregation.NONE:
            raise InvalidValueError(
                f"The copies of variable {self.name!r} may differ and its aggregation is NONE, so it "
                "has no single value in cross-replica context. Look at the copies with "
                "strategy.experimental_local_results, or choose an aggregation. "
                f"Received: a read of {shown(self.name)}"
            )
        assert self._strategy is not None
        op = ReduceOp.from_variable_aggregation(kind)
        result: jax.Array = self._strategy.extended._reduce(op, self._held(), None)
        return result

    _operand_or_type_error = CopiedVariable._array  # operators raise what reading raises

    def _update(self, method: str, operand: Any) -> Any:
        if isinstance(operand, IndexedSlices):
            raise UnsupportedError(
                f"{method} is not defined for variables that are synchronized on read. "
                f"Received: variable {shown(self.name)}"
            )
        here = self._here()
        if here is not None:
            operand = _component(operand, here)
            self._store_copy(here, apply_update(method, self._copy(here), operand))
            return self
        self._check_cross_replica(method)
        if isinstance(operand, DistributedValues):
            operand = PerReplica([self._checked(method, v) for v in operand.values])
        elif self.aggregation is VariableAggregation.SUM:
            operand = copy_value_for_read_sum(operand, self._held().count, self.dtype)
        self._on_copies(method, operand)
        return self._held()

    def load_state(self, state: Any) -> None:
        """Take back what `state` returned; unlike `assign`, this loses no rest of an integer."""
        is_sum = self.aggregation is VariableAggregation.SUM
        if is_sum and jnp.issubdtype(self.dtype, jnp.integer) and not compat.is_staging():
            assert self._strategy is not None
            held, first = self._held(), self._strategy.extended._first_replica
            numbers = range(first, first + len(held.values))
            state = PerReplica([share_of_read_sum(state, held.count, number) for number in numbers])
        super().load_state(state)

    def _check_cross_replica(self, method: str) -> None:
        if self.aggregation is VariableAggregation.SUM and method != "assign":
            raise InvalidValueError(
                f"Variable {self.name!r} is the sum of its copies, so {method} in cross-replica "
                "context does not say which copy should change. Use assign, or write it inside "
                f"strategy.run. Received: {method} of {shown(self.name)}"
            )


class AggregatingVariable(Variable):
    """One copy of a variable for all replicas, on a device of its own.

    Replicas read it across devices; what they write is aggregated and applied once.
    """

    def __init__(self, spec: VariableSpec, strategy: Strategy, device: jax.Device) -> None:
        self._set_up(spec, strategy, device)

    def _read(self) -> jax.Array:
        value: jax.Array = self._held()
        replica = ctx.active_replica()
        if replica is not None and replica.strategy is self._strategy and replica_device(replica):
            return place(value, replica_device(replica))
        return value

    def _check_access(self, what: str) -> None:
        assert self._strategy is not None
        ctx.require_same_strategy(self._strategy, what)

    def _update(self, method: str, operand: Any) -> Any:
        replica = ctx.active_replica()
        if replica is not None:
            return update_together(self, replica, method, operand)
        if isinstance(operand, DistributedValues):
            operand = self._checked(method, require_same(operand, self, method))
        self._write(method, operand)
        return self

    def _write(self, method: str, operand: Any) -> None:
        assert self._device is not None
        operand = map_nest(lambda x: _component(x, 0), operand)
        with jax.default_device(self._device):
            new = apply_update(method, self._held(), operand)
        self._store(new)


# -- writing from replicas ----------------------------------------------------------------------


def update_together(
    variable: MirroredVariable | AggregatingVariable, replica: Any, method: str, operand: Any
) -> Any:
    """Let all replicas meet and write one aggregated value."""
    kind = variable.aggregation
    if isinstance(operand, IndexedSlices):
        check_scatter(method, kind, variable.name)

    def write(strategy: Strategy, values: Any) -> None:
        with compat.without_differentiation():
            variable._write(method, aggregate(variable, strategy, method, values))

    point = MergePoint(f"{method} of variable {variable.name!r}", write, (operand,), {})
    meet(replica, point)
    traced_variables.written_together(variable)
    return variable


def aggregate(variable: Variable, strategy: Strategy, method: str, values: Any) -> Any:
    """One operand from the operands of all replicas.

    `values` is `PerReplica`, or plain if every replica wrote the very same object. A plain value
    has no sum: whether it should count once or once per replica is not said.
    """
    kind = variable.aggregation
    if strategy.num_replicas_in_sync == 1:
        return _component(values, 0)
    if kind is VariableAggregation.NONE:
        return require_same(values, variable, method)
    if kind is VariableAggregation.ONLY_FIRST_REPLICA:
        return strategy.extended._from_first(values) if isinstance(values, PerReplica) else values
    op = ReduceOp.from_variable_aggregation(kind)
    return cross_replica.reduce_for_update(strategy.extended, op, values, variable)


def require_same(value: Any, variable: Variable, method: str) -> Any:
    """The one value that all components hold; an error if they differ."""
    if not isinstance(value, DistributedValues):
        return value
    if isinstance(value, SpmdPerReplica):
        # Whether replicas agree is decided when the whole program is known.
        return compat.mark_same_on_all_replicas(value.local, f"{method} of variable {variable.name!r}")
    first, *others = value.values
    for i, other in enumerate(others, start=1):
        if not same_value(first, other):
            raise DivergenceError(
                f"{method} of variable {variable.name!r} would write different values to copies "
                f"that must stay equal. {_remedy(variable)} Received: "
                f"{_brief(first)} on replica 0 and {_brief(other)} on replica {i}"
            )
    assert variable._strategy is not None
    variable._strategy.extended._require_agreement(first, f"{method} of variable {variable.name!r}")
    return first


def _remedy(variable: Variable) -> str:
    if variable.aggregation is not VariableAggregation.NONE:
        return "Combine the replicas' values first, as with strategy.reduce or reduce_to."
    return (
        "Its aggregation is NONE: create it with aggregation=px.VariableAggregation.SUM, MEAN or "
        "ONLY_FIRST_REPLICA, or with synchronization=px.VariableSynchronization.ON_READ."
    )


def _component(x: Any, index: int) -> Any:
    return x.component(index) if isinstance(x, Mirrored | PerReplica) else x


def _brief(x: Any) -> str:
    if isinstance(x, jax.Array):
        where = f" ({short_name(next(iter(x.devices())))})" if len(x.devices()) == 1 else ""
        text = np.array2string(np.asarray(x), threshold=6)
        return f"{text}{where}"
    return repr(x)
