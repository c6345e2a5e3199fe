"""Scaling losses so that gradients can be summed over replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import compat
from phalanx.core import context as ctx
from phalanx.core.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.core.numbers import check_integer
from phalanx.core.showing import shown


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> jax.Array:
    """The sum of a replica's losses divided by the size of the global batch.

    The sum of the result over replicas is the mean loss of the global batch, so gradients may be
    summed over replicas.

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
