"""Other views and copies of arrays, with what JAX offers to everybody."""

from __future__ import annotations

import jax

from phalanx.core import compat


def without_mesh(x: jax.Array) -> jax.Array:
    """The same traced value for code inside of another mesh; costs nothing when it runs.

    JAX makes `zeros_like(x)` with the sharding of `x`, and refuses if that is one of another mesh.
    """
    sharding = getattr(jax.typeof(x), "sharding", None)
    return x if sharding is None or sharding.mesh.empty else jax.numpy.copy(x)


def copied(x: jax.Array) -> jax.Array:
    """The same values in memory of their own; nothing is compiled for it, as `x.copy()` would."""
    copy = jax.device_put(x, x.sharding, may_alias=False)
    return copy if x.committed else compat.uncommitted(copy)
