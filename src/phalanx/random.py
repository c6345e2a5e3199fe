"""`px.random`: random numbers that differ between replicas, reproducibly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.seeding import next_seed, set_seed

__all__ = ["next_key", "replica_key", "set_seed"]


def replica_key(seed: Any) -> jax.Array:
    """A random key that differs between replicas and does not depend on their number.

    Replica 2 gets the same key from the same seed whether there are 3 replicas or 300. On a single
    replica, and outside of strategies, it is the key of replica 0.

    Args:
        seed: an integer, a key of `jax.random.key`, or one of `jax.random.PRNGKey`.

    Examples:
        >>> import jax, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> noise = strategy.run(lambda: jax.random.normal(px.random.replica_key(0)))
        >>> len({float(x) for x in noise.values})
        2
    """
    context = ctx.get_replica_context()
    if context is None:
        raise ContextError(
            "replica_key makes the key of one replica; call it in the function that is given to "
            "Strategy.run, not in the strategy's scope."
        )
    return jax.random.fold_in(_as_key(seed), jnp.asarray(context.replica_id_in_sync_group))


def next_key() -> jax.Array:
    """A random key, another one with each call; reproducible after `set_seed`.

    Call it outside of compiled functions, which would keep the first one. In replicas give its result
    to `replica_key`.

    Examples:
        >>> import jax, phalanx as px
        >>> px.random.set_seed(3)
        >>> first = jax.random.normal(px.random.next_key())
        >>> px.random.set_seed(3)
        >>> bool(first == jax.random.normal(px.random.next_key()))
        True
    """
    if compat.is_staging():
        raise ContextError(
            "A compiled function would keep the key of its first call. Call next_key outside of it, "
            "and give it the key as an argument."
        )
    return jax.random.key(next_seed())


def _as_key(seed: Any) -> jax.Array:
    if compat.is_key_array(seed):
        return seed
    if isinstance(seed, int | np.ndarray | np.generic | jax.Array) and not isinstance(seed, bool):
        shape, dtype = np.shape(seed), jnp.result_type(seed) if not isinstance(seed, int) else np.int64
        if jnp.issubdtype(dtype, np.integer) and shape == ():
            try:
                return jax.random.key(seed if isinstance(seed, int) else jnp.asarray(seed))
            except (OverflowError, ValueError) as error:
                raise InvalidValueError(
                    f"seed must fit into 64 bits. Received: {shown(seed)}"
                ) from error
        if dtype == np.uint32 and len(shape) == 1:
            return jax.random.wrap_key_data(jnp.asarray(seed))
    raise InvalidTypeError(
        f"seed must be an integer, a jax.random.key or a jax.random.PRNGKey. Received: {shown(seed)}"
    )
