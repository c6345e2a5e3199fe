"""Operators that compute each element by itself, and copies that stand for a tensor in the search."""

from __future__ import annotations

from phalanx.parallel.layout import NONE
from phalanx.parallel.operators.base import Dims, Equation, Keeps, Operator, Spec, free_dims


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LINEAR = _names(
    "abs add add_any and bitcast_convert_type ceil clamp clz "
    "convert_element_type copy copy_p eq floor ge gt imag "
    "is_finite le lt max min ne neg nextafter not or population_count pvary "
    "random_fold_in real reduce_precision round select_n sharding_constraint shift_left "
    "shift_right_arithmetic shift_right_logical sign stop_gradient sub threefry2x32 to_edtype "
    "from_edtype xor mesh_cast layout_constraint"
)
"""Their gradient needs no tensor, or a mask that is small beside them."""

KEEP_OPERANDS = _names(
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e conj cos digamma erf erf_inv "
    "erfc igamma igammac integer_pow lgamma log log1p polygamma random_gamma_grad "
    "regularized_incomplete_beta rem rng_uniform sin sinh square zeta complex"
)
KEEP_OTHERS = frozenset({"mul", "div", "pow"})
KEEP_RESULT = _names("cbrt cosh exp exp2 expm1 logistic rsqrt sqrt tan tanh")
NAMES = LINEAR | KEEP_OPERANDS | KEEP_OTHERS | KEEP_RESULT


def elementwise(eqn: Equation) -> Operator | None:
    """Any dims may be cut, in the same way for all operands; dims of one element are repeated."""
    out = eqn.results[0].shape
    loops, dims = free_dims(out)
    if any(spec.shape != out for spec in eqn.results):
        return None
    operands: list[Dims] = []
    for spec in eqn.operands:
        if not spec.shape:
            operands.append(())
        elif len(spec.shape) == len(out):
            pairs = zip(spec.shape, out, dims, strict=True)
            operands.append(tuple(loop if size == whole else NONE for size, whole, loop in pairs))
        else:
            return None
    return Operator(
        eqn.name,
        "elementwise",
        loops,
        tuple(operands),
        (dims,) * len(eqn.results),
        eqn.operands,
        eqn.results,
        fused=True,
        keeps=_keeps(eqn.name),
    )


def _keeps(name: str) -> Keeps:
    if name in KEEP_RESULT:
        return Keeps.RESULT
    if name in KEEP_OTHERS:
        return Keeps.OTHERS
    return Keeps.OPERANDS if name in KEEP_OPERANDS else Keeps.NOTHING


def standing_for(name: str, spec: Spec, sources: int) -> Operator:
    """An operator that takes no time and stands for a tensor, in any layout.

    Args:
        name: what to call it.
        spec: the tensor.
        sources: the number of operands, which all become this tensor.
    """
    loops, dims = free_dims(spec.shape)
    return Operator(
        name, name, loops, (dims,) * sources, (dims,), (spec,) * sources, (spec,), fused=True, free=True
    )
