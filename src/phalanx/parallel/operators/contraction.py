"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from phalanx.parallel.layout import NONE
from phalanx.parallel.operators.base import Equation, Keeps, Operator


def dot_general(eqn: Equation) -> Operator:
    """Batch dims, the other dims of both operands and the contracted dims are loops."""
    (left_k, right_k), (left_b, right_b) = eqn.params["dimension_numbers"]
    left, right = eqn.operands[0].shape, eqn.operands[1].shape
    loops: list[int] = []
    a, b = [NONE] * len(left), [NONE] * len(right)
    out: list[int] = []

    def loop(size: int) -> int:
        loops.append(size)
        return len(loops) - 1

    for i, j in zip(left_b, right_b, strict=True):
        a[i] = b[j] = loop(left[i])
        out.append(a[i])
    for i, size in enumerate(left):
        if i not in left_k and i not in left_b:
            a[i] = loop(size)
            out.append(a[i])
    for j, size in enumerate(right):
        if j not in right_k and j not in right_b:
            b[j] = loop(size)
            out.append(b[j])
    for i, j in zip(left_k, right_k, strict=True):
        a[i] = b[j] = loop(left[i])
    return Operator(
        eqn.name,
        "contraction",
        tuple(loops),
        (tuple(a), tuple(b)),
        (tuple(out),),
        eqn.operands,
        eqn.results,
        flops=2.0 * prod(loops),
        keeps=Keeps.OTHERS,
    )


def convolution(eqn: Equation) -> Operator | None:
    """The batch, the features that go in and those that come out are loops; a window is never cut.

    Features in groups are cut between groups.
    """
    numbers = eqn.params["dimension_numbers"]
    groups = eqn.params["feature_group_count"]
    left, right, out = (s.shape for s in (*eqn.operands, *eqn.results))
    (batch, feature), (out_feature, in_feature) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    if eqn.params["batch_group_count"] != 1:
        return None  # which stands in gradients only
    a, b, c = [NONE] * len(left), [NONE] * len(right), [NONE] * len(out)
    a[batch] = c[numbers.out_spec[0]] = 0
    b[out_feature] = c[numbers.out_spec[1]] = 1
    if groups == 1:
        loops: tuple[int, ...] = (left[batch], right[out_feature], left[feature])
        a[feature] = b[in_feature] = 2
    else:  # each group goes in and comes out by itself
        loops = (left[batch], groups)
        a[feature] = 1
    window = prod(size for dim, size in enumerate(right) if dim != out_feature)
    return Operator(
        eqn.name,
        "convolution",
        loops,
        (tuple(a), tuple(b)),
        (tuple(c),),
        eqn.operands,
        eqn.results,
        flops=2.0 * prod(out) * window,
        keeps=Keeps.OTHERS,
    )


def is_grouped(params: Mapping[str, Any], features: int, out_features: int) -> bool:
    """Whether a convolution has groups of several features, which XLA would gather to cut it."""
    groups = params["feature_group_count"]
    return bool(groups > 1 and not groups == features == out_features)
