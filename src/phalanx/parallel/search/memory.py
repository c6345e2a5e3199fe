"""The cheapest assignment within a memory budget, exactly.

First a price per byte is raised until the cheapest assignment fits; the best price gives a lower bound
that is usually close. Then Pareto fronts (`fronts`) close the gap: all assignments up to a certain cost
above the bound are looked at, and the first one that fits is the cheapest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.parallel.search.elimination import (
    CAP,
    PRUNE_ABOVE,
    Elimination,
    TableCache,
    eliminate,
    is_small,
    largest,
    order,
    reduced,
)
from phalanx.parallel.search.fronts import Fronts, TooManyPointsError
from phalanx.parallel.search.problem import Problem, Solution, improved, solution
from phalanx.parallel.search.pruning import prune

WIDEST_FRONTS = 1_000_000
"""The entries that a table of fronts may have."""

PRICES = 5
"""How many prices of a byte say which points of fronts are needed."""

WIDTHS = ((1 / 16, 4), (1 / 4, 32), (1, 256))
"""Where a good assignment is looked for: up to which part of the gap, with how many points a front."""


@dataclass(frozen=True)
class Smallest:
    """There is no assignment within the budget; the smallest one."""

    values: tuple[int, ...]
    bytes: float


def smallest(problem: Problem) -> Smallest:
    """The assignment that holds the fewest bytes, and costs least among those."""
    heavy = problem.weights
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
    best, bound, tried = under, over.bound, {0.0: over.bound}
    while deadline is None or time.monotonic() < deadline:
        # Where the lines of both assignments meet, which no price with a better bound is far from.
        price = (under.cost - over.cost) / (over.bytes - under.bytes)
        if price <= 0:
            break
        at_price, middle = at(price)
        tried[price] = middle.bound
        if middle.bound > bound:
            found, bound = at_price, middle.bound
        best = min(best, middle, key=lambda s: s.cost if s.bytes <= budget else np.inf)
        value = middle.cost + price * middle.bytes
        if value >= (under.cost + price * under.bytes) * (1 - 1e-12):
            break
        under, over = (middle, over) if middle.bytes <= budget else (under, middle)
    best = _better(problem, best, (*_between(under, over), best.values), budget)
    if not found.exact:
        return solution(problem, best.values, bound)
    prices = sorted(tried, key=lambda price: -tried[price])[:PRICES]

    answers: _Answers
    if wide:
        answers = _narrowed(problem, prices, budget, deadline)
    else:
        answers = _all_at_once(
            lambda most: Fronts(problem, steps, prices, budget, most, known=known, deadline=deadline)
        )
    return _closed(problem, replace(best, bound=bound), answers)


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


_Answers = Callable[[float, int | None], list[int]]
"""The cheapest values up to a cost, with fronts of a width; see `Fronts.best`."""


def _closed(problem: Problem, best: Solution, answers: _Answers) -> Solution:
    """Look further and further above the bound, until an assignment that fits is found there.

    All assignments up to a certain cost are looked at, so the first one that fits is the cheapest.
    """
    bound = best.bound

    def better(most: float, width: int | None) -> Solution:
        values = answers(most, width)
        is_better = values and problem.cost(values) < best.cost
        return solution(problem, values, bound) if is_better else best

    with contextlib.suppress(TooManyPointsError):
        for part, width in WIDTHS:
            best = better(bound + (best.cost - bound) * part, width)
    base, gap, parts = bound, best.cost - bound, [1 / 64, 1 / 16, 1 / 4, 1]
    with contextlib.suppress(TooManyPointsError):
        while best.cost > bound and parts:
            most = min(best.cost, base + gap * parts.pop(0))
            best = better(most, None)
            bound = min(most, best.cost)
    return solution(problem, best.values, bound)


def _all_at_once(made: Callable[[float], Fronts]) -> _Answers:
    """Fronts that are prepared for the largest cost that was asked for so far."""
    known: list[tuple[float, Fronts]] = []

    def best(most: float, width: int | None) -> list[int]:
        if not known or known[0][0] < most:
            known[:] = [(most, made(most))]
        return known[0][1].best(most, width)

    return best


def _narrowed(
    problem: Problem, prices: Sequence[float], budget: float, deadline: float | None
) -> _Answers:
    """Fronts of a problem whose tables are too large, on the values that matter."""

    def best(most: float, width: int | None) -> list[int]:
        limit = most + prices[0] * budget
        small = prune(problem, price=prices[0], most=limit, enough=is_small, deadline=deadline)
        steps = order(small.problem)
        if largest(small.problem, steps) > WIDEST_FRONTS:
            raise TooManyPointsError
        fronts = Fronts(small.problem, steps, prices, budget, most, deadline=deadline)
        values = fronts.best(most, width)
        return small.whole(values) if values else values

    return best
