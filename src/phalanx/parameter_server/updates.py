"""What each update of a variable means, in NumPy: the same as `px.Variable` does with JAX.

Updates change arrays in place where they can. JAX's rules hold: operands are converted to the
variable's dtype, integers wrap around, negative indices count from the end, rows that do not exist are
left out, and an index may occur several times.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from phalanx.errors import InvalidArgumentError
from phalanx.parameter_server.requests import Update, VariableDefinition
from phalanx.runtime.formatting import shown

__all__ = ["APPLY", "CODES", "METHODS", "apply_update", "checked"]

Array = np.ndarray[Any, Any]

APPLY = "apply"
"""The method that gives a gradient to an optimizer."""

_DENSE: dict[str, Any] = {"assign": None, "assign_add": np.add, "assign_sub": np.subtract}
_SPARSE: dict[str, Any] = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
}
METHODS = (*_DENSE, *_SPARSE, "scatter_div", "scatter_update", APPLY)
"""What an update can do, in an order that never changes: logs refer to it."""
CODES = {method: i for i, method in enumerate(METHODS)}
"""The number of each method."""

_BOOLS = {"assign_sub", "scatter_sub", "scatter_div", APPLY}  # which truth values cannot do


def checked(update: Update) -> Update:
    """An update whose arrays are as servers want them; an error if it makes no sense."""
    definition, method, values, indices, optimizer = update
    dtype, shape = dtype_named(definition.dtype), definition.shape
    if method not in CODES or (dtype.kind == "b" and method in _BOOLS):
        raise InvalidArgumentError(
            f"Variables of dtype {definition.dtype} on parameter servers have no such method. "
            f"Received: {shown(method)} for {shown(definition.name)}"
        )
    values = _as_array(values, dtype)
    if indices is None:
        if method not in _DENSE and method != APPLY:
            raise InvalidArgumentError(
                f"{method} needs indices. Received: none, for {shown(definition.name)}"
            )
        fits = values.shape == shape or (method != APPLY and _broadcasts(values.shape, shape))
    else:
        indices = _as_array(indices, np.dtype(np.int64), np.integer)
        fits = bool(shape) and indices.ndim == 1 and values.shape == indices.shape + shape[1:]
        fits = fits and method not in _DENSE
    if not fits:
        of_indices = "no indices" if indices is None else f"indices of shape {list(indices.shape)}"
        raise InvalidArgumentError(
            f"{method} of variable {shown(definition.name)}, whose shape is {list(shape)}, got arrays "
            f"that do not fit. Received: values of shape {list(values.shape)} and {of_indices}"
        )
    if values is update.values and indices is update.indices:
        return update
    return Update(definition, method, values, indices, optimizer)


@functools.lru_cache(maxsize=256)
def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of a name, as NumPy or JAX has it."""
    return np.dtype(name)


def _as_array(given: Any, dtype: np.dtype[Any], kind: type = np.generic) -> Array:
    array = np.asarray(given)
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    if array.dtype.kind == dtype.kind == "i" and array.itemsize <= dtype.itemsize:
        return array.astype(dtype, "C")
    if not np.issubdtype(array.dtype, kind) and array.size:
        raise InvalidArgumentError(f"Indices must be integers. Received: {array.dtype}")
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(array, dtype).reshape(array.shape)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def apply_update(method: str, old: Array, out: Array, values: Array, indices: Array | None) -> None:
    """Write into `out`, which may be `old` itself, what becomes of a value by an update.

    The update is one that `checked` has returned, and not "apply".
    """
    with np.errstate(all="ignore"):
        if indices is None:
            if method == "assign":
                np.copyto(out, values)
            else:
                _DENSE[method](old, values, out=out)
            return
        if out is not old:
            np.copyto(out, old)
        indices, values = existing(indices, values, len(out))
        if method == "scatter_update":
            out[indices] = values
        elif method == "scatter_div":
            _divide(out, indices, values)
        elif has_duplicates(indices):
            _SPARSE[method].at(out, indices, values)
        else:
            out[indices] = _SPARSE[method](out.take(indices, axis=0), values)


def apply_to_all(method: str, rows: Array, values: Array) -> None:
    """Change rows in place by a sparse update of each of them."""
    with np.errstate(all="ignore"):
        if method == "scatter_update":
            np.copyto(rows, values)
        elif method == "scatter_div":
            _divide(rows, np.arange(len(rows)), values)
        else:
            _SPARSE[method](rows, values, out=rows)


def has_duplicates(indices: Array) -> bool:
    """Whether an index occurs several times."""
    ordered = indices.copy()
    ordered.sort()
    return bool((ordered[1:] == ordered[:-1]).any())


def existing_rows(indices: Array, count: int) -> tuple[Array, Array | None]:
    """Indices from 0 on of rows that exist, and where those are; None for all of them."""
    exist = (_unsigned(indices) < count).nonzero()[0]
    if len(exist) == len(indices):
        return indices, None
    if indices.dtype.kind == "i" and np.minimum.reduce(indices) < 0:
        indices = np.where(indices < 0, indices + count, indices)
        exist = (_unsigned(indices) < count).nonzero()[0]
    return indices.take(exist), exist


def are_rows(indices: Array, count: int) -> bool:
    """Whether all indices are those of rows, from 0 on."""
    return not len(indices) or bool(np.maximum.reduce(_unsigned(indices), axis=None) < count)


def _unsigned(indices: Array) -> Array:
    """Integers of which negative ones have become larger than any index."""
    return indices.view(_UNSIGNED[indices.itemsize]) if indices.dtype.kind == "i" else indices


_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def existing(indices: Array, values: Array, count: int) -> tuple[Array, Array]:
    """The indices and the values of rows that exist."""
    indices, exist = existing_rows(indices, count)
    return indices, values if exist is None else values.take(exist, axis=0)


def _divide(out: Array, indices: Array, values: Array) -> None:
    """Divide rows by the product of their operands, as JAX does; integers by way of floats."""
    rows, where = np.unique(indices, return_inverse=True)
    products = np.ones((len(rows), *values.shape[1:]), out.dtype)
    np.multiply.at(products, where, values)
    if not np.issubdtype(out.dtype, np.integer):
        out[rows] = np.divide(out[rows], products)
        return
    real = jax.dtypes.canonicalize_dtype(np.float64)
    quotients = np.divide(out[rows].astype(real), products.astype(real))
    limits = np.iinfo(out.dtype)
    whole = np.trunc(np.nan_to_num(quotients, nan=0.0, posinf=np.inf, neginf=-np.inf))
    # The largest integer may have no float of its own, so it is put in afterwards.
    inside = np.where((whole > limits.min) & (whole < limits.max), whole, 0).astype(out.dtype)
    out[rows] = np.where(
        whole >= limits.max, limits.max, np.where(whole <= limits.min, limits.min, inside)
    ).astype(out.dtype)


def has_dtype(definition: VariableDefinition) -> np.dtype[Any]:
    """The dtype of a variable; an error if there is none of that name."""
    try:
        return np.dtype(definition.dtype)
    except TypeError:
        raise InvalidArgumentError(
            f"Parameter servers do not know the dtype of variable {shown(definition.name)}. "
            f"Received: {shown(definition.dtype)}"
        ) from None
