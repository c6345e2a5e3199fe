"""What the search minimises: a sum of tables over variables and pairs of variables, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Variables, and what their values cost.

    Args:
        costs: the cost of each value of each variable.
        memory: the bytes of each value of each variable.
        edges: pairs of variables, the cost of each pair of values, and its bytes if there are any.
    """

    costs: tuple[Table, ...]
    memory: tuple[Table, ...]
    edges: tuple[tuple[int, int, Table, Table | None], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of values of each variable."""
        return tuple(len(table) for table in self.costs)

    def cost(self, values: Sequence[int]) -> float:
        """The cost of an assignment."""
        alone = sum(table[v] for table, v in zip(self.costs, values, strict=True))
        return float(alone + sum(table[values[a], values[b]] for a, b, table, _ in self.edges))

    def bytes(self, values: Sequence[int]) -> float:
        """The bytes of an assignment."""
        alone = sum(table[v] for table, v in zip(self.memory, values, strict=True))
        return float(alone + sum(m[values[a], values[b]] for a, b, _, m in self.edges if m is not None))

    @cached_property
    def weights(self) -> Problem:
        """The same variables, with their bytes as costs."""
        zero = {id(t): np.zeros_like(t) for _, _, t, m in self.edges if m is None}
        edges = tuple((a, b, zero[id(t)] if m is None else m, None) for a, b, t, m in self.edges)
        return Problem(self.memory, self.memory, edges)

    @cached_property
    def neighbours(self) -> tuple[tuple[tuple[int, Table, Table | None, bool], ...], ...]:
        """The edges of each variable: the other one, both tables, whether this one is first."""
        found: list[list[tuple[int, Table, Table | None, bool]]] = [[] for _ in self.costs]
        for a, b, table, memory in self.edges:
            found[a].append((b, table, memory, True))
            found[b].append((a, table, memory, False))
        return tuple(tuple(x) for x in found)

    def local(self, variable: int, values: Sequence[int], price: float = 0.0) -> Table:
        """The cost of each value of one variable if all others keep theirs."""
        found = self.costs[variable] + price * self.memory[variable]
        for other, table, memory, first in self.neighbours[variable]:
            at = (slice(None), values[other]) if first else (values[other], slice(None))
            found = found + table[at]
            if price and memory is not None:
                found = found + price * memory[at]
        return found


@dataclass(frozen=True)
class Solution:
    """What a search found.

    Args:
        values: the value of each variable.
        cost: what it costs.
        bytes: what it holds.
        bound: no assignment costs less.
    """

    values: tuple[int, ...]
    cost: float
    bytes: float
    bound: float

    @property
    def proven(self) -> bool:
        """Whether nothing can be cheaper."""
        return self.cost <= self.bound


def solution(problem: Problem, values: Sequence[int], bound: float) -> Solution:
    """An assignment as a solution."""
    cost = problem.cost(values)
    return Solution(tuple(int(v) for v in values), cost, problem.bytes(values), min(bound, cost))


def improved(
    problem: Problem, values: Sequence[int], price: float = 0.0, rounds: int = 20
) -> list[int]:
    """Change one variable after the other to its best value until none changes."""
    found = list(values)
    for _ in range(rounds):
        changed = False
        for variable in range(len(found)):
            local = problem.local(variable, found, price)
            best = int(local.argmin())
            if local[best] < local[found[variable]]:
                found[variable], changed = best, True
        if not changed:
            break
    return found
