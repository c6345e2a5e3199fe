"""MindSpore's two other searches, on the same tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.parallel.search.problems import problems

import phalanx as px
from phalanx.parallel.search.elimination import solve
from phalanx.parallel.search.problem import Problem
from phalanx.parallel.search.propagation import solve_by_propagation
from phalanx.parallel.search.recursive import solve_recursively


@given(problems(variables=5), st.data())
def test_heuristics_never_beat_the_exact_search(problem: Problem, data: st.DataObject) -> None:
    best = solve(problem).cost
    pinned = data.draw(st.sets(st.integers(0, len(problem.sizes) - 1), min_size=1))
    loops = [[(v - 1,) for v in range(n)] for n in problem.sizes]
    for found in (solve_by_propagation(problem, pinned), solve_recursively(problem, loops)):
        assert found.cost == problem.cost(found.values) >= best


def path(values: int = 3) -> Problem:
    """A row of three variables for which it is cheapest to agree."""
    agree = 10 * (1 - np.eye(values))
    costs = (np.array([5.0, 0, 1]), np.zeros(values), np.array([0.0, 9, 9]))
    return Problem(costs, costs, ((0, 1, agree, None), (1, 2, agree, None)))


def test_propagation_copies_the_neighbour() -> None:
    problem = path()
    assert solve_by_propagation(problem, [0]).values == (1, 1, 1)
    assert solve_by_propagation(problem, [2]).values == (0, 0, 0)
    with pytest.raises(px.errors.InvalidValueError, match="There is no operator that is configured"):
        solve_by_propagation(problem, [])


def test_what_propagation_does_not_reach_takes_its_first_value() -> None:
    zero = np.zeros(3)
    problem = Problem((zero, zero - 1.0, zero), (zero,) * 3, ())
    assert solve_by_propagation(problem, [2]).values == (0, 0, 0)


def test_recursion_decides_one_axis_after_the_other() -> None:
    loops = [[(0, 0), (0, -1), (-1, 0), (-1, -1)]]
    # Best with both axes; but one alone is worse than none, so a greedy search never gets there.
    costs = np.array([0.0, 9.0, 9.0, 5.0])
    problem = Problem((costs,), (costs,), ())
    assert solve(problem).values == (0,)
    assert solve_recursively(problem, loops).values == (3,)
