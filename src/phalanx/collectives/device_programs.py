"""The compiled multi-device programs behind cross-device operations.

Each takes one array per replica and device, and runs as one SPMD program with XLA's collectives. Inputs
are handed over without copying: the replicas' arrays become the shards of a global array that is
declared replicated although the shards differ, which `shard_map` passes on as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from phalanx.collectives import sums_in_programs
from phalanx.collectives.packing import Packing
from phalanx.core import spmd
from phalanx.core.reduction import ReduceOp
from phalanx.core.values import Mirrored
from phalanx.execution.throttle import THROTTLE, token
from phalanx.job.shared_programs import SharedProgram
from phalanx.runtime import compat
from phalanx.runtime.deadlines import limit
from phalanx.runtime.placement import Span, place, replica_mesh, replicated_over

Devices = tuple[jax.Device, ...]


def all_reduce(
    op: ReduceOp,
    columns: Sequence[Sequence[jax.Array]],
    devices: Devices,
    packing: Packing,
    span: Span | None = None,
    total: Callable[[jax.Array], jax.Array] = sums_in_programs.total,
) -> list[Mirrored]:
    """Reduce each column, which holds one array per device, onto all devices.

    With a `span` the devices are those of this process, and all processes must call it. `total` is how
    one array is summed.
    """
    everywhere = span or devices
    inputs = [_as_global(column, devices, everywhere) for column in columns]
    shared = _shared(f"all_reduce {op.name}", inputs, packing) if span else None
    program = _all_reduce_program(op, everywhere, packing, total)
    outputs = THROTTLE.dispatch(program, inputs, shared=shared)
    return [Mirrored.of_global(x, len(everywhere)) for x in outputs]


def all_gather(
    column: Sequence[jax.Array], devices: Devices, axis: int, span: Span | None = None
) -> Mirrored:
    """Join arrays of one shape, one per device, along `axis` on all devices."""
    everywhere = span or devices
    whole = _as_global(column, devices, everywhere)
    shared = _shared(f"all_gather along {axis}", [whole]) if span else None
    joined = THROTTLE.dispatch(_all_gather_program(everywhere, axis), whole, shared=shared)
    return Mirrored.of_global(joined, len(everywhere))


def from_first(column: Sequence[jax.Array], devices: Devices, span: Span) -> Mirrored:
    """The array of the first of all devices, on all devices."""
    places = [jnp.int32(span.index(d)) for d in devices]
    inputs = [_as_global(column, devices, span), _as_global(places, devices, span)]
    shared = _shared("broadcast from the first replica", inputs[:1])
    given = THROTTLE.dispatch(_from_first_program(span), inputs, shared=shared)
    return Mirrored.of_global(given, len(span))


def _shared(
    operation: str, inputs: Sequence[jax.Array], packing: Packing | None = None
) -> SharedProgram:
    key = (operation, packing, tuple((x.shape, x.dtype) for x in inputs))
    return SharedProgram(key, operation, inputs, lambda: repr(packing), limit())


def _as_global(column: Sequence[jax.Array], devices: Devices, everywhere: Devices) -> jax.Array:
    pieces = [place(x, d) for x, d in zip(column, devices, strict=True)]
    return compat.assemble(pieces[0].shape, replicated_over(everywhere), pieces)


def _spmd(fn: Callable[..., Any], devices: Devices) -> Callable[..., Any]:
    """Compile a per-device function; the extra output tells the throttle that it has finished."""
    replicated = PartitionSpec()
    mapped = jax.shard_map(
        fn, mesh=replica_mesh(devices), in_specs=replicated, out_specs=replicated, check_vma=False
    )
    spans_workers = len({d.process_index for d in devices}) > 1
    return jax.jit(lambda x: (mapped(x), token(spans_workers)))


@functools.cache
def _all_reduce_program(
    op: ReduceOp,
    devices: Devices,
    packing: Packing,
    total: Callable[[jax.Array], jax.Array] = sums_in_programs.total,
) -> Callable[..., Any]:
    def program(xs: list[jax.Array]) -> list[jax.Array]:
        return sums_in_programs.reduce_over_replicas(op, xs, packing, total)

    return _spmd(program, devices)


@functools.cache
def _all_gather_program(devices: Devices, axis: int) -> Callable[..., Any]:
    return _spmd(lambda x: spmd.all_gather(x, axis), devices)


@functools.cache
def _from_first_program(devices: Devices) -> Callable[..., Any]:
    return _spmd(lambda inputs: spmd.from_replica(inputs[0], inputs[1] == 0), devices)


@jax.jit
def add_n(xs: Sequence[jax.Array]) -> jax.Array:
    """The sum of arrays on one device, from left to right."""
    return functools.reduce(jnp.add, xs)
