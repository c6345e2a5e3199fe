"""Random schedules of faults: every survivor is told in time by name, and keeps its weights."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import pytest

import phalanx as px
from tests.multi_worker import schedules
from tests.multi_worker.schedules import EXPECTED, LASTING, Schedule, Survivor, schedule
from tests.processes import wait_gone

DEADLINE = 3.0
KNOWN_WITHIN = 5.0
STACKS_WITHIN = 6.0  # seconds that the hub waits for the stacks of a frozen worker, and says so

QUICK = range(5)
SLOW = range(5, 125)
AT_ONCE = 5  # schedules that are played at the same time


def check_weights(plan: Schedule, survivor: Survivor) -> None:
    """The variable holds the weights before the step that failed, or after it."""
    assert survivor.held in (survivor.before, survivor.after), (plan, survivor)


def check(plan: Schedule, results: list[Any], faulted: float) -> None:
    lasts = plan.fault in LASTING
    for result in results:
        if result.worker == plan.guilty and plan.fault in ("kill", "raise", "early", "freeze"):
            continue
        assert result.error is None, (plan, result.error)
        survivor: Survivor = result.value
        # Workers tell each other of a failing input before they take what it gave.
        told = {EXPECTED[plan.fault]} | ({"AbortedError"} if plan.place == "input" else set())
        assert survivor.kind in told, (plan, survivor)
        assert f"worker {plan.guilty}" in survivor.text, (plan, survivor)
        patience = DEADLINE + STACKS_WITHIN if lasts else 0.0
        assert survivor.when - faulted < patience + KNOWN_WITHIN, (plan, survivor)
        check_weights(plan, survivor)


def play(plans: list[Schedule]) -> None:
    """Play schedules at the same time."""
    env, preload = {"PHALANX_DEADLINE": str(DEADLINE)}, ["phalanx", schedules.__name__]
    with contextlib.ExitStack() as stack:
        clusters = [
            stack.enter_context(px.testing.MultiProcess(p.workers, 1, env=env, preload=preload))
            for p in plans
        ]
        pids = [pid for cluster in clusters for pid in cluster.pids]
        runs = [c.start(schedules.play, p) for c, p in zip(clusters, plans, strict=True)]
        for plan, cluster, run in zip(plans, clusters, runs, strict=True):
            frozen = plan.fault == "freeze"
            others = [i for i in range(plan.workers) if not (frozen and i == plan.guilty)]
            end = time.monotonic() + 90.0
            assert cluster.wait(lambda r=run, o=others: all(i in r.replies for i in o), 90.0), (  # type: ignore[misc]
                plan,
                time.monotonic() - end,
                cluster.stacks(others),
            )
            results = [run.replies[i].outcome(i, cluster.names[i]) for i in others]
            if frozen:
                cluster.kill(plan.guilty)
            (said,) = re.findall(r"^fault (\S+)$", cluster.stdout(plan.guilty), re.M)
            check(plan, results, float(said))
    assert wait_gone(pids) == []


def play_all(seeds: range) -> None:
    plans = [schedule(seed) for seed in seeds]
    for i in range(0, len(plans), AT_ONCE):
        play(plans[i : i + AT_ONCE])


@pytest.mark.soak  # tests/testing/test_laboratory.py plays twenty others
def test_some_schedules() -> None:
    play_all(QUICK)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SLOW.start, SLOW.stop, 10))
def test_many_schedules(first: int) -> None:
    play_all(range(first, first + 10))
