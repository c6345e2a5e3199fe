"""MindSpore's ``sharding_propagation`` on our cost model: given layouts spread to their neighbours.

From each pinned variable outwards, a neighbour takes the value whose tables with the variable that it
was reached from cost least, and of equal ones the cheapest. Variables that no pinned one reaches take
their first value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np

from phalanx.errors import InvalidValueError
from phalanx.parallel.search.problem import Problem, Solution, solution


def solve_by_propagation(problem: Problem, pinned: Collection[int]) -> Solution:
    """The assignment that pinned variables spread.

    Args:
        problem: the variables and their tables.
        pinned: the variables whose value is given.
    """
    if not pinned:
        raise InvalidValueError(
            "There is no operator that is configured sharding strategy. Propagation needs at least one "
            "tensor or operator whose layout is given in `pins`. Received: none."
        )
    values: dict[int, int] = {v: int(problem.costs[v].argmin()) for v in sorted(pinned)}
    queue = deque(values)
    while queue:
        v = queue.popleft()
        for other, table, _, first in problem.neighbours[v]:
            if other not in values:
                between = table[values[v], :] if first else table[:, values[v]]
                values[other] = int(np.lexsort((problem.costs[other], between))[0])
                queue.append(other)
    return solution(problem, [values.get(v, 0) for v in range(len(problem.sizes))], -np.inf)
