"""Reductions between the replicas of several processes, with XLA's collectives over one mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from phalanx.collectives import device_programs, pair_exchange, sums_in_programs
from phalanx.collectives.cross_device_ops import AllReduceCrossDeviceOps, Pairs
from phalanx.collectives.packing import BETWEEN_WORKERS, Packing
from phalanx.core.cross_replica import destination_devices
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.options import (
    CommunicationImplementation,
    CommunicationOptions,
    as_communication_options,
)
from phalanx.core.reduction import ReduceOp, as_operand, as_reduce_op, divide
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables import traced_variables
from phalanx.runtime.deadlines import limited
from phalanx.runtime.host_memory import expect_model
from phalanx.runtime.placement import REPLICA_AXIS, Span, place, replica_mesh


class CrossWorkerOps(AllReduceCrossDeviceOps):
    """All-reduce between workers. Every worker must make the same calls in the same order.

    `devices` are those of this worker's replicas, and `span` those of all replicas.
    """

    def __init__(
        self,
        devices: tuple[jax.Device, ...],
        span: Span,
        options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__()
        self._devices, self._span = devices, span
        self._options = as_communication_options(options)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one value onto the devices of `destinations`."""
        return self.batch_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values in as few messages as possible."""
        op = as_reduce_op(reduce_op)
        pairs = [(self._own(v), d) for v, d in value_destination_pairs]
        if any(isinstance(v, SpmdPerReplica) for v, _ in pairs):
            return super().batch_reduce(op, pairs, options)
        results: list[Any] = [None] * len(pairs)
        dense: list[int] = []
        for i, (value, destinations) in enumerate(pairs):
            if isinstance(value.values[0], IndexedSlices):
                with limited(None if options is None else options.timeout_seconds):
                    results[i] = self._reduce_slices(op, value, destinations)
            else:
                dense.append(i)
        reduced = self._all_reduce(op, [pairs[i] for i in dense], options) if dense else []
        for i, x in zip(dense, reduced, strict=True):
            results[i] = x
        return results

    def _all_reduce(
        self, op: ReduceOp, pairs: Pairs, options: CommunicationOptions | None
    ) -> list[Any]:
        columns = [[as_operand(x) for x in value.values] for value, _ in pairs]
        given = self._options if options is None else options
        expect_model([column[0] for column in columns])
        with limited(given.timeout_seconds):
            reduced = device_programs.all_reduce(
                op, columns, self._devices, self._packing(given), self._span, self._total(given)
            )
        return [self._deliver(x, d) for x, (_, d) in zip(reduced, pairs, strict=True)]

    def reduce_in_program(
        self, reduce_op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[jax.Array]:
        """Reduce inside a compiled run."""
        xs = [v.component(0) for v in values]
        expect_model(xs)
        _limit_program(options)
        packing, total = self._packing(options), self._total(options)
        return sums_in_programs.reduce_over_replicas(reduce_op, xs, packing, total)

    def sum_of_rows(self, rows: jax.Array) -> jax.Array:
        """The sum over replicas of a traced array with a row for each of them."""
        total = self._total(self._options)
        if total is sums_in_programs.total:
            return super().sum_of_rows(rows)
        summed: jax.Array = jax.shard_map(
            lambda row: total(row[0]),
            mesh=replica_mesh(self._span),
            in_specs=PartitionSpec(REPLICA_AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(rows)
        return summed

    def _packing(self, options: CommunicationOptions) -> Packing:
        if options.bytes_per_pack or self._options.bytes_per_pack:
            return Packing(bytes_per_pack=options.bytes_per_pack or self._options.bytes_per_pack)
        return BETWEEN_WORKERS

    def _total(self, options: CommunicationOptions) -> Callable[[jax.Array], jax.Array]:
        """How one array is summed; who asks for a ring gets one."""
        asked = {options.implementation, self._options.implementation}
        if asked == {CommunicationImplementation.AUTO} and pair_exchange.is_worthwhile(self._span):
            return pair_exchange.total
        return sums_in_programs.total

    def _reduce_slices(self, op: ReduceOp, value: PerReplica, destinations: Any) -> Any:
        rows = self._gathered(value.apply(lambda s: s.values), 0)
        indices = self._gathered(value.apply(lambda s: s.indices), 0)
        count = len(self._span)
        joined = [
            IndexedSlices(divide(r, count) if op is ReduceOp.MEAN else r, i, s.dense_shape)
            for r, i, s in zip(rows.values, indices.values, value.values, strict=True)
        ]
        return self._deliver(Mirrored(joined, self._span), destinations)

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Join the components of all replicas along `axis`; they may differ in length there."""
        value = self._own(per_replica_value)
        if isinstance(value, SpmdPerReplica):
            _limit_program(options)
            return super().gather(value, destinations, axis, options)
        return self._deliver(self._gathered(value, axis), destinations)

    def _gathered(self, value: PerReplica, axis: int) -> Mirrored:
        sizes = self.sizes(value, axis)
        most = max(sizes)
        if min(sizes) == most:
            return device_programs.all_gather(value.values, self._devices, axis, self._span)
        padded = [_padded(jnp.asarray(x), axis, most) for x in value.values]
        joined = device_programs.all_gather(padded, self._devices, axis, self._span)
        kept = np.concatenate([np.arange(n) + i * most for i, n in enumerate(sizes)])
        copies = [jnp.take(x, kept, axis=axis) for x in joined.values]
        return Mirrored([place(x, d) for x, d in zip(copies, self._devices, strict=True)], self._span)

    def sizes(self, per_replica_value: Any, axis: int) -> list[int]:
        """The length of every replica's component along `axis`."""
        value = self._own(per_replica_value)
        lengths = [
            place(jnp.full(1, x.shape[axis], jnp.int32), d)
            for x, d in zip(value.values, self._devices, strict=True)
        ]
        everywhere = device_programs.all_gather(lengths, self._devices, 0, self._span)
        return [int(n) for n in np.asarray(everywhere.values[0])]

    def from_first(self, value: Any) -> Any:
        """What the first replica of all has."""
        return device_programs.from_first(self._own(value).values, self._devices, self._span)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value that all workers have to the devices of `destinations`."""
        copied = super().broadcast_implementation(tensor, destinations)
        on_replicas = isinstance(copied, Mirrored) or destination_devices(destinations) == self._devices
        if not on_replicas or isinstance(copied, SpmdPerReplica):
            return copied
        copies = copied.values if isinstance(copied, Mirrored) else (copied,)
        return Mirrored(copies, self._span) if len(copies) == len(self._devices) else copied

    def _own(self, value: Any) -> PerReplica:
        if isinstance(value, PerReplica):
            return value
        copies = value.values if isinstance(value, Mirrored) else [value] * len(self._devices)
        return PerReplica(copies, self._span)

    def _deliver(self, result: Mirrored, destinations: Any) -> Any:
        """Bring a result that all replicas have to where it is wanted."""
        devices = destination_devices(destinations)
        one_device = isinstance(destinations, str | jax.Device)
        if not one_device and set(devices) == set(self._devices):
            return result
        if len(devices) == 1:
            return _placed(result.values[0], devices[0])
        return Mirrored([_placed(result.values[0], d) for d in devices])


def _placed(x: Any, device: jax.Device) -> Any:
    if isinstance(x, IndexedSlices):
        return IndexedSlices(place(x.values, device), place(x.indices, device), x.dense_shape)
    return place(x, device)


def _padded(x: jax.Array, axis: int, length: int) -> jax.Array:
    widths = [(0, length - n if i == axis % x.ndim else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths)


def _limit_program(options: CommunicationOptions | None) -> None:
    """The program that is being traced has as long as the most impatient of its collectives."""
    if options is not None and options.timeout_seconds is not None:
        for program in traced_variables.enclosing()[:1]:
            program.seconds = min(options.timeout_seconds, program.seconds or options.timeout_seconds)
