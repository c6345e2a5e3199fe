"""Memory budgets, against all assignments of random cost graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.parallel.search.problems import every, problems

from phalanx.parallel.search import fronts, memory
from phalanx.parallel.search.memory import Smallest, smallest, solve_within
from phalanx.parallel.search.problem import Problem


@settings(max_examples=300)
@given(problems(), st.floats(0, 1))
def test_budgets_are_met_at_the_least_cost(problem: Problem, part: float) -> None:
    costs, held = every(problem)
    budget = float(np.quantile(held, part))
    found = solve_within(problem, budget)
    assert not isinstance(found, Smallest)
    assert found.bytes <= budget
    assert found.cost == costs[held <= budget].min()
    assert found.proven


@settings(max_examples=100)
@given(problems(), st.floats(0, 1))
def test_wide_problems_are_narrowed_first(problem: Problem, part: float) -> None:
    costs, held = every(problem)
    budget = float(np.quantile(held, part))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "PRUNE_ABOVE", 0)
        found = solve_within(problem, budget)
    assert not isinstance(found, Smallest)
    assert found.bytes <= budget
    assert found.cost == costs[held <= budget].min()
    assert found.bound == pytest.approx(found.cost)


@settings(max_examples=100)
@given(problems())
def test_what_does_not_fit_is_told_with_the_least_that_would(problem: Problem) -> None:
    _, held = every(problem)
    found = solve_within(problem, float(held.min()) - 1)
    assert isinstance(found, Smallest)
    assert found.bytes == held.min() == problem.bytes(found.values) == smallest(problem).bytes


@settings(max_examples=50)
@given(problems())
def test_more_memory_never_costs_more(problem: Problem) -> None:
    _, held = every(problem)
    costs = []
    for budget in np.unique(held)[:8]:
        found = solve_within(problem, float(budget))
        assert not isinstance(found, Smallest)
        costs.append(found.cost)
    assert costs == sorted(costs, reverse=True)


@settings(max_examples=50)
@given(problems(), st.floats(0, 1), st.integers(0, 30))
def test_without_room_for_fronts_the_bound_still_holds(
    problem: Problem, part: float, points: int
) -> None:
    costs, held = every(problem)
    budget = float(np.quantile(held, part))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fronts, "MOST_POINTS", points)
        found = solve_within(problem, budget)
    assert not isinstance(found, Smallest)
    assert found.bytes <= budget
    assert found.bound <= costs[held <= budget].min() <= found.cost
