"""Slices of many arrays in a program: summed and divided, or joined, in few messages.

Slices of several arrays travel together as columns: row i of a pack is what member i gets or gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.collectives.packing import Packing, plan_packs
from phalanx.core.reduction import divide
from phalanx.core.slicing import Members, Slicing


def reduce_scatter(
    xs: Sequence[jax.Array], members: Members, packing: Packing, mean: bool = False
) -> list[jax.Array]:
    """Sum local arrays over all replicas; each replica gets its slice of every sum.

    With several groups, slices are summed in each group first and then between groups.

    Args:
        xs: the arrays of this replica.
        members: who gets which slice.
        packing: which of them travel together.
        mean: whether to divide by the number of replicas.
    """
    results: list[Any] = [None] * len(xs)
    slicings = [Slicing(tuple(x.shape), members.parts) for x in xs]
    for pack in plan_packs([x.nbytes for x in xs], [x.dtype for x in xs], packing):
        rows = [slicings[i].flat(xs[i]).reshape(members.parts, -1) for i in pack]
        whole = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)
        part = lax.psum_scatter(whole, members.axis, axis_index_groups=members.groups)
        if members.across is not None:
            part = lax.psum(part, members.axis, axis_index_groups=members.across)
        for i, x in zip(pack, _columns(part, [slicings[i].length for i in pack]), strict=True):
            results[i] = divide(x, members.count) if mean else x
    return results


def all_gather(
    slices: Sequence[jax.Array], slicings: Sequence[Slicing], members: Members, packing: Packing
) -> list[jax.Array]:
    """Whole arrays, given this replica's slice of each."""
    results: list[Any] = [None] * len(slices)
    for pack in plan_packs([x.nbytes for x in slices], [x.dtype for x in slices], packing):
        mine = slices[pack[0]] if len(pack) == 1 else jnp.concatenate([slices[i] for i in pack])
        rows = members.gather(mine)
        for i, x in zip(pack, _columns(rows, [slicings[i].length for i in pack]), strict=True):
            results[i] = slicings[i].join(x.reshape(-1))
    return results


def _columns(x: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
    """Parts of an array along its last dimension."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [x[..., a : a + n] for a, n in zip(starts, lengths, strict=True)]
