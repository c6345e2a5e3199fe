"""All ways to cut a function, with the latency of each in a schedule.

A schedule does the same actions in the same order wherever the function is cut; only their costs
differ. So one walk through its actions, on arrays with a row for each cut, times thousands of cuts at
once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.parallel.pipelines.schedule import BACKWARD, FORWARD, WEIGHT, PipelineSchedule

__all__ = ["CutCosts", "fastest_cuts"]

Array = np.ndarray[Any, Any]

_AT_ONCE = 8192
_NEARLY = 1 + 1e-9  # sums in another order differ in the last digits


@dataclass(frozen=True)
class CutCosts:
    """What equations cost, as `StageCosts` has it.

    Args:
        cuts: the equations after which the function can be cut.
        forward: the seconds of each equation's forward computation.
        input: those of the gradient of its input.
        weight: those of the gradient of its weights.
        transfers: the seconds that it takes to hand over the tensor at each cut.
        kept: the bytes of each equation that stay for its gradient.
        parameters: the bytes that training holds for what each equation is first to use.
    """

    cuts: Sequence[int]
    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    transfers: Sequence[float]
    kept: Sequence[float]
    parameters: Sequence[float]


def fastest_cuts(costs: CutCosts, made: PipelineSchedule, budget: float) -> list[tuple[int, ...]]:
    """The cuts with the least latency of all that fit into memory: one, or a few that are as fast.

    Args:
        costs: of equations.
        made: the schedule.
        budget: the bytes that each device may hold.
    """
    best = float("inf")
    found: list[tuple[int, ...]] = []
    for numbers in _batches(len(costs.cuts), made.positions - 1):
        seconds = _latencies(costs, made, numbers)
        seconds[~_fit(costs, made, numbers, budget)] = np.inf
        least = float(seconds.min())
        if least == float("inf") or least > best * _NEARLY:
            continue
        found = [] if least * _NEARLY < best else found
        best = min(best, least)
        rows = numbers[seconds <= best * _NEARLY][:8]
        found += [tuple(costs.cuts[i] for i in row) for row in rows]
    return found


def _batches(places: int, cuts: int) -> Iterator[Array]:
    """All choices of so many places, some at once; a row has the numbers of one."""
    every = itertools.combinations(range(places), cuts)
    while some := list(itertools.islice(every, _AT_ONCE)):
        yield np.asarray(some, np.intp).reshape(len(some), cuts)


def _sums(costs: CutCosts, numbers: Array, values: Sequence[float]) -> Array:
    """The sums of values of equations in each part; a row for each cut."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = total[np.asarray(costs.cuts, np.intp)[numbers] + 1]
    edge = np.ones((len(numbers), 1))
    return np.diff(np.concatenate([0 * edge, ends, total[-1] * edge], axis=1), axis=1)


def _fit(costs: CutCosts, made: PipelineSchedule, numbers: Array, budget: float) -> Array:
    """Which cuts let each device hold no more than it may."""
    kept, held = (_sums(costs, numbers, values) for values in (costs.kept, costs.parameters))
    fits = np.ones(len(numbers), bool)
    for stage, positions in enumerate(made.homes):
        live = made.peak_live[stage] / len(positions)
        fits &= sum(held[:, p] + live * kept[:, p] for p in positions) <= budget
    return fits


def _latencies(costs: CutCosts, made: PipelineSchedule, numbers: Array) -> Array:
    """When the last action ends, for each cut."""
    parts = {
        kind: np.ascontiguousarray(_sums(costs, numbers, values).T)
        for kind, values in zip(
            (FORWARD, BACKWARD, WEIGHT), (costs.forward, costs.input, costs.weight), strict=True
        )
    }
    if not made.splits_backward:
        parts[BACKWARD] = parts[BACKWARD] + parts[WEIGHT]
    known = np.asarray(costs.transfers)
    transfer = known[numbers].max(axis=1) if numbers.shape[1] else np.zeros(len(numbers))
    free: list[Any] = [np.zeros(len(numbers))] * made.stages
    ends: dict[Any, tuple[int, Array]] = {}
    for stage, action in made.issue_order:
        key = made.key(stage, action)
        start = free[stage]
        for needed in made.needs(key):
            at, end = ends[needed]
            start = np.maximum(start, end if at == stage else end + transfer)
        free[stage] = start + parts[action.kind][key[2]]
        ends[key] = stage, free[stage]
    return np.max(free, axis=0)
