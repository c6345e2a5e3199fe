"""Two jobs in one program, and variables that come and go while functions run."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.coordinator.jobs import TIMEOUT, Gate, Job

import phalanx as px
from phalanx.parameter_server import watch


def held(job: Job) -> int:
    """How many variables the servers of a job hold."""
    gc.collect()
    for server in range(len(job.cluster["ps"])):
        job.strategy.extended.home.let_go(server)
    with job.strategy.extended.home.in_turn() as servers:
        return sum(s["variables"] for s in servers.status())  # type: ignore[attr-defined]


def settled(job: Job, count: int) -> None:
    """Wait until servers hold so many variables; workers tell that they have forgotten functions."""
    end = time.monotonic() + TIMEOUT
    while held(job) != count:
        assert time.monotonic() < end, held(job)
        job.coordinator.schedule(nothing).fetch()


@px.function
def nothing() -> None:
    """A round trip."""


def test_two_jobs_are_used_in_turns() -> None:
    with Job(1, 1) as one, Job(2, 2) as other:
        jobs = [one, other]
        counts = [job.variable(0) for job in jobs]
        steps = [px.function(lambda c=c: c.assign_add(1) + 0) for c in counts]
        for _ in range(3):
            for job, count, step in zip(jobs, counts, steps, strict=True):
                job.coordinator.schedule(step)
                count.assign_add(1)
                job.coordinator.join()
        threads = [
            threading.Thread(target=lambda j=j, s=s: [j.coordinator.schedule(s) for _ in range(20)])
            for j, s in zip(jobs, steps, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for job in jobs:
            job.coordinator.join()
        assert [int(c) for c in counts] == [26, 26]


def test_functions_use_the_variables_of_their_coordinator() -> None:
    with Job(1, 1) as one, Job(1, 1) as other:
        mine, theirs = one.variable(0), other.variable(0, name="theirs")
        for fn, why in (
            (lambda: theirs + 0, "'theirs:0' is on those of another"),
            (lambda: mine.assign_add(1) + theirs, "one function for each strategy"),
        ):
            one.coordinator.schedule(px.function(fn))
            with pytest.raises(px.errors.StrategyMismatchError, match=why):
                one.coordinator.join()
        value = one.coordinator.schedule(
            px.function(lambda x: mine.assign_add(1) + x), (theirs.numpy(),)
        )
        assert (int(value.fetch()), int(mine), int(theirs)) == (1, 1, 0)


def test_coordinators_have_nothing_in_common() -> None:
    with Job(1, 1) as one, Job(1, 1) as other:
        mine, theirs = (
            iter(job.coordinator.create_per_worker_dataset(px.data.Dataset.range(first, 9)))
            for job, first in ((one, 1), (other, 5))
        )
        take = px.function(next)
        assert int(one.coordinator.schedule(take, args=(mine,)).fetch()) == 1
        value = other.coordinator.schedule(take, args=(theirs,))
        for foreign in (theirs, value, {"nested": [theirs]}):
            with pytest.raises(ValueError, match="of another coordinator"):
                one.coordinator.schedule(take, args=(foreign,))
        with pytest.raises(ValueError, match="of another coordinator"):
            one.coordinator.create_per_worker_resource(next, (theirs,))
        one.coordinator.close()  # the next one numbers what workers have in the same way
        first = one.coordinator.create_per_worker_dataset(px.data.Dataset.range(3))
        with pytest.raises(ValueError, match="of another coordinator"):
            one.coordinator.schedule(take, args=(mine,))
        assert int(one.coordinator.schedule(take, args=(iter(first),)).fetch()) == 0
        assert int(value.fetch()) == 5


def test_variables_last_as_long_as_functions_that_use_them() -> None:
    with Job(1, 1) as job:
        kept = job.variable(0.0)
        gate = Gate("variables")
        coordinator = job.coordinator
        coordinator.schedule(px.function(lambda: Gate.named("variables").pass_through()))
        gate.wait_for()
        values = []
        for i in range(4):
            v = job.variable(np.full(3, i, np.float32))
            values.append(
                coordinator.schedule(px.function(lambda v=v: v.assign_add(np.ones(3)) + kept))
            )
            values.append(coordinator.schedule(total, args=(v,)))
        del v
        assert held(job) == 1 + 4  # functions wait that refer to them
        gate.open()
        coordinator.join()
        found = [float(x.fetch().sum()) for x in values[::2]]
        assert found == [3.0 * (i + 1) for i in range(4)]
        settled(job, 1)


@px.function
def total(v: Any) -> Any:
    return v.read_value().sum()


def test_a_loop_that_makes_variables_leaves_nothing() -> None:
    with Job(1, 1) as job:
        for i in range(20):
            v = job.variable(np.full((64, 64), i, np.float32))
            assert float(job.coordinator.schedule(total, args=(v,)).fetch()) == 4096 * i
        del v
        settled(job, 0)
        (worker,) = job.tasks["worker", 0]._services["closures"]._sessions  # type: ignore[attr-defined]
        end = time.monotonic() + TIMEOUT
        while len(worker._servers._known) > 1:  # the last values that the worker has read
            assert time.monotonic() < end, "the worker keeps values"
            job.coordinator.schedule(nothing).fetch()


def test_a_closed_strategy_holds_nothing() -> None:
    with Job(1, 1) as job:
        v = job.variable(0.0)
        job.coordinator.schedule(px.function(lambda: v.assign_add(1.0) + 0.0)).fetch()
        job.strategy.close()
        with pytest.raises(RuntimeError, match="has been closed"):
            v.numpy()
        job.strategy = job.new_strategy()
        v = job.variable(2.0)
        assert (float(v), held(job)) == (2.0, 1)


def test_variables_are_freed_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_BEAT", 0.1)
    with Job(1, 1) as job:
        v, kept = job.variable(0.0), job.variable(1.0)
        del v
        gc.collect()
        (service,) = (s for name, s in job.tasks["ps", 0]._services.items() if name == "ps")
        end = time.monotonic() + TIMEOUT
        while service.status()["variables"] != 1:
            assert time.monotonic() < end, "the variable is not freed"
        assert float(kept) == 1.0


def test_a_lost_server_does_not_disturb_the_others() -> None:
    with Job(1, 2, server_timeout=1.0) as job:
        kept, lost = job.variable(1.0), job.variable(2.0)
        job.stop("ps", 1)
        del lost
        gc.collect()
        assert float(kept) == 1.0
        job.start("ps", 1)
