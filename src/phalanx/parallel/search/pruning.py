"""Values that cannot be in any cheapest assignment, found before tables are made.

Messages between neighbours move costs around without changing any total. After some rounds the sum of
all smallest entries is close to the best cost, and a value whose own entries raise it above the cost of
a known assignment can go. Few are left, so the elimination stays exact where its tables would have been
too large. The first rounds (sequential tree-reweighted message passing) find a good assignment; the
others (dual block-coordinate ascent on pairs) raise the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.parallel.search.problem import Problem, Table, improved

FIRST, MORE, MOST = 8, 5, 60
"""Rounds that look for an assignment, rounds until the next check of the bound, and rounds in all."""


@dataclass(frozen=True)
class Pruned:
    """A problem with fewer values.

    Args:
        problem: what is left.
        kept: for each variable, the numbers of the values that are left.
        bound: no assignment costs less.
        values: the best known assignment.
    """

    problem: Problem
    kept: tuple[npt.NDArray[np.intp], ...]
    bound: float
    values: list[int]

    def whole(self, values: Sequence[int]) -> list[int]:
        """The values of the whole problem from those of the small one."""
        return [int(kept[v]) for kept, v in zip(self.kept, values, strict=True)]


def prune(
    problem: Problem,
    *,
    price: float = 0.0,
    most: float | None = None,
    enough: Callable[[Problem], bool] = lambda _: False,
    deadline: float | None = None,
) -> Pruned:
    """Remove values that cannot be in any cheapest assignment.

    Args:
        problem: the variables and their tables.
        price: the cost of a byte.
        most: what an assignment may cost, with the price of its bytes; by default as much as the best
            known one.
        enough: whether a problem is small enough.
        deadline: when to stop, by `time.monotonic`.
    """

    def late() -> bool:
        return deadline is not None and time.monotonic() > deadline

    flow = _Messages(problem, price)
    for _ in range(FIRST):
        flow.round()
        if late():
            break
    best, cost = flow.known(None)
    for _ in range(FIRST, MOST, MORE):
        for i in range(1 if late() else MORE):
            flow.shake(forwards=i % 2 == 0)
        best, cost = flow.known((best, cost))
        limit = cost if most is None else most
        kept = flow.within(limit + 1e-9 * abs(limit))
        small = flow.restricted(kept)
        if enough(small) or late():
            break
    return Pruned(small, tuple(kept), flow.bound(), best)


def _priced(problem: Problem, values: Sequence[int], price: float) -> float:
    return problem.cost(values) + (price * problem.bytes(values) if price else 0.0)


class _Messages:
    """Costs that neighbours have moved to each other."""

    def __init__(self, problem: Problem, price: float) -> None:
        self.problem = problem
        self.price = price
        self.alone = [c + price * m for c, m in zip(problem.costs, problem.memory, strict=True)]
        self.pairs: list[tuple[int, int, Table]] = []
        for a, b, table, memory in problem.edges:
            both = table if memory is None or not price else table + price * memory
            if a == b:
                self.alone[a] = self.alone[a] + np.diagonal(both)
            else:
                self.pairs.append((a, b, both) if a < b else (b, a, both.T))
        self.edges: list[list[int]] = [[] for _ in problem.costs]
        for i, (a, b, _) in enumerate(self.pairs):
            self.edges[a].append(i)
            self.edges[b].append(i)
        # To the first and to the second variable of each pair.
        self.sent = [
            [np.zeros(len(self.alone[a])), np.zeros(len(self.alone[b]))] for a, b, _ in self.pairs
        ]
        self.sums = [x.copy() for x in self.alone]

    def round(self) -> None:
        """Send all messages once forwards and once backwards."""
        count = len(self.alone)
        for forwards in (True, False):
            for v in range(count) if forwards else range(count - 1, -1, -1):
                later = [e for e in self.edges[v] if (self.pairs[e][0] == v) is forwards]
                if not later:
                    continue
                share = 1 / max(len(later), len(self.edges[v]) - len(later))
                own = share * self.sums[v]
                for e in later:
                    self._send(e, v, own)

    def shake(self, forwards: bool) -> None:
        """Let both variables of each pair share what they have, as far as its table allows."""
        count = len(self.pairs)
        for e in range(count) if forwards else range(count - 1, -1, -1):
            a, b, table = self.pairs[e]
            one, two = self.sums[a], self.sums[b]
            first, second = self.sent[e]
            whole = table + (one - first)[:, None] + (two - second)[None, :]
            left = 0.5 * whole.min(axis=1)
            whole = whole - left[:, None]
            right = whole.min(axis=0)
            left = left + (whole - right[None, :]).min(axis=1)
            self.sent[e] = [first + left - one, second + right - two]
            self.sums[a], self.sums[b] = left, right

    def known(self, before: tuple[list[int], float] | None) -> tuple[list[int], float]:
        """The better one of a known assignment and the one that the messages lead to."""
        found = improved(self.problem, self.decoded(), self.price)
        cost = _priced(self.problem, found, self.price)
        return before if before is not None and before[1] <= cost else (found, cost)

    def _send(self, e: int, v: int, own: Table) -> None:
        a, b, table = self.pairs[e]
        if v == a:
            message = ((own - self.sent[e][0])[:, None] + table).min(axis=0)
            target, side = b, 1
        else:
            message = ((own - self.sent[e][1])[None, :] + table).min(axis=1)
            target, side = a, 0
        message -= message.min()
        self.sums[target] = self.sums[target] + (message - self.sent[e][side])
        self.sent[e][side] = message

    def _left(self, e: int) -> Table:
        """What is left of the table of a pair."""
        first, second = self.sent[e]
        return self.pairs[e][2] - first[:, None] - second[None, :]

    def bound(self) -> float:
        """The sum of all smallest entries."""
        pairs = sum(float(self._left(e).min()) for e in range(len(self.pairs)))
        return sum(float(x.min()) for x in self.sums) + pairs

    def decoded(self) -> list[int]:
        """An assignment: each value the best for those before it and the messages of those after it."""
        values: list[int] = []
        for v, alone in enumerate(self.alone):
            total = alone
            for e in self.edges[v]:
                a, _, table = self.pairs[e]
                total = total + (self.sent[e][0] if a == v else table[values[a], :])
            values.append(int(total.argmin()))
        return values

    def within(self, most: float) -> list[npt.NDArray[np.intp]]:
        """For each variable, the values that may be in an assignment that costs at most `most`."""
        lefts = [self._left(e) for e in range(len(self.pairs))]
        smallest = [float(left.min()) for left in lefts]
        bound = sum(float(x.min()) for x in self.sums) + sum(smallest)
        kept = []
        for v, own in enumerate(self.sums):
            least = bound - float(own.min()) + own
            for e in self.edges[v]:
                least = least + lefts[e].min(axis=1 if self.pairs[e][0] == v else 0) - smallest[e]
            found = np.flatnonzero(least <= most)
            kept.append(found if len(found) else np.asarray([int(least.argmin())]))
        return kept

    def restricted(self, kept: Sequence[npt.NDArray[np.intp]]) -> Problem:
        """The problem with these values only."""
        problem = self.problem
        costs = tuple(c[k] for c, k in zip(problem.costs, kept, strict=True))
        memory = tuple(m[k] for m, k in zip(problem.memory, kept, strict=True))
        edges = []
        for a, b, table, held in problem.edges:
            at = np.ix_(kept[a], kept[b])
            edges.append((a, b, table[at], None if held is None else held[at]))
        return Problem(costs, memory, tuple(edges))
