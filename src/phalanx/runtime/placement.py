"""Where the arrays of replicas lie: devices, meshes and shardings."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from phalanx.runtime import compat

Span = tuple[jax.Device, ...]
"""The devices of all replicas, in their order; some may belong to other processes."""

REPLICA_AXIS = "replica"
"""The mesh axis that replicas are laid out on."""


@functools.cache
def replica_mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    """The one-dimensional mesh over the devices of a strategy's replicas."""
    return Mesh(np.array(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))


@functools.cache
def replicated_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """The sharding of values that every device holds whole."""
    return NamedSharding(replica_mesh(devices), PartitionSpec())


@functools.cache
def stacked_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """The sharding of values whose leading dimension is split over the devices."""
    return NamedSharding(replica_mesh(devices), PartitionSpec(REPLICA_AXIS))


def device_of(x: jax.Array) -> jax.Device | None:
    """The device of a single-device array; None for tracers and arrays over several devices."""
    if compat.is_tracer(x):
        return None
    devices = x.sharding.device_set  # also of a deleted array, which can be replaced
    return next(iter(devices)) if len(devices) == 1 else None


def place(x: Any, device: jax.Device) -> jax.Array:
    """`x` as an uncommitted array on `device`; no copy if it is there already."""
    if compat.is_tracer(x):
        return x  # the program that is being traced decides
    if isinstance(x, jax.Array) and device_of(x) is device:
        return compat.uncommitted(x)
    return compat.uncommitted(jax.device_put(x, device))


def without_mesh(x: jax.Array) -> jax.Array:
    """The same traced value for code in another mesh; costs nothing when it runs.

    JAX makes `zeros_like(x)` with the sharding of `x`, and refuses if that is one of another mesh.
    """
    sharding = getattr(jax.typeof(x), "sharding", None)
    return x if sharding is None or sharding.mesh.empty else jax.numpy.copy(x)


def copied(x: jax.Array) -> jax.Array:
    """The same values in memory of their own; nothing is compiled for it, as `x.copy()` would."""
    copy = jax.device_put(x, x.sharding, may_alias=False)
    return copy if x.committed else compat.uncommitted(copy)
