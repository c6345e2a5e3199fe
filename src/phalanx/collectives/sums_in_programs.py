"""Sums and means over all replicas in a program, where each replica has its own array."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.collectives.packing import Packing, reduce_packed
from phalanx.core import spmd
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.reduction import ReduceOp, divide
from phalanx.runtime.placement import REPLICA_AXIS


def total(x: jax.Array) -> jax.Array:
    """The sum of a local array over all replicas."""
    summed: jax.Array = lax.psum(x, REPLICA_AXIS)
    return summed


def reduce_over_replicas(
    op: ReduceOp,
    xs: Sequence[jax.Array],
    packing: Packing,
    total: Callable[[jax.Array], jax.Array] = total,
) -> list[jax.Array]:
    """Reduce local arrays over all replicas.

    `packing` says which of them travel together, and `total` sums one array over all replicas.
    """
    reduced = reduce_packed(xs, packing, jnp.concatenate, total)
    if op is ReduceOp.MEAN:
        count = lax.axis_size(REPLICA_AXIS)
        reduced = [divide(x, count) for x in reduced]
    return reduced


def join_slices(op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
    """Join sparse rows over all replicas."""
    values, indices = spmd.all_gather(slices.values, 0), spmd.all_gather(slices.indices, 0)
    if op is ReduceOp.MEAN:
        values = divide(values, lax.axis_size(REPLICA_AXIS))
    return IndexedSlices(values, indices, slices.dense_shape)
