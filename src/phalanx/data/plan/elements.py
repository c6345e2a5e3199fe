"""Elements: what iteration yields, and what is known of it beforehand.

An element is a pytree of leaves. A leaf is a NumPy array or scalar, a string, a `Ragged` value or a
dataset. As in TensorFlow lists are no structure: they become arrays (or `Ragged` values, if their rows
differ).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import tree_util
from numpy.typing import NDArray

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.plan.columns import stack
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

_SCALARS: dict[type, Any] = {bool: np.bool_, float: np.float32, complex: np.complex64}
_NARROW = {np.dtype(np.float64): np.float32, np.dtype(np.complex128): np.complex64}
_INT32, _INT64 = np.iinfo(np.int32), np.iinfo(np.int64)


@dataclass(frozen=True)
class RaggedSpec:
    """What is known of a `Ragged` value: its dtype, and its shape with None where rows differ."""

    shape: tuple[int | None, ...]
    dtype: Any


@dataclass(frozen=True)
class DatasetSpec:
    """What is known of an element that is a dataset itself: the spec of its elements."""

    element_spec: Any


class Ragged(Sequence[Any]):
    """Rows of different shapes that travel as one leaf, as `ragged_batch` makes them.

    Examples:
        >>> rows = Ragged([np.array([1, 2]), np.array([3])])
        >>> rows.shape, len(rows), rows[1]
        ((2, None), 2, array([3]))
        >>> rows.pad(0)
        array([[1, 2],
               [3, 0]])
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Sequence[Any]) -> None:
        leaves = [as_leaf(row) for row in rows]
        if any(isinstance(leaf, Ragged) for leaf in leaves):
            raise InvalidTypeError(
                f"The rows of a Ragged value must be arrays. Received: {shown(rows)}"
            )
        if len({(np.ndim(leaf), dtype_of(leaf)) for leaf in leaves}) > 1:
            raise InvalidValueError(
                "The rows of a Ragged value must have one dtype and one number of dimensions. "
                f"Received: {', '.join(sorted({str(spec_of(leaf)) for leaf in leaves}))}"
            )
        self._rows = tuple(leaves)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return Ragged(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows; float32 if there are none."""
        return dtype_of(self._rows[0]) if self._rows else np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The number of rows, and each dimension of a row: None where rows differ."""
        dims = zip(*(np.shape(row) for row in self._rows), strict=True)
        return len(self), *(d[0] if len(set(d)) == 1 else None for d in dims)

    def pad(self, value: Any = 0, shape: Sequence[int | None] | None = None) -> NDArray[Any]:
        """One array with every row filled up with `value`, to `shape` or to the longest row.

        Args:
            value: what to fill with.
            shape: the shape of a row; None and -1 stand for the longest.
        """
        return pad_rows(self._rows, shape, np.asarray(value, self.dtype))

    def to_list(self) -> list[Any]:
        """The rows as nested Python lists."""
        return [row.tolist() if isinstance(row, np.ndarray | np.generic) else row for row in self._rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        column = stack(self._rows) if self._rows else np.empty(0, self.dtype)
        if isinstance(column, list):
            raise InvalidValueError(
                f"Rows of different shapes are no array; call pad(). Received: shape {self.shape}"
            )
        return column if dtype is None else column.astype(dtype)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Ragged)
            and len(self) == len(other)
            and all(np.array_equal(a, b) for a, b in zip(self, other, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({self.to_list()!r})"


def pad_rows(rows: Sequence[Any], shape: Sequence[int | None] | None, value: Any) -> NDArray[Any]:
    """Rows of one rank in one array, filled up with `value` to `shape` or to the largest row."""
    rank = np.ndim(rows[0]) if rows else 0
    wanted = [None] * rank if shape is None else list(shape)
    if any(np.ndim(row) != len(wanted) for row in rows):
        raise InvalidValueError(
            f"Rows to be padded need as many dimensions as the shape {tuple(wanted)}. "
            f"Received: shapes {sorted({np.shape(row) for row in rows})}"
        )
    largest = [max(dims) for dims in zip(*(np.shape(row) for row in rows), strict=True)]
    final = [
        big if want is None or want < 0 else want
        for want, big in zip(wanted, largest or [0] * len(wanted), strict=True)
    ]
    if any(big > size for big, size in zip(largest, final, strict=False)):
        raise InvalidValueError(
            f"A row is larger than the shape to pad to, {tuple(final)}. "
            f"Received: a row of at least {tuple(largest)}"
        )
    dtype = dtype_of(rows[0]) if rows else np.asarray(value).dtype
    out = np.full((len(rows), *final), value, dtype)
    for i, row in enumerate(rows):
        out[i][tuple(slice(n) for n in np.shape(row))] = row
    return out


# -- leaves ---------------------------------------------------------------------------------------


class LeafBase:
    """Base of the classes that may be leaves besides arrays and strings: datasets."""

    _node: Any

    def _leaf_spec(self) -> Any:
        raise NotImplementedError


def dtype_of(leaf: Any) -> np.dtype[Any]:
    """The dtype of a leaf; strings are objects."""
    return np.dtype(object) if isinstance(leaf, str | bytes) else leaf.dtype


def spec_of(leaf: Any) -> Any:
    """The spec of a leaf."""
    if isinstance(leaf, Ragged):
        return RaggedSpec((len(leaf), *[None] * (len(leaf.shape) - 1)), leaf.dtype)
    if isinstance(leaf, LeafBase):
        return leaf._leaf_spec()
    return TensorSpec(np.shape(leaf), dtype_of(leaf))


def with_rows(spec: Any, rows: int | None) -> Any:
    """The spec of a batch with another number of rows."""
    return type(spec)((rows, *spec.shape[1:]), spec.dtype)


def as_leaf(x: Any) -> Any:
    """A leaf from what users give: arrays of any kind, Python numbers, strings, lists."""
    cls = type(x)
    if cls is np.ndarray:
        return _from_array(x)
    if isinstance(x, np.str_ | np.bytes_):
        return x.item()
    if isinstance(x, np.generic | str | bytes | Ragged | LeafBase):
        return x
    if cls is int and _INT64.min <= x <= _INT64.max:
        return np.int32(x) if _INT32.min <= x <= _INT32.max else np.int64(x)
    if cls in _SCALARS:
        return _SCALARS[cls](x)
    if isinstance(x, list | tuple):
        return _from_list(x)
    try:
        return _from_array(np.asarray(x))
    except Exception as error:
        raise InvalidTypeError(
            "Elements are made of arrays, numbers and strings. "
            f"Received: {shown(x)} of type {cls.__name__}"
        ) from error


def _from_array(array: NDArray[Any]) -> Any:
    if array.dtype.kind in "US":
        array = array.astype(object)
    elif array.dtype.kind == "O" and not all(isinstance(v, str | bytes) for v in array.flat):
        raise InvalidTypeError(
            "Arrays of Python objects can hold strings only. "
            f"Received: objects of types {sorted({type(v).__name__ for v in array.flat})}"
        )
    return array if array.ndim else array[()]


def _from_list(values: Sequence[Any]) -> Any:
    first: Any = values
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, str | bytes):
        array = np.array(values, object)
        if any(isinstance(v, list | tuple) for v in array.flat):
            return _ragged(values)
        return _from_array(array)
    if isinstance(first, jax.Array):
        values = [np.asarray(v) if isinstance(v, jax.Array) else v for v in values]
    try:
        array = np.asarray(values)
    except ValueError:
        return _ragged(values)
    if type(first) is int and array.dtype == np.int64:
        fits = _INT32.min <= array.min() and array.max() <= _INT32.max
        return array.astype(np.int32) if fits else array
    if type(first) in (float, int, complex) and array.dtype in _NARROW:
        return array.astype(_NARROW[array.dtype])
    if isinstance(first, list | tuple):  # nothing inside
        return array.astype(np.float32)
    return _from_array(array)


def _ragged(values: Sequence[Any]) -> Ragged:
    """A ragged value from nested lists, whose rows get a common dtype."""
    rows = [as_leaf(value) for value in values]
    filled = [row for row in rows if np.size(row)]
    dtypes = {dtype_of(row) for row in filled}
    if len(dtypes) > 1 and all(isinstance(value, list | tuple) for value in values):
        common = np.int64 if all(dtype.kind == "i" for dtype in dtypes) else np.float32
        if all(dtype in (np.int32, np.int64, np.float32) for dtype in dtypes):
            rows = [row.astype(common) for row in rows]
    elif filled:  # an empty list has no dtype and no dimensions of its own
        like = filled[0]
        empty = np.empty((0,) * np.ndim(like), dtype_of(like))
        rows = [
            empty if isinstance(value, list | tuple) and not len(value) else row
            for value, row in zip(values, rows, strict=True)
        ]
    return Ragged(rows)


# -- structure ------------------------------------------------------------------------------------


def flatten(nest: Any) -> tuple[list[Any], Any]:
    """The leaves of what a user gave, as leaves of elements, and the structure around them."""
    found, structure = tree_util.tree_flatten(nest, is_leaf=lambda x: isinstance(x, list))
    return [as_leaf(x) for x in found], structure


def merge_specs(a: Any, b: Any, what: str) -> Any:
    """The spec of elements that come from either of two plans; shapes that differ become None."""
    structures: list[Any] = [tree_util.tree_structure(spec) for spec in (a, b)]
    if structures[0] != structures[1]:
        raise InvalidTypeError(f"{what}: elements must have one structure. Received: {a} and {b}")

    def merge(x: Any, y: Any) -> Any:
        if type(x) is not type(y):
            raise InvalidTypeError(f"{what}: leaves must be of one kind. Received: {x} and {y}")
        if isinstance(x, DatasetSpec):
            return DatasetSpec(merge_specs(x.element_spec, y.element_spec, what))
        if np.dtype(x.dtype) != np.dtype(y.dtype) or len(x.shape) != len(y.shape):
            raise InvalidTypeError(
                f"{what}: leaves must have one dtype and number of dimensions. Received: {x} and {y}"
            )
        shape = tuple(m if m == n else None for m, n in zip(x.shape, y.shape, strict=True))
        return type(x)(shape, x.dtype)

    return tree_util.tree_map(merge, a, b)
