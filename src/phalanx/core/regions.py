"""Regions of arrays: what a part of an array covers. Pure functions.

A part is a range of the flattened array (`Flat`), as the slices of sharded optimizers are, or a box
with a range for each dim (`Box`), as the shards of laid-out arrays are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Box", "Flat", "Region", "assemble", "cut", "region_of", "whole"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Flat:
    """Elements `start` to `stop` of the array in one dimension, row by row."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements there are."""
        return self.stop - self.start


@dataclass(frozen=True)
class Box:
    """Elements from start to stop along each dim."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """How many elements there are along each dim."""
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def size(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts it out of the array."""
        return tuple(slice(start, stop) for start, stop in self.ranges)


Region = Flat | Box


def whole(shape: tuple[int, ...]) -> Flat:
    """The region of all elements.

    >>> whole((2, 3))
    Flat(start=0, stop=6)
    """
    return Flat(0, math.prod(shape))


def region_of(ranges: Iterable[tuple[int, int]], shape: tuple[int, ...]) -> Region:
    """A box, as a range of the flattened array where it is one.

    >>> region_of([(1, 2), (0, 3)], (2, 3))
    Flat(start=3, stop=6)
    >>> region_of([(0, 2), (0, 1)], (2, 3))
    Box(ranges=((0, 2), (0, 1)))
    """
    box = Box(tuple(ranges))
    cut_dims = [i for i, (r, n) in enumerate(zip(box.ranges, shape, strict=True)) if r != (0, n)]
    if not cut_dims:
        return whole(shape)
    last = cut_dims[-1]
    if math.prod(box.shape[:last]) != 1:  # rows lie apart
        return box
    start = int(np.ravel_multi_index([r[0] for r in box.ranges], shape)) if box.size else 0
    return Flat(start, start + box.size)


def cut(array: Array, region: Region) -> Array:
    """A region of a whole array: in one dimension if it is flat."""
    return (
        array.reshape(-1)[region.start : region.stop]
        if isinstance(region, Flat)
        else array[region.slices]
    )


def assemble(
    shape: tuple[int, ...], dtype: Any, wanted: Region, parts: Iterable[tuple[Region, Any]]
) -> Array:
    """A region of an array that is there in parts.

    Args:
        shape: of the whole array.
        dtype: of the whole array.
        wanted: what is needed.
        parts: where each part lies, and a function that reads it, in one dimension. Parts outside of
            what is wanted are not read.

    Examples:
        >>> halves = [(Flat(0, 3), lambda: np.arange(3)), (Flat(3, 6), lambda: np.arange(3, 6))]
        >>> assemble((2, 3), int, Flat(2, 5), halves).tolist()
        [2, 3, 4]
        >>> assemble((2, 3), int, Box(((0, 2), (1, 2))), halves).tolist()
        [[1], [4]]
    """
    listed = list(parts)
    if isinstance(wanted, Flat) and all(isinstance(region, Flat) for region, _ in listed):
        return _assemble_flat(dtype, wanted, listed)
    if isinstance(wanted, Box) and all(isinstance(region, Box) for region, _ in listed):
        return _assemble_box(dtype, wanted, listed)
    everything = np.empty(shape, dtype)
    for region, read in listed:
        target = everything.reshape(-1) if isinstance(region, Flat) else everything
        place = slice(region.start, region.stop) if isinstance(region, Flat) else region.slices
        target[place] = read() if isinstance(region, Flat) else read().reshape(region.shape)
    return cut(everything, wanted)


def _assemble_flat(dtype: Any, wanted: Flat, parts: list[tuple[Any, Any]]) -> Array:
    inside = [p for p in parts if p[0].start < wanted.stop and wanted.start < p[0].stop]
    if len(inside) == 1 and inside[0][0] == wanted:
        return np.asarray(inside[0][1]())
    result = np.empty(wanted.size, dtype)
    for region, read in inside:
        start, stop = max(region.start, wanted.start), min(region.stop, wanted.stop)
        piece = read()[start - region.start : stop - region.start]
        result[start - wanted.start : stop - wanted.start] = piece
    return result


def _assemble_box(dtype: Any, wanted: Box, parts: list[tuple[Any, Any]]) -> Array:
    result = np.empty(wanted.shape, dtype)
    for region, read in parts:
        common = [
            (max(a[0], b[0]), min(a[1], b[1]))
            for a, b in zip(wanted.ranges, region.ranges, strict=True)
        ]
        if all(start < stop for start, stop in common):
            into = tuple(
                slice(s - w[0], e - w[0]) for (s, e), w in zip(common, wanted.ranges, strict=True)
            )
            of = tuple(
                slice(s - r[0], e - r[0]) for (s, e), r in zip(common, region.ranges, strict=True)
            )
            result[into] = read().reshape(region.shape)[of]
    return result
