"""Workers, servers and whole clusters that come late, go, and come back."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.coordinator.jobs import TIMEOUT, Gate, Held, Job

import phalanx as px
from phalanx.coordinator import cluster_coordinator
from phalanx.coordinator.cluster_coordinator import ClusterCoordinator

TOKEN = "known to all tasks of this test"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)


def until(condition: Callable[[], bool], what: str) -> None:
    """Look until something is so; each look waits for the coordinator's thread."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, f"{what} does not happen"


def adding(variables: list[Any]) -> px.Function:
    """A function that adds to all variables and returns its argument."""

    def add(x: Any) -> Any:
        for variable in variables:
            variable.assign_add(1.0)
        return x

    return px.function(add)


def states(coordinator: ClusterCoordinator) -> list[str]:
    return [worker["state"] for worker in coordinator.report()["workers"]]


def busy_worker(coordinator: ClusterCoordinator) -> int:
    loads = [worker["in_flight"] for worker in coordinator.report()["workers"]]
    return loads.index(max(loads))


# -- workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_function_of_a_lost_worker_runs_elsewhere(delivery: str) -> None:
    with Job(2, 2, delivery=delivery) as job:
        counts = [job.variable(0.0), job.variable(0.0)]
        coordinator = job.coordinator
        until(lambda: states(coordinator) == ["up", "up"], "that both workers are up")
        gate = Gate("lost")
        value = coordinator.schedule(adding(counts), args=(Held(gate),))
        gate.wait_for()
        job.stop("worker", busy_worker(coordinator))
        assert value.fetch() == "held"
        coordinator.join()
        assert [float(c.numpy()) for c in counts] == [1, 1]
        assert coordinator.report()["retried"] == 1
        gate.open()  # the lost worker still runs it, and servers refuse what it pushes
        gate.wait_for_left(2)
        for _ in range(20):
            coordinator.schedule(adding(counts[:1]), args=(1,)).fetch()
        if delivery == "exactly_once":
            assert [float(c.numpy()) for c in counts] == [21, 1]


def test_a_worker_comes_back_and_has_its_resources_again() -> None:
    with Job(1) as job:
        coordinator = job.coordinator
        numbers = iter(coordinator.create_per_worker_dataset(px.data.Dataset.range(10, 20)))
        take = px.function(next)
        assert [int(coordinator.schedule(take, args=(numbers,)).fetch()) for _ in range(3)] == [
            10,
            11,
            12,
        ]
        job.stop("worker", 0)
        until(lambda: states(coordinator) == ["lost"], "that the worker is lost")
        waiting = [coordinator.schedule(take, args=(numbers,)) for _ in range(3)]
        assert not coordinator.done()
        job.start("worker", 0)
        assert [int(v.fetch()) for v in waiting] == [10, 11, 12], "its dataset begins anew"


def test_tasks_may_come_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
    with Job(2, 1, start=False) as job:
        job.start("ps", 0)
        count = job.variable(0.0)
        values = [job.coordinator.schedule(adding([count]), args=(i,)) for i in range(10)]
        job.start("worker", 1)
        assert [int(v.fetch()) for v in values] == list(range(10))
        job.start("worker", 0)
        until(lambda: states(job.coordinator) == ["up", "up"], "that both workers are up")


def test_missing_workers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with Job(2, 1, start=False, worker_timeout=6.0) as job, caplog.at_level(logging.WARNING):
        job.start("ps", 0)
        value = job.coordinator.schedule(px.function(lambda: 1))
        named = f"worker 1 at {job.cluster['worker'][1]}: .*nothing listens"
        with pytest.raises(px.errors.DeadlineExceededError, match=named):
            job.coordinator.join()
        with pytest.raises(px.errors.DeadlineExceededError, match="worker 0 at"):
            value.fetch()
        assert f"worker 0 at {job.cluster['worker'][0]} is missing" in caplog.text
        job.start("worker", 0)  # it is not too late
        assert int(value.fetch()) == 1


def test_a_wait_says_what_it_is_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_coordinator, "_QUIET", 1.0)
    with Job(1, 1) as job, caplog.at_level(logging.WARNING):
        gate = Gate("long")
        value = job.coordinator.schedule(
            px.function(
                lambda x: x,
            ),
            args=(Held(gate),),
        )
        gate.wait_for()
        timer = threading.Timer(3.5, gate.open)
        timer.start()
        job.coordinator.join()
        assert value.fetch() == "held"
    assert "Waiting for all functions" in caplog.text
    assert f"worker 0 at {job.cluster['worker'][0]} has been running <lambda> for" in caplog.text


def test_what_only_a_lost_worker_had_is_said_to_be_lost() -> None:
    with Job(1, 1, start=False) as job:
        job.start("ps", 0)
        count = job.variable(0.0)

        @px.function
        def large(x: Any) -> Any:
            count.assign_add(1.0)
            return np.zeros(1 << 20, np.float32)

        # Its updates are made before it can tell: the coordinator is told of the loss first.
        coordinator = job.coordinator
        dispatcher = coordinator._dispatcher
        receive = dispatcher._receive  # connections keep the one that is there when they are made
        dispatcher._receive = lambda worker, message: dispatcher._peers[worker].connection.close()  # type: ignore[method-assign,union-attr]
        job.start("worker", 0)
        until(lambda: states(coordinator) == ["up"], "that the worker is up")
        value = coordinator.schedule(large, args=(1,))
        with pytest.raises(px.errors.UnavailableError, match="not run again"):
            value.fetch()
        dispatcher._receive = receive  # type: ignore[method-assign]
        coordinator.join()
        assert float(count.numpy()) == 1


def test_workers_that_can_never_get_ready_are_not_awaited() -> None:
    with Job(1, 1, start=False) as job:
        job.start("ps", 0)
        count = job.variable(0.0)
        job.stop("ps", 0)
        job.start("ps", 0)  # which keeps nothing
        job.start("worker", 0)
        coordinator = job.coordinator
        value = coordinator.schedule(adding([count]), args=(1,))
        with pytest.raises(px.errors.ServerStateLostError, match=r"ps task 0, .* kept nothing"):
            coordinator.join()
        with pytest.raises(px.errors.CancelledError):
            value.fetch()


# -- slow workers -------------------------------------------------------------------------------------


def test_a_backup_worker_overtakes_a_slow_one() -> None:
    with Job(2, 2, backup_workers=1) as job:
        counts = [job.variable(0.0), job.variable(0.0)]
        coordinator = job.coordinator
        until(lambda: states(coordinator) == ["up", "up"], "that both workers are up")
        gate = Gate("slow")
        value = coordinator.schedule(adding(counts), args=(Held(gate),))
        gate.wait_for(2)
        assert value.fetch() == "held"
        coordinator.join()
        gate.open()
        gate.wait_for_left(2)
        until(lambda: coordinator.report()["in_flight"] == 0, "that the slow worker is heard of")
        assert [float(c.numpy()) for c in counts] == [1, 1]
        assert coordinator.report()["done"] == 1


def test_without_staleness_functions_run_in_order() -> None:
    with Job(2, 1, max_staleness=0) as job:
        v = job.variable(1.0)
        step = px.function(lambda x: v.assign(v * 0.5 + x))
        expected = 1.0
        for i in range(30):
            job.coordinator.schedule(step, args=(np.float32(i),))
            expected = expected * 0.5 + i
        job.coordinator.join()
        np.testing.assert_allclose(float(v.numpy()), expected, rtol=1e-6)


# -- servers ------------------------------------------------------------------------------------------


def test_a_lost_server_is_named() -> None:
    with Job(1, 2, server_timeout=1.0) as job:
        counts = [job.variable(0.0), job.variable(0.0)]
        coordinator = job.coordinator
        add = adding(counts)
        coordinator.schedule(add, args=(1,)).fetch()
        job.stop("ps", 1)
        value = coordinator.schedule(add, args=(1,))
        with pytest.raises(px.errors.UnavailableError, match="ps task 1"):
            value.fetch()
        with pytest.raises(px.errors.UnavailableError, match="ps task 1"):
            coordinator.join()


# -- processes ----------------------------------------------------------------------------------------

SERVE = """
import json, sys
import phalanx as px
cluster, job, index = json.loads(sys.argv[1])
px.Server(cluster, job_name=job, task_index=index).join()
"""


class Process:
    """A task in a process of its own."""

    def __init__(self, job: Job, kind: str, index: int) -> None:
        about = json.dumps([job.cluster, kind, index])
        self._process = subprocess.Popen([sys.executable, "-c", SERVE, about])

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT)


@contextlib.contextmanager
def processes(job: Job, kind: str) -> Iterator[list[Process]]:
    started = [Process(job, kind, i) for i in range(len(job.cluster[kind]))]
    try:
        yield started
    finally:
        for process in started:
            process.end()


def test_killed_and_frozen_workers(caplog: pytest.LogCaptureFixture) -> None:
    with Job(2, 1, start=False, worker_timeout=2.0) as job:
        job.start("ps", 0)
        with processes(job, "worker") as workers:
            counts = [job.variable(0.0), job.variable(0.0)]
            coordinator = job.coordinator
            until(lambda: states(coordinator) == ["up", "up"], "that both workers are up")
            add = adding(counts)
            for _ in range(200):
                coordinator.schedule(add, args=(1,))
            workers[0].end()
            until(lambda: states(coordinator)[0] == "lost", "that the killed worker is lost")
            workers[0] = Process(job, "worker", 0)
            until(lambda: states(coordinator)[0] == "up", "that it is back")
            for _ in range(200):
                coordinator.schedule(add, args=(1,))
            workers[1].signal(signal.SIGSTOP)
            coordinator.join()
            assert [float(c.numpy()) for c in counts] == [400, 400]
            workers[1].signal(signal.SIGCONT)
            until(lambda: states(coordinator) == ["up", "up"], "that it is back")
            index = px.function(px.coordinator.experimental_get_current_worker_index)
            values = [coordinator.schedule(index) for _ in range(50)]
            assert {int(v.fetch()) for v in values} <= {0, 1}
            assert [float(c.numpy()) for c in counts] == [400, 400]
