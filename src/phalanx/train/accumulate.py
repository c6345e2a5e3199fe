"""Gradient accumulation: large batches in small pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.core.variables import traced_variables
from phalanx.errors import InvalidValueError
from phalanx.execution.gradients import value_and_grad
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer


def accumulate_gradients(
    loss_fn: Callable[..., Any], variables: Any, batch: Any, micro_batches: int
) -> tuple[jax.Array, Any]:
    """The loss of a batch and its gradients, computed in pieces that need less memory.

    In a compiled function the pieces are one `lax.scan`, whose state is one copy of the gradients. The
    results are sums over the pieces, so divide the loss by the size of the global batch.

    Args:
        loss_fn: takes one piece of the batch (its parts as separate arguments if it is a tuple) and
            returns a scalar. It reads the variables and must not write any.
        variables: a variable or a nest of them.
        batch: an array or nest of arrays, each with the examples along its leading dimension.
        micro_batches: how many pieces; must divide the number of examples.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> w = px.Variable(2.0)
        >>> loss, gradient = px.train.accumulate_gradients(
        ...     lambda x: jnp.sum(w * x), w, jnp.arange(6.0), micro_batches=3)
        >>> float(loss), float(gradient)
        (30.0, 15.0)
    """
    return accumulated(value_and_grad(loss_fn, variables), batch, micro_batches)


def accumulated(
    differentiated: Callable[..., tuple[Any, Any]],
    batch: Any,
    micro_batches: int,
    each: Callable[[Any], Any] = lambda gradients: gradients,
) -> tuple[Any, Any]:
    """The sums of what a function gives for the pieces of a batch.

    Args:
        differentiated: gives a loss and its gradients.
        batch: as for `accumulate_gradients`.
        micro_batches: how many pieces.
        each: what is added up in place of the gradients of a piece.
    """
    count = _checked_count(batch, micro_batches)
    parts = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)

    def piece(part: Any) -> tuple[jax.Array, Any]:
        loss, gradients = differentiated(*part) if isinstance(part, tuple) else differentiated(part)
        return loss, each(gradients)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, piece(part)), None

    first = piece(jax.tree.map(lambda x: x[0], parts))
    if traced_variables.current() is not None or compat.is_staging():
        rest = jax.tree.map(lambda x: x[1:], parts)
        total: tuple[jax.Array, Any] = lax.scan(add, first, rest)[0]
        return total
    total = first
    for i in range(1, count):
        total, _ = add(total, jax.tree.map(lambda x, i=i: x[i], parts))
    return total


def _checked_count(batch: Any, micro_batches: Any) -> int:
    count = check_integer(micro_batches, "micro_batches", 1, 2**31 - 1)
    arrays = jax.tree.leaves(batch)
    if not arrays or any(getattr(x, "ndim", 0) == 0 for x in arrays):
        raise InvalidValueError(
            f"The batch must be arrays with examples along their leading dimension. "
            f"Received: {shown(batch)}"
        )
    sizes = {x.shape[0] for x in arrays}
    if len(sizes) != 1 or next(iter(sizes)) % count:
        raise InvalidValueError(
            f"The number of examples must be a multiple of micro_batches={count}, and the same in "
            f"every part of the batch. Received: {sorted(sizes)} examples"
        )
    return count
