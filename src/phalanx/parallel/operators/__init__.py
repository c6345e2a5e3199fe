"""Operator families: how each primitive of JAX may be cut.

`describe` gives the `Operator` of an equation. What no rule knows (calls of foreign code, callbacks,
kernels) is opaque: its operands and results are whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from phalanx.parallel.layout import NONE
from phalanx.parallel.operators import contraction, dims, elementwise, indexing, reduction
from phalanx.parallel.operators.base import Equation, Operator

__all__ = ["OPAQUE", "RULES", "describe", "opaque"]

OPAQUE = "opaque"

RULES: Mapping[str, Callable[[Equation], Operator | None]] = MappingProxyType(
    {
        **dict.fromkeys(elementwise.NAMES, elementwise.elementwise),
        "dot_general": contraction.dot_general,
        "conv_general_dilated": contraction.convolution,
        "transpose": dims.transpose,
        "broadcast_in_dim": dims.broadcast_in_dim,
        "squeeze": dims.squeeze,
        "reshape": dims.reshape,
        "slice": dims.slice_,
        "pad": dims.pad,
        "concatenate": dims.concatenate,
        "split": dims.split,
        "rev": dims.rev,
        "dynamic_update_slice": dims.dynamic_update_slice,
        "iota": dims.iota,
        "random_bits": dims.random_bits,
        **dict.fromkeys(
            (
                *(
                    "cholesky",
                    "eigh",
                    "fft",
                    "lu",
                    "qr",
                    "svd",
                    "triangular_solve",
                    "tridiagonal_solve",
                ),
                *("random_wrap", "random_unwrap", "random_seed", "random_split"),
            ),
            dims.leading,
        ),
        **dict.fromkeys(
            (
                "reduce_sum",
                "reduce_max",
                "reduce_min",
                "reduce_prod",
                "reduce_and",
                "reduce_or",
                "reduce_xor",
            ),
            reduction.reduce,
        ),
        **dict.fromkeys(("argmax", "argmin"), reduction.arg_reduce),
        **dict.fromkeys(
            ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), reduction.cumulative
        ),
        "sort": reduction.sort,
        "top_k": reduction.top_k,
        **dict.fromkeys(
            ("reduce_window_max", "reduce_window_min", "reduce_window_sum", "reduce_window"),
            reduction.window,
        ),
        "gather": indexing.gather,
        **dict.fromkeys(
            ("scatter", "scatter_add", "scatter-add", "scatter_mul", "scatter_min", "scatter_max"),
            indexing.scatter,
        ),
        "dynamic_slice": indexing.dynamic_slice,
    }
)
"""The rule of each primitive. A rule may return None for forms that it does not know."""


def describe(eqn: Equation) -> Operator:
    """The operator of an equation, and the loops that may be shared out."""
    rule = RULES.get(eqn.name)
    return (rule(eqn) if rule else None) or opaque(eqn)


def opaque(eqn: Equation) -> Operator:
    """An operator that cannot be cut."""

    def whole(specs: tuple[object, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple((NONE,) * len(spec.shape) for spec in specs)  # type: ignore[attr-defined]

    return Operator(
        eqn.name, OPAQUE, (), whole(eqn.operands), whole(eqn.results), eqn.operands, eqn.results
    )
