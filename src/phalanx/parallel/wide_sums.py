"""Sums of 16-bit numbers that are communicated in 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from phalanx.parallel.applying import Interpreter
from phalanx.parallel.reading import CALLS, REMAT
from phalanx.runtime import compat

__all__ = [
    "is_narrow",
    "marked_gradient",
    "with_wide_gradients",
    "with_wide_marked_gradients",
    "with_wide_results",
    "with_wide_sums",
]

_SUMS = {"psum", "psum_invariant", "reduce_scatter", "psum_scatter"}
_PRODUCTS = {"dot_general", "conv_general_dilated"}
_FORMS = {
    *("convert_element_type", "transpose", "reshape", "squeeze", "expand_dims", "copy", "copy_p"),
    *("neg", "mul", "div", "add_any", "sharding_constraint", "optimization_barrier"),
    *("slice", "split", "unstack", "stack", "concatenate", "pad"),
    *("dynamic_slice", "dynamic_update_slice"),
}
"""What may stand between a sum and the gradient that it is."""


_GRADIENT = "phalanx gradient"


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


def with_wide_gradients(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns a value and gradients, and sums gradients of 16 bits in 32.

    XLA adds up the gradients of several devices where they are made: in the product of matrices, or the
    sum, that gives them. So these are made in 32 bits, and then rounded; in loops, in each round.

    >>> w, x = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((4, 2), jnp.bfloat16)
    >>> gradient = jax.value_and_grad(lambda w: jnp.sum(x @ w))
    >>> str(jax.make_jaxpr(with_wide_gradients(gradient))(w)).count("preferred_element_type=float32")
    1
    """

    def wide(*args: Any) -> Any:
        closed, results = compat.jaxpr_and_result(gradient, *args)
        first = len(jax.tree.leaves(results[0]))
        chosen: set[int] = set()
        _choose(closed.jaxpr, closed.jaxpr.outvars[first:], chosen)
        leaves = jax.tree.leaves(args)
        if chosen:
            outs = _Wide({}, None, {}, chosen).run(closed.jaxpr, closed.consts, leaves, ())
        else:
            outs = compat.eval_jaxpr(closed, leaves)
        return jax.tree.unflatten(jax.tree.structure(results), outs)

    return wide


def with_wide_results(pull: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns gradients, with those of 16 bits summed in 32.

    >>> x = jnp.ones((4, 2), jnp.bfloat16)
    >>> pull = jax.vjp(lambda w: x @ w, jnp.ones((2, 3), jnp.bfloat16))[1]
    >>> ones = jnp.ones((4, 3), jnp.bfloat16)
    >>> str(jax.make_jaxpr(with_wide_results(pull))(ones)).count("preferred_element_type=float32")
    1
    """
    wide = with_wide_gradients(lambda *given: ((), pull(*given)))
    return lambda *given: wide(*given)[1]


def marked_gradient(x: Any) -> Any:
    """A gradient that `with_wide_marked_gradients` finds in the program."""
    return checkpoint_name(x, _GRADIENT) if is_narrow(x) else x


def with_wide_marked_gradients(closed: Any) -> Callable[..., list[Any]]:
    """The function of a jaxpr, which sums the gradients in it that are marked in 32 bits.

    >>> x = jnp.ones((4, 2), jnp.bfloat16)
    >>> closed = jax.make_jaxpr(lambda w: marked_gradient(jax.grad(lambda w: jnp.sum(x @ w))(w)))(x.T)
    >>> text = str(jax.make_jaxpr(with_wide_marked_gradients(closed))(x.T))
    >>> text.count("preferred_element_type=float32")
    1
    """
    chosen: set[int] = set()
    _choose_marked(closed.jaxpr, chosen)

    def wide(*args: Any) -> list[Any]:
        if not chosen:
            return compat.eval_jaxpr(closed, args)
        return _Wide({}, None, {}, chosen).run(closed.jaxpr, closed.consts, args, ())

    return wide


def _choose_marked(jaxpr: Any, chosen: set[int]) -> None:
    marked = [e for e in jaxpr.eqns if e.primitive.name == "name" and e.params["name"] == _GRADIENT]
    _choose(jaxpr, [atom for eqn in marked for atom in eqn.invars], chosen)
    for eqn in jaxpr.eqns:
        for inner in compat.sub_jaxprs(eqn):
            _choose_marked(inner, chosen)


def _choose(jaxpr: Any, wanted: Sequence[Any], chosen: set[int]) -> set[Any]:
    """Add the equations that make some results; returns what these depend on in the same way."""
    needed = {var for var in wanted if not compat.is_literal(var)}
    for eqn in reversed(jaxpr.eqns):
        hit = [var in needed for var in eqn.outvars]
        name = eqn.primitive.name
        if not any(hit):
            continue
        if name in _FORMS:
            needed |= {var for var in eqn.invars if not compat.is_literal(var)}
        elif name in (*_PRODUCTS, "reduce_sum") and is_narrow(eqn.outvars[0].aval):
            chosen.add(id(eqn))
        elif name in REMAT:
            needed |= _choose_inside(eqn.params["jaxpr"], hit, eqn.invars, chosen)
        elif name in CALLS and not name.startswith("custom"):
            needed |= _choose_inside(eqn.params[CALLS[name]], hit, eqn.invars, chosen)
        elif name == "scan":
            consts, carries = compat.scan_counts(eqn)
            inner = eqn.params["jaxpr"]
            needed |= _choose_in_rounds(inner, hit, eqn.invars, (consts, carries), chosen)
        elif name == "while":
            tests, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            inner, inputs = eqn.params["body_jaxpr"], eqn.invars[tests:]
            needed |= _choose_in_rounds(inner, hit, inputs, (consts, len(hit)), chosen)
        elif name == "cond":
            for inner in eqn.params["branches"]:
                needed |= _choose_inside(inner, hit, eqn.invars[1:], chosen)
    return needed


def _choose_inside(
    inner: Any, hit: Sequence[bool], inputs: Sequence[Any], chosen: set[int]
) -> set[Any]:
    """The same for what is inside an equation.

    Args:
        inner: its jaxpr.
        hit: which of its results are wanted.
        inputs: what the equation gives it.
        chosen: to add to.
    """
    inner = getattr(inner, "jaxpr", inner)
    outs = [var for var, is_hit in zip(inner.outvars, hit, strict=True) if is_hit]
    below = _choose(inner, outs, chosen)
    pairs = zip(inputs, inner.invars, strict=True)
    return {var for var, own in pairs if own in below and not compat.is_literal(var)}


def _choose_in_rounds(
    inner: Any,
    hit: Sequence[bool],
    inputs: Sequence[Any],
    counts: tuple[int, int],
    chosen: set[int],
) -> set[Any]:
    """The same for a loop: what a round begins with is what the round before it ends with.

    Args:
        inner: the jaxpr of a round.
        hit: which results of the loop are wanted.
        inputs: what it begins with.
        counts: how many constants a round has, and how many values it carries.
        chosen: to add to.
    """
    consts, carries = counts
    own = list(getattr(inner, "jaxpr", inner).invars)
    wanted = list(hit)
    while True:
        found = _choose_inside(inner, wanted, own, chosen)
        more = [wanted[i] or own[consts + i] in found for i in range(carries)]
        if more == wanted[:carries]:
            return {
                var
                for var, mine in zip(inputs, own, strict=True)
                if mine in found and not compat.is_literal(var)
            }
        wanted[:carries] = more


class _Wide(Interpreter):
    """Runs a program with sums in 32 bits: all that may go over devices, or those that are chosen."""

    def __init__(
        self, operators: Any, mesh: Any, keys: Any, chosen: Collection[int] | None = None
    ) -> None:
        super().__init__(operators, mesh, keys)
        self._chosen = chosen

    def evaluate(self, jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of one equation, computed in 32 bits if it sums over devices."""
        name = eqn.primitive.name
        narrow = [is_narrow(var.aval) for var in eqn.outvars if hasattr(var.aval, "dtype")]
        if self._chosen is not None and id(eqn) not in self._chosen:
            return super().evaluate(jaxpr, eqn, operands)
        if (name in _SUMS or (self._chosen and name == "reduce_sum")) and any(narrow):
            widened = [x.astype(jnp.float32) if is_narrow(x) else x for x in operands]
            outs = eqn.primitive.bind(*widened, **eqn.params)
            listed = outs if eqn.primitive.multiple_results else [outs]
            return [x.astype(var.aval.dtype) for x, var in zip(listed, eqn.outvars, strict=True)]
        if name in _PRODUCTS and any(narrow):
            params = {**eqn.params, "preferred_element_type": jnp.dtype(jnp.float32)}
            return [eqn.primitive.bind(*operands, **params).astype(eqn.outvars[0].aval.dtype)]
        return super().evaluate(jaxpr, eqn, operands)
