"""Updates of variables: what each does to a value, and which values fit. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import compat
from phalanx.core.errors import InvalidValueError
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.showing import shown

# -- new = update(old, operand) ---------------------------------

Update = Callable[[jax.Array, Any], jax.Array]

_UPDATES: dict[str, Update] = {
    "assign": lambda old, new: new,
    "assign_add": lambda old, x: old + x,
    "assign_sub": lambda old, x: old - x,
    "scatter_add": lambda old, s: old.at[s.indices].add(s.values),
    "scatter_sub": lambda old, s: old.at[s.indices].add(-s.values),
    "scatter_mul": lambda old, s: old.at[s.indices].multiply(s.values),
    "scatter_div": lambda old, s: old.at[s.indices].divide(s.values),
    "scatter_min": lambda old, s: old.at[s.indices].min(s.values),
    "scatter_max": lambda old, s: old.at[s.indices].max(s.values),
    "scatter_update": lambda old, s: old.at[s.indices].set(s.values),
}


def _compiled(update: Update) -> Update:
    # One small program in place of several operations, each of which costs a dispatch.
    return jax.jit(lambda old, x: update(old, x).astype(old.dtype), inline=True)


_COMPILED = {method: _compiled(update) for method, update in _UPDATES.items()}


def apply_update(method: str, old: jax.Array, operand: Any) -> jax.Array:
    """The value after an update; never changes the dtype.

    Writing is not differentiable: inside `jax.grad` the value is written, not its derivative.
    """
    old, operand = compat.primal_value(old), compat.primal_value(operand)
    with compat.without_differentiation():
        if isinstance(operand, IndexedSlices):
            return _COMPILED[method](old, IndexedSlices(operand.values, operand.indices))
        if not isinstance(operand, jax.Array) or operand.dtype != old.dtype:
            operand = jnp.asarray(operand, old.dtype)
        return operand if method == "assign" else _COMPILED[method](old, operand)


def fitting_shape(value: Any, dtype: Any, name: str, method: str) -> tuple[int, ...]:
    """The shape of a value that fits a variable's dtype; an error if it does not fit.

    Python and NumPy values convert within their kind (and integers to floats); arrays of JAX must
    promote to the variable's dtype.
    """
    if isinstance(value, jax.Array):
        shape, given = value.shape, value.dtype
        fits = given == dtype or jnp.promote_types(given, dtype) == dtype
    else:
        try:
            host = np.asarray(value)
        except (TypeError, ValueError):
            host = np.asarray(None)
        if host.dtype.kind in "USO":
            raise InvalidValueError(
                f"Variable.{method} of {shown(name)} needs an array or a number. "
                f"Received: {shown(value)}"
            )
        shape, given = host.shape, host.dtype
        fits = _kind_order(given) <= _kind_order(dtype)
    if not fits:
        raise InvalidValueError(
            f"Variable {name!r} has the dtype {dtype}; the value would lose information. Convert it "
            f"first with .astype('{dtype}'). Received: a value of dtype {given} for {method}"
        )
    return tuple(shape)


def _kind_order(dtype: Any) -> int:
    for order, kind in enumerate((jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)):
        if jnp.issubdtype(dtype, kind):
            return order
    return 4


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a value of one shape can be added to a value of another without changing its shape."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
