"""Arrays with room for values of several shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from phalanx.core.padding import CannotJoin


@dataclass(frozen=True)
class Slot:
    """A value of a joint program: an array, of which each program uses a part in its own shape.

    Args:
        array: the array.
        avals: what the value is in each program: anything with a shape and a dtype.
    """

    array: Any
    avals: tuple[Any, ...]

    @property
    def is_even(self) -> bool:
        """Whether the value has the same shape in all programs."""
        return all(kind(a) == kind(self.avals[0]) for a in self.avals)


def kind(aval: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of a value. Weak types do not matter once a program has been traced."""
    return tuple(aval.shape), aval.dtype


def room_for(avals: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """An array that has room for each: of the largest size in each dimension, or else flat."""
    shapes = [a.shape for a in avals]
    if len({len(s) for s in shapes}) == 1:
        shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    else:
        shape = (max(math.prod(s) for s in shapes),)
    return jax.ShapeDtypeStruct(shape, avals[0].dtype)


def empty(room: Any) -> Any:
    """An array with nothing in it."""
    return jnp.zeros(room.shape, room.dtype)


def fill(x: Any, room: Any) -> Any:
    """An array as the beginning of one that has room for it."""
    if _is_key(room.dtype):
        return _on_data(fill, x, room)
    x = lax.convert_element_type(x, room.dtype)
    if x.shape == room.shape:
        return x
    if x.ndim != len(room.shape):
        x = x.reshape(-1)
    widths = [(0, m - n, 0) for n, m in zip(x.shape, room.shape, strict=True)]
    return lax.pad(x, np.zeros((), room.dtype), widths)


def cut(x: Any, aval: Any) -> Any:
    """The part at the beginning of an array that has the shape of `aval`: the opposite of `fill`."""
    if x.shape == aval.shape:
        return x
    if _is_key(aval.dtype):
        return _on_data(cut, x, aval)
    if x.ndim == len(aval.shape):
        return lax.slice(x, (0,) * x.ndim, aval.shape)
    return lax.slice(x, (0,), (math.prod(aval.shape),)).reshape(aval.shape)


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _on_data(change: Any, x: Any, aval: Any) -> Any:
    """The same for random keys, which are views of integers."""
    if x.shape == aval.shape:
        return x
    if x.ndim != len(aval.shape):
        raise CannotJoin("they have random keys of different ranks")
    data = jax.random.key_data(x)
    whole = jax.ShapeDtypeStruct((*aval.shape, *data.shape[x.ndim :]), data.dtype)
    return jax.random.wrap_key_data(change(data, whole), impl=jax.random.key_impl(x))
