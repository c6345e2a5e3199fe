"""Exact min-sum variable elimination.

Eliminating a variable replaces all tables that it is in by one table over its neighbours: the cost of
its best value for each of their values. What was best is remembered, and looked up once the neighbours
are known. The cheapest variable goes first, so tables stay small on graphs that are narrow, as programs
are.

Variables that are in the same tables give the same result, so equal blocks of a program are computed
once.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.parallel.search.problem import Problem, Solution, Table, improved, solution
from phalanx.parallel.search.pruning import prune

CAP = 20_000_000
"""The entries that a table may have before the search settles for a bound."""

PRUNE_ABOVE = 1_000_000
"""The entries of the largest table from which on values are pruned first."""

TINY = 4096
"""Tables with fewer entries than this take the same time."""

SMALL = 50_000
"""The entries that a table may have once the time is over."""


@dataclass(frozen=True)
class EliminationStep:
    """The elimination of one variable.

    Args:
        variable: which one.
        scope: the variables that it had tables with.
    """

    variable: int
    scope: tuple[int, ...]


@dataclass(eq=False)
class Factor:
    """A table over some variables, in the order of its dims."""

    scope: tuple[int, ...]
    table: Table


@dataclass
class Bucket:
    """A variable that has been eliminated.

    Args:
        step: which variable it was, and its neighbours.
        factors: the tables that it was in.
        message: the table that replaced them; None if they were replaced one by one.
        best: the best value of the variable for each entry of the message.
    """

    step: EliminationStep
    factors: list[Factor]
    message: Factor | None = None
    best: npt.NDArray[np.intp] | None = None


@dataclass
class Elimination:
    """The elimination of all variables.

    Args:
        buckets: in the order of elimination.
        bound: no assignment costs less.
        exact: whether all tables could be computed as a whole.
    """

    buckets: list[Bucket]
    bound: float
    exact: bool
    values: list[int] = field(default_factory=list)


def order(problem: Problem) -> list[EliminationStep]:
    """The order in which variables go: always the one that makes the smallest table.

    Of tables that are all small, those come first that depend on the fewest others. So equal blocks of
    a program shrink in the same way, and their tables are found made.
    """
    sizes = problem.sizes
    near: list[set[int]] = [set() for _ in sizes]
    for a, b, *_ in problem.edges:
        if a != b:
            near[a].add(b)
            near[b].add(a)
    depth = [0] * len(sizes)

    def rank(v: int) -> tuple[int, int, int]:
        return max(prod((sizes[n] for n in near[v]), start=sizes[v]), TINY), depth[v], v

    ranks = [rank(v) for v in range(len(sizes))]
    heap = list(ranks)
    heapq.heapify(heap)
    gone = [False] * len(sizes)
    steps: list[EliminationStep] = []
    while heap:
        found = heapq.heappop(heap)
        v = found[2]
        if gone[v] or found != ranks[v]:
            continue
        gone[v] = True
        scope = tuple(sorted(near[v]))
        steps.append(EliminationStep(v, scope))
        for n in scope:
            near[n].discard(v)
            near[n].update(m for m in scope if m != n)
            depth[n] = max(depth[n], depth[v] + 1)
        for n in scope:
            if (changed := rank(n)) != ranks[n]:
                ranks[n] = changed
                heapq.heappush(heap, changed)
    return steps


class TableCache:
    """Computed tables, so that what is the same is computed once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Table, npt.NDArray[np.intp]]] = {}
        self._alive: list[Any] = []

    def priced(self, cost: Table, memory: Table | None, price: float) -> Table:
        """Cost and memory in one table."""
        if not price or memory is None:
            return cost
        key = ("priced", id(cost), id(memory), price)
        if key not in self._known:
            self._alive += [cost, memory]
            self._known[key] = cost + price * memory, np.zeros(0, np.intp)
        return self._known[key][0]

    def eliminated(
        self, step: EliminationStep, factors: Sequence[Factor]
    ) -> tuple[Table, npt.NDArray[np.intp]]:
        """The best cost and the best value for each entry of the scope."""
        place = {v: i for i, v in enumerate((*step.scope, step.variable))}
        key = tuple(sorted((id(f.table), tuple(place[v] for v in f.scope)) for f in factors))
        if key not in self._known:
            self._alive += [f.table for f in factors]
            whole = joined((*step.scope, step.variable), factors)
            best = whole.argmin(axis=-1)
            self._known[key] = np.take_along_axis(whole, best[..., None], axis=-1)[..., 0], best
        return self._known[key]


def joined(scope: Sequence[int], factors: Iterable[Factor]) -> Table:
    """The sum of tables over the variables of `scope`, which each of them has some of."""
    place = {v: i for i, v in enumerate(scope)}
    total: Table | None = None
    for factor in sorted(factors, key=lambda f: -f.table.size):
        where = [place[v] for v in factor.scope]
        table = factor.table.transpose(np.argsort(where))
        shape = [1] * len(scope)
        for i, size in zip(sorted(where), table.shape, strict=True):
            shape[i] = size
        table = table.reshape(shape)
        total = table if total is None else total + table
    assert total is not None
    return total


def eliminate(
    problem: Problem,
    steps: Sequence[EliminationStep],
    *,
    price: float = 0.0,
    known: TableCache | None = None,
    cap: int = CAP,
    deadline: float | None = None,
) -> Elimination:
    """Eliminate all variables, and find the best value of each.

    Args:
        problem: the variables and their tables.
        steps: the order, from `order`.
        price: the cost of a byte.
        known: tables that were computed before.
        cap: the entries that a table may have.
        deadline: when to settle for small tables, by `time.monotonic`.
    """
    known = known or TableCache()
    waiting: list[list[Factor]] = [[] for _ in problem.sizes]
    turn = {step.variable: i for i, step in enumerate(steps)}
    bound, exact = 0.0, True

    def put(factor: Factor) -> None:
        nonlocal bound
        if factor.scope:
            waiting[min(factor.scope, key=turn.__getitem__)].append(factor)
        else:
            bound += float(factor.table)

    for v, (cost, memory) in enumerate(zip(problem.costs, problem.memory, strict=True)):
        put(Factor((v,), known.priced(cost, memory, price)))
    for a, b, table, held in problem.edges:
        both = known.priced(table, held, price)
        put(Factor((a, b), both) if a != b else Factor((a,), np.diagonal(both)))
    buckets = []
    for step in steps:
        factors = waiting[step.variable]
        bucket = Bucket(step, factors)
        buckets.append(bucket)
        late = deadline is not None and time.monotonic() > deadline
        limit = min(cap, SMALL) if late else cap
        for group in _groups(problem, step.variable, factors, limit):
            scope = tuple(sorted({v for f in group for v in f.scope} - {step.variable}))
            table, best = known.eliminated(EliminationStep(step.variable, scope), group)
            message = Factor(scope, table)
            if len(group) == len(factors):
                bucket.message, bucket.best = message, best
            else:
                exact = False
            put(message)
    return Elimination(buckets, bound, exact, _values(buckets, len(problem.sizes)))


def _groups(problem: Problem, variable: int, factors: list[Factor], cap: int) -> list[list[Factor]]:
    """The tables of a variable, in as few groups as keep the tables of each group below the cap.

    Minimising each group by itself gives a lower bound.
    """
    groups: list[tuple[set[int], list[Factor]]] = []
    for factor in sorted(factors, key=lambda f: -f.table.size):
        for scope, group in groups:
            if prod(problem.sizes[v] for v in scope.union(factor.scope)) <= cap:
                scope.update(factor.scope)
                group.append(factor)
                break
        else:
            groups.append(({variable, *factor.scope}, [factor]))
    return [group for _, group in groups]


def _values(buckets: Sequence[Bucket], count: int) -> list[int]:
    """The best value of each variable, from the last one that was eliminated to the first."""
    values = [0] * count
    for bucket in reversed(buckets):
        v = bucket.step.variable
        if bucket.best is not None and bucket.message is not None:
            values[v] = int(bucket.best[tuple(values[n] for n in bucket.message.scope)])
            continue
        total = sum(_row(factor, v, values) for factor in bucket.factors)
        values[v] = int(np.argmin(total))
    return values


def _row(factor: Factor, variable: int, values: Sequence[int]) -> Table:
    """The entries of a table for all values of one variable and the given ones of the others."""
    return factor.table[tuple(slice(None) if v == variable else values[v] for v in factor.scope)]


def largest(problem: Problem, steps: Sequence[EliminationStep]) -> int:
    """The entries of the largest table that an order makes."""
    return max((prod(problem.sizes[v] for v in (s.variable, *s.scope)) for s in steps), default=0)


def is_small(problem: Problem) -> bool:
    """Whether all tables of an elimination are small."""
    return largest(problem, order(problem)) <= SMALL


def reduced(
    problem: Problem, *, price: float = 0.0, cap: int = CAP, deadline: float | None = None
) -> Elimination:
    """Eliminate all variables after values that cannot be best have been removed.

    The buckets are those of the smaller problem, so there are none in the answer.
    """
    small = prune(problem, price=price, enough=is_small, deadline=deadline)
    found = eliminate(small.problem, order(small.problem), price=price, cap=cap, deadline=deadline)
    if found.exact:
        return Elimination([], found.bound, True, small.whole(found.values))
    return Elimination([], max(found.bound, small.bound), False, small.values)


def solve(problem: Problem, *, cap: int = CAP, deadline: float | None = None) -> Solution:
    """The cheapest assignment; with a lower bound if tables became too large or the time is over."""
    steps = order(problem)
    if largest(problem, steps) > PRUNE_ABOVE:
        found = reduced(problem, cap=cap, deadline=deadline)
    else:
        found = eliminate(problem, steps, cap=cap, deadline=deadline)
    values = found.values if found.exact else improved(problem, found.values)
    return solution(problem, values, found.bound)
