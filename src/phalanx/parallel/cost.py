"""What things cost, in seconds: collectives on rings, changes of layout, computation.

A change of layout is the cheapest sequence of moves of one axis: gathering it, cutting along it (which
is free), moving the cut to another dim, summing. Axes cut one dim in the order of the mesh, so moves of
an axis that is not the last one on its dim need a permutation besides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from phalanx.parallel.hardware import Hardware
from phalanx.parallel.layout import NONE, PARTIAL, Layout, Shape, fits, layouts, pieces, summed
from phalanx.parallel.mesh import DeviceMesh, Link

Table = npt.NDArray[np.float64]

QUANTUM = 2.0**-44
"""The unit of time: costs are multiples of it, so that float64 adds them exactly in any order."""

GATHERED = 0.5
"""What a byte that is gathered costs in shared memory, relative to one that is summed."""

TIE_PRICE = QUANTUM / 4096
"""Seconds per byte that are added so that the smallest of equally fast plans wins."""


def quantised(seconds: Table) -> Table:
    """The nearest multiples of the unit of time."""
    return np.round(seconds / QUANTUM) * QUANTUM


@dataclass(frozen=True)
class CollectiveOperation:
    """One collective operation.

    Args:
        kind: its name in XLA: ``all-gather``, ``all-reduce``, ``reduce-scatter``, ``all-to-all`` or
            ``collective-permute``.
        axes: the numbers of the mesh axes that it runs along.
        sent: the bytes that each device sends, by the ring algorithm.
        seconds: how long it takes.
    """

    kind: str
    axes: tuple[int, ...]
    sent: float
    seconds: float


def all_gather(link: Link, size: int, held: float) -> tuple[float, float]:
    """Bytes sent and seconds for each of `size` devices to get the `held` bytes of all others."""
    if not link.ring:
        return (size - 1) * held, link.alpha + link.beta * size * held * GATHERED
    return (size - 1) * held, (size - 1) * (link.alpha + link.beta * held)


def reduce_scatter(link: Link, size: int, held: float) -> tuple[float, float]:
    """Bytes sent and seconds to sum `held` bytes over `size` devices and keep a piece on each."""
    part = held / size
    if not link.ring:
        return (size - 1) * part, link.alpha + link.beta * held
    return (size - 1) * part, (size - 1) * (link.alpha + link.beta * part)


def all_to_all(link: Link, size: int, held: float) -> tuple[float, float]:
    """Bytes sent and seconds for each of `size` devices to send a piece of its bytes to each other."""
    return reduce_scatter(link, size, held)


def permute(links: Sequence[Link], held: float) -> tuple[float, float]:
    """Bytes sent and seconds for each device to send what it holds to one other."""
    return held, max(link.alpha + link.beta * held for link in links)


def all_reduce(links: Sequence[Link], sizes: Sequence[int], held: float) -> tuple[float, float]:
    """Bytes sent and seconds to sum `held` bytes over one or several axes.

    Over several axes, devices reduce-scatter along the fastest axis first, so that slower axes move
    less.
    """
    sent = seconds = 0.0
    if not any(link.ring for link in links):
        slowest = max(links, key=lambda link: (link.beta, link.alpha))
        size = prod(sizes)
        return 2 * (size - 1) * held / size, slowest.alpha + slowest.beta * held
    for link, size in sorted(zip(links, sizes, strict=True), key=lambda pair: (pair[0].beta, pair[1])):
        part = held / size
        sent += 2 * (size - 1) * part
        ring = 2 * (size - 1) * (link.alpha + link.beta * part)
        seconds += ring if link.ring else link.alpha + link.beta * held
        held = part
    return sent, seconds


def moves(
    layout: Layout, shape: Shape, held: float, mesh: DeviceMesh, hardware: Hardware
) -> Iterator[tuple[Layout, list[CollectiveOperation]]]:
    """The layouts one move away, and the collectives that lead there.

    Args:
        layout: where to begin.
        shape: of the whole tensor.
        held: the bytes that each device holds.
        mesh: the devices.
        hardware: what they can do.
    """
    for axis, dim in enumerate(layout):
        for to in (*range(len(shape)), NONE):
            other = (*layout[:axis], to, *layout[axis + 1 :])
            if to == dim or not fits(other, shape, mesh.sizes):
                continue
            found = [] if mesh.sizes[axis] == 1 else _move(layout, other, axis, held, mesh, hardware)
            if found is not None:
                yield other, found
    yield from _joint_sums(layout, held, mesh)
    yield from _exchanges(layout, shape, held, mesh, hardware)


def _move(
    layout: Layout, other: Layout, axis: int, held: float, mesh: DeviceMesh, hardware: Hardware
) -> list[CollectiveOperation] | None:
    """The collectives that move one axis; None if the hardware has none that do."""
    size, link = mesh.sizes[axis], mesh.links[axis]
    dim, to = layout[axis], other[axis]

    def ordered(kept: Layout, each: float) -> list[CollectiveOperation]:
        return [] if _is_last(kept, axis) else [_permutation(kept, kept[axis], each, mesh)]

    if dim == NONE:
        return ordered(other, held / size)
    if dim == PARTIAL and (to == NONE or not hardware.reduce_scatter):
        summed_up = CollectiveOperation("all-reduce", (axis,), *all_reduce([link], [size], held))
        return [summed_up, *([] if to == NONE else ordered(other, held / size))]
    if dim == PARTIAL:
        scattered = CollectiveOperation("reduce-scatter", (axis,), *reduce_scatter(link, size, held))
        return [scattered, *ordered(other, held / size)]
    if to == NONE:
        gathered = CollectiveOperation("all-gather", (axis,), *all_gather(link, size, held))
        return [*ordered(layout, held), gathered]
    if not hardware.all_to_all:
        return None
    moved = CollectiveOperation("all-to-all", (axis,), *all_to_all(link, size, held))
    return [*ordered(layout, held), moved, *ordered(other, held)]


def _is_last(layout: Layout, axis: int) -> bool:
    """Whether an axis cuts its dim into the smallest pieces."""
    return layout[axis] not in layout[axis + 1 :]


def _permutation(layout: Layout, dim: int, held: float, mesh: DeviceMesh) -> CollectiveOperation:
    axes = tuple(axis for axis, d in enumerate(layout) if d == dim and mesh.sizes[axis] > 1)
    links = [mesh.links[axis] for axis in axes]
    return CollectiveOperation("collective-permute", axes, *permute(links, held))


def _joint_sums(
    layout: Layout, held: float, mesh: DeviceMesh
) -> Iterator[tuple[Layout, list[CollectiveOperation]]]:
    """Sums along several axes at once."""
    terms = [axis for axis, dim in enumerate(layout) if dim == PARTIAL]
    for count in range(2, len(terms) + 1):
        for axes in itertools.combinations(terms, count):
            other = tuple(NONE if axis in axes else dim for axis, dim in enumerate(layout))
            links, sizes = [mesh.links[a] for a in axes], [mesh.sizes[a] for a in axes]
            yield other, [CollectiveOperation("all-reduce", axes, *all_reduce(links, sizes, held))]


def _exchanges(
    layout: Layout, shape: Shape, held: float, mesh: DeviceMesh, hardware: Hardware
) -> Iterator[tuple[Layout, list[CollectiveOperation]]]:
    """Two axes that change their roles.

    If they have the same size, every device sends what it holds to one other. If the size of one is a
    multiple of the other's, a part of the larger axis moves by itself.
    """
    for one, two in itertools.permutations(range(len(layout)), 2):
        small, large = mesh.sizes[one], mesh.sizes[two]
        a, b = layout[one], layout[two]
        if a == b or PARTIAL in (a, b) or small == 1 or large % small or (small == large and one > two):
            continue
        swapped = list(layout)
        swapped[one], swapped[two] = b, a
        other = tuple(swapped)
        if not fits(other, shape, mesh.sizes):
            continue
        links, part = [mesh.links[one], mesh.links[two]], large // small
        link = mesh.links[two]

        def permuted(size: float, links: Sequence[Link] = links) -> CollectiveOperation:
            return CollectiveOperation("collective-permute", (one, two), *permute(links, size))  # noqa: B023

        if part == 1:
            yield other, [permuted(held)]
        elif b == NONE:  # the larger axis takes over a cut: smaller pieces, then to their places
            yield other, [permuted(held / part)]
        elif a == NONE:  # the smaller axis does: to their places, then the rest of each piece
            yield (
                other,
                [
                    permuted(held),
                    CollectiveOperation("all-gather", (two,), *all_gather(link, part, held)),
                ],
            )
        elif hardware.all_to_all:
            yield (
                other,
                [
                    CollectiveOperation("all-to-all", (two,), *all_to_all(link, part, held)),
                    permuted(held),
                ],
            )


def groups_of(layout: Layout, loops: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The axes that are still to be summed over, those together that cut the same loop of an operator.

    >>> groups_of((PARTIAL, 0, PARTIAL), (2, 1, 3)), groups_of((PARTIAL, 0, PARTIAL), (2, 1, 2))
    (((0,), (2,)), ((0, 2),))
    """
    found: dict[int, list[int]] = {}
    for axis, (dim, loop) in enumerate(zip(layout, loops, strict=True)):
        if dim == PARTIAL:
            found.setdefault(loop, []).append(axis)
    return tuple(tuple(axes) for axes in found.values())


class Resharding:
    """The cheapest ways between all layouts of a tensor.

    Where there is no reduce-scatter, XLA completes a sum before it cuts or gathers the tensor. It sums
    over the axes that cut one dim of an operand at once, and over those of another dim after that.

    Args:
        shape: of the whole tensor.
        itemsize: the bytes of one element.
        mesh: the devices.
        hardware: what they can do.
    """

    def __init__(self, shape: Shape, itemsize: float, mesh: DeviceMesh, hardware: Hardware) -> None:
        self.layouts = layouts(shape, mesh.sizes, partial=True)
        self.number = {layout: i for i, layout in enumerate(self.layouts)}
        self.whole = prod(shape) * itemsize
        self._mesh, self._sums_first = mesh, not hardware.reduce_scatter
        count = len(self.layouts)
        seconds = np.full((count, count), np.inf)
        np.fill_diagonal(seconds, 0.0)
        self._steps: dict[tuple[int, int], list[CollectiveOperation]] = {}
        self._after = np.tile(np.arange(count), (count, 1))
        for start, layout in enumerate(self.layouts):
            if self._sums_first and PARTIAL in layout:
                continue
            held = self.whole / pieces(layout, mesh.sizes)
            for other, found in moves(layout, shape, held, mesh, hardware):
                end = self.number[other]
                cost = sum(c.seconds for c in found)
                if cost < seconds[start, end]:
                    seconds[start, end] = cost
                    self._steps[start, end] = found
        for middle in range(count):
            if self._sums_first and PARTIAL in self.layouts[middle]:
                continue
            through = seconds[:, middle, None] + seconds[None, middle, :]
            better = through < seconds * (1 - 1e-12)
            if better.any():
                seconds = np.where(better, through, seconds)
                self._after = np.where(better, self._after[:, middle, None], self._after)
        if self._sums_first:
            for start, layout in enumerate(self.layouts):
                if PARTIAL in layout:
                    complete = self.number[summed(layout)]
                    seconds[start] = seconds[complete] + sum(c.seconds for c in self._sums(layout))
                    seconds[start, start] = 0.0
        self.seconds = quantised(seconds)
        """From each layout to each other one, with sums over all axes at once."""

    def _sums(
        self, layout: Layout, groups: Sequence[Sequence[int]] | None = None
    ) -> list[CollectiveOperation]:
        """The sums that complete a tensor: one for each group of axes, or one over all."""
        mesh = self._mesh
        held = self.whole / pieces(layout, mesh.sizes)
        if groups is None:
            groups = [[axis for axis, dim in enumerate(layout) if dim == PARTIAL]]
        found = []
        for group in groups:
            axes = tuple(axis for axis in group if mesh.sizes[axis] > 1)
            links, sizes = [mesh.links[a] for a in axes], [mesh.sizes[a] for a in axes]
            if axes:
                found.append(CollectiveOperation("all-reduce", axes, *all_reduce(links, sizes, held)))
        return found

    def extra(self, layout: Layout, loops: Sequence[int]) -> float:
        """The seconds that sums over axes of different loops take in addition.

        Args:
            layout: that an operator computes the tensor in.
            loops: of the operator, that the axes cut.
        """
        if not self._sums_first or layout.count(PARTIAL) < 2:
            return 0.0
        apart = sum(c.seconds for c in self._sums(layout, groups_of(layout, loops)))
        return apart - sum(c.seconds for c in self._sums(layout))

    def steps(
        self, start: Layout, end: Layout, loops: Sequence[int] | None = None
    ) -> Iterator[tuple[Layout, list[CollectiveOperation]]]:
        """The moves on the cheapest way from one layout to another, and their collectives.

        Args:
            start: where to begin.
            end: where to go.
            loops: of the operator that computes the tensor, that the axes cut.
        """
        if self._sums_first and PARTIAL in start and start != end:
            groups = None if loops is None else groups_of(start, loops)
            yield summed(start), self._sums(start, groups)
            start = summed(start)
        here, there = self.number[start], self.number[end]
        while here != there:
            after = int(self._after[here, there])
            yield self.layouts[after], self._steps[here, after]
            here = after

    def path(
        self, start: Layout, end: Layout, loops: Sequence[int] | None = None
    ) -> list[CollectiveOperation]:
        """The collectives on the cheapest way from one layout to another; see `steps`."""
        return [c for _, found in self.steps(start, end, loops) for c in found]
