"""Exact elimination, against all assignments of random cost graphs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.parallel.search.problems import assignments, every, problems

from phalanx.parallel.search import elimination
from phalanx.parallel.search.elimination import eliminate, largest, order, reduced, solve
from phalanx.parallel.search.marginals import marginals
from phalanx.parallel.search.problem import Problem, improved


@settings(max_examples=300)
@given(problems())
def test_elimination_finds_the_cheapest_assignment(problem: Problem) -> None:
    costs, _ = every(problem)
    found = solve(problem)
    assert found.cost == costs.min() == problem.cost(found.values)
    assert found.proven
    assert found.bytes == problem.bytes(found.values)


@settings(max_examples=100)
@given(problems(variables=5))
def test_marginals_are_the_best_costs_of_every_value(problem: Problem) -> None:
    count = len(problem.sizes)
    found = marginals(eliminate(problem, order(problem)), frozenset(range(count)))
    costs, _ = every(problem)
    grids = np.indices(problem.sizes).reshape(count, -1)
    for v in range(count):
        best = [costs[grids[v] == x].min() for x in range(problem.sizes[v])]
        assert found[v].tolist() == best


@settings(max_examples=100)
@given(problems(), st.floats(0, 3))
def test_pruning_keeps_a_cheapest_assignment(problem: Problem, price: float) -> None:
    costs, held = every(problem)
    found = reduced(problem, price=price)
    best = (costs + price * held).min()
    assert found.exact
    assert found.bound == pytest.approx(best)
    assert problem.cost(found.values) + price * problem.bytes(found.values) == pytest.approx(best)


@settings(max_examples=100)
@given(problems(variables=7, edges=14), st.integers(1, 60))
def test_small_tables_give_bounds_that_hold(problem: Problem, cap: int) -> None:
    """With less room than an exact answer needs, the bound is below it, and the answer above."""
    costs, _ = every(problem)
    found = solve(problem, cap=cap)
    assert found.bound <= costs.min() <= found.cost
    assert found.cost == problem.cost(found.values)


def chain(blocks: int, sizes: tuple[int, ...] = (9, 3, 3, 3)) -> Problem:
    """Equal blocks in a row: a cycle of four variables each."""
    random = np.random.default_rng(0)

    def table(*shape: int) -> np.ndarray:
        return random.integers(0, 99, shape).astype(float)

    alone = [table(n) for n in sizes]
    inner = [(0, 1), (1, 2), (2, 3), (0, 3)]
    tables = [table(sizes[a], sizes[b]) for a, b in inner]
    between = table(sizes[3], sizes[0])
    edges = []
    for i in range(0, 4 * blocks, 4):
        edges += [(i + a, i + b, t, None) for (a, b), t in zip(inner, tables, strict=True)]
        if i:
            edges.append((i - 1, i, between, None))
    return Problem(tuple(alone) * blocks, tuple(np.zeros(n) for n in sizes) * blocks, tuple(edges))


def test_equal_blocks_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = elimination.joined
    monkeypatch.setattr(elimination, "joined", lambda *args: made.append(1) or real(*args))
    counts = []
    for blocks in (8, 64):
        made.clear()
        problem = chain(blocks)
        solve(problem)
        counts.append(len(made) / len(problem.sizes))
    assert counts[1] < 0.4  # most of the variables find their table made
    assert counts[1] < counts[0]


def test_chains_are_solved_as_by_dynamic_programming() -> None:
    problem = chain(30)
    message = np.zeros(problem.sizes[0])
    # The same by hand: the cost of each value of the last variable of a block, block after block.
    for block in range(30):
        i = 4 * block
        a, b, c, d = problem.costs[i : i + 4]
        tables = {(x, y): t for x, y, t, _ in problem.edges if i <= x and y < i + 4}
        whole = (a + message)[:, None, None, None] + b[:, None, None] + c[:, None] + d
        whole = whole + tables[i, i + 1][:, :, None, None] + tables[i + 1, i + 2][:, :, None]
        whole = whole + tables[i + 2, i + 3] + tables[i, i + 3][:, None, None, :]
        last = whole.min(axis=(0, 1, 2))
        if block < 29:
            between = next(t for x, y, t, _ in problem.edges if (x, y) == (i + 3, i + 4))
            message = (last[:, None] + between).min(axis=0)
    assert solve(problem).cost == last.min()


def test_a_time_limit_gives_an_answer_and_a_bound() -> None:
    random = np.random.default_rng(1)
    count, size = 14, 12
    costs = tuple(random.integers(0, 50, size).astype(float) for _ in range(count))
    edges = tuple(
        (a, b, random.integers(0, 50, (size, size)).astype(float), None)
        for a in range(count)
        for b in range(a)
    )
    problem = Problem(costs, costs, edges)  # every variable with every other: no exact answer in time
    assert largest(problem, order(problem)) > 10**12
    found = solve(problem, deadline=time.monotonic())
    assert found.bound < found.cost
    assert not found.proven
    assert improved(problem, found.values) == list(found.values)


def test_brute_force_and_tables_count_alike() -> None:
    problem = chain(1)
    costs, _ = every(problem)
    assert [problem.cost(values) for values in assignments(problem)] == costs.tolist()
