"""Reductions: what SUM and MEAN mean over replicas, batch axes and partial batches.

The rules are pure functions. Communication is in `phalanx.collectives`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.options import NamedEnum, VariableAggregation
from phalanx.errors import (
    InvalidArgumentError,
    InvalidOperandError,
    InvalidReduceOpError,
    InvalidTypeError,
    InvalidValueError,
)
from phalanx.runtime.formatting import shown


class ReduceOp(NamedEnum):
    """How the values of all replicas, or the arrays of all ranks, are combined.

    Strategies take SUM and MEAN; the functions of `px.comm` take all of them. Everything that takes a
    `ReduceOp` also takes its name in any case.

    Examples:
        >>> import phalanx as px
        >>> px.ReduceOp("sum") is px.ReduceOp.SUM
        True
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"
    PROD = "PROD"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"
    PREMUL_SUM = "PREMUL_SUM"

    AVG = "MEAN"
    PRODUCT = "PROD"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """The reduction that a variable aggregation stands for; only SUM and MEAN do."""
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise InvalidValueError(
            "Only VariableAggregation.SUM and MEAN are reductions over replicas. "
            f"Received: {shown(aggregation)}"
        )


def as_reduce_op(op: Any) -> ReduceOp:
    """The `ReduceOp` of a strategy that `op` is or names."""
    found = ReduceOp.__members__.get(op.upper()) if isinstance(op, str) else op
    if found in (ReduceOp.SUM, ReduceOp.MEAN):
        assert isinstance(found, ReduceOp)
        return found
    if isinstance(op, str | ReduceOp):
        raise InvalidValueError(
            f"{op!r} is not a valid ReduceOp of a strategy; write px.ReduceOp.SUM or px.ReduceOp.MEAN. "
            f"The functions of px.comm know others. Received: {shown(op)}"
        )
    raise InvalidReduceOpError(
        "The reduction must be px.ReduceOp.SUM, px.ReduceOp.MEAN or their names. "
        f"Received: {shown(op)} of type {type(op).__name__}"
    )


class Axes(NamedTuple):
    """The dimensions to reduce within each replica, as the user gave them, checked for type."""

    dims: tuple[int, ...]

    def normalized(self, ndim: int) -> tuple[int, ...]:
        """The dimensions counted from the front of an array of rank `ndim`."""
        out = []
        for dim in self.dims:
            if not -ndim <= dim < ndim:
                raise InvalidValueError(
                    f"axis {dim} is out of range for values of rank {ndim}. "
                    f"Received: axis={self.dims if len(self.dims) > 1 else self.dims[0]}"
                )
            out.append(dim % ndim)
        if len(set(out)) != len(out):
            raise InvalidValueError(f"axis names a dimension twice. Received: axis={self.dims}")
        return tuple(out)


def as_axes(axis: Any) -> Axes | None:
    """Check the ``axis`` argument of `Strategy.reduce`: None, an int, or a tuple or list of ints."""
    if axis is None:
        return None
    given = axis if isinstance(axis, tuple | list) else (axis,)
    try:
        dims = tuple(operator.index(a) for a in given)
    except TypeError:
        dims = None
    if dims is None or any(isinstance(a, bool | np.bool_) for a in given):
        raise InvalidTypeError(
            "axis must be None, an int, or a tuple of ints: the dimensions to reduce within each "
            f"replica's value. Received: axis={shown(axis)}"
        )
    return Axes(dims)


def as_operand(x: Any) -> jax.Array:
    """Turn a replica's contribution into an array that can be reduced.

    Python and NumPy numbers are accepted. Strings, None and other objects are not, nor are bools:
    a sum of truth values has no agreed meaning.
    """
    if not isinstance(x, jax.Array):
        try:
            host = np.asarray(x)
        except (TypeError, ValueError):
            host = np.asarray(None)
        if host.dtype.kind in "USO":
            raise InvalidOperandError(
                "Only arrays and numbers can be reduced over replicas. "
                f"Received: {shown(x)} of type {type(x).__name__}"
            )
        x = jnp.asarray(x)
    if x.dtype == jnp.bool_:
        raise InvalidArgumentError(
            "Booleans cannot be summed or averaged. Cast them to a number type first, as in "
            f"x.astype('int32'). Received: an array of dtype {x.dtype} and shape {x.shape}"
        )
    return x


def check_alike(values: Sequence[jax.Array], what: str) -> None:
    """Require one shape and one dtype over all replicas."""
    kinds = [(v.shape, v.dtype) for v in values]
    if any(kind != kinds[0] for kind in kinds):
        listing = ", ".join(f"{v.dtype}{list(v.shape)} on replica {i}" for i, v in enumerate(values))
        raise InvalidArgumentError(
            f"{what} needs the same shape and dtype on every replica. If the batch is uneven, "
            f"reduce over it as well: strategy.reduce(op, value, axis=0). Received: {listing}"
        )


def mean_dtype(dtype: Any) -> Any:
    """The dtype of a mean: floating and complex types stay, integers become JAX's float."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.dtype(dtype) if inexact else jnp.result_type(float)


def divide(total: jax.Array, count: Any) -> jax.Array:
    """A sum divided by a count, in the mean's dtype; 0/0 is nan."""
    dtype = mean_dtype(total.dtype)
    return total.astype(dtype) / jnp.asarray(count, dtype)


def local_sum(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum of one replica's value over `axes`, in the value's own dtype."""
    return jnp.sum(x, axis=axes.normalized(x.ndim), dtype=x.dtype)


def local_count(shape: tuple[int, ...], axes: Axes) -> int:
    """How many elements of one replica's value enter each element of the result."""
    count = 1
    for dim in axes.normalized(len(shape)):
        count *= shape[dim]
    return count


def check_gather_axis(axis: Any, ndims: Sequence[int], what: str) -> int:
    """Check the ``axis`` of a gather over values of the given ranks; returns it from the front."""
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise InvalidTypeError(f"{what} needs an integer axis. Received: axis={shown(axis)}")
    axis = operator.index(axis)
    if len(set(ndims)) > 1:
        raise InvalidArgumentError(
            f"{what} needs values of one rank on all replicas. Received: ranks {list(ndims)}"
        )
    ndim = ndims[0]
    if ndim == 0:
        raise InvalidArgumentError(
            f"{what} joins values along an axis, and scalars have none. Reshape them to shape (1,) "
            "first. Received: values of rank 0"
        )
    if not -ndim <= axis < ndim:
        raise InvalidArgumentError(
            f"{what}: axis {axis} is out of range for values of rank {ndim}. Received: axis={axis}"
        )
    return axis % ndim


def check_gather_shapes(shapes: Sequence[tuple[int, ...]], axis: int, what: str) -> None:
    """Require that shapes agree except along `axis`."""
    rest = [shape[:axis] + shape[axis + 1 :] for shape in shapes]
    if any(r != rest[0] for r in rest):
        raise InvalidArgumentError(
            f"{what} needs equal sizes in every dimension but axis {axis}. "
            f"Received: shapes {[list(s) for s in shapes]}"
        )
