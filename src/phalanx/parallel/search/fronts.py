"""Elimination with Pareto fronts as the entries of tables: all assignments within a budget and a cost.

A point of a front is a cost and the bytes that come with it, for variables that have been eliminated.
No other point of its front is both cheaper and smaller. Most points are never made: an assignment that
fits the budget and costs at most so much stays below a line for every price of a byte, and each price
says what the variables that are still there cost at least. Points of all entries are in a few long
arrays, so that numpy does the work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.parallel.search.elimination import (
    Elimination,
    EliminationStep,
    Factor,
    TableCache,
    eliminate,
)
from phalanx.parallel.search.marginals import outside, totals
from phalanx.parallel.search.problem import Problem, Table

__all__ = ["Fronts", "TooManyPointsError"]

Numbers = npt.NDArray[np.intp]

MOST_POINTS = 60_000_000
"""The points that all fronts together may have before the search settles for a bound."""

MOST_AT_ONCE = 6_000_000
"""The points that are looked at together."""

_SLACK = 1e-11
"""What rounding may add to a sum of costs and prices, as a part of it."""


class TooManyPointsError(Exception):
    """The fronts became too large, or the time is over."""


@dataclass(frozen=True)
class Line:
    """What a price of a byte says.

    Args:
        price: the cost of a byte; infinite if only bytes count.
        found: the elimination of all variables at that price.
    """

    price: float
    found: Elimination

    def value(self, cost: Any, held: Any) -> Any:
        """Costs with the price of bytes."""
        return held if np.isinf(self.price) else cost + self.price * held

    def limit(self, budget: float, most: float) -> float:
        """What assignments within the budget, that cost at most `most`, have at most."""
        found = float(self.value(most, budget))
        return found + _SLACK * abs(found)


@dataclass
class _Stage:
    """The elimination of one variable: what its entries may be.

    Args:
        places: the values of its neighbours and its own, for each entry that may be in an answer.
        cost: of these values in the tables of the problem.
        held: the same of bytes.
        least: for each line, the least value of an assignment with the entry.
        children: the stages whose fronts it takes in, and the columns of `places` that they depend on.
    """

    places: Numbers
    cost: Table
    held: Table
    least: list[Table]
    children: list[tuple[int, list[int]]] = field(default_factory=list)


@dataclass(frozen=True)
class _Front:
    """The points of a stage, those of one entry of its message next to each other.

    Args:
        number: the front of each entry of the message; -1 if there is none.
        starts: where each front begins.
        counts: how many points it has.
        cost: of each point.
        held: its bytes.
        value: that the variable has.
        parts: for each child, the point of its front that was taken in.
    """

    number: Numbers
    starts: Numbers
    counts: Numbers
    cost: Table
    held: Table
    value: Numbers
    parts: list[Numbers]


@dataclass
class _Points:
    """Points that are being put together.

    Args:
        place: the entry of each.
        cost: of the tables and points taken in so far.
        held: the same of bytes.
        parts: for each child so far, the point of its front.
    """

    place: Numbers
    cost: Table
    held: Table
    parts: list[Numbers]

    def kept(self, keep: Any) -> _Points:
        """Some of them, perhaps in another order."""
        parts = [part[keep] for part in self.parts]
        return _Points(self.place[keep], self.cost[keep], self.held[keep], parts)


class Fronts:
    """All assignments of a problem within a budget that cost no more than a known one."""

    def __init__(
        self,
        problem: Problem,
        steps: Sequence[EliminationStep],
        prices: Sequence[float],
        budget: float,
        most: float,
        *,
        known: TableCache | None = None,
        deadline: float | None = None,
    ) -> None:
        self.problem, self.budget, self.deadline = problem, budget, deadline
        self.turn = {step.variable: i for i, step in enumerate(steps)}
        known = known or TableCache()
        self.lines = [
            Line(price, eliminate(problem, steps, price=price, known=known)) for price in prices
        ]
        self.lines.append(Line(np.inf, eliminate(problem.weights, steps)))
        self.points = 0
        self.stages = self._prepared(most)

    def _prepared(self, most: float) -> list[_Stage]:
        """The entries of each stage that may be in an answer."""
        count = len(self.lines[0].found.buckets)
        stages: list[_Stage | None] = [None] * count
        own: list[list[tuple[tuple[int, ...], Table, Table | None]]] = [[] for _ in range(count)]
        for v, (cost, memory) in enumerate(zip(self.problem.costs, self.problem.memory, strict=True)):
            own[self.turn[v]].append(((v,), cost, memory))
        for a, b, cost, held in self.problem.edges:
            own[min(self.turn[a], self.turn[b])].append(((a, b), cost, held))
        for line in self.lines:
            limit = line.limit(self.budget, most)
            for i, bucket, rest in outside(line.found):
                self._check_time()
                whole, stage = totals(bucket, rest), stages[i]
                if stage is None:
                    places = np.argwhere(whole <= limit)
                    nothing = np.zeros(len(places))
                    stage = stages[i] = _Stage(places, nothing, nothing, [])
                least = whole[tuple(stage.places.T)]
                keep = least <= limit
                stage.places = stage.places[keep]
                stage.least = [*(x[keep] for x in stage.least), least[keep]]
        found = [stage for stage in stages if stage is not None]
        for i, stage in enumerate(found):
            where = {v: column for column, v in enumerate(self._scope(i))}
            stage.cost, stage.held = np.zeros(len(stage.places)), np.zeros(len(stage.places))
            for variables, costs, bytes_ in own[i]:
                at = tuple(stage.places[:, where[v]] for v in variables)
                stage.cost = stage.cost + costs[at]
                if bytes_ is not None:
                    stage.held = stage.held + bytes_[at]
            if message := self._message(i).scope:
                parent = min(self.turn[v] for v in message)
                columns = {v: column for column, v in enumerate(self._scope(parent))}
                found[parent].children.append((i, [columns[v] for v in message]))
        return found

    def _message(self, stage: int) -> Factor:
        message = self.lines[0].found.buckets[stage].message
        assert message is not None
        return message

    def _scope(self, stage: int) -> tuple[int, ...]:
        """The variables of the columns of `places`."""
        return (*self._message(stage).scope, self.lines[0].found.buckets[stage].step.variable)

    # -- all assignments up to a cost --------------------------------------------------------------

    def best(self, most: float, width: int | None = None) -> list[int]:
        """The cheapest values within the budget; [] if they cost more than `most`.

        Args:
            most: what they may cost.
            width: how many points a front may have. With one, the values need not be the cheapest.

        Raises:
            TooManyPointsError: if there are too many points, or the time is over.
        """
        self.points = 0
        limits = [line.limit(self.budget, most) for line in self.lines]
        fronts: list[_Front] = []
        for i in range(len(self.stages)):
            fronts.append(self._eliminated(i, fronts, limits, width))
        return self._chosen(fronts, limits)

    def _eliminated(
        self, number: int, fronts: Sequence[_Front], limits: Sequence[float], width: int | None
    ) -> _Front:
        stage = self.stages[number]
        keep = np.ones(len(stage.places), bool)
        for least, limit in zip(stage.least, limits, strict=True):
            keep &= least <= limit
        rows = np.flatnonzero(keep)
        points = _Points(rows, stage.cost[rows], stage.held[rows], [])
        # What is still missing of the least value of each entry: the points of the children to come.
        missing = [
            least - line.value(stage.cost, stage.held)
            for least, line in zip(stage.least, self.lines, strict=True)
        ]
        for child, columns in stage.children:
            at = tuple(stage.places[:, c] for c in columns)
            for k, line in enumerate(self.lines):
                message = line.found.buckets[child].message
                assert message is not None
                missing[k] = missing[k] - message.table[at]
            entries = fronts[child].number[at]
            points = self._taken_in(points, fronts[child], entries[points.place], missing, limits)
        return self._front(number, points, width)

    def _taken_in(
        self,
        points: _Points,
        front: _Front,
        entries: Numbers,
        missing: Sequence[Table],
        limits: Sequence[float],
    ) -> _Points:
        """Each point with each point of the front that goes with it, if the sum may be in an answer."""
        there = entries >= 0
        points, entries = points.kept(there), entries[there]
        counts = front.counts[entries]
        ends = np.cumsum(counts)
        found = []
        first = 0
        while first < len(entries):
            before = ends[first - 1] if first else 0
            last = max(int(np.searchsorted(ends, before + MOST_AT_ONCE, "right")), first + 1)
            part, many = slice(first, last), counts[first:last]
            row = np.repeat(np.arange(first, last), many)
            inside = np.arange(len(row)) - np.repeat(ends[part] - many - before, many)
            other = np.repeat(front.starts[entries[part]], many) + inside
            place = points.place[row]
            cost = points.cost[row] + front.cost[other]
            held = points.held[row] + front.held[other]
            self._count(len(row))
            keep = np.ones(len(row), bool)
            for line, left, limit in zip(self.lines, missing, limits, strict=True):
                keep &= line.value(cost, held) + left[place] <= limit
            parts = [x[row[keep]] for x in points.parts]
            found.append(_Points(place[keep], cost[keep], held[keep], [*parts, other[keep]]))
            first = last
        return _together(found, len(points.parts) + 1)

    def _front(self, number: int, points: _Points, width: int | None) -> _Front:
        """The points of each entry of the message that no other one beats."""
        stage, shape = self.stages[number], self._message(number).table.shape
        places = stage.places[points.place]
        keys = np.zeros(len(places), np.intp)
        for column, size in enumerate(shape):
            keys = keys * size + places[:, column]
        order, keep = _pareto(keys, points.cost, points.held)
        order = order[keep]
        if width is not None:
            order = self._thinned(keys, points, order, width)
        points, keys = points.kept(order), keys[order]
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        counts = np.diff(starts, append=len(keys))
        table = np.full(int(np.prod(shape)), -1, np.intp)
        table[keys[starts]] = np.arange(len(starts))
        value = stage.places[points.place, -1]
        return _Front(
            table.reshape(shape), starts, counts, points.cost, points.held, value, points.parts
        )

    def _thinned(self, keys: Numbers, points: _Points, order: Numbers, width: int) -> Numbers:
        """Of each front, the smallest point and the best ones at the first price."""
        key, line = keys[order], self.lines[0]
        value = line.value(points.cost[order], points.held[order])
        smallest = np.diff(key, prepend=-1) != 0
        ranked = np.lexsort((value, ~smallest, key))
        starts = np.flatnonzero(np.diff(key[ranked], prepend=-1))
        within = np.arange(len(ranked)) - np.repeat(starts, np.diff(starts, append=len(ranked)))
        return order[np.sort(ranked[within < width])]

    def _chosen(self, fronts: Sequence[_Front], limits: Sequence[float]) -> list[int]:
        """The cheapest point within the budget, and the values that it stands for."""
        roots = [i for i in range(len(fronts)) if not self._message(i).scope]
        joint = _Points(np.zeros(1, np.intp), np.zeros(1), np.zeros(1), [])
        missing = [
            sum((np.atleast_1d(self._root(line, i)) for i in roots), np.zeros(1)) for line in self.lines
        ]
        for i in roots:  # one for each part of the graph that is not connected to others
            missing = [
                m - np.atleast_1d(self._root(line, i))
                for m, line in zip(missing, self.lines, strict=True)
            ]
            entries = np.full(len(joint.place), int(fronts[i].number))
            joint = self._taken_in(joint, fronts[i], entries, missing, limits)
            order, keep = _pareto(joint.place, joint.cost, joint.held)
            joint = joint.kept(order[keep])
        fitting = np.flatnonzero(joint.held <= self.budget)
        if not len(fitting):
            return []
        best = fitting[np.lexsort((joint.held[fitting], joint.cost[fitting]))[0]]
        values = [0] * len(self.problem.sizes)
        stack = [(i, int(part[best])) for i, part in zip(roots, joint.parts, strict=True)]
        while stack:
            i, point = stack.pop()
            values[self._scope(i)[-1]] = int(fronts[i].value[point])
            stack += [
                (child, int(part[point]))
                for (child, _), part in zip(self.stages[i].children, fronts[i].parts, strict=True)
            ]
        return values

    def _root(self, line: Line, stage: int) -> Table:
        message = line.found.buckets[stage].message
        assert message is not None
        return message.table

    def _count(self, points: int) -> None:
        self.points += points
        if self.points > MOST_POINTS:
            raise TooManyPointsError
        self._check_time()

    def _check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TooManyPointsError


def _together(found: Sequence[_Points], parts: int) -> _Points:
    """Points of several arrays in one."""
    if not found:
        empty = np.zeros(0, np.intp)
        return _Points(empty, np.zeros(0), np.zeros(0), [empty] * parts)
    return _Points(
        np.concatenate([p.place for p in found]),
        np.concatenate([p.cost for p in found]),
        np.concatenate([p.held for p in found]),
        [np.concatenate(columns) for columns in zip(*(p.parts for p in found), strict=True)],
    )


def _pareto(keys: Numbers, cost: Table, held: Table) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """An order by key and bytes, and which points in it no other of their key beats.

    >>> keys, cost, held = np.array([1, 0, 0, 0]), np.array([5.0, 3, 1, 1]), np.array([1.0, 1, 2, 3])
    >>> order, keep = _pareto(keys, cost, held)
    >>> order[keep].tolist()
    [1, 2, 0]
    """
    order = np.lexsort((cost, held, keys))
    if not len(order):
        return order, np.zeros(0, bool)
    # Later keys get smaller numbers, so that the least number so far starts anew with each key.
    _, rank = np.unique(cost[order], return_inverse=True)
    _, group = np.unique(keys[order], return_inverse=True)
    number = rank - group * (int(rank.max()) + 1)
    before = np.concatenate([[np.iinfo(np.intp).max], np.minimum.accumulate(number)[:-1]])
    return order, number < before
