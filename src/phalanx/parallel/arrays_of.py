"""The arrays of nests of arguments, and what else is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["dtype_of", "is_array", "with_others"]


def with_others(function: Callable[..., Any], others: Any) -> Callable[..., Any]:
    """A function of arrays alone, from one that also takes other things."""
    if not jax.tree.leaves(others):
        return function

    def complete(*arrays: Any) -> Any:
        def merged(array: Any, other: Any) -> Any:
            return other if array is None else array

        return function(*jax.tree.map(merged, arrays, others, is_leaf=lambda x: x is None))

    complete.__name__ = getattr(function, "__name__", "function")
    return complete


def is_array(x: Any) -> bool:
    """Whether something is an array, or a number that stands for one."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | float | int | complex | bool) or (
        hasattr(x, "shape") and hasattr(x, "dtype")
    )


def dtype_of(x: Any) -> Any:
    """The dtype that an array or a number has in programs of JAX; random keys have one of their own.

    >>> dtype_of(np.ones(1)), dtype_of(jax.random.key(0))
    (dtype('float32'), key<fry>)
    """
    found = x.dtype if hasattr(x, "dtype") else np.result_type(type(x))
    if jnp.issubdtype(found, jax.dtypes.extended):
        return found
    return jax.dtypes.canonicalize_dtype(found)
