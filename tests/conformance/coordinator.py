"""Translations of the recorded cases about the coordinator; its tasks are threads of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import pytest

import phalanx as px
from phalanx.coordinator import cluster_coordinator
from tests.conformance.harness import case, mirrored
from tests.coordinator.jobs import TIMEOUT, Gate, Held, Job


@contextlib.contextmanager
def setup(workers: int = 1, servers: int = 1) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_TOKEN", "known to all tasks of this test")
        with Job(workers, servers) as job:
            yield job


def with_job(workers: int) -> Callable[[Callable[[Job], Any]], Callable[[], Any]]:
    """A case that has a job, with one server."""

    def add(fn: Callable[[Job], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with setup(workers) as job:
                return fn(job)

        case(fn.__name__)(run)
        return run

    return add


@px.function
def failing() -> None:
    raise px.errors.InvalidArgumentError("assertion failed")


def outcome(action: Callable[[], Any], good: str = "ok") -> str:
    try:
        action()
    except px.PhalanxError as error:
        return type(error).__name__
    return good


# -- the coordinator ----------------------------------------------------------------------------------


@with_job(1)
def co_single_instance(job: Job) -> Any:
    return px.coordinator.ClusterCoordinator(job.strategy) is job.coordinator


@case()
def co_wrong_strategy() -> Any:
    return px.coordinator.ClusterCoordinator(mirrored(1))  # type: ignore[arg-type]


@with_job(1)
def co_schedule_python_function(job: Job) -> Any:
    return job.coordinator.schedule(lambda: 1)  # type: ignore[arg-type]


@with_job(1)
def co_schedule_not_callable(job: Job) -> Any:
    return job.coordinator.schedule(5)  # type: ignore[arg-type]


@with_job(1)
def co_schedule_plain_args_kwargs(job: Job) -> Any:
    @px.function
    def f(x: Any, y: Any) -> Any:
        return {"sum": x + y, "l": [jnp.asarray(1.0)]}

    return job.coordinator.schedule(f, args=(2,), kwargs={"y": jnp.asarray(3)}).fetch()


@with_job(1)
def co_fetch_structure(job: Job) -> Any:
    c, f = job.coordinator, px.function(lambda x: x * 2)
    return c.fetch({"a": c.schedule(f, args=(1,)), "b": [c.schedule(f, args=(2,)), 5, "x"]})


@with_job(2)
def co_worker_index(job: Job) -> Any:
    f = px.function(px.coordinator.experimental_get_current_worker_index)
    return {int(job.coordinator.schedule(f).fetch()) for _ in range(10)} <= {0, 1}


@case()
def co_per_worker_values_bad() -> Any:
    return px.coordinator.PerWorkerValue([1, 2])  # type: ignore[list-item]


# -- errors -------------------------------------------------------------------------------------------


@with_job(1)
def co_error_on_schedule(job: Job) -> Any:
    c, v = job.coordinator, job.variable(0.0)
    inc = px.function(lambda: v.assign_add(1.0))
    outcome(c.schedule(failing).fetch)
    r = outcome(lambda: c.schedule(inc))
    c.join()
    a = v.numpy()
    c.schedule(inc)
    c.join()
    return {"schedule": r, "v_after_failed_schedule": a, "v_after_next_schedule": v.numpy()}


@with_job(1)
def co_error_cancels_queued(job: Job) -> Any:
    c, v = job.coordinator, job.variable(0.0)

    @px.function
    def slow(x: Any) -> Any:
        v.assign_add(1.0)
        return x

    gate = Gate("slow")
    values = [c.schedule(slow, args=(Held(gate),)), c.schedule(failing)]
    values += [c.schedule(slow, args=(i,)) for i in range(5)]
    gate.open()
    joined = outcome(c.join)
    o = [outcome(value.fetch, "ran") for value in values]
    return {
        "join": joined,
        "first": o[0],
        "failed": o[1],
        "queued_outcomes": sorted(set(o[2:])),
        "count_matches": int(v.numpy()) == o.count("ran"),
    }


@with_job(2)
def co_worker_failure_retry(job: Job) -> Any:
    """A worker is lost while it runs the function."""
    c, v = job.coordinator, job.variable(0.0)

    @px.function
    def f(x: Any) -> Any:
        v.assign_add(1.0)
        return v.read_value()

    gate = Gate("retried")
    value = c.schedule(f, args=(Held(gate),))
    gate.wait_for()
    workers = c.report()["workers"]
    job.stop("worker", next(i for i, w in enumerate(workers) if w["in_flight"]))
    found = value.fetch()
    c.join()
    return {"executions_at_least": gate.arrived >= 2, "value": found}


@with_job(1)
def co_queue_limit_blocks(job: Job) -> Any:
    c, gate = job.coordinator, Gate("limit")
    slow = px.function(lambda x: x)
    st = {"n": 0}

    def produce() -> None:
        for _ in range(6):
            c.schedule(slow, args=(Held(gate),))
            st["n"] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_coordinator, "QUEUE_LIMIT", 2)
        thread = threading.Thread(target=produce)
        thread.start()
        gate.wait_for()
        thread.join(0.2)
        early = st["n"]
        gate.open()
        thread.join(TIMEOUT)
    c.join()
    return {"blocked_early": early < 6, "final": st["n"]}


# -- input --------------------------------------------------------------------------------------------


@with_job(2)
def co_create_per_worker_dataset_from_dataset(job: Job) -> Any:
    c = job.coordinator
    iterator = iter(c.create_per_worker_dataset(px.data.Dataset.range(5, 9)))
    return c.schedule(px.function(next), args=(iterator,)).fetch()


@with_job(1)
def co_create_per_worker_dataset_bad(job: Job) -> Any:
    return job.coordinator.create_per_worker_dataset([1, 2])


@with_job(1)
def co_distributed_dataset_iter_outside_coordinator(job: Job) -> Any:
    return iter(job.strategy.experimental_distribute_dataset(px.data.Dataset.range(4).batch(2)))
