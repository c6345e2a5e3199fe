"""Layouts: which dim of a tensor each mesh axis cuts.

A layout has one entry per mesh axis: the dim that it cuts, `NONE` if all devices along it hold the
same, or `PARTIAL` if each of them holds a term of a sum. Several axes that cut one dim do so in the
order of the mesh, the first one into the largest pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from phalanx.errors import InvalidValueError

NONE = -1
PARTIAL = -2

Layout = tuple[int, ...]
Shape = tuple[int, ...]


def cuts(layout: Layout, sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Into how many pieces a layout cuts each dim.

    >>> cuts((0, 1), (2, 4), rank=3)
    (2, 4, 1)
    """
    counts = [1] * rank
    for dim, size in zip(layout, sizes, strict=True):
        if dim >= 0:
            counts[dim] *= size
    return tuple(counts)


def pieces(layout: Layout, sizes: Sequence[int]) -> int:
    """The number of pieces that a layout cuts a tensor into."""
    return prod(size for dim, size in zip(layout, sizes, strict=True) if dim >= 0)


def fits(layout: Layout, shape: Shape, sizes: Sequence[int]) -> bool:
    """Whether all pieces have the same size."""
    return all(
        size % count == 0 for size, count in zip(shape, cuts(layout, sizes, len(shape)), strict=True)
    )


@lru_cache(maxsize=4096)
def layouts(shape: Shape, sizes: tuple[int, ...], partial: bool = False) -> tuple[Layout, ...]:
    """Every layout of a tensor, those that cut its first dims first.

    Args:
        shape: of the tensor.
        sizes: of the mesh axes.
        partial: whether to include the layouts of tensors that are still to be summed.
    """
    options = [*range(len(shape)), NONE, *([PARTIAL] if partial else [])]
    every = itertools.product(options, repeat=len(sizes))
    return tuple(layout for layout in every if fits(layout, shape, sizes))


def summed(layout: Layout) -> Layout:
    """The layout after an all-reduce along the axes that hold terms of a sum."""
    return tuple(NONE if dim == PARTIAL else dim for dim in layout)


@lru_cache(maxsize=65536)
def to_spec(layout: Layout, names: tuple[str, ...], rank: int) -> PartitionSpec:
    """The `PartitionSpec` of a layout, without entries for the last dims if they are whole.

    >>> tuple(to_spec((0, 1), ("x", "y"), rank=3))
    ('x', 'y')
    """
    dims: list[Any] = [None] * rank
    for dim in range(rank):
        axes = tuple(name for name, d in zip(names, layout, strict=True) if d == dim)
        if axes:
            dims[dim] = axes[0] if len(axes) == 1 else axes
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def from_spec(spec: Any, names: Sequence[str], shape: Shape, sizes: Sequence[int]) -> Layout:
    """The layout of a `PartitionSpec`, or of a tuple like one.

    Raises:
        InvalidValueError: if it names unknown axes, an axis twice, too many dims, axes of one dim in
            another order than the mesh, or cuts a dim into pieces of different sizes.
    """
    entries = _entries(spec)
    if len(entries) > len(shape):
        raise InvalidValueError(
            f"A tensor of shape {shape} has {len(shape)} dims. "
            f"Received: a layout of {len(entries)}, {spec}."
        )
    layout = [NONE] * len(names)
    for dim, axes in enumerate(entries):
        places = []
        for axis in axes:
            if axis not in names:
                raise InvalidValueError(
                    f"The mesh has the axes {tuple(names)}. Received: {axis!r} in {spec}."
                )
            places.append(list(names).index(axis))
            if layout[places[-1]] != NONE:
                raise InvalidValueError(
                    f"Each axis can cut one dim once. Received: {axis!r} twice in {spec}."
                )
            layout[places[-1]] = dim
        if places != sorted(places):
            raise InvalidValueError(
                f"Axes of one dim stand in the order of the mesh, {tuple(names)}. Received: {spec}."
            )
    found = tuple(layout)
    if not fits(found, shape, sizes):
        counts = cuts(found, sizes, len(shape))
        raise InvalidValueError(
            "Every dim must be divisible by the number of its pieces. "
            f"Received: shape {shape} cut into {counts} by {spec}."
        )
    return found


def _entries(spec: Any) -> list[tuple[str, ...]]:
    if not isinstance(spec, Iterable) or isinstance(spec, str):
        raise InvalidValueError(
            "A layout is a PartitionSpec, or None, an axis or a tuple of axes for each dim. "
            f"Received: {spec!r}."
        )
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
