"""How many shards a variable is split into, and along which dimension.

A partitioner is a pure function of shape and dtype: it answers with one number of shards per
dimension, of which only the chosen axis can differ from one. A parameter server strategy asks it
once for every variable that is created.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.runtime.formatting import shown

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]

# numpy's kinds of text: bytes, str, objects (as in arrays of Python strings) and StringDType.
_STRING_KINDS = frozenset("SUOT")


class _AxisRangeError(InvalidValueError, IndexError):
    """The axis is outside the shape; tf.distribute raises one or the other, by partitioner."""


class _UnknownDimError(InvalidTypeError, ValueError):
    """A dimension has no size yet; tf.distribute raises one or the other, by partitioner."""


class Partitioner:
    """Base class of the rules that split a variable into shards.

    A subclass defines ``__call__(shape, dtype, axis=0)`` and returns a list with one entry per
    dimension: the number of shards along `axis`, and 1 everywhere else. `axis` counts from the
    end if it is negative.

    >>> class HalvesPartitioner(Partitioner):
    ...     def __call__(self, shape, dtype, axis=0):
    ...         return [2 if dim == axis else 1 for dim in range(len(shape))]
    >>> HalvesPartitioner()((10, 3), "float32")
    [2, 1]
    """

    def __call__(self, shape: Iterable[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of shards per dimension of an array of this shape and dtype."""
        raise UnsupportedError(
            "This partitioner has no rule. Define `__call__(self, shape, dtype, axis=0)` in your "
            "subclass, or use FixedShardsPartitioner, MinSizePartitioner or MaxSizePartitioner. "
            f"Received: {type(self).__name__}"
        )


@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """Splits into a fixed number of shards, or one per row if there are fewer rows than that.

    `num_shards` is at least 1. A dimension of size 0 gives 0 shards: there is nothing to store.
    The dtype does not matter.

    >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
    [2, 1]
    >>> FixedShardsPartitioner(num_shards=4)((10, 3), "float32", axis=1)
    [1, 3]
    """

    num_shards: int

    def __post_init__(self) -> None:
        _store_count(self, "num_shards", minimum=1)

    def __call__(self, shape: Iterable[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns ``min(num_shards, size of the axis)`` on the axis."""
        dims = _dims(shape)
        dim = _dim_index(dims, axis)
        return _on_one_dim(dims, dim, min(self.num_shards, _known_size(dims[dim], dims)))


@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """Splits into as many shards of about `min_shard_bytes` as there are, up to `max_shards`.

    The number of shards is the size of the variable divided by `min_shard_bytes`, rounded up, so
    shards can come out a little smaller than the minimum. It is at least 1, and at most the
    number of rows and `max_shards`. An element of a string array counts as `bytes_per_string`.

    >>> partitioner = MinSizePartitioner(min_shard_bytes=24, max_shards=8)
    >>> partitioner((10, 3), "float32")  # 120 bytes
    [5, 1]
    >>> MinSizePartitioner(min_shard_bytes=24, max_shards=4)((10, 3), "float32")
    [4, 1]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _store_count(self, "min_shard_bytes", minimum=1)
        _store_count(self, "max_shards", minimum=1)
        _store_count(self, "bytes_per_string", minimum=1)

    def __call__(self, shape: Iterable[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the size divided by `min_shard_bytes`, within the limits, on the axis."""
        dims = _dims(shape)
        dim = _dim_index(dims, axis)
        sizes = [_known_size(size, dims) for size in dims]
        total_bytes = math.prod(sizes) * _element_bytes(dtype, self.bytes_per_string)
        wanted = _ceil_div(total_bytes, self.min_shard_bytes)
        return _on_one_dim(dims, dim, max(1, min(wanted, self.max_shards, sizes[dim])))


@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """Splits into the fewest shards that are no larger than `max_shard_bytes` each.

    A shard has at least one row, so it is larger than `max_shard_bytes` where a single row is.
    `max_shards` limits the number of shards and wins over the size; None and 0 mean no limit. An
    empty variable has one shard. An element of a string array counts as `bytes_per_string`.

    >>> MaxSizePartitioner(max_shard_bytes=24)((10, 3), "float32")  # rows of 12 bytes
    [5, 1]
    >>> MaxSizePartitioner(max_shard_bytes=24, max_shards=2)((10, 3), "float32")
    [2, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _store_count(self, "max_shard_bytes", minimum=1)
        if self.max_shards is not None:
            _store_count(self, "max_shards", minimum=0)
        _store_count(self, "bytes_per_string", minimum=1)

    def __call__(self, shape: Iterable[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the fewest shards within `max_shard_bytes`, at most `max_shards`, on the axis."""
        dims = _dims(shape)
        dim = _dim_index(dims, axis)
        sizes = [_known_size(size, dims) for size in dims]
        others = math.prod(size for index, size in enumerate(sizes) if index != dim)
        row_bytes = others * _element_bytes(dtype, self.bytes_per_string)
        if row_bytes == 0 or sizes[dim] == 0:
            return _on_one_dim(dims, dim, 1)
        rows_per_shard = max(1, self.max_shard_bytes // row_bytes)
        shards = _ceil_div(sizes[dim], rows_per_shard)
        return _on_one_dim(dims, dim, min(shards, self.max_shards or shards))


def _on_one_dim(dims: tuple[Any, ...], dim: int, shards: int) -> list[int]:
    return [shards if index == dim else 1 for index in range(len(dims))]


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _store_count(partitioner: Partitioner, name: str, minimum: int) -> None:
    """Checks a constructor argument and stores it as an int (byte sizes are often floats: 1e6)."""
    value = getattr(partitioner, name)
    try:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        count = operator.index(whole)
    except TypeError as error:
        raise InvalidTypeError(
            f"`{name}` of {type(partitioner).__name__} must be a whole number. Received: {shown(value)}"
        ) from error
    if count < minimum:
        raise InvalidValueError(
            f"`{name}` of {type(partitioner).__name__} must be {minimum} or more. Received: {count}"
        )
    # The dataclasses are frozen for their users; this is still their construction.
    object.__setattr__(partitioner, name, count)


def _dims(shape: Iterable[int]) -> tuple[Any, ...]:
    try:
        return tuple(shape)
    except (TypeError, ValueError) as error:  # ValueError: a shape object of unknown rank
        raise _UnknownDimError(
            "`shape` must list the sizes of the dimensions, for example (10, 3). "
            f"Received: {shown(shape)}"
        ) from error


def _dim_index(dims: tuple[Any, ...], axis: int) -> int:
    try:
        index = operator.index(axis)
    except TypeError as error:
        raise InvalidTypeError(
            f"`axis` must be an int, for example axis=0. Received: {shown(axis)}"
        ) from error
    rank = len(dims)
    if not -rank <= index < rank:
        hint = f"Use an axis from {-rank} to {rank - 1}" if rank else "A scalar cannot be split"
        raise _AxisRangeError(
            f"`axis` is outside the shape. {hint}. Received: axis={axis}, shape={dims}"
        )
    return index % rank


def _known_size(size: Any, dims: tuple[Any, ...]) -> int:
    try:
        known = operator.index(size)
    except TypeError as error:
        raise _UnknownDimError(
            "Every dimension that is split or measured must have a known size. Give the full "
            f"shape of the variable, for example (10, 3). Received: shape={dims}"
        ) from error
    if known < 0:
        raise InvalidValueError(f"Sizes in `shape` must be 0 or more. Received: shape={dims}")
    return known


def _element_bytes(dtype: Any, bytes_per_string: int) -> int:
    # "string" is TensorFlow's name for a dtype that numpy calls "str".
    if isinstance(dtype, str) and dtype == "string":
        return bytes_per_string
    try:
        if dtype is None:
            raise TypeError("numpy reads None as float64, which is never meant here")
        # The bare Python types mean JAX's default widths (float is float32), not numpy's.
        # Compared by identity: np.dtype("float64") == float, but is meant to be 8 bytes wide.
        is_python_type = any(dtype is python_type for python_type in (float, int, complex))
        known = jnp.result_type(dtype) if is_python_type else np.dtype(dtype)
    except TypeError as error:
        raise InvalidTypeError(
            f"`dtype` must be a dtype, for example jnp.float32 or 'float32'. Received: {shown(dtype)}"
        ) from error
    return bytes_per_string if known.kind in _STRING_KINDS else known.itemsize
