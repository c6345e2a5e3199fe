"""Combining the values of replicas: reductions and gathers, for every kind of value.

Which values can be summed, averaged or joined is decided here once, for any number of replicas. Moving
the data is left to a `Communicator`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import compat
from phalanx.core.deadlines import limited
from phalanx.core.distributed_variables import CopiedVariable
from phalanx.core.errors import (
    InvalidOperandError,
    InvalidValueError,
    MirroredReductionError,
    UnsupportedError,
)
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.operators import operand_of
from phalanx.core.options import CommunicationOptions
from phalanx.core.placement import Span, place
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
from phalanx.core.showing import shown
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.values import DistributedValues, Mirrored, PerReplica, check_count
from phalanx.core.variables import Variable


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


@dataclass(frozen=True)
class Combiner:
    """The rules, for replicas on certain devices and a way to move their data."""

    devices: tuple[jax.Device | None, ...]
    communicator: Communicator
    span: Span | None = None

    @property
    def replicas(self) -> int:
        """How many replicas there are, in all processes."""
        return len(self.span or self.devices)

    def _own(self, value: Any) -> Any:
        """The value behind a variable, if it is one of these replicas'."""
        value = copies_of(value)
        if self.devices != (None,):  # the default strategy takes values of all others
            check_count(value, self.replicas, "The strategy")
        return value

    # -- reductions -----------------------------------------------------------------------------

    def reduce_to(
        self, op: ReduceOp, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce one value onto the devices of `destinations`."""
        value = self._own(value)
        if isinstance(value, PerReplica):
            if _is_traced(value):
                return self._reduce_traced(op, value)
            return self.communicator.reduce(op, value, destinations, options)
        return self.communicator.broadcast(self.reduce_undistributed(op, value), destinations)

    def _reduce_traced(self, op: ReduceOp, value: PerReplica) -> jax.Array:
        """A reduction in traced code outside of replicas, which JAX can transform."""
        array = value.array
        if array is None:
            components = [as_operand(x) for x in value.values]
            check_alike(components, "A reduction over replicas")
            total = functools.reduce(jnp.add, components)
        else:
            rows = as_operand(PerReplica.by_replica(array, value.layout))
            total = self.communicator.sum_of_rows(rows)
        return divide(total, value.count) if op is ReduceOp.MEAN else total

    def batch_reduce_to(
        self, op: ReduceOp, pairs: Sequence[Pair], options: CommunicationOptions
    ) -> list[Any]:
        """Reduce several values, those that differ between replicas together."""
        values = [self._own(value) for value, _ in pairs]
        together = [i for i, v in enumerate(values) if isinstance(v, PerReplica) and not _is_traced(v)]
        batch = [(values[i], pairs[i][1]) for i in together]
        reduced = self.communicator.batch_reduce(op, batch, options) if batch else []
        results = dict(zip(together, reduced, strict=True))
        return [
            results[i] if i in results else self.reduce_to(op, values[i], pairs[i][1], options)
            for i in range(len(pairs))
        ]

    def reduce_undistributed(self, op: ReduceOp, value: Any) -> Any:
        """The reduction of a value that does not differ between replicas.

        Its mean is the value. It has no sum, because it is not said whether it should count once or
        once per replica; zeros and single replicas are unambiguous.
        """
        if isinstance(value, Mirrored):
            if op is ReduceOp.SUM and self.replicas > 1:
                raise MirroredReductionError(
                    "A mirrored value is one value with a copy per replica, so it has no sum over "
                    "replicas. Use MEAN to get the value, or multiply it by the number of "
                    f"replicas. Received: {shown(value)}"
                )
            return value.values[0]
        value = operand_of(value)
        if op is ReduceOp.MEAN or self.replicas == 1 or _is_zero(value):
            return value
        raise InvalidValueError(
            f"This value is not distributed: it is one object for all {self.replicas} replicas, so "
            "it does not say whether it should count once or once per replica. Give each replica "
            "a value of its own, or multiply by the number of replicas. "
            f"Received: {shown(value)} for ReduceOp.SUM"
        )

    def reduce(self, op: ReduceOp, value: Any, axes: Axes | None, device: jax.Device) -> Any:
        """Reduce one value over replicas, and over `axes` within each, to an array on `device`."""
        value = self._own(value)
        if axes is not None:
            return self._reduce_axes(op, value, axes, device)
        if isinstance(value, DistributedValues):
            return self.reduce_to(op, value, device)
        reduced = self.reduce_undistributed(op, value)
        return reduced if isinstance(reduced, IndexedSlices) else as_operand(reduced)

    def _reduce_axes(self, op: ReduceOp, value: Any, axes: Axes, device: jax.Device) -> Any:
        """Sums over axes in each replica, then over replicas; a mean divides by the true count."""
        if isinstance(value, PerReplica):
            operands = value.apply(lambda x: as_operand(operand_of(x)))
            sums = operands.apply(lambda x: local_sum(x, axes))
            check_alike(sums.samples(), "Strategy.reduce over an axis")
            counts = [local_count(x.shape, axes) for x in operands.samples()]
            if self.span is None or _is_traced(value):
                total, count = self.reduce_to(ReduceOp.SUM, sums, device), sum(counts)
            else:  # nobody knows how many examples the others have
                given = value.like([jnp.float32(c) for c in counts])
                pairs = [(sums, device), (self._spread(given), device)]
                total, count = self.communicator.batch_reduce(ReduceOp.SUM, pairs)
        else:  # the same on all replicas
            operand = as_operand(operand_of(value))
            total, count = local_sum(operand, axes), local_count(operand.shape, axes)
            total = total if op is ReduceOp.MEAN else total * self.replicas
        return divide(total, count) if op is ReduceOp.MEAN else total

    def reduce_for_update(self, op: ReduceOp, values: Any, variable: Variable) -> Any:
        """Aggregate what replicas write to a variable, onto its devices."""
        if not isinstance(values, PerReplica):
            return self.reduce_undistributed(op, values)
        if not isinstance(values.samples()[0], IndexedSlices):
            values = values.apply(as_operand)
        return self.communicator.reduce(op, values, variable)

    # -- gathers --------------------------------------------------------------------------------

    def gather(self, value: Any, axis: Any, device: jax.Device) -> Any:
        """Join the components of a value on one device; plain values are returned as they are."""
        value = self._own(value)
        items = value.samples() if isinstance(value, Mirrored | PerReplica) else (value,)
        if any(isinstance(x, IndexedSlices) for x in items):
            raise UnsupportedError(
                "gather does not take IndexedSlices; strategy.reduce joins their rows over "
                f"replicas. Received: {shown(value)}"
            )
        if not isinstance(value, DistributedValues):
            return value
        return self._join(value, axis, "Strategy.gather", device, None)[0]

    def _join(
        self, value: DistributedValues, axis: Any, what: str, destinations: Any, options: Any
    ) -> tuple[Any, int, list[int]]:
        per_replica = value if isinstance(value, PerReplica) else PerReplica(value.values, self.span)
        operands = per_replica.apply(lambda x: _gatherable(x, what))
        shapes = [x.shape for x in operands.samples()]
        axis = check_gather_axis(axis, [len(shape) for shape in shapes], what)
        check_gather_shapes(shapes, axis, what)
        sizes = [shape[axis] for shape in shapes]
        if (
            self.span is not None
            and not isinstance(operands, SpmdPerReplica)
            and not _is_traced(operands)
        ):
            sizes = self.communicator.sizes(operands, axis)
        if len(sizes) == 1:
            return operands.component(0), axis, sizes
        if _is_traced(operands):
            return jnp.concatenate(operands.values, axis=axis), axis, sizes
        return self.communicator.gather(operands, destinations, axis, options), axis, sizes

    # -- collectives that replicas call (see phalanx.core.collective_calls) ---------------------

    def all_reduce(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Reduce each value onto the devices of its own components."""
        if self.replicas == 1:
            return [divide(v, 1) if op is ReduceOp.MEAN else v for v in values]
        for value in values:
            check_alike(value.samples(), "all_reduce")
        spread = [self._spread(v) for v in values]
        return self.batch_reduce_to(op, [(v, v) for v in spread], options)

    def all_reduce_slices(self, op: ReduceOp, value: Any) -> Any:
        """Join sparse rows on every replica."""
        if self.replicas == 1:
            return value
        rows = self._spread(value.apply(lambda s: s.values))
        return self.communicator.reduce(op, value, rows)

    def all_gather(
        self, value: Any, axis: Any, options: CommunicationOptions
    ) -> tuple[Any, int, list[int]]:
        """Join a value on every replica; also gives the axis and each replica's size along it."""
        value = self._spread(value if isinstance(value, PerReplica) else PerReplica([value], self.span))
        with limited(options.timeout_seconds):
            return self._join(value, axis, "all_gather", value, options)

    def _spread(self, value: PerReplica) -> PerReplica:
        """The value with each component on its replica's device, so that results return there.

        Replicas may contribute an array that lives elsewhere, such as one they all captured.
        """
        if isinstance(value, SpmdPerReplica) or _is_traced(value):
            return value
        pairs = zip(value.values, self.devices, strict=True)
        return value.like([x if d is None else place(x, d) for x, d in pairs])


def copies_of(value: Any) -> Any:
    """The distributed value behind a variable with copies; other values as they are."""
    return value._held() if isinstance(value, CopiedVariable) else value


def _is_traced(value: DistributedValues) -> bool:
    if not isinstance(value, PerReplica) or not value.is_traced:
        return False
    if value.is_part:
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
