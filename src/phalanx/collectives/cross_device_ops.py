"""`CrossDeviceOps`: the algorithms that a strategy can use to reduce over its devices.

Give one to `MirroredStrategy(cross_device_ops=…)`. Underneath are XLA's collectives or plain copies;
users may derive algorithms of their own from `CrossDeviceOps`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.collectives import device_programs, large_sums, sums_in_programs
from phalanx.collectives.packing import UNPACKED, Packing
from phalanx.core import spmd
from phalanx.core.cross_replica import destination_devices
from phalanx.core.indexed_slices import IndexedSlices, reduce_slices
from phalanx.core.options import CommunicationOptions, as_communication_options
from phalanx.core.reduction import ReduceOp, as_operand, as_reduce_op, check_alike, divide
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.values import DistributedValues, Mirrored, PerReplica, samples_of
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.runtime import compat
from phalanx.runtime.devices import DeviceLike, resolve_device
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import place

_log = logging.getLogger("phalanx")

Devices = tuple[jax.Device, ...]
Pairs = Sequence[tuple[PerReplica, Any]]


class CrossDeviceOps:
    """Base class of reductions and broadcasts between devices.

    To write an algorithm, derive from it and override `reduce_implementation` and
    `batch_reduce_implementation`; values arrive checked. `broadcast` is provided.

    Examples:
        >>> import phalanx as px
        >>> class SumPlusHundred(px.CrossDeviceOps):
        ...     def reduce_implementation(self, op, value, destinations, options):
        ...         return self.broadcast(sum(value.values) + 100.0, destinations)
        ...     def batch_reduce_implementation(self, op, pairs, options):
        ...         return [self.reduce_implementation(op, v, d, options) for v, d in pairs]
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=SumPlusHundred())
        >>> def step():
        ...     context = px.get_replica_context()
        ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 1.0)
        >>> [float(x) for x in strategy.run(step).values]
        [103.0, 103.0]
    """

    # -- what strategies call -------------------------------------------------------------------

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce a per-replica value onto the devices of `destinations`.

        Returns a plain array for one destination device, a `Mirrored` value for several.
        """
        op, options = as_reduce_op(reduce_op), as_communication_options(options)
        devices = destination_devices(destinations)
        value = _as_per_replica(per_replica_value)
        if isinstance(value, SpmdPerReplica):
            return self._in_program(op, [(value, destinations)], options)[0]
        if isinstance(value.values[0], IndexedSlices):
            return _reduce_sparse(op, value, devices)
        if len(value.values) == 1:
            return self.broadcast(value.values[0], destinations)
        return self.reduce_implementation(op, value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values in as few messages as the algorithm can."""
        op, options = as_reduce_op(reduce_op), as_communication_options(options)
        pairs = [(_as_per_replica(v), d) for v, d in _checked_pairs(value_destination_pairs)]
        if any(isinstance(v, SpmdPerReplica) for v, _ in pairs):
            return self._in_program(op, pairs, options)
        simple = any(len(v.values) == 1 or isinstance(v.values[0], IndexedSlices) for v, _ in pairs)
        if simple:
            return [self.reduce(op, v, d, options) for v, d in pairs]
        return list(self.batch_reduce_implementation(op, pairs, options)) if pairs else []

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to the devices of `destinations`."""
        destination_devices(destinations)
        return self.broadcast_implementation(tensor, destinations)

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Join the components of a value along `axis` on the devices of `destinations`."""
        del options
        value = _as_per_replica(per_replica_value)
        if isinstance(value, SpmdPerReplica):
            return _result_in_program(spmd.all_gather(value.local, axis), destinations, value.count)
        components = [jnp.asarray(x) for x in value.values]
        devices = destination_devices(destinations)
        alike = len({(x.shape, x.dtype) for x in components}) == 1
        if alike and 1 < len(components) == len(set(devices)) == len(devices):
            return device_programs.all_gather(components, devices, axis)
        here = devices[0]
        with jax.default_device(here):
            joined = jnp.concatenate([place(x, here) for x in components], axis=axis)
        return self.broadcast(joined, destinations)

    def sum_of_rows(self, rows: jax.Array) -> jax.Array:
        """The sum over replicas of a traced array with a row for each of them: plain arithmetic."""
        return jnp.sum(rows, axis=0, dtype=rows.dtype)

    def sizes(self, per_replica_value: Any, axis: int) -> list[int]:
        """The length of every replica's component along `axis`."""
        return [x.shape[axis] for x in samples_of(_as_per_replica(per_replica_value))]

    def _in_program(self, op: ReduceOp, pairs: Pairs, options: CommunicationOptions) -> list[Any]:
        """Reduce inside a compiled run, where values are local and devices are given."""
        results: list[Any] = [None] * len(pairs)
        dense = []
        for i, (value, _) in enumerate(pairs):
            if isinstance(samples_of(value)[0], IndexedSlices):
                results[i] = sums_in_programs.join_slices(op, value.component(0))
            else:
                dense.append(i)
        values = [pairs[i][0].apply(as_operand) for i in dense]
        for i, x in zip(dense, self.reduce_in_program(op, values, options), strict=True):
            results[i] = _result_in_program(x, pairs[i][1], pairs[i][0].count)
        return results

    def reduce_in_program(
        self, reduce_op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[jax.Array]:
        """May be overridden: reduce inside a compiled run.

        The default calls `batch_reduce_implementation`, for which components are gathered.
        """
        pairs = [(value, value) for value in values]
        reduced = self.batch_reduce_implementation(reduce_op, pairs, options)
        return [x.component(0) if isinstance(x, Mirrored) else jnp.asarray(x) for x in reduced]

    # -- what algorithms implement --------------------------------------------------------------

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Override this: reduce one value."""
        raise self._lacks("reduce_implementation")

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Any]:
        """Override this: reduce several values."""
        raise self._lacks("batch_reduce_implementation")

    def _lacks(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self).__name__} does not implement {name}; derive from px.CrossDeviceOps and "
            "override it, or use px.ReductionToOneDevice()."
        )

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """May be overridden: copy one value to several devices."""
        devices = destination_devices(destinations)
        if compat.is_tracer(tensor) or not devices:
            count = getattr(destinations, "count", None) or len(getattr(destinations, "values", (0,)))
            return _result_in_program(jnp.asarray(tensor), destinations, count)
        if isinstance(tensor, IndexedSlices):
            copies: list[Any] = [
                IndexedSlices(place(tensor.values, d), place(tensor.indices, d), tensor.dense_shape)
                for d in devices
            ]
            return copies[0] if len(copies) == 1 else Mirrored(copies)
        source = jnp.asarray(tensor)
        if len(devices) == 1:
            return place(source, devices[0])
        return Mirrored([place(source, d) for d in devices])


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one device, reduces them there, and copies the result back.

    Args:
        reduce_to_device: where to reduce; the first destination by default.
        accumulation_fn: a function that sums a list of arrays; addition by default. It is used by
            every reduction, and MEAN divides what it returns.
    """

    def __init__(
        self,
        reduce_to_device: DeviceLike | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise InvalidTypeError(
                f"accumulation_fn must be callable. Received: {shown(accumulation_fn)}"
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn or device_programs.add_n

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value."""
        del options
        components = _operands(per_replica_value)
        chosen = self.reduce_to_device
        here = destination_devices(destinations)[0] if chosen is None else resolve_device(chosen)
        total = _reduce_here(reduce_op, components, here, self.accumulation_fn)
        return self.broadcast(total, destinations)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Any]:
        """Reduce several values, one after the other."""
        return [
            self.reduce_implementation(reduce_op, v, d, options) for v, d in value_destination_pairs
        ]

    def reduce_in_program(
        self, reduce_op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[jax.Array]:
        """Reduce inside a compiled run, where XLA chooses the route."""
        if self.accumulation_fn is device_programs.add_n:
            xs = [v.component(0) for v in values]
            return sums_in_programs.reduce_over_replicas(reduce_op, xs, UNPACKED)
        totals = [self.accumulation_fn(list(v.values)) for v in values]
        mean = reduce_op is ReduceOp.MEAN
        return [divide(t, v.count) if mean else t for t, v in zip(totals, values, strict=True)]


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """Reduces with XLA's all-reduce in one program, packing small tensors together.

    The default of `MirroredStrategy`. A result that is wanted on one device only is summed there.

    Args:
        num_packs: make this many packs of each dtype; 0 packs nothing; None packs small tensors.
            `CommunicationOptions.bytes_per_pack` overrides it.
    """

    def __init__(self, num_packs: int | None = None) -> None:
        if num_packs is not None and num_packs < 0:
            raise InvalidValueError(
                f"num_packs must be 0 (no packing) or a positive number. Received: {num_packs}"
            )
        self._num_packs = num_packs

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Any]:
        """Reduce several values in one program per set of devices."""
        results: list[Any] = [None] * len(value_destination_pairs)
        groups: dict[Devices, list[tuple[int, list[jax.Array]]]] = {}
        for i, (value, destinations) in enumerate(value_destination_pairs):
            devices = destination_devices(destinations)
            components = _operands(value)
            if len(components) == len(devices) == len(set(devices)):
                groups.setdefault(devices, []).append((i, components))
            else:
                total = _reduce_here(reduce_op, components, devices[0], device_programs.add_n)
                results[i] = self.broadcast(total, destinations)
        for devices, members in groups.items():
            self._announce(devices)
            small = []
            for i, components in members:
                if large_sums.is_worthwhile(components, devices):
                    results[i] = Mirrored(large_sums.reduce_on_host(reduce_op, components, devices))
                else:
                    small.append((i, components))
            if small:
                columns = [components for _, components in small]
                reduced = device_programs.all_reduce(
                    reduce_op, columns, devices, self._packing(options)
                )
                for (i, _), result in zip(small, reduced, strict=True):
                    results[i] = result
        return results

    def reduce_in_program(
        self, reduce_op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[jax.Array]:
        """Reduce inside a compiled run, packing small tensors together."""
        xs = [v.component(0) for v in values]
        return sums_in_programs.reduce_over_replicas(reduce_op, xs, self._packing(options))

    def _packing(self, options: CommunicationOptions) -> Packing:
        if options.bytes_per_pack:
            return Packing(bytes_per_pack=options.bytes_per_pack)
        return Packing(num_packs=self._num_packs)

    def _announce(self, devices: Devices) -> None:
        """Say once if the algorithm's name does not fit the platform."""


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduce, on GPUs by NCCL; elsewhere XLA's own collectives do the same work.

    Args:
        num_packs: how many packs to make of the tensors that are reduced together; 0 for none.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)

    def _announce(self, devices: Devices) -> None:
        if devices[0].platform not in ("gpu", "cuda", "rocm"):
            _say_no_nccl(devices[0].platform)


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """All-reduce by hierarchical copies, a hint for machines with groups of linked GPUs.

    XLA chooses the route by itself; the name is kept for ported code.

    Args:
        num_packs: how many packs to make of the tensors that are reduced together; 0 for none.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)


@functools.cache
def _say_no_nccl(platform: str) -> None:
    _log.info(
        "NcclAllReduce: there is no NCCL on the platform %r; XLA's collectives are used instead",
        platform,
    )


# -- helpers ------------------------------------------------------------------------------------


def _result_in_program(x: jax.Array, destinations: Any, count: int) -> Any:
    """In a compiled run every device has the result: a plain array for one device, else a copy each."""
    several = isinstance(destinations, DistributedValues | Variable)
    return Mirrored.of_global(x, count) if several else x


def _as_per_replica(value: Any) -> PerReplica:
    if isinstance(value, PerReplica):
        return value
    if isinstance(value, Variable):
        held = value._held()
        return held if isinstance(held, PerReplica) else PerReplica([value.read_value()])
    if isinstance(value, DistributedValues):
        return PerReplica([value.values[0]])
    return PerReplica([value])


def _checked_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    checked = list(pairs)
    if not all(isinstance(p, list | tuple) and len(p) == 2 for p in checked):
        raise InvalidValueError(
            f"batch_reduce needs a list of (value, destinations) pairs. Received: {shown(pairs)}"
        )
    return checked


def _operands(value: PerReplica) -> list[jax.Array]:
    components = [as_operand(x) for x in value.values]
    check_alike(components, "A reduction over replicas")
    return components


def _reduce_here(
    op: ReduceOp,
    components: Sequence[jax.Array],
    device: jax.Device,
    accumulate: Callable[[list[jax.Array]], jax.Array],
) -> jax.Array:
    with jax.default_device(device):
        total = accumulate([place(x, device) for x in components])
        return divide(total, len(components)) if op is ReduceOp.MEAN else total


def _reduce_sparse(op: ReduceOp, value: PerReplica, devices: Devices) -> Any:
    def on(device: jax.Device) -> IndexedSlices:
        with jax.default_device(device):
            return reduce_slices(op, value.values, device)

    results = [on(d) for d in devices]
    return results[0] if len(results) == 1 else Mirrored(results)
