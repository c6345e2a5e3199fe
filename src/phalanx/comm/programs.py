"""The compiled programs that move data between the workers of a group, one device each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.comm.reductions import PremulSum, ReduceOp, Reduction, combine, divided, premultiplied

AXIS = "rank"
Devices = tuple[jax.Device, ...]


def run(kind: str, devices: Devices, x: Any, *parameters: Any) -> Any:
    """Run a program with this worker's array, together with the other workers; waits for the result.

    A NumPy array gives a NumPy array.

    Args:
        kind: 'reduce', 'gather', 'exchange', 'reduce_scatter' or 'from_one'.
        devices: one device of each worker, in the order of ranks.
        x: the array of this worker.
        parameters: what else the program depends on.
    """
    if len(devices) == 1:
        return _alone(kind, x, *parameters)
    here = next(d for d in devices if d.process_index == jax.process_index())
    with jax.enable_x64(True):  # NumPy's 64-bit numbers keep their width
        block = jax.device_put(x[None], here)
        sharding = NamedSharding(_mesh(devices), PartitionSpec(AXIS))
        shape = (len(devices), *block.shape[1:])
        whole = jax.make_array_from_single_device_arrays(shape, sharding, [block])
        result = _program(kind, devices, *parameters)(whole)
        mine = result.addressable_data(0)
        return np.asarray(mine)[0] if isinstance(x, np.ndarray) else mine[0].block_until_ready()


def _alone(kind: str, x: Any, *parameters: Any) -> Any:
    """What a group of one computes; traced arrays are welcome."""
    with jax.enable_x64(True):
        if kind in ("reduce", "reduce_scatter"):
            rows = jnp.asarray(x if kind == "reduce_scatter" else x[None])
            return combine(parameters[0], rows)
        return x[None] if kind == "gather" else x


@functools.cache
def _mesh(devices: Devices) -> Mesh:
    return Mesh(list(devices), (AXIS,))


@functools.cache
def _program(kind: str, devices: Devices, *parameters: Any) -> Callable[[jax.Array], jax.Array]:
    bodies: dict[str, Callable[..., jax.Array]] = {
        "reduce": _reduce,
        "gather": _gather,
        "exchange": _exchange,
        "reduce_scatter": _reduce_scatter,
        "from_one": _from_one,
    }
    body = bodies[kind]
    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            lambda x: body(x[0], *parameters)[None],
            mesh=_mesh(devices),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )


def _reduce(x: jax.Array, op: Reduction) -> jax.Array:
    if isinstance(op, PremulSum):
        return lax.psum(premultiplied(op, x), AXIS)
    if x.dtype == jnp.bool_ or op not in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN):
        return combine(op, _gather(x))
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        return lax.pmax(x, AXIS) if op is ReduceOp.MAX else lax.pmin(x, AXIS)
    total = lax.psum(x, AXIS)
    return total if op is ReduceOp.SUM else divided(total, lax.axis_size(AXIS))


def _gather(x: jax.Array) -> jax.Array:
    return _from_bits(lax.all_gather(_bits(x), AXIS), x.dtype)


def _exchange(x: jax.Array) -> jax.Array:
    """Row i goes to rank i; row i of the result came from rank i."""
    return _from_bits(lax.all_to_all(_bits(x), AXIS, 0, 0, tiled=True), x.dtype)


def _reduce_scatter(x: jax.Array, op: Reduction) -> jax.Array:
    if x.dtype != jnp.bool_ and (isinstance(op, PremulSum) or op in (ReduceOp.SUM, ReduceOp.AVG)):
        factor = premultiplied(op, x) if isinstance(op, PremulSum) else x
        total = lax.psum_scatter(factor, AXIS, scatter_dimension=0)
        return divided(total, lax.axis_size(AXIS)) if op is ReduceOp.AVG else total
    return combine(op, _exchange(x))


def _from_one(x: jax.Array, source: int) -> jax.Array:
    bits = _bits(x)
    mine = jnp.where(lax.axis_index(AXIS) == source, bits, jnp.zeros_like(bits))
    return _from_bits(lax.psum(mine, AXIS), x.dtype)


def _bits(x: jax.Array) -> jax.Array:
    """An array as unsigned integers, which travel as they are; complex ones as pairs."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if x.dtype.name in ("int2", "int4", "uint2", "uint4"):
        return x.astype(jnp.int8)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        half = jnp.float32 if dtype == jnp.complex64 else jnp.float64
        parts = lax.bitcast_convert_type(bits, half)
        return lax.complex(parts[..., 0], parts[..., 1])
    if dtype == jnp.bool_ or dtype.name in ("int2", "int4", "uint2", "uint4"):
        return bits.astype(dtype)
    return lax.bitcast_convert_type(bits, dtype)
