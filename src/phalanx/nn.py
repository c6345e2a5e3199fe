"""`px.nn`: helpers for losses and embeddings under a strategy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.errors import ContextError, InvalidArgumentError, InvalidTypeError, InvalidValueError
from phalanx.parameter_server.remote_variable import RemoteVariable
from phalanx.parameter_server.sharded_variable import ShardedVariable
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer

__all__ = ["compute_average_loss", "embedding_lookup", "scale_regularization_loss"]


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> jax.Array:
    """The sum of a replica's losses divided by the size of the global batch.

    The sum of the result over replicas is the mean loss of the global batch, so sum gradients over
    replicas too.

    Args:
        per_example_loss: one loss per example of this replica; rank 1 or more.
        sample_weight: a weight per example, or anything that broadcasts against the losses.
        global_batch_size: by default the local batch size times the number of replicas.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> float(px.nn.compute_average_loss(jnp.array([1.0, 2.0, 3.0]), global_batch_size=6))
        1.0
    """
    replicas = _replicas("compute_average_loss")
    losses = _numbers(per_example_loss, "per_example_loss")
    if losses.ndim == 0:
        raise InvalidValueError(
            "compute_average_loss needs one loss per example, an array of rank 1 or more. "
            f"Received: an array of rank 0, {losses}"
        )
    if sample_weight is not None:
        weights = _numbers(sample_weight, "sample_weight").astype(losses.dtype)
        if not _broadcasts(weights.shape, losses.shape):
            raise InvalidValueError(
                "sample_weight must be one weight per loss, or anything that broadcasts against the "
                f"losses. Received: weights of shape {weights.shape} for losses of {losses.shape}"
            )
        losses = losses * weights
    if global_batch_size is None:
        # A replica without examples adds nothing.
        size: Any = max(losses.shape[0], 1) * replicas
    else:
        size = _checked_size(global_batch_size)
    return jnp.sum(losses) / jnp.asarray(size, losses.dtype)


def embedding_lookup(params: Any, ids: Any, max_norm: Any = None, name: str | None = None) -> jax.Array:
    """Rows of a table, in the order of their ids.

    Of a variable on parameter servers only these rows travel, and its gradient by
    `px.value_and_grad` is `px.IndexedSlices`.

    Args:
        params: a variable, an array, or a list of those that are the parts of one table.
        ids: integers from 0 on, of any shape. Ids that are known when it is called must be rows of the
            table.
        max_norm: rows that are longer than this are shortened to it.
        name: accepted for ported code.

    Returns:
        An array of the shape of the ids, and then of a row.

    Examples:
        >>> import phalanx as px
        >>> table = px.Variable([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
        >>> px.nn.embedding_lookup(table, [2, 0]).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    del name
    if isinstance(params, RemoteVariable | ShardedVariable):
        rows = params.sparse_read(ids)
    else:
        rows = _rows_of(params, ids)
    if max_norm is None:
        return rows
    axes = tuple(range(np.ndim(ids), rows.ndim))
    lengths = jnp.sqrt(jnp.sum(rows * rows, axis=axes, keepdims=True))
    return rows * jnp.minimum(1.0, max_norm / jnp.maximum(lengths, 1e-30))


def _rows_of(params: Any, ids: Any) -> jax.Array:
    if isinstance(params, list | tuple) and params:
        table = jnp.concatenate([jnp.asarray(x) for x in params])
    else:
        table = jnp.asarray(params)
    indices = jnp.asarray(ids)
    if not jnp.issubdtype(indices.dtype, jnp.integer) or table.ndim == 0:
        raise InvalidTypeError(
            "embedding_lookup needs integer ids, and a table of rank 1 or more. Received: ids of dtype "
            f"{indices.dtype}, and a table of shape {list(table.shape)}"
        )
    known = compat.primal_value(indices)
    if not compat.is_tracer(known) and known.size:
        lowest, highest = int(known.min()), int(known.max())
        if lowest < 0 or highest >= table.shape[0]:
            raise InvalidArgumentError(
                f"The table has rows from 0 to {table.shape[0] - 1}. Received: ids from {lowest} to "
                f"{highest}"
            )
    return jnp.take(table, indices, axis=0)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """The sum of regularization losses divided by the number of replicas.

    Every replica computes the same regularization loss, so that the sum over replicas counts it
    once.

    Examples:
        >>> import phalanx as px
        >>> float(px.nn.scale_regularization_loss(6.0))
        6.0
    """
    replicas = _replicas("scale_regularization_loss")
    return jnp.sum(_numbers(regularization_loss, "regularization_loss")) / replicas


def _checked_size(size: Any) -> Any:
    """A global batch size; one that is being traced is known only later."""
    if isinstance(size, jax.Array | np.ndarray | np.generic):
        if size.ndim != 0 or not jnp.issubdtype(size.dtype, jnp.integer):
            raise InvalidTypeError(
                "global_batch_size must be one integer. Received: an array of dtype "
                f"{size.dtype} and shape {size.shape}"
            )
        if compat.is_staged(size):
            return size
        size = int(compat.primal_value(size))
    return check_integer(size, "global_batch_size", 1, 2**53)


def _numbers(x: Any, name: str) -> jax.Array:
    """An array of numbers that can be divided."""
    try:
        array = jnp.asarray(x)
        if jnp.issubdtype(array.dtype, jnp.inexact):
            return array
    except ContextError:
        raise
    except Exception:  # noqa: BLE001 - whatever the user's class does
        array = None
    kind = "" if array is None else f" of dtype {array.dtype}"
    if array is not None and jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(jnp.float32)
    raise InvalidTypeError(
        f"{name} must be an array of numbers, or numbers. Received: {shown(x)}{kind}"
    )


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(shape, target)
    except (ValueError, RuntimeError):  # the latter for too many dimensions
        return False
    return True


def _replicas(what: str) -> int:
    if ctx.in_cross_replica_context():
        raise ContextError(
            f"{what} scales the loss of one replica; call it in the function that is given to "
            "Strategy.run, not in the strategy's scope."
        )
    return ctx.get_strategy().num_replicas_in_sync
