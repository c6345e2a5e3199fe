"""Random cost graphs, and all of their assignments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from phalanx.parallel.search.problem import Problem


@st.composite
def problems(draw: st.DrawFn, *, variables: int = 6, values: int = 4, edges: int = 10) -> Problem:
    """Any graph, with cycles, several edges between two variables, and edges to the same one."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, variables))
    sizes = [draw(st.integers(1, values)) for _ in range(count)]
    numbers = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=edges))

    def table(*shape: int) -> np.ndarray:
        return random.integers(0, 20, shape).astype(float)

    return Problem(
        tuple(table(n) for n in sizes),
        tuple(table(n) for n in sizes),
        tuple(
            (a, b, table(sizes[a], sizes[b]), table(sizes[a], sizes[b]) if heavy else None)
            for a, b, heavy in pairs
        ),
    )


def assignments(problem: Problem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, problem.sizes))


def every(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The cost and the bytes of every assignment, in the order of `assignments`."""
    grids = np.indices(problem.sizes).reshape(len(problem.sizes), -1)
    costs, bytes_ = np.zeros(grids.shape[1]), np.zeros(grids.shape[1])
    for table, memory, grid in zip(problem.costs, problem.memory, grids, strict=True):
        costs += table[grid]
        bytes_ += memory[grid]
    for a, b, table, memory in problem.edges:
        costs += table[grids[a], grids[b]]
        if memory is not None:
            bytes_ += memory[grids[a], grids[b]]
    return costs, bytes_
