"""Coordinators and strategies that are closed: nobody waits in vain, and nothing stays behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.jobs import TIMEOUT, Gate, Job

import phalanx as px


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "known to all tasks of this test")


@px.function
def double(x: Any) -> Any:
    return x * 2


def raised(call: Any) -> BaseException:
    try:
        call()
    except px.PhalanxError as error:
        return error
    raise AssertionError("there is no error")


@pytest.mark.parametrize("closed", ["coordinator", "strategy"])
def test_nothing_of_a_closed_coordinator_is_awaited(closed: str, tmp_path: Path) -> None:
    with Job(1) as job, ThreadPoolExecutor(4) as threads:
        gate, coordinator = Gate("closing"), job.coordinator
        done = coordinator.schedule(double, args=(1,))
        assert int(done.fetch()) == 2
        dataset = coordinator.create_per_worker_dataset(px.data.Dataset.range(3))
        running = coordinator.schedule(px.function(lambda: Gate.named("closing").pass_through()))
        gate.wait_for()
        never = coordinator.create_per_worker_resource(int)  # the worker is busy
        waiting = [coordinator.schedule(double, args=(x,)) for x in (running, 1)]
        values = [running, *waiting, never.values[0]]
        calls = [value.fetch for value in values]
        calls.append(coordinator.join)
        futures = [threads.submit(raised, call) for call in (calls[0], calls[1], calls[3], calls[4])]
        while len(coordinator._dispatcher.questions._open) < 1:
            assert not any(future.done() for future in futures)
        (job.strategy if closed == "strategy" else coordinator).close()
        found = [future.result(TIMEOUT) for future in futures]
        kinds = [px.errors.CancelledError] * 3 + [px.errors.ContextError]
        assert [type(error) for error in found] == kinds
        assert "may have been made" in str(found[0])
        assert "was not run" in str(found[1])
        assert int(done.fetch()) == 2
        for call in (
            *calls[4:],
            coordinator.done,
            coordinator.report,
            lambda: coordinator.schedule(double, args=(1,)),
            lambda: coordinator.create_per_worker_dataset(px.data.Dataset.range(3)),
            lambda: iter(dataset),
            lambda: coordinator.checkpoint(tmp_path),
        ):
            with pytest.raises(px.errors.ContextError, match="coordinator has been closed"):
                call()
        coordinator.close()  # nothing happens
        gate.open()


def test_what_is_scheduled_while_the_coordinator_is_closed_is_given_up() -> None:
    with Job(1) as job:
        coordinator = job.coordinator
        assert int(coordinator.schedule(double, args=(1,)).fetch()) == 2  # else the worker still begins
        dispatcher = coordinator._dispatcher
        put = dispatcher.put

        def close_and_put(entry: Any) -> None:
            coordinator.close()
            put(entry)

        dispatcher.put = close_and_put  # type: ignore[method-assign]
        value = coordinator.schedule(double, args=(1,))
        with pytest.raises(px.errors.CancelledError, match="was not run"):
            value.fetch()


def test_another_coordinator_of_a_strategy_goes_on() -> None:
    with Job(1, 2) as job:
        counts = [job.variable(0), job.variable(0)]

        @px.function
        def step() -> None:
            for count in counts:
                count.assign_add(1)

        for i in range(3):
            coordinator = job.coordinator
            for _ in range(5):
                coordinator.schedule(step)
            coordinator.join()
            assert [int(count) for count in counts] == [5 * (i + 1)] * 2
            coordinator.close()
            if i == 1:
                job._coordinators[0].close()  # the first one was closed long ago


def test_a_closed_coordinator_leaves_nothing_behind() -> None:
    def program() -> list[weakref.ref[Any]]:
        with Job(1) as job:
            count = job.variable(0)
            coordinator = job.coordinator
            numbers = iter(coordinator.create_per_worker_dataset(px.data.Dataset.range(3)))
            step = px.function(lambda numbers: count.assign_add(next(numbers)) + 0)
            coordinator.schedule(step, args=(numbers,)).fetch()
            coordinator.close()
            job._strategies.clear()  # as programs do that forget to close them
            job._coordinators.clear()
            return [
                weakref.ref(x) for x in (coordinator, job.strategy, job.strategy.extended.home, count)
            ]

    found = program()
    end = time.monotonic() + TIMEOUT
    while any(ref() is not None for ref in found) or watches():
        assert time.monotonic() < end, ([ref() for ref in found], watches())
        gc.collect()


def watches() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "phalanx-watch" in thread.name]
