"""Operators that move, split, merge, repeat or cut dims and leave the elements as they are."""

from __future__ import annotations

from math import gcd, prod

from phalanx.parallel.layout import NONE, Shape
from phalanx.parallel.operators.base import Dims, Equation, Keeps, Operator, free_dims


def _moving(
    eqn: Equation, loops: tuple[int, ...], operands: tuple[Dims, ...], results: tuple[Dims, ...]
) -> Operator:
    # XLA repeats, counts and renames dims within other operators.
    free = eqn.name in ("broadcast_in_dim", "iota", "reshape", "squeeze")
    return Operator(
        eqn.name, "dim map", loops, operands, results, eqn.operands, eqn.results, fused=True, free=free
    )


def transpose(eqn: Equation) -> Operator:
    """Every dim may be cut."""
    loops, dims = free_dims(eqn.operands[0].shape)
    return _moving(eqn, loops, (dims,), (tuple(dims[i] for i in eqn.params["permutation"]),))


def broadcast_in_dim(eqn: Equation) -> Operator:
    """Every dim may be cut; new ones cost nothing, and a sum in the gradient."""
    loops, dims = free_dims(eqn.results[0].shape)
    out = eqn.results[0].shape
    where = eqn.params["broadcast_dimensions"]
    operand = eqn.operands[0].shape
    before = tuple(dims[i] if size == out[i] else NONE for i, size in zip(where, operand, strict=True))
    rest = tuple(() for _ in eqn.operands[1:])
    return _moving(eqn, loops, (before, *rest), (dims,))


def squeeze(eqn: Equation) -> Operator:
    """Every dim that stays may be cut."""
    loops, dims = free_dims(eqn.operands[0].shape)
    gone = {d % len(dims) for d in eqn.params["dimensions"]}
    return _moving(eqn, loops, (dims,), (tuple(d for i, d in enumerate(dims) if i not in gone),))


def reshape(eqn: Equation) -> Operator | None:
    """The first dim of those that are merged or split may be cut, if whole pieces stay together."""
    if eqn.params.get("dimensions") is not None:
        return None
    before, after = eqn.operands[0].shape, eqn.results[0].shape
    loops: list[int] = []
    a, b = [NONE] * len(before), [NONE] * len(after)
    for ones, others in groups(before, after):
        if ones and others:
            a[ones[0]] = b[others[0]] = len(loops)
            loops.append(gcd(before[ones[0]], after[others[0]]))
    rest = tuple(() for _ in eqn.operands[1:])
    return _moving(eqn, tuple(loops), (tuple(a), *rest), (tuple(b),))


def groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """The dims of two shapes that hold the same elements, dims of one element left out.

    >>> groups((4, 6, 5), (24, 1, 5))
    [([0, 1], [0]), ([2], [2])]
    """
    if 0 in before:
        return []
    left = [i for i, size in enumerate(before) if size > 1]
    right = [i for i, size in enumerate(after) if size > 1]
    found = []
    while left or right:
        ones, others = [left.pop(0)], [right.pop(0)]
        while (a := prod(before[i] for i in ones)) != (b := prod(after[i] for i in others)):
            if a < b:
                ones.append(left.pop(0))
            else:
                others.append(right.pop(0))
        found.append((ones, others))
    return found


def _untouched(eqn: Equation, touched: set[int]) -> Operator:
    """Operands and results have the same dims; those that the operator touches are not cut."""
    shape = eqn.results[0].shape
    loops, dims = free_dims(tuple(1 if i in touched else size for i, size in enumerate(shape)))
    operands = tuple(
        dims if len(s.shape) == len(shape) else (NONE,) * len(s.shape) for s in eqn.operands
    )
    return _moving(eqn, loops, operands, (dims,) * len(eqn.results))


def slice_(eqn: Equation) -> Operator:
    """Dims that stay whole may be cut."""
    before, after = eqn.operands[0].shape, eqn.results[0].shape
    return _untouched(eqn, {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b})


def pad(eqn: Equation) -> Operator:
    """Dims that are not padded may be cut."""
    return _untouched(
        eqn, {i for i, p in enumerate(eqn.params["padding_config"]) if tuple(p) != (0, 0, 0)}
    )


def concatenate(eqn: Equation) -> Operator:
    """All dims but the joined one may be cut."""
    return _untouched(eqn, {eqn.params["dimension"]})


def split(eqn: Equation) -> Operator:
    """All dims but the split one may be cut."""
    return _untouched(eqn, {eqn.params["axis"]})


def rev(eqn: Equation) -> Operator:
    """Dims that are not reversed may be cut."""
    return _untouched(eqn, set(eqn.params["dimensions"]))


def dynamic_update_slice(eqn: Equation) -> Operator:
    """Dims that are replaced as a whole may be cut."""
    whole, part = eqn.operands[0].shape, eqn.operands[1].shape
    return _untouched(eqn, {i for i, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b})


def iota(eqn: Equation) -> Operator:
    """Each device makes its own piece."""
    loops, dims = free_dims(eqn.results[0].shape)
    return _moving(eqn, loops, tuple(() for _ in eqn.operands), (dims,))


def random_bits(eqn: Equation) -> Operator:
    """Each device draws its own piece; JAX's generator gives the same numbers however it is cut."""
    keys = len(eqn.operands[0].shape)
    loops, dims = free_dims(eqn.results[0].shape)
    return _moving(eqn, loops, (dims[:keys],), (dims,))


def leading(eqn: Equation) -> Operator:
    """The dims that all operands and results begin with may be cut: matrices in a batch, or keys."""
    shapes = [s.shape for s in (*eqn.operands, *eqn.results) if s.shape]
    whole = _whole_dims(eqn)
    count = 0
    while all(len(s) > count + whole for s in shapes) and len({s[count] for s in shapes}) == 1:
        count += 1
    loops, dims = free_dims(shapes[0][:count] if shapes else ())

    def of(shape: Shape) -> Dims:
        return (*dims, *[NONE] * (len(shape) - count)) if shape else ()

    return Operator(
        eqn.name,
        "batched",
        loops,
        tuple(of(s.shape) for s in eqn.operands),
        tuple(of(s.shape) for s in eqn.results),
        eqn.operands,
        eqn.results,
        keeps=Keeps.OPERANDS,
    )


def _whole_dims(eqn: Equation) -> int:
    """How many of the last dims belong together."""
    if eqn.name == "fft":
        return len(eqn.params["fft_lengths"])
    return 0 if eqn.name.startswith("random") else 1 if eqn.name == "tridiagonal_solve" else 2
