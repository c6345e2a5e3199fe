"""`StrategyExtended`: what a strategy does, for code that must know about distribution.

The rules are here, once, for any number of replicas. A concrete strategy says which devices there are,
which variables it makes, how it runs functions and who moves data between devices.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from phalanx.core import context as ctx, cross_replica
from phalanx.core.checks import check_numeric, check_variable
from phalanx.core.cross_replica import Communicator, checked_pairs, destination_devices
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.operators import operand_of
from phalanx.core.options import CommunicationOptions, ValueContext, as_communication_options
from phalanx.core.reduction import Axes, ReduceOp, as_reduce_op
from phalanx.core.regrouping import regroup
from phalanx.core.replica_context import MergePoint, is_compiled, meet
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.structure import map_nest, merge_nests
from phalanx.core.values import Mirrored, PerReplica, select_replica
from phalanx.core.variables import traced_variables, transactions
from phalanx.core.variables.distributed_variables import (
    AggregatingVariable,
    CopiedVariable,
    MirroredVariable,
    require_same,
)
from phalanx.core.variables.sliced_variables import SlicedVariable
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import InitialValue, VariableSpec
from phalanx.errors import (
    ContextError,
    ForeignVariableError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
)
from phalanx.runtime.devices import default_device, device_name
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import Span, place

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy


class StrategyExtended:
    """Additional methods of a strategy, for optimizers, layers and other distribution-aware code.

    Get it from `Strategy.extended`. To implement a strategy, derive from this class and override the
    hooks that are marked as such.
    """

    _wraps_values = True  # whether values made by functions are wrapped also for a single replica

    def __init__(self, container_strategy: Strategy) -> None:
        self._strategy: Strategy = container_strategy
        self._get_next_as_optional = False

    def _container_strategy(self) -> Strategy:
        return self._strategy

    # -- hooks ----------------------------------------------------------------------------------

    @property
    def _replica_devices(self) -> tuple[jax.Device | None, ...]:
        """Hook: the device of each replica; None for JAX's default device."""
        raise UnsupportedError(f"{type(self).__name__} does not say where its replicas are")

    @property
    def _communicator(self) -> Communicator:
        """Hook: who moves data between the devices."""
        raise UnsupportedError(f"{type(self).__name__} has no communicator")

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Hook: run a function once per replica and join the results."""
        raise UnsupportedError(f"{type(self).__name__} cannot run functions")

    def _create_variable(self, spec: VariableSpec) -> Variable:
        """Hook: make a variable."""
        raise UnsupportedError(f"{type(self).__name__} cannot make variables")

    def _creation(self) -> AbstractContextManager[None]:
        """Hook: what variables are made in: at once, also while a program is traced."""
        return jax.ensure_compile_time_eval()

    def _create_variable_from(self, initial: InitialValue, kinds: tuple[Any, ...]) -> Variable:
        """Hook: make a variable in parts; `kinds` are the fields of `VariableSpec` after the value."""
        return self._create_variable(VariableSpec(initial.array(), *kinds))

    def _computed(self, make: Callable[[Any], Any], values: list[jax.Array]) -> Any:
        """Hook: what a function makes of the values of variables, laid out like them."""
        return make(values)

    def _updating(self, update: Callable[..., Any], compiled: Callable[..., Any]) -> Any:
        """Hook: how the update of an optimizer runs; `compiled` is `update` as one program."""
        return compiled

    @property
    def _input_worker(self) -> tuple[int, int]:
        """Hook: how many workers read input, and which of them this process is."""
        return 1, 0

    def _exchange(self, name: str, value: Any, given_up: threading.Event | None = None) -> list[Any]:
        """Hook: what every worker gives under a name, in their order; all of them must call it.

        Args:
            name: what it is about; each worker may exchange under a name again and again.
            value: small, and as JSON has it.
            given_up: if it is set, the call may return anything.
        """
        del name, given_up
        return [value]

    def _input_place(self) -> Callable[[int, Any], Any] | None:
        """Hook: who puts the leaves of elements on devices, given their numbers; None for replicas."""
        return None

    def _distribute_dataset(self, dataset: Any, options: Any) -> Any:
        """Hook: divide a dataset over workers and replicas."""
        raise UnsupportedError(f"{type(self).__name__} cannot distribute datasets")

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        """Hook: make a distributed dataset from a function."""
        raise UnsupportedError(f"{type(self).__name__} cannot distribute datasets")

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """A dataset of the slices of NumPy arrays along their first dimension; a list is stacked."""
        raise UnsupportedError(f"{type(self).__name__} cannot make datasets")

    def _scope(self) -> Any:
        """Hook: the context manager that `Strategy.scope` returns."""
        return ctx.Scope(self._strategy)

    def _copy_for_new_strategy(self) -> StrategyExtended:
        return copy.copy(self)

    # -- description ----------------------------------------------------------------------------

    @property
    def _span(self) -> Span | None:
        """The devices of all replicas, if other processes have some of them."""
        return None

    @property
    def _first_replica(self) -> int:
        """The id of this process's first replica."""
        return 0

    def _from_first(self, value: PerReplica) -> Any:
        """What the first replica of all processes has."""
        return value.first()

    def _require_agreement(self, value: Any, what: str) -> None:
        """Require that all processes have the same value."""

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self._span or self._replica_devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that replicas compute on, as canonical device strings."""
        return tuple(device_name(d) for d in self._replica_devices if d is not None)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables, as canonical device strings."""
        return self.worker_devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all replicas must see arrays of one fixed shape."""
        return False

    @property
    def experimental_enable_get_next_as_optional(self) -> bool:
        """A setting of TensorFlow without effect here: no partial batch is dropped, whatever it is."""
        return self._get_next_as_optional

    @experimental_enable_get_next_as_optional.setter
    def experimental_enable_get_next_as_optional(self, value: bool) -> None:
        self._get_next_as_optional = bool(value)

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker builds its own part of the computation."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries."""
        return True

    # -- running --------------------------------------------------------------------------------

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `fn` once per replica; `Strategy.run` is the usual way to do it."""
        ctx.require_cross_replica_or_default(self._strategy, "call_for_each_replica")
        with ctx.entered(self._strategy, "call_for_each_replica"):
            return self._call_for_each_replica(fn, tuple(args), dict(kwargs or {}))

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> Any:
        """Run `fn(context, inputs)` for several elements of an iterator; an older form.

        Returns an object whose `last_step_outputs` holds what the last call returned.
        """
        ctx.require_cross_replica_or_default(self._strategy, "experimental_run_steps_on_iterator")
        steps = StepsContext(initial_loop_values)
        with ctx.entered(self._strategy, "experimental_run_steps_on_iterator"):
            for _ in range(iterations):
                element = iterator.get_next() if hasattr(iterator, "get_next") else next(iterator)
                steps.last_step_outputs = fn(steps, element)
        return steps

    # -- reductions -----------------------------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine a per-replica value and put the result where `destinations` are.

        Args:
            reduce_op: the reduction.
            value: a `PerReplica` value; a nest of them gives a nest of results.
            destinations: a device, or a value or variable whose devices are meant. A variable is
                not written.
            options: how tensors are packed.

        Returns:
            A plain array for one device, a `Mirrored` value for several. A mirrored value is its mean.
        """
        op, options = as_reduce_op(reduce_op), as_communication_options(options)
        ctx.require_cross_replica_or_default(self._strategy, "reduce_to")
        destination_devices(destinations)
        mirrored = (Mirrored, MirroredVariable) if op is ReduceOp.MEAN else ()

        def reduce(x: Any) -> Any:
            is_done = isinstance(x, mirrored)
            return x if is_done else cross_replica.reduce_to(self, op, x, destinations, options)

        with ctx.entered(self._strategy, "reduce_to"):
            return map_nest(reduce, value)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """`reduce_to` for a list of ``(value, destinations)`` pairs, in as few messages as possible.

        Any mixture of dtypes is allowed.
        """
        op, options = as_reduce_op(reduce_op), as_communication_options(options)
        ctx.require_cross_replica_or_default(self._strategy, "batch_reduce_to")
        pairs = checked_pairs(value_destination_pairs)
        with ctx.entered(self._strategy, "batch_reduce_to"):
            return cross_replica.batch_reduce_to(self, op, pairs, options)

    def _reduce(self, op: ReduceOp, value: Any, axes: Axes | None) -> Any:
        """`Strategy.reduce` of one leaf: the result is a plain array on the default device."""
        return cross_replica.reduce(self, op, value, axes, default_device())

    def _gather(self, value: Any, axis: int) -> Any:
        """`Strategy.gather` of one leaf."""
        return cross_replica.gather(self, value, axis, default_device())

    # -- broadcasting and updating --------------------------------------------------------------

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to the devices of `destinations`; numbers are returned unchanged."""
        ctx.require_cross_replica_or_default(self._strategy, "broadcast_to")
        destination_devices(destinations)
        if isinstance(tensor, bool | int | float | complex):
            return tensor
        with ctx.entered(self._strategy, "broadcast_to"):
            operand = check_numeric(operand_of(tensor), "broadcast_to")
            return self._communicator.broadcast(operand, destinations)

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(copy, *args, **kwargs)` once for each copy of a variable, on its device.

        Args:
            var: a variable of this strategy.
            fn: may assign to the copy it is given.
            args: plain or `Mirrored` values, of which each call gets its own component. Values that
                differ between replicas would make the copies differ, which is an error.
            kwargs: treated alike.
            group: whether to join the results of the calls; if False, each leaf of the result is a
                tuple with one element per copy.

        In replica context all replicas meet and make the update once. If `fn` fails, every copy keeps
        its old value.
        """
        if not callable(fn):
            raise InvalidTypeError(f"fn must be callable. Received: {shown(fn)}")
        replica = ctx.active_replica()
        if replica is not None:
            ctx.require_same_strategy(self._strategy, "StrategyExtended.update")

            def merged(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
                return strategy.extended.update(var, fn, args, kwargs, group)

            kind = f"update of variable {getattr(var, 'name', var)!r}"
            result = meet(replica, MergePoint(kind, merged, tuple(args), dict(kwargs or {})))
            traced_variables.written_together(var)
            return result
        ctx.require_cross_replica_or_default(self._strategy, "StrategyExtended.update")
        self._require_own(var, "update")
        with ctx.entered(self._strategy, "StrategyExtended.update"):
            return self._update(var, fn, tuple(args), dict(kwargs or {}), group)

    def _update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Any:
        copies = var.values if isinstance(var, CopiedVariable) else (var,)
        if isinstance(var, MirroredVariable) and traced_variables.current() is not None:
            copies = copies[: len(var._held()._samples())]
        if isinstance(var, SlicedVariable):
            copies = copies[:1]  # which is made of the slices of all
        if isinstance(var, MirroredVariable | AggregatingVariable):
            args, kwargs = map_nest(lambda x: _agreed(x, var), (args, kwargs))

        def on_copies() -> list[Any]:
            results = []
            for i, component in enumerate(copies):
                mode = ctx.Mode(self._strategy, update_index=i)
                with ctx.push(mode), jax.default_device(component._device):
                    mine = select_replica(i, (args, kwargs))
                    result = fn(component, *mine[0], **mine[1])
                    results.append(
                        map_nest(_value_of, result) if group and component is not var else result
                    )
            return results

        return _grouped(transactions.atomically(on_copies), group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn` once for each device that `non_slot_devices` gave."""
        ctx.require_cross_replica_or_default(self._strategy, "update_non_slot")
        devices = destination_devices(colocate_with, lists=True)

        def on_devices() -> list[Any]:
            results = []
            for i, device in enumerate(devices):
                with ctx.push(ctx.Mode(self._strategy, update_index=i)), jax.default_device(device):
                    mine = select_replica(i, (tuple(args), dict(kwargs or {})))
                    results.append(fn(*mine[0], **mine[1]))
            return results

        with ctx.entered(self._strategy, "update_non_slot"):
            return _grouped(transactions.atomically(on_devices), group)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Where state that belongs to no single variable should be kept."""
        return self.worker_devices

    def read_var(self, v: Variable) -> jax.Array:
        """The value of a variable in this context; copies are aggregated if they may differ."""
        return check_variable(v, "read_var").read_value()

    # -- ownership ------------------------------------------------------------------------------

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether this strategy created a variable."""
        return check_variable(v, "variable_created_in_scope").distribute_strategy is self._strategy

    def value_container(self, value: Any) -> Any:
        """The variable that a copy belongs to; anything else is returned as it is."""
        return getattr(value, "replica_container", None) or value

    def colocate_vars_with(self, colocate_with_variable: Variable) -> AbstractContextManager[None]:
        """A context manager in which new variables are placed like an existing one."""
        if ctx.get_strategy() is not self._strategy:
            ctx.require_same_strategy(self._strategy, "colocate_vars_with")
            raise ContextError(
                "colocate_vars_with must be used inside `with strategy.scope():`. "
                f"Received: {shown(colocate_with_variable)} outside of the scope"
            )
        v = colocate_with_variable
        if not isinstance(v, Variable) or not self.variable_created_in_scope(v):
            raise InvalidValueError(
                "New variables can only be placed with a variable of the same strategy. "
                f"Received: {shown(colocate_with_variable)}"
            )
        return ctx.colocation(colocate_with_variable)

    def _require_own(self, var: Any, what: str) -> None:
        if not isinstance(var, Variable) or not self.variable_created_in_scope(var):
            raise ForeignVariableError(
                f"{what} needs a variable that was created in this strategy's scope: "
                f"`with strategy.scope(): v = px.Variable(…)`. Received: {shown(var)}"
            )

    def _values_from(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """A distributed value, with arrays on the devices of their replicas."""
        devices, first, span = self._replica_devices, self._first_replica, self._span
        count = self._num_replicas_in_sync
        replica = ctx.active_replica()
        if replica is not None and is_compiled(replica):  # one program for all replicas
            devices, first, span = (None,) * count, 0, None
        nests = []
        for i, device in enumerate(devices):
            with jax.default_device(device):
                made = value_fn(ValueContext(first + i, count))
            nests.append(map_nest(functools.partial(_to_device, device), made))
        return regroup(nests, always_wrap=True, span=span) if self._wraps_values else nests[0]


class StepsContext:
    """What `experimental_run_steps_on_iterator` gives to its function and returns."""

    def __init__(self, initial: Any) -> None:
        self.last_step_outputs = initial


# -- helpers ------------------------------------------------------------------------------------


def _to_device(device: jax.Device | None, x: Any) -> Any:
    if device is None:
        return x
    host_array = isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "USO"
    if host_array or isinstance(x, jax.Array):
        return place(x, device)
    if isinstance(x, IndexedSlices):
        return IndexedSlices(place(x.values, device), place(x.indices, device), x.dense_shape)
    return x


def _agreed(x: Any, var: Variable) -> Any:
    """An argument of an update of copies that must stay equal."""
    same = require_same(x, var, "update") if isinstance(x, PerReplica) else x
    return same if isinstance(x, SpmdPerReplica) else x


def _value_of(x: Any) -> Any:
    return x.value() if isinstance(x, Variable) else x


def _grouped(results: list[Any], group: bool) -> Any:
    if not group:
        return merge_nests(results, tuple)
    return results[0] if len(results) == 1 else regroup(results, wrap=Mirrored)
