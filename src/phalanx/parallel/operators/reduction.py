"""Reductions, and operators that go along a dim: running sums, sorting, windows."""

from __future__ import annotations

from phalanx.parallel.layout import NONE
from phalanx.parallel.operators.base import Equation, Keeps, Operator, free_dims

_KEEPS = {"reduce_max": Keeps.OPERANDS, "reduce_min": Keeps.OPERANDS, "reduce_prod": Keeps.OPERANDS}


def reduce(eqn: Equation) -> Operator:
    """Every dim may be cut. Cutting a reduced one leaves each device with a part of the result."""
    axes = set(eqn.params["axes"])
    loops, dims = free_dims(eqn.operands[0].shape)
    out = tuple(d for i, d in enumerate(dims) if i not in axes)
    keeps = _KEEPS.get(eqn.name, Keeps.NOTHING)
    return Operator(
        eqn.name,
        "reduction",
        loops,
        (dims,),
        (out,),
        eqn.operands,
        eqn.results,
        fused=True,
        keeps=keeps,
        counts=eqn.name in ("reduce_max", "reduce_min"),
    )


def _whole(eqn: Equation, along: set[int], drop: bool = False) -> Operator:
    """Dims that the operator goes along stay whole."""
    shape = eqn.operands[0].shape
    loops, dims = free_dims(tuple(1 if i in along else size for i, size in enumerate(shape)))
    out = tuple(d for i, d in enumerate(dims) if not (drop and i in along))
    operands = tuple(dims if s.shape else () for s in eqn.operands)
    return Operator(
        eqn.name,
        "reduction",
        loops,
        operands,
        (out,) * len(eqn.results),
        eqn.operands,
        eqn.results,
        keeps=Keeps.OPERANDS,
    )


def arg_reduce(eqn: Equation) -> Operator:
    """The reduced dims stay whole."""
    return _whole(eqn, set(eqn.params["axes"]), drop=True)


def cumulative(eqn: Equation) -> Operator:
    """The dim of the running result stays whole."""
    return _whole(eqn, {eqn.params["axis"]})


def sort(eqn: Equation) -> Operator:
    """The sorted dim stays whole."""
    return _whole(eqn, {eqn.params["dimension"]})


def top_k(eqn: Equation) -> Operator:
    """The dim of which the largest elements are taken stays whole."""
    return _whole(eqn, {eqn.params.get("axis", len(eqn.operands[0].shape) - 1)})


def window(eqn: Equation) -> Operator | None:
    """Dims with a window of one element may be cut."""
    before, after = eqn.operands[0].shape, eqn.results[0].shape
    extents = eqn.params.get("window_dimensions")
    if extents is None or len(eqn.results) > 1:
        return None
    sizes = [1 if w != 1 or a != b else a for a, b, w in zip(before, after, extents, strict=True)]
    loops, dims = free_dims(tuple(sizes))
    operands = tuple(dims if s.shape == before else (NONE,) * len(s.shape) for s in eqn.operands)
    return Operator(
        eqn.name,
        "reduction",
        loops,
        operands,
        (dims,),
        eqn.operands,
        eqn.results,
        keeps=Keeps.OPERANDS,
    )
