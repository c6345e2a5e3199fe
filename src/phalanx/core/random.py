"""Random keys for replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core import compat
from phalanx.core import context as ctx
from phalanx.core.errors import ContextError, InvalidTypeError
from phalanx.core.showing import shown


def replica_key(seed: Any) -> jax.Array:
    """A random key that differs between replicas and does not depend on their number.

    Replica 2 gets the same key from the same seed whether there are 3 replicas or 300. On a single
    replica, and outside of strategies, it is the key of replica 0.

    Args:
        seed: an int, or a key of `jax.random.key`.

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
    if compat.is_key_array(seed):
        key = seed
    elif isinstance(seed, int) and not isinstance(seed, bool):
        key = jax.random.key(seed)
    else:
        raise InvalidTypeError(f"seed must be an int or a jax.random.key. Received: {shown(seed)}")
    return jax.random.fold_in(key, jnp.asarray(context.replica_id_in_sync_group))
