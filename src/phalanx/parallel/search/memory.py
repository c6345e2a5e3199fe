"""The cheapest assignment within a memory budget, exactly.

First a price per byte is raised until the cheapest assignment fits; the best price gives a lower bound
that is usually close. Then tables of Pareto fronts (no other assignment is both cheaper and smaller)
close the gap; the bound keeps them small, because only entries that could beat the best known
assignment are looked at.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.parallel.search.elimination import (
    CAP,
    PRUNE_ABOVE,
    Bucket,
    Elimination,
    EliminationStep,
    TableCache,
    eliminate,
    is_small,
    largest,
    order,
    reduced,
)
from phalanx.parallel.search.marginals import outside, totals
from phalanx.parallel.search.problem import Problem, Solution, Table, improved, solution
from phalanx.parallel.search.pruning import prune

MOST_POINTS = 300_000
"""The points that all fronts together may have before the search settles for a bound."""


WIDEST_FRONTS = 1_000_000
"""The entries that a table of fronts may have."""


@dataclass(frozen=True)
class Smallest:
    """There is no assignment within the budget; the smallest one."""

    values: tuple[int, ...]
    bytes: float


def smallest(problem: Problem) -> Smallest:
    """The assignment that holds the fewest bytes, and costs least among those."""
    zero = {id(t): np.zeros_like(t) for _, _, t, m in problem.edges if m is None}
    edges = tuple((a, b, zero[id(t)] if m is None else m, None) for a, b, t, m in problem.edges)
    heavy = Problem(problem.memory, problem.memory, edges)
    steps = order(heavy)
    wide = largest(heavy, steps) > PRUNE_ABOVE
    values = (reduced(heavy) if wide else eliminate(heavy, steps)).values
    return Smallest(tuple(values), problem.bytes(values))


def solve_within(
    problem: Problem, budget: float, *, cap: int = CAP, deadline: float | None = None
) -> Solution | Smallest:
    """The cheapest assignment that holds at most `budget` bytes; the smallest one if none does."""
    steps, known = order(problem), TableCache()
    wide = largest(problem, steps) > PRUNE_ABOVE

    def at(price: float) -> tuple[Elimination, Solution]:
        if wide:
            found = reduced(problem, price=price, cap=cap, deadline=deadline)
        else:
            found = eliminate(problem, steps, price=price, known=known, cap=cap, deadline=deadline)
        values = found.values if found.exact else improved(problem, found.values, price)
        return found, solution(problem, values, found.bound - price * budget)

    found, over = at(0.0)
    if over.bytes <= budget:
        return over
    least = smallest(problem)
    if least.bytes > budget:
        return least
    under = solution(problem, least.values, over.bound)
    best, bound, price = under, over.bound, 0.0
    while deadline is None or time.monotonic() < deadline:
        # Where the lines of both assignments meet, which no price with a better bound is far from.
        next_price = (under.cost - over.cost) / (over.bytes - under.bytes)
        if next_price <= 0:
            break
        tried, middle = at(next_price)
        if middle.bound > bound:
            found, bound, price = tried, middle.bound, next_price
        best = min(best, middle, key=lambda s: s.cost if s.bytes <= budget else np.inf)
        value = middle.cost + next_price * middle.bytes
        if value >= (under.cost + next_price * under.bytes) * (1 - 1e-12):
            break
        under, over = (middle, over) if middle.bytes <= budget else (under, middle)
    best = _better(problem, best, (*_between(under, over), best.values), budget)
    if not found.exact:
        return solution(problem, best.values, bound)
    fronts = (
        _Narrowed(problem, price, deadline) if wide else _Fronts(problem, steps, found, price, deadline)
    )
    return _closed(problem, budget, best, fronts, bound)


def _better(
    problem: Problem, best: Solution, others: Sequence[Sequence[int]], budget: float
) -> Solution:
    """The best assignment near a few others, if it beats the best known one."""
    filled = [_filled(problem, values, budget) for values in others]
    return min([best, *(s for s in filled if s.bytes <= budget)], key=lambda s: s.cost)


def _between(under: Solution, over: Solution) -> list[tuple[int, ...]]:
    """Mixtures of an assignment that fits and one that does not: some variables of each."""
    found = []
    count = len(under.values)
    for i in range(1, 16):
        cut = count * i // 16
        found.append((*over.values[:cut], *under.values[cut:]))
        found.append((*under.values[:cut], *over.values[cut:]))
    return found


def _filled(problem: Problem, start: Sequence[int], budget: float) -> Solution:
    """Change single variables to cheaper values as long as the assignment fits."""
    values, held = list(start), problem.bytes(start)
    for v in range(len(values)):
        local = problem.local(v, values)
        bytes_ = problem.local(v, values, 1.0) - local
        fits = held - bytes_[values[v]] + bytes_ <= budget
        if not fits.any():
            fits = bytes_ <= bytes_.min()
        local = np.where(fits, local, np.inf)
        choice = int(local.argmin())
        if local[choice] < local[values[v]]:
            held += float(bytes_[choice] - bytes_[values[v]])
            values[v] = choice
    return solution(problem, values, 0.0)


def _closed(
    problem: Problem, budget: float, best: Solution, fronts: _Fronts | _Narrowed, bound: float
) -> Solution:
    """Look further and further above the bound, until an assignment that fits is found there.

    All assignments up to a certain cost are looked at, so the first one that fits is the cheapest.
    """
    gap = best.cost - bound
    base, parts = bound, [1 / 64, 1 / 16, 1 / 4, 1]
    for part in (1 / 16, 1 / 4):
        values = fronts.best(budget, base + gap * part, width=3)
        if values and problem.cost(values) < best.cost:
            best = solution(problem, values, bound)
    while best.cost > bound and parts:
        most = min(best.cost, base + gap * parts.pop(0))
        values = fronts.best(budget, most)
        if values is None:
            break
        if values and problem.cost(values) < best.cost:
            best = solution(problem, values, bound)
        bound = min(most, best.cost)
    return solution(problem, best.values, bound)


class _Narrowed:
    """Fronts of a problem whose tables are too large, on the values that matter."""

    def __init__(self, problem: Problem, price: float, deadline: float | None) -> None:
        self.problem, self.price, self.deadline = problem, price, deadline

    def best(self, budget: float, most: float, width: int | None = None) -> list[int] | None:
        """As `_Fronts.best`."""
        limit = most + self.price * budget
        small = prune(
            self.problem, price=self.price, most=limit, enough=is_small, deadline=self.deadline
        )
        steps = order(small.problem)
        if largest(small.problem, steps) > WIDEST_FRONTS:
            return None
        found = eliminate(small.problem, steps, price=self.price, deadline=self.deadline)
        if not found.exact:
            return None
        fronts = _Fronts(small.problem, steps, found, self.price, self.deadline)
        values = fronts.best(budget, most, width)
        return small.whole(values) if values else values


class _TooMany(Exception):
    """The fronts became too large, or the time is over."""


_Point = tuple[float, float, int, tuple[Any, ...]]
"""Variables eliminated so far: their cost and bytes, the last value, and the points before it."""

_Front = dict[tuple[int, ...], list[_Point]]


class _Fronts:
    """Elimination with Pareto fronts as the entries of tables."""

    def __init__(
        self,
        problem: Problem,
        steps: Sequence[EliminationStep],
        found: Elimination,
        price: float,
        deadline: float | None,
    ) -> None:
        self.problem, self.found, self.price, self.deadline = problem, found, price, deadline
        self.turn = {step.variable: i for i, step in enumerate(steps)}
        self.most = 0.0
        self.width: int | None = None
        self.points = 0

    def best(self, budget: float, most: float, width: int | None = None) -> list[int] | None:
        """The cheapest values within the budget; [] if they cost more than `most`; None if not known.

        With a width, fronts have at most so many points, and the values need not be the cheapest.
        """
        self.width = width
        self.most = (most + self.price * budget) * (1 + 1e-12)
        self.points = 0
        rest = {i: table for i, _, table in outside(self.found)}
        own = self._own()
        messages: list[list[tuple[tuple[int, ...], int, _Front]]] = [[] for _ in self.found.buckets]
        roots: list[tuple[int, list[_Point]]] = []
        try:
            for i, bucket in enumerate(self.found.buckets):
                front = self._eliminated(bucket, rest.pop(i), own[i], messages[i])
                assert bucket.message is not None
                scope = bucket.message.scope
                if scope:
                    at = min(self.turn[v] for v in scope)
                    messages[at].append((scope, i, front))
                else:
                    roots.append((i, front.get((), [])))
            return self._chosen(roots, budget, messages)
        except _TooMany:
            return None

    def _own(self) -> list[list[tuple[tuple[int, ...], Table, Table | None]]]:
        """For each bucket, the tables of the problem that are in it."""
        own: list[list[tuple[tuple[int, ...], Table, Table | None]]] = [[] for _ in self.found.buckets]
        for v, (cost, memory) in enumerate(zip(self.problem.costs, self.problem.memory, strict=True)):
            own[self.turn[v]].append(((v,), cost, memory))
        for a, b, cost, held in self.problem.edges:
            own[min(self.turn[a], self.turn[b])].append(((a, b), cost, held))
        return own

    def _eliminated(
        self,
        bucket: Bucket,
        rest: Table,
        own: Sequence[tuple[tuple[int, ...], Table, Table | None]],
        messages: Sequence[tuple[tuple[int, ...], int, _Front]],
    ) -> _Front:
        assert bucket.message is not None
        scope = (*bucket.message.scope, bucket.step.variable)
        whole = totals(bucket, rest)
        places = np.argwhere(whole <= self.most)
        found: _Front = {}
        where = {v: i for i, v in enumerate(scope)}
        picks = [([where[v] for v in s], cost, held) for s, cost, held in own]
        asks = [([where[v] for v in s], front) for s, _, front in messages]
        for place in places.tolist():
            cost = held = 0.0
            for pick, costs, bytes_ in picks:
                at = tuple(place[i] for i in pick)
                cost += float(costs[at])
                held += 0.0 if bytes_ is None else float(bytes_[at])
            points: list[_Point] = [(cost, held, place[-1], ())]
            for pick, front in asks:
                after = front.get(tuple(place[i] for i in pick), [])
                points = [(a + q[0], b + q[1], v, (*c, q)) for a, b, v, c in points for q in after]
            limit = self.most - float(rest[tuple(place[:-1])])
            points = [p for p in points if p[0] + self.price * p[1] <= limit]
            self._count(len(points))
            found.setdefault(tuple(place[:-1]), []).extend(points)
        return {at: self._thinned(_pareto(points)) for at, points in found.items()}

    def _thinned(self, points: list[_Point]) -> list[_Point]:
        """The smallest point and the best ones at the price of a byte, if not all are wanted."""
        if self.width is None or len(points) <= self.width:
            return points
        best = sorted(points[1:], key=lambda p: p[0] + self.price * p[1])[: self.width - 1]
        return [points[0], *sorted(best, key=lambda p: p[1])]

    def _count(self, points: int) -> None:
        self.points += points
        late = self.deadline is not None and time.monotonic() > self.deadline
        if self.points > MOST_POINTS or late:
            raise _TooMany

    def _chosen(
        self,
        roots: Sequence[tuple[int, list[_Point]]],
        budget: float,
        messages: Sequence[Sequence[tuple[tuple[int, ...], int, _Front]]],
    ) -> list[int] | None:
        """The cheapest point within the budget, and the values that it stands for."""
        joint: list[_Point] = [(0.0, 0.0, 0, ())]
        for _, front in roots:  # one for each part of the graph that is not connected to others
            joint = _pareto([(a + q[0], b + q[1], 0, (*c, q)) for a, b, _, c in joint for q in front])
            self._count(len(joint))
        fitting = [p for p in joint if p[1] <= budget]
        if not fitting:
            return []
        best = min(fitting, key=lambda p: p[:2])
        values = [0] * len(self.problem.sizes)
        stack = [(i, point) for (i, _), point in zip(roots, best[3], strict=True)]
        while stack:
            i, point = stack.pop()
            values[self.found.buckets[i].step.variable] = point[2]
            stack += [(child, q) for (_, child, _), q in zip(messages[i], point[3], strict=True)]
        return values


def _pareto(points: list[_Point]) -> list[_Point]:
    """The points that no other one beats in cost without holding more."""
    kept: list[_Point] = []
    for point in sorted(points, key=lambda p: (p[1], p[0])):
        if not kept or point[0] < kept[-1][0]:
            kept.append(point)
    return kept
