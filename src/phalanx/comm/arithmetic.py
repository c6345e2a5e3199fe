"""Reductions of NumPy arrays, one after another in the order of ranks: the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.comm.reductions import PremulSum, ReduceOp, Reduction, kind_of

Array = np.ndarray[Any, Any]

_ANY_KIND: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
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
    ufunc = _BOOL.get(op, _ANY_KIND[op]) if total.dtype == np.bool_ else _ANY_KIND[op]
    ufunc(first, second, out=total)
    for row in found:
        ufunc(total, row, out=total)
    if op is not ReduceOp.AVG:
        return
    if kind_of(dtype) == "integer":
        whole = total if total.dtype == dtype else total.astype(dtype).astype(total.dtype)
        np.floor_divide(whole, np.asarray(count, total.dtype), out=total)
        return
    for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):
        np.divide(part, np.asarray(count, part.dtype), out=part)


def _wide(dtype: Any) -> Any:
    """The dtype in which to compute instead, or None."""
    kind = kind_of(dtype)
    if kind == "floating" and dtype.itemsize < 4:
        return np.float32
    if kind == "integer" and dtype.kind not in "iu":  # two or four bits, in a byte each
        return np.uint8 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int8
    return None
