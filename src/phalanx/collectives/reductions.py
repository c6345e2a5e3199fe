"""What reductions mean: the dtypes that they have, and how they combine arrays of JAX and NumPy.

NumPy arrays are combined one after another in the order of ranks, so that all ranks have the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.reduction import ReduceOp
from phalanx.errors import InvalidReduceOpError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


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
Array = np.ndarray[Any, Any]

_KINDS: dict[ReduceOp, tuple[str, ...]] = {
    ReduceOp.SUM: ("bool", "integer", "floating", "complex"),
    ReduceOp.MEAN: ("integer", "floating", "complex"),
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
            "The reduction must be a px.comm.ReduceOp, its name or "
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


# -- arrays of NumPy ----------------------------------------------------------------------------------

_ANY_KIND: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_BOOL: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.PROD: np.logical_and,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.MIN: np.logical_and,
}


def reduce_into(op: Reduction, rows: Sequence[Array], out: Array) -> None:
    """Combine arrays of one shape and dtype into `out`, which may be one of them.

    Floating point numbers of less than 32 bits are combined in 32 and rounded once.

    >>> out = np.zeros(2, np.float16)
    >>> reduce_into(ReduceOp.SUM, [np.float16([2048, 1]), np.float16([1, 1]), np.float16([1, 1])], out)
    >>> out.tolist()
    [2050.0, 3.0]
    """
    wide = _wide(out.dtype)
    if wide is not None:
        total = rows[0].astype(wide)
        _accumulate(op, (row.astype(wide) for row in rows), total, out.dtype, len(rows))
        out[...] = total.astype(out.dtype)
        return
    # Where `out` is a row that is still to be read, the total grows elsewhere.
    is_row = any(np.may_share_memory(out, row) for row in rows[2:])
    total = np.empty_like(out) if is_row else out
    _accumulate(op, rows, total, out.dtype, len(rows))
    if is_row:
        out[...] = total


def _accumulate(op: Reduction, rows: Any, total: Array, dtype: Any, count: int) -> None:
    found = iter(rows)
    first, second = next(found), next(found)
    if isinstance(op, PremulSum):
        factor = np.asarray(op.factor, total.dtype)
        scaled = first * factor
        np.add(scaled, second * factor, out=total)
        for row in found:
            np.add(total, row * factor, out=total)
        return
    ufunc = _ufunc(op, total.dtype)
    ufunc(first, second, out=total)
    for row in found:
        ufunc(total, row, out=total)
    if op is not ReduceOp.MEAN:
        return
    if kind_of(dtype) == "integer":
        whole = total if total.dtype == dtype else total.astype(dtype).astype(total.dtype)
        np.floor_divide(whole, np.asarray(count, total.dtype), out=total)
        return
    for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):
        np.divide(part, np.asarray(count, part.dtype), out=part)


def _ufunc(op: ReduceOp, dtype: Any) -> np.ufunc:
    return _BOOL.get(op, _ANY_KIND[op]) if dtype == np.bool_ else _ANY_KIND[op]


def ufunc_of(op: Reduction, dtype: Any) -> np.ufunc | None:
    """What combines two arrays at once, as `reduce_into` would; None if more has to be done.

    >>> ufunc_of(ReduceOp.SUM, np.dtype(np.float32)), ufunc_of(ReduceOp.SUM, np.dtype(np.float16))
    (<ufunc 'add'>, None)
    """
    if isinstance(op, PremulSum) or op is ReduceOp.MEAN or _wide(dtype) is not None:
        return None
    return _ufunc(op, dtype)


def _wide(dtype: Any) -> Any:
    """The dtype in which to compute instead, or None."""
    kind = kind_of(dtype)
    if kind == "floating" and dtype.itemsize < 4:
        return np.float32
    if kind == "integer" and dtype.kind not in "iu":  # two or four bits, in a byte each
        return np.uint8 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int8
    return None
