"""`px.random`: random numbers that differ between replicas, reproducibly."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.core.options import VariableAggregation
from phalanx.core.replica_context import MergePoint, meet
from phalanx.core.variables import traced_variables
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.runtime import compat, seeding
from phalanx.runtime.formatting import shown
from phalanx.runtime.seeding import next_seed

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

    On replicas, and in a `px.function`, the strategy has a variable that counts the calls, so that each
    run of a compiled step has new keys, and each replica its own. All replicas must call it equally
    often. Call `set_seed` before the first step. `jax.jit` would keep the key of the first call, so it
    is refused there.

    Examples:
        >>> import jax, phalanx as px
        >>> px.random.set_seed(3)
        >>> first = jax.random.normal(px.random.next_key())
        >>> px.random.set_seed(3)
        >>> bool(first == jax.random.normal(px.random.next_key()))
        True
        >>> step = px.function(lambda: jax.random.normal(px.random.next_key()))
        >>> len({float(step()) for _ in range(3)})
        3
    """
    source = seeding.key_source()
    if source is not None:
        key: jax.Array = source()
        return key
    replica = ctx.active_replica()
    if replica is None and not compat.is_staging():
        return jax.random.key(next_seed())
    if compat.is_staging() and traced_variables.program() is None:
        raise ContextError(
            "jax.jit would keep the key of its first call. Use px.function in its place, or call "
            "next_key outside of it, and give it the key as an argument."
        )
    strategy = ctx.get_strategy()
    if strategy not in _counters:
        if replica is None:
            _make_counter(strategy)
        else:
            meet(replica, MergePoint("creation of the random state", _make_counter, (), {}))
    counter = _counters[strategy]
    seed, count = jnp.asarray(counter.value())
    counter.assign_add(jnp.uint32([0, 1]))
    key = jax.random.fold_in(jax.random.key(seed), count)
    return key if replica is None else replica_key(key)


_counters: weakref.WeakKeyDictionary[Any, Variable] = weakref.WeakKeyDictionary()
"""By strategy, a seed and how many keys were made of it."""


def _make_counter(strategy: Any) -> None:
    if strategy in _counters:
        return
    mode = ctx.default_mode() if strategy is ctx.default_mode().strategy else ctx.Mode(strategy)
    with ctx.push(mode), jax.ensure_compile_time_eval():
        _counters[strategy] = Variable(
            jnp.uint32([next_seed() % 2**32, 0]),
            trainable=False,
            name="random_state",
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )


def set_seed(seed: int | None) -> None:
    """Make everything random that names no seed reproducible: shuffles, and `px.random.next_key`.

    Programs that ask for random things in the same order get the same ones; so do the workers of a job.
    Steps that were compiled before keep their seed.

    Args:
        seed: an integer; None goes back to other numbers in every run.

    Examples:
        >>> import phalanx as px
        >>> def shuffled():
        ...     px.random.set_seed(1)
        ...     return [int(x) for x in px.data.Dataset.range(5).shuffle(5)]
        >>> shuffled() == shuffled()
        True
        >>> px.random.set_seed(None)
    """
    seeding.set_seed(seed)
    _counters.clear()


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
