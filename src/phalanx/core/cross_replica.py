"""Reductions and gathers of the values of all replicas, for every kind of value.

Which values can be summed, averaged or joined is decided here once, for any number of replicas. Moving
the data is left to the `Communicator` of a strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.operators import operand_of
from phalanx.core.options import CommunicationOptions
from phalanx.core.reduction import (
    Axes,
    ReduceOp,
    as_operand,
    check_alike,
    check_gather_axis,
    check_gather_shapes,
    divide,
    local_count,
    local_sum,
)
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.values import DistributedValues, Mirrored, PerReplica, check_count
from phalanx.core.variables.variable import Variable
from phalanx.errors import (
    InvalidDestinationError,
    InvalidOperandError,
    InvalidTypeError,
    InvalidValueError,
    MirroredReductionError,
    UnsupportedError,
)
from phalanx.runtime import compat
from phalanx.runtime.deadlines import limited
from phalanx.runtime.devices import LogicalDevice, resolve_device
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import place

if TYPE_CHECKING:
    from phalanx.core.extended import StrategyExtended


class Communicator(Protocol):
    """Who moves and reduces data between devices; `phalanx.CrossDeviceOps` is one."""

    def reduce(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Reduce one value onto the devices of `destinations`."""
        ...

    def batch_reduce(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[Any], options: Any = None
    ) -> list[Any]:
        """Reduce several values in few messages."""
        ...

    def sum_of_rows(self, rows: jax.Array) -> jax.Array:
        """The sum over replicas of a traced array with a row for each of them."""
        ...

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to the devices of `destinations`."""
        ...

    def gather(self, per_replica_value: Any, destinations: Any, axis: int, options: Any = None) -> Any:
        """Join the components of a value along `axis`."""
        ...

    def sizes(self, per_replica_value: Any, axis: int) -> list[int]:
        """The length of every replica's component along `axis`."""
        ...


Pair = tuple[Any, Any]


def _own(extended: StrategyExtended, value: Any) -> Any:
    """The value behind a variable, if it is one of these replicas'."""
    value = copies_of(value)
    if extended._replica_devices != (None,):  # the default strategy takes values of all others
        check_count(value, extended._num_replicas_in_sync, "The strategy")
    return value


# -- reductions -----------------------------------------------------------------------------


def reduce_to(
    extended: StrategyExtended,
    op: ReduceOp,
    value: Any,
    destinations: Any,
    options: CommunicationOptions | None = None,
) -> Any:
    """Reduce one value onto the devices of `destinations`."""
    value = _own(extended, value)
    if isinstance(value, PerReplica):
        if _is_traced(value):
            return _reduce_traced(extended, op, value)
        return extended._communicator.reduce(op, value, destinations, options)
    return extended._communicator.broadcast(reduce_undistributed(extended, op, value), destinations)


def _reduce_traced(extended: StrategyExtended, op: ReduceOp, value: PerReplica) -> jax.Array:
    """A reduction in traced code outside of replicas, which JAX can transform."""
    array = value.array
    if array is None:
        components = [as_operand(x) for x in value.values]
        check_alike(components, "A reduction over replicas")
        total = functools.reduce(jnp.add, components)
    else:
        rows = as_operand(PerReplica.by_replica(array, value.layout))
        total = extended._communicator.sum_of_rows(rows)
    return divide(total, value.count) if op is ReduceOp.MEAN else total


def batch_reduce_to(
    extended: StrategyExtended, op: ReduceOp, pairs: Sequence[Pair], options: CommunicationOptions
) -> list[Any]:
    """Reduce several values, those that differ between replicas together."""
    values = [_own(extended, value) for value, _ in pairs]
    together = [i for i, v in enumerate(values) if isinstance(v, PerReplica) and not _is_traced(v)]
    batch = [(values[i], pairs[i][1]) for i in together]
    reduced = extended._communicator.batch_reduce(op, batch, options) if batch else []
    results = dict(zip(together, reduced, strict=True))
    return [
        results[i] if i in results else reduce_to(extended, op, values[i], pairs[i][1], options)
        for i in range(len(pairs))
    ]


def reduce_undistributed(extended: StrategyExtended, op: ReduceOp, value: Any) -> Any:
    """The reduction of a value that does not differ between replicas.

    Its mean is the value. It has no sum, because it is not said whether it should count once or
    once per replica; zeros and single replicas are unambiguous.
    """
    if isinstance(value, Mirrored):
        if op is ReduceOp.SUM and extended._num_replicas_in_sync > 1:
            raise MirroredReductionError(
                "A mirrored value is one value with a copy per replica, so it has no sum over "
                "replicas. Use MEAN to get the value, or multiply it by the number of "
                f"replicas. Received: {shown(value)}"
            )
        return value.values[0]
    value = operand_of(value)
    count = extended._num_replicas_in_sync
    if op is ReduceOp.MEAN or count == 1 or _is_zero(value):
        return value
    raise InvalidValueError(
        f"This value is not distributed: it is one object for all {count} replicas, so "
        "it does not say whether it should count once or once per replica. Give each replica "
        "a value of its own, or multiply by the number of replicas. "
        f"Received: {shown(value)} for ReduceOp.SUM"
    )


def reduce(
    extended: StrategyExtended, op: ReduceOp, value: Any, axes: Axes | None, device: jax.Device
) -> Any:
    """Reduce one value over replicas, and over `axes` within each, to an array on `device`."""
    value = _own(extended, value)
    if axes is not None:
        return _reduce_axes(extended, op, value, axes, device)
    if isinstance(value, DistributedValues):
        return reduce_to(extended, op, value, device)
    reduced = reduce_undistributed(extended, op, value)
    return reduced if isinstance(reduced, IndexedSlices) else as_operand(reduced)


def _reduce_axes(
    extended: StrategyExtended, op: ReduceOp, value: Any, axes: Axes, device: jax.Device
) -> Any:
    """Sums over axes in each replica, then over replicas; a mean divides by the true count."""
    if isinstance(value, PerReplica):
        operands = value.apply(lambda x: as_operand(operand_of(x)))
        sums = operands.apply(lambda x: local_sum(x, axes))
        check_alike(sums._samples(), "Strategy.reduce over an axis")
        counts = [local_count(x.shape, axes) for x in operands._samples()]
        if extended._span is None or _is_traced(value):
            total, count = reduce_to(extended, ReduceOp.SUM, sums, device), sum(counts)
        else:  # this worker does not know how many examples the others have
            given = value._like([jnp.float32(c) for c in counts])
            pairs = [(sums, device), (_spread(extended, given), device)]
            total, count = extended._communicator.batch_reduce(ReduceOp.SUM, pairs)
    else:  # the same on all replicas
        operand = as_operand(operand_of(value))
        total, count = local_sum(operand, axes), local_count(operand.shape, axes)
        total = total if op is ReduceOp.MEAN else total * extended._num_replicas_in_sync
    return divide(total, count) if op is ReduceOp.MEAN else total


def reduce_for_update(extended: StrategyExtended, op: ReduceOp, values: Any, variable: Variable) -> Any:
    """Aggregate what replicas write to a variable, onto its devices."""
    if not isinstance(values, PerReplica):
        return reduce_undistributed(extended, op, values)
    if not isinstance(values._samples()[0], IndexedSlices):
        values = values.apply(as_operand)
    return extended._communicator.reduce(op, values, variable)


# -- gathers --------------------------------------------------------------------------------


def gather(extended: StrategyExtended, value: Any, axis: Any, device: jax.Device) -> Any:
    """Join the components of a value on one device; plain values are returned as they are."""
    value = _own(extended, value)
    items = value._samples() if isinstance(value, Mirrored | PerReplica) else (value,)
    if any(isinstance(x, IndexedSlices) for x in items):
        raise UnsupportedError(
            "gather does not take IndexedSlices; strategy.reduce joins their rows over "
            f"replicas. Received: {shown(value)}"
        )
    if not isinstance(value, DistributedValues):
        return value
    return _join(extended, value, axis, "Strategy.gather", device, None)[0]


def _join(
    extended: StrategyExtended,
    value: DistributedValues,
    axis: Any,
    what: str,
    destinations: Any,
    options: Any,
) -> tuple[Any, int, list[int]]:
    per_replica = value if isinstance(value, PerReplica) else PerReplica(value.values, extended._span)
    operands = per_replica.apply(lambda x: _gatherable(x, what))
    shapes = [x.shape for x in operands._samples()]
    axis = check_gather_axis(axis, [len(shape) for shape in shapes], what)
    check_gather_shapes(shapes, axis, what)
    sizes = [shape[axis] for shape in shapes]
    if (
        extended._span is not None
        and not isinstance(operands, SpmdPerReplica)
        and not _is_traced(operands)
    ):
        sizes = extended._communicator.sizes(operands, axis)
    if len(sizes) == 1:
        return operands.component(0), axis, sizes
    if _is_traced(operands):
        return jnp.concatenate(operands.values, axis=axis), axis, sizes
    return extended._communicator.gather(operands, destinations, axis, options), axis, sizes


# -- collectives that replicas call (see phalanx.core.collective_calls) ---------------------


def all_reduce(
    extended: StrategyExtended, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
) -> list[Any]:
    """Reduce each value onto the devices of its own components."""
    if extended._num_replicas_in_sync == 1:
        return [divide(v, 1) if op is ReduceOp.MEAN else v for v in values]
    for value in values:
        check_alike(value._samples(), "all_reduce")
    spread = [_spread(extended, v) for v in values]
    return batch_reduce_to(extended, op, [(v, v) for v in spread], options)


def all_reduce_slices(extended: StrategyExtended, op: ReduceOp, value: Any) -> Any:
    """Join sparse rows on every replica."""
    if extended._num_replicas_in_sync == 1:
        return value
    rows = _spread(extended, value.apply(lambda s: s.values))
    return extended._communicator.reduce(op, value, rows)


def all_gather(
    extended: StrategyExtended, value: Any, axis: Any, options: CommunicationOptions
) -> tuple[Any, int, list[int]]:
    """Join a value on every replica; also gives the axis and each replica's size along it."""
    given = value if isinstance(value, PerReplica) else PerReplica([value], extended._span)
    value = _spread(extended, given)
    with limited(options.timeout_seconds):
        return _join(extended, value, axis, "all_gather", value, options)


def _spread(extended: StrategyExtended, value: PerReplica) -> PerReplica:
    """The value with each component on its replica's device, so that results return there.

    Replicas may contribute an array that lives elsewhere, such as one they all captured.
    """
    if isinstance(value, SpmdPerReplica) or _is_traced(value):
        return value
    pairs = zip(value.values, extended._replica_devices, strict=True)
    return value._like([x if d is None else place(x, d) for x, d in pairs])


def copies_of(value: Any) -> Any:
    """The distributed value behind a variable with copies; other values as they are."""
    is_copied = isinstance(value, Variable) and isinstance(value, DistributedValues)
    return value.distributed() if is_copied else value


def _is_traced(value: DistributedValues) -> bool:
    if not isinstance(value, PerReplica) or not value.is_traced:
        return False
    if value._is_part:
        raise UnsupportedError(
            "JAX cannot transform a reduction between workers from outside of a step: take gradients "
            "inside the function given to strategy.run, or transform the whole computation inside "
            f"jax.jit. Received: {shown(value)}"
        )
    return True


def _gatherable(x: Any, what: str) -> jax.Array:
    try:
        return jnp.asarray(operand_of(x))
    except (TypeError, ValueError):
        raise InvalidOperandError(
            f"{what} needs arrays. Received: {shown(x)} of type {type(x).__name__}"
        ) from None


def _is_zero(value: Any) -> bool:
    if isinstance(value, jax.Array) and compat.is_tracer(value):
        return False
    try:
        host = np.asarray(value)
    except (TypeError, ValueError):
        return False
    return host.dtype.kind in "biufc" and not np.any(host)


def destination_devices(destinations: Any, lists: bool = False) -> tuple[jax.Device, ...]:
    """The devices of a destination, in replica order.

    Args:
        destinations: a device string or `jax.Device`, a variable, a distributed value, or an array.
        lists: whether a list or tuple of devices is also allowed.
    """
    if isinstance(destinations, str | jax.Device | LogicalDevice):
        return (resolve_device(destinations),)
    if isinstance(destinations, SpmdPerReplica):
        return ()  # the program runs on all of them
    if isinstance(destinations, Variable | DistributedValues):
        return tuple(device for x in destinations.values for device in _device_of(x))
    if isinstance(destinations, jax.Array):
        return _device_of(destinations)
    if lists and isinstance(destinations, list | tuple):
        return tuple(device for d in destinations for device in destination_devices(d))
    raise InvalidDestinationError(
        "The destination must be one device, or a value or variable whose devices are meant. To "
        "reach all replicas, give a variable or a per-replica value. "
        f"Received: {shown(destinations)} of type {type(destinations).__name__}"
    )


def _device_of(x: Any) -> tuple[jax.Device, ...]:
    if isinstance(x, Variable):
        if x._device is not None:
            return (x._device,)
        x = x._value
    if compat.is_tracer(x):
        return ()
    if isinstance(x, jax.Array):
        return tuple(sorted(x.devices(), key=lambda d: d.id))
    raise InvalidDestinationError(
        f"This destination holds a value that is on no device. Received: {shown(x)}"
    )


def checked_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """A list of (value, destinations) pairs, or an error that says what else was given."""
    checked = []
    for pair in pairs if isinstance(pairs, list | tuple) else [pairs]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidTypeError(
                f"batch_reduce_to needs a list of (value, destinations) pairs. Received: {shown(pair)}"
            )
        destination_devices(pair[1])
        checked.append((pair[0], pair[1]))
    return checked
