"""Each strategy has parameter servers of its own, and servers free what no code refers to."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.job.hub.descriptions import Task
from phalanx.parameter_server import watch
from phalanx.parameter_server.closure import closure
from phalanx.parameter_server.durability import Durability
from phalanx.parameter_server.home import ServersHome
from phalanx.parameter_server.requests import Token
from phalanx.parameter_server.session import Session
from phalanx.parameter_server.snapshots import load_snapshot, records_of, write_snapshot
from phalanx.parameter_server.store import Store
from tests.parameter_server.jobs import Job
from tests.parameter_server.running import KEY, SECONDS, connections, running

FIXED = px.partitioners.FixedShardsPartitioner


def held(job: Job) -> list[int]:
    """How many variables each server of a job holds that has freed what it can."""
    gc.collect()
    for server in range(len(job.servers.stores)):
        job.strategy.extended.home.let_go(server)
    return [len(store.variables) for store in job.servers.stores]


# -- two strategies ---------------------------------------------------------------------------------


def test_two_strategies_are_used_in_turns() -> None:
    jobs = [Job(1), Job(2, FIXED(2))]
    variables = [job.variable(np.zeros((4, 2), np.float32)) for job in jobs]
    assert [held(job) for job in jobs] == [[1], [1, 1]]
    steps = [px.function(lambda v=v: v.assign_add(jnp.ones((4, 2))).name) for v in variables]
    for i in range(3):
        for job, v, step in zip(jobs, variables, steps, strict=True):
            v.assign_add(np.ones((4, 2), np.float32))  # by itself
            step()  # a commit
            job.run(step)  # a closure
            assert v.numpy().sum() == 8 * 3 * (i + 1)
            assert px.nn.embedding_lookup(v, [3]).sum() == 2 * 3 * (i + 1)


def test_optimizers_belong_to_the_servers_of_their_strategy() -> None:
    jobs = [Job(1), Job(1)]
    for job in jobs:
        v = job.variable(1.0)
        with job.strategy.scope():
            optimizer = px.train.Optimizer(optax.sgd(0.5))
        job.run(px.function(lambda v=v, o=optimizer: o.minimize(lambda: v * v, [v])))
        assert float(v) == 0.0
        assert len(job.servers.stores[0].optimizers) == 1


def test_threads_use_two_strategies_at_the_same_time() -> None:
    jobs = [Job(1), Job(1)]
    variables = [job.variable(0) for job in jobs]

    def count(v: Any) -> None:
        for _ in range(50):
            v.assign_add(1)

    threads = [threading.Thread(target=count, args=(v,)) for v in variables for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(v) for v in variables] == [100, 100]
    assert [len(job.servers.pushes) for job in jobs] == [100, 100]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_closure_uses_the_variables_of_one_strategy(compiled: bool) -> None:
    one, other = Job(1), Job(1)
    v, w = one.variable(1.0, name="mine"), other.variable(2.0, name="other")

    def read() -> Any:
        return w + 0.0

    def write() -> Any:
        return w.assign_add(1.0).name

    for fn in (read, write):
        with pytest.raises(px.errors.StrategyMismatchError, match="'other:0' is on those of another"):
            one.run(px.function(fn) if compiled else fn)
    one.run(lambda: v.assign(5.0).name)  # it is not broken
    assert (float(v), float(w)) == (5.0, 2.0)


def test_a_program_uses_the_variables_of_one_strategy() -> None:
    one, other = Job(1), Job(1)
    v, w = one.variable(1.0, name="mine"), other.variable(2.0, name="other")
    with pytest.raises(px.errors.StrategyMismatchError, match="one function for each strategy"):
        px.function(lambda: v + w)()
    assert float(v + w) == 3.0  # by itself, each read is one of its own


# -- freeing ----------------------------------------------------------------------------------------


def test_servers_free_what_no_code_refers_to() -> None:
    job = Job(2, FIXED(2))
    for _ in range(5):
        v = job.variable(np.zeros((4, 2), np.float32))
        step = px.function(lambda v=v: v.assign_add(jnp.ones((4, 2))).name)
        job.run(step)
        del step
    gc.collect()
    kept = [job.variable(1.0) for _ in range(2)]  # which makes room
    assert [len(store.variables) for store in job.servers.stores] == [2, 2]
    del v
    assert held(job) == [1, 1]
    assert [float(k) for k in kept] == [1.0, 1.0]


def test_an_optimizer_goes_with_its_slots() -> None:
    job = Job(1)
    v = job.variable(1.0)
    for _ in range(3):
        with job.strategy.scope():
            optimizer = px.train.Optimizer(optax.adam(0.5))
        job.run(px.function(lambda o=optimizer: o.minimize(lambda: v * v, [v])))
    del optimizer
    store = job.servers.stores[0]
    assert (held(job), len(store.optimizers)) == ([1], 0)
    assert store.variables[v.definition.id].slots == {}


def test_placement_by_size_knows_what_was_freed() -> None:
    job = Job(2, placement="by_size")
    large = job.variable(np.zeros(100))
    small = job.variable(np.zeros(10))
    assert [x.definition.server for x in (large, small)] == [0, 1]
    del large
    gc.collect()
    assert job.variable(np.zeros(1)).definition.server == 0


def test_a_function_keeps_the_variables_that_it_captures() -> None:
    job = Job(1)

    def make() -> Any:
        v = job.variable(0.0)
        return px.function(lambda: v.assign_add(1.0) + 0.0)

    step = make()
    gc.collect()
    assert [float(job.run(step)) for _ in range(2)] == [1.0, 2.0]
    del step
    assert held(job) == [0]


def test_a_late_message_does_not_hold_a_freed_variable_again() -> None:
    job = Job(1)
    v = job.variable(0.0)
    definition, there = v.definition, weakref.ref(v)
    del v
    gc.collect()
    assert there() is None
    job.servers.free(0, [definition.id])
    job.servers.create(definition, np.float32(0))
    assert held(job) == [0]


def test_what_was_staged_for_a_freed_variable_is_dropped() -> None:
    job = Job(1)
    v, w = job.variable(0.0), job.variable(0.0)
    store = job.servers.stores[0]
    with closure(Token(7), job.servers) as attempt:
        v.assign_add(1.0)
        w.assign_add(1.0)
    store.stage(attempt.token, attempt.updates)
    store.free([v.definition.id])
    store.commit(attempt.token)
    assert float(w) == 1.0
    with pytest.raises(px.errors.NotFoundError, match="was freed"):
        v.numpy()


def test_freed_variables_stay_freed_in_logs(tmp_path: Path) -> None:
    with running(1, tmp_path) as tasks, connections(tasks, durability=Durability("log")) as found:
        job = Job(1)
        job.use(found)
        v, kept = job.variable(np.zeros(4)), job.variable(1.0)
        freed = v.definition
        del v
        gc.collect()
        job.strategy.extended.home.let_go(0)
        kept.assign_add(1.0)
        for _ in range(2):
            tasks[0].restart()
            assert float(kept) == 2.0
            found.create(freed, np.zeros(4, np.float32))  # a late message
            assert found.status()[0]["variables"] == 1


def test_freed_variables_stay_freed_in_snapshots(tmp_path: Path) -> None:
    job = Job(1)
    v, w = job.variable(0.0), job.variable(0.0)
    store, again = job.servers.stores[0], Store()
    with closure(Token(7), job.servers) as attempt:
        v.assign_add(1.0)
    store.stage(attempt.token, attempt.updates)
    store.free([v.definition.id])
    write_snapshot(tmp_path / "snapshot", records_of(store))
    load_snapshot(tmp_path / "snapshot", again)
    assert not again.create(v.definition, np.zeros((), np.float32))
    assert list(again.variables) == [w.definition.id]


def test_a_checkpoint_ignores_what_either_program_has_freed(tmp_path: Path) -> None:
    with running(1) as tasks:
        with connections(tasks) as found:
            job = Job(1)
            job.use(found)
            v, w, kept = (job.variable(x) for x in (1.0, 2.0, 3.0))
            del v
            gc.collect()
            job.strategy.extended.home.let_go(0)
            assert float(kept) == 3.0
            found.save(str(tmp_path))
        with connections(tasks) as found:
            job = Job(1)
            job.use(found)
            v, w, kept = (job.variable(0.0) for _ in range(3))
            del w
            gc.collect()
            job.strategy.extended.home.let_go(0)
            found.load(str(tmp_path))
            assert (float(kept), float(v)) == (3.0, 0.0)
            assert found.status()[0]["variables"] == 2


# -- watching ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_there", [True, False])
def test_no_server_is_watched_for_a_strategy_that_is_gone(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_BEAT", 0.05)
    monkeypatch.setattr(watch, "_PAUSE", 0.01)
    with running(1) as tasks, connections(tasks) as found:
        home = ServersHome(found.run, lambda: found)  # type: ignore[attr-defined]
        server = Task("ps", 0, tasks[0].address)
        options = px.experimental.ParameterServerOptions(server_timeout=1.0)
        session = Session(home.run, KEY, (server,), (), options)
        begun = watch.ServerWatch(session, weakref.ref(home), settles=True).start()
        assert begun._lost is not None
        begun._lost.doubt([Token(-7)])
        if not is_there:
            tasks[0].stop()
        del home
        for thread in (begun._watched[0]._thread, begun._lost._settler._thread):
            assert thread is not None
            thread.join(SECONDS)
            assert not thread.is_alive(), f"{thread.name} goes on"


def test_a_server_that_has_lost_the_run_is_asked_less_often() -> None:
    """A run that is over must not take the time of servers that serve another one."""
    waits: list[float] = []

    class Over:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) > 3

    with running(1) as tasks, connections(tasks) as found:
        home = ServersHome(found.run, lambda: found)  # type: ignore[attr-defined]
        server = Task("ps", 0, tasks[0].address)
        options = px.experimental.ParameterServerOptions()
        session = Session("0123abcd", KEY, (server,), (), options)
        watched = watch.ServerWatch(session, weakref.ref(home))._watched[0]
        watched._over = Over()  # type: ignore[assignment]
        watched._run()
        assert watched.report()["state"] == "lost"
        assert waits == [watch._PAUSE, watch._BEAT, watch._BEAT, watch._BEAT]
