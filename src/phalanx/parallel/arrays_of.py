"""The arrays of nests of arguments and results, and what else is in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.errors import InvalidValueError

__all__ = ["OtherResults", "argument_numbers", "dtype_of", "is_array", "merged", "with_others"]


def with_others(function: Callable[..., Any], others: Any) -> Callable[..., Any]:
    """A function of arrays alone, from one that also takes other things."""
    if not jax.tree.leaves(others):
        return function

    @functools.wraps(function)  # whose arguments have names
    def complete(*arrays: Any) -> Any:
        return function(*merged(arrays, others))

    complete.__name__ = getattr(function, "__name__", "function")
    return complete


def merged(arrays: Any, others: Any) -> Any:
    """A nest of arrays, and everything else where it has None.

    >>> merged({"x": 2, "name": None}, {"x": None, "name": "layer"})
    {'name': 'layer', 'x': 2}
    """

    def chosen(array: Any, other: Any) -> Any:
        return other if array is None else array

    return jax.tree.map(chosen, arrays, others, is_leaf=lambda x: x is None)


class OtherResults:
    """What a function returns besides arrays, such as the activation of a layer that it returns.

    >>> others = OtherResults()
    >>> shape = jax.eval_shape(others.left_out(lambda x: {"x": x, "name": "layer"}), 1.0)
    >>> others.put_back({"x": 2, "name": None})
    {'name': 'layer', 'x': 2}
    """

    def __init__(self) -> None:
        self._found: tuple[Any, list[Any]] | None = None

    def left_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which returns None in place of what is no array."""

        @functools.wraps(function)  # whose arguments have names
        def arrays(*args: Any) -> Any:
            leaves, structure = jax.tree.flatten(function(*args))
            others = [None if is_array(x) else x for x in leaves]
            self._found = (structure, others) if any(x is not None for x in others) else None
            kept = [x if other is None else None for x, other in zip(leaves, others, strict=True)]
            return jax.tree.unflatten(structure, kept)

        arrays.__name__ = getattr(function, "__name__", "function")
        return arrays

    def put_back(self, results: Any) -> Any:
        """Results of the function that was traced last, with everything in them."""
        if self._found is None:
            return results
        structure, others = self._found
        arrays = iter(jax.tree.leaves(results))
        return jax.tree.unflatten(structure, [next(arrays) if x is None else x for x in others])


def is_array(x: Any) -> bool:
    """Whether something is an array, or a number that stands for one."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | float | int | complex | bool) or (
        hasattr(x, "shape") and hasattr(x, "dtype")
    )


def argument_numbers(name: str, given: Any, count: int) -> tuple[int, ...]:
    """The numbers of some of the arguments of a function, counted from the first one.

    >>> argument_numbers("parameters", -1, 3), argument_numbers("parameters", (0, 1), 3)
    ((2,), (0, 1))
    """
    listed = tuple(given) if isinstance(given, Sequence) else (given,)
    for number in listed:
        if type(number) is not int or not -count <= number < count:
            raise InvalidValueError(
                f"The function has {count} arguments, and `{name}` are numbers of some of them. "
                f"Received: {name}={given!r}."
            )
    return tuple(number % count for number in listed)


def dtype_of(x: Any) -> Any:
    """The dtype that an array or a number has in programs of JAX; random keys have one of their own.

    >>> dtype_of(np.ones(1)), dtype_of(jax.random.key(0))
    (dtype('float32'), key<fry>)
    """
    found = x.dtype if hasattr(x, "dtype") else np.result_type(type(x))
    if jnp.issubdtype(found, jax.dtypes.extended):
        return found
    return jax.dtypes.canonicalize_dtype(found)
