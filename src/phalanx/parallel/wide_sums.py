"""Sums of 16-bit numbers that are communicated in 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.parallel.applying import Interpreter
from phalanx.runtime import compat

__all__ = ["is_narrow", "with_wide_sums"]

_SUMS = {"psum", "psum_invariant", "reduce_scatter", "psum_scatter"}
_PRODUCTS = {"dot_general", "conv_general_dilated"}


def is_narrow(x: Any) -> bool:
    """Whether an array has floating-point numbers of less than 32 bits."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def with_wide_sums(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose sums over devices are made in 32 bits, and then rounded.

    These are sums that it asks for, and products of matrices: XLA adds up the products of several
    devices in the dtype in which they come.

    >>> x = jnp.ones((2, 2), jnp.bfloat16)
    >>> print(jax.make_jaxpr(with_wide_sums(jnp.dot))(x, x).eqns[0].outvars[0].aval)
    float32[2,2]
    """

    def wide(*args: Any) -> Any:
        closed, results = compat.jaxpr_and_result(function, *args)
        outs = _Wide({}, None, {}).run(closed.jaxpr, closed.consts, jax.tree.leaves(args), ())
        return jax.tree.unflatten(jax.tree.structure(results), outs)

    wide.__name__ = getattr(function, "__name__", "function")
    return wide


class _Wide(Interpreter):
    def evaluate(self, jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of one equation, computed in 32 bits if it sums over devices."""
        name = eqn.primitive.name
        narrow = [is_narrow(var.aval) for var in eqn.outvars if hasattr(var.aval, "dtype")]
        if name in _SUMS and any(narrow):
            widened = [x.astype(jnp.float32) if is_narrow(x) else x for x in operands]
            outs = eqn.primitive.bind(*widened, **eqn.params)
            listed = outs if eqn.primitive.multiple_results else [outs]
            return [x.astype(var.aval.dtype) for x, var in zip(listed, eqn.outvars, strict=True)]
        if name in _PRODUCTS and any(narrow):
            params = {**eqn.params, "preferred_element_type": jnp.dtype(jnp.float32)}
            return [eqn.primitive.bind(*operands, **params).astype(eqn.outvars[0].aval.dtype)]
        return super().evaluate(jaxpr, eqn, operands)
