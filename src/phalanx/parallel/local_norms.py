"""Norms of gradients, told while a program runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from phalanx.parallel.communication import DEVICE, norms_to
from phalanx.parallel.options import ParallelOptions
from phalanx.runtime.placement import REPLICA_AXIS
from phalanx.train.gradient_communication import norm_of

__all__ = ["tell_norms", "tell_norms_of_parts"]


def tell_norms(
    options: ParallelOptions, named: Sequence[tuple[str, Any]], axes: tuple[str, ...] = (REPLICA_AXIS,)
) -> None:
    """Tell the norms of this device's gradients, if options ask for them.

    Args:
        options: that are in force.
        named: gradients with their names.
        axes: of the mesh, from the outermost.
    """
    tell = norms_to(options)
    if tell is None or not named:
        return
    rank = functools.reduce(
        lambda total, axis: total * lax.axis_size(axis) + lax.axis_index(axis), axes, jnp.int32(0)
    )
    norms = [(name, norm_of(x)) for name, x in named]
    told = norms if options.dump_local_norm else []
    if options.dump_device_local_norm:
        told = [*told, (DEVICE, jnp.linalg.norm(jnp.stack([norm for _, norm in norms])))]
    for name, norm in told:
        jax.debug.callback(functools.partial(_told, tell, name), rank, norm)


def _told(tell: Any, name: str, rank: Any, norm: Any) -> None:
    tell(name, int(rank), float(norm))


def tell_norms_of_parts(
    options: ParallelOptions,
    named: Sequence[tuple[str, Any]],
    specs: Sequence[PartitionSpec],
    mesh: Mesh,
) -> None:
    """Tell the norms of the parts of gradients that each device has, where a program sees whole ones.

    XLA sums what devices have before a program sees it, so there are no other local gradients.
    """
    if norms_to(options) is None:
        return
    axes = tuple(mesh.axis_names)

    def tell(*parts: Any) -> jax.Array:
        tell_norms(options, [(name, x) for (name, _), x in zip(named, parts, strict=True)], axes)
        return jnp.zeros((1,) * len(axes))

    jax.shard_map(
        tell, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec(*axes), check_vma=False
    )(*(x for _, x in named))
