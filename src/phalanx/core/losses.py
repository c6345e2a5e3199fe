"""Scaling losses so that gradients can be summed over replicas."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core import context as ctx
from phalanx.core.errors import ContextError, InvalidTypeError, InvalidValueError


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
    losses = jnp.asarray(per_example_loss)
    if losses.ndim == 0:
        raise InvalidValueError(
            "compute_average_loss needs one loss per example, an array of rank 1 or more. "
            f"Received: an array of rank 0, {losses}"
        )
    if global_batch_size is None:
        global_batch_size = losses.shape[0] * replicas
    elif not isinstance(global_batch_size, jax.Array):
        try:
            global_batch_size = operator.index(global_batch_size)
        except TypeError:
            raise InvalidTypeError(
                f"global_batch_size must be an integer. Received: {global_batch_size!r}"
            ) from None
        if global_batch_size < 0:
            raise InvalidValueError(
                f"global_batch_size must not be negative. Received: {global_batch_size}"
            )
    if sample_weight is not None:
        losses = losses * jnp.asarray(sample_weight, losses.dtype)
    return jnp.sum(losses) / jnp.asarray(global_batch_size, losses.dtype)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """The sum of regularization losses divided by the number of replicas.

    Every replica computes the same regularization loss, so that the sum over replicas counts it
    once.

    Examples:
        >>> import phalanx as px
        >>> float(px.nn.scale_regularization_loss(6.0))
        6.0
    """
    return jnp.sum(jnp.asarray(regularization_loss)) / _replicas("scale_regularization_loss")


def _replicas(what: str) -> int:
    if ctx.in_cross_replica_context():
        raise ContextError(
            f"{what} scales the loss of one replica; call it in the function that is given to "
            "Strategy.run, not in the strategy's scope."
        )
    return ctx.get_strategy().num_replicas_in_sync
