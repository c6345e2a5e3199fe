"""What reductions mean: their names, the dtypes that they have, and how they combine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core import reduction
from phalanx.core.errors import InvalidReduceOpError, InvalidTypeError, InvalidValueError
from phalanx.core.options import NamedEnum
from phalanx.core.showing import shown


class ReduceOp(NamedEnum):
    """How the arrays of all ranks are combined. Names in any case do as well, as do `px.ReduceOp`.

    Examples:
        >>> import phalanx as px
        >>> px.comm.ReduceOp("sum") is px.comm.ReduceOp.SUM
        True
    """

    SUM = "SUM"
    AVG = "AVG"
    MAX = "MAX"
    MIN = "MIN"
    PROD = "PROD"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"
    PREMUL_SUM = "PREMUL_SUM"

    MEAN = "AVG"
    PRODUCT = "PROD"


@dataclass(frozen=True)
class PremulSum:
    """A sum of arrays that are multiplied by a factor first; see `premul_sum`."""

    factor: complex | float | int


def premul_sum(factor: complex | float | int) -> PremulSum:
    """The reduction PREMUL_SUM: every rank's array is multiplied by `factor` before the sum.

    Args:
        factor: a number, the same on all ranks.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> px.comm.all_reduce(np.float32([1, 2]), px.comm.premul_sum(0.5))[0].tolist()
        [0.5, 1.0]
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float | complex):
        raise InvalidTypeError(f"The factor of premul_sum must be a number. Received: {shown(factor)}")
    return PremulSum(factor)


Reduction = ReduceOp | PremulSum

_KINDS: dict[ReduceOp, tuple[str, ...]] = {
    ReduceOp.SUM: ("bool", "integer", "floating", "complex"),
    ReduceOp.AVG: ("integer", "floating", "complex"),
    ReduceOp.MAX: ("bool", "integer", "floating"),
    ReduceOp.MIN: ("bool", "integer", "floating"),
    ReduceOp.PROD: ("bool", "integer", "floating", "complex"),
    ReduceOp.BAND: ("bool", "integer"),
    ReduceOp.BOR: ("bool", "integer"),
    ReduceOp.BXOR: ("bool", "integer"),
    ReduceOp.PREMUL_SUM: ("integer", "floating", "complex"),
}


def as_reduction(op: Any) -> Reduction:
    """The reduction that `op` is or names."""
    if isinstance(op, reduction.ReduceOp):
        op = op.name
    if isinstance(op, str):
        try:
            op = ReduceOp(op)
        except ValueError:
            names = ", ".join(o.name for o in ReduceOp)
            raise InvalidValueError(
                f"The reduction must be one of {names}. Received: {shown(op)}"
            ) from None
    if op is ReduceOp.PREMUL_SUM:
        raise InvalidValueError(
            "PREMUL_SUM needs a factor: write px.comm.premul_sum(factor). Received: PREMUL_SUM alone"
        )
    if not isinstance(op, ReduceOp | PremulSum):
        raise InvalidReduceOpError(
            "The reduction must be a px.comm.ReduceOp, its name, a px.ReduceOp or "
            f"px.comm.premul_sum(factor). Received: {shown(op)}"
        )
    return op


def name_of(op: Reduction) -> str:
    """The name of a reduction, for people and for comparing."""
    return f"PREMUL_SUM by {op.factor!r}" if isinstance(op, PremulSum) else op.name


def check_dtype(op: Reduction, dtype: Any) -> None:
    """Require a dtype that the reduction is defined for."""
    known = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
    kinds = _KINDS[known]
    if isinstance(op, PremulSum):
        needed = {int: kinds, float: kinds[1:], complex: kinds[2:]}
        kinds = needed[type(op.factor)]
    if kind_of(dtype) not in kinds:
        raise InvalidTypeError(
            f"{name_of(op)} is defined for arrays of these kinds: {', '.join(kinds)}. "
            f"Received: an array of dtype {jnp.dtype(dtype).name}"
        )


@functools.cache
def kind_of(dtype: Any) -> str:
    """Whether a dtype is bool, integer, floating or complex; '' for anything else."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return "bool"
    kinds = {
        "integer": jnp.integer,
        "floating": jnp.floating,
        "complex": jnp.complexfloating,
    }
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), "")


_BITWISE: dict[ReduceOp, Callable[..., jax.Array]] = {
    ReduceOp.BAND: jnp.bitwise_and,
    ReduceOp.BOR: jnp.bitwise_or,
    ReduceOp.BXOR: jnp.bitwise_xor,
}


def combine(op: Reduction, rows: jax.Array) -> jax.Array:
    """Reduce the first dimension of an array, which has one row per rank; the dtype stays."""
    dtype = rows.dtype
    if isinstance(op, PremulSum):
        return jnp.sum(premultiplied(op, rows), axis=0, dtype=dtype)
    if op in _BITWISE:
        result = rows[0]
        for i in range(1, rows.shape[0]):
            result = _BITWISE[op](result, rows[i])
        return result
    if dtype == jnp.bool_:
        return rows.any(0) if op in (ReduceOp.SUM, ReduceOp.MAX) else rows.all(0)
    if op is ReduceOp.PROD:
        return jnp.prod(rows, axis=0, dtype=dtype)
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        return rows.max(0) if op is ReduceOp.MAX else rows.min(0)
    total = jnp.sum(rows, axis=0, dtype=dtype)
    return total if op is ReduceOp.SUM else divided(total, rows.shape[0])


def divided(total: jax.Array, count: int) -> jax.Array:
    """A sum as a mean in the same dtype; integers are rounded down."""
    if jnp.issubdtype(total.dtype, jnp.integer):
        return total // jnp.asarray(count, total.dtype)
    return (total / count).astype(total.dtype)


def premultiplied(op: PremulSum, x: jax.Array) -> jax.Array:
    """An array times the factor of a reduction, in the same dtype."""
    return x * jnp.asarray(op.factor, x.dtype)
