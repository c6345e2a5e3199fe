"""MindSpore's ``recursive_programming`` on our cost model: one mesh axis after the other, greedily.

In each round every operator, the most expensive ones first, gives the axis of the round to the loop
that costs least, with the changes of layout from and to operators that have chosen before. Choices are
never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.parallel.layout import NONE, Layout
from phalanx.parallel.search.problem import Problem, Solution, Table, solution


def solve_recursively(problem: Problem, loops: Sequence[Sequence[Layout]]) -> Solution:
    """A greedy assignment.

    Args:
        problem: the variables and their tables.
        loops: for each value of each variable, the loop of each mesh axis.
    """
    axes = len(loops[0][0]) if loops else 0
    visits = sorted(range(len(loops)), key=lambda v: (-float(problem.costs[v].max()), v))
    chosen: list[Layout] = [(NONE,) * axes for _ in loops]
    values = [0] * len(loops)
    for axis in range(axes):
        decided: set[int] = set()
        for v in visits:
            local = _local(problem, v, values, decided)
            values[v] = min(_open(loops[v], chosen[v], axis), key=lambda x: (float(local[x]), x))
            chosen[v] = loops[v][values[v]]
            decided.add(v)
    return solution(problem, values, -np.inf)


def _open(options: Sequence[Layout], chosen: Layout, axis: int) -> list[int]:
    """The values that keep what earlier rounds chose and leave later ones open; all if none does."""
    rest = (NONE,) * (len(chosen) - axis - 1)
    found = [
        x
        for x, loops in enumerate(options)
        if loops[:axis] == chosen[:axis] and loops[axis + 1 :] == rest
    ]
    return found or list(range(len(options)))


def _local(problem: Problem, v: int, values: Sequence[int], decided: set[int]) -> Table:
    """The cost of each value, with the tables of variables that have been decided."""
    found = problem.costs[v]
    for other, table, _, first in problem.neighbours[v]:
        if other in decided:
            found = found + (table[:, values[other]] if first else table[values[other], :])
    return found
