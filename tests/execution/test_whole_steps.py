"""A step changes all its variables or none, whatever ends it, and however many threads there are."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.core.variables import transactions
from phalanx.runtime.turns import Turn, Turns

DEADLINE = 60.0
SUM, MEAN = px.VariableAggregation.SUM, px.VariableAggregation.MEAN


@pytest.fixture(params=[1, 2], ids=["one replica", "two replicas"])
def strategy(request: pytest.FixtureRequest) -> px.Strategy:
    return px.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


@pytest.fixture(params=["eager", "compiled"])
def execute(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return px.function if request.param == "compiled" else lambda fn: fn


class Boom(Exception):
    pass


# -- exceptions ---------------------------------------------------------------------------------------


def test_a_step_that_raises_changes_no_variable(
    strategy: px.Strategy, execute: Callable[..., Any]
) -> None:
    with strategy.scope():
        a, b = px.Variable(1.0, aggregation=MEAN), px.Variable(jnp.ones(3), aggregation=MEAN)
        local = px.Variable(0.0, synchronization=px.VariableSynchronization.ON_READ, aggregation=SUM)
        metric = px.train.Mean()

    def replica(x: jax.Array) -> None:
        a.assign_add(x[0])
        local.assign_add(x[0])
        metric.update_state(x)
        assert not isinstance(a.value(), float)
        b.assign(x)
        raise Boom

    @execute
    def step(x: jax.Array) -> None:
        strategy.run(replica, args=(x,))

    with pytest.raises(Boom):
        step(jnp.full(3, 5.0))
    assert float(a) == 1.0
    assert b.numpy().tolist() == [1.0, 1.0, 1.0]
    assert float(local) == 0.0
    assert float(metric.result()) == 0.0


def test_a_step_sees_what_it_has_written_and_others_do_not() -> None:
    v = px.Variable(1.0)
    seen: list[float] = []
    strategy = px.OneDeviceStrategy("CPU:0")

    def step() -> None:
        v.assign(2.0)
        seen.append(float(v))
        thread = threading.Thread(target=lambda: seen.append(float(v)))
        thread.start()
        thread.join(DEADLINE)
        seen.append(float(px.train.snapshot(v)))

    strategy.run(step)
    assert seen == [2.0, 1.0, 1.0]
    assert float(v) == 2.0


def test_an_update_that_fails_is_forgotten_and_the_rest_of_its_step_is_not() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v, w = px.Variable(1.0, aggregation=MEAN), px.Variable(1.0)

    def broken(copy: Any, x: Any) -> None:
        copy.assign_add(x)
        raise Boom

    def merged(strategy: px.Strategy, x: Any) -> None:
        with pytest.raises(Boom):
            strategy.extended.update(w, broken, args=(x,))

    def replica() -> None:
        context = px.get_replica_context()
        assert context is not None
        v.assign_add(jnp.float32(1.0))
        context.merge_call(merged, args=(2.0,))

    strategy.run(replica)
    assert float(v) == 2.0
    assert [float(x) for x in w.values] == [1.0, 1.0]


def test_apply_gradients_is_one_step_without_a_strategy_too() -> None:
    w = px.Variable(jnp.ones(3))
    optimizer = px.train.Optimizer(optax.adam(0.1))
    optimizer.apply_gradients([(jnp.ones(3), w)])
    before = px.train.snapshot([w, *optimizer.variables])
    with pytest.raises((TypeError, ValueError)):
        optimizer.apply_gradients([(jnp.ones(7), w)])
    jax.tree.map(np.testing.assert_array_equal, px.train.snapshot([w, *optimizer.variables]), before)


@pytest.mark.parametrize("callback", ["pure_callback", "io_callback", "debug.callback"])
def test_a_callback_that_raises_leaves_variables_as_they_were(
    strategy: px.Strategy, callback: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with strategy.scope():
        a, b = px.Variable(jnp.zeros(4), aggregation=MEAN), px.Variable(0.0, aggregation=MEAN)
    fails = []

    def python(x: Any) -> Any:
        if fails:
            raise Boom("in a callback")
        return np.asarray(x)

    def replica() -> None:
        y, shape = a + 1.0, jax.ShapeDtypeStruct((4,), jnp.float32)
        if callback == "debug.callback":
            jax.debug.callback(python, y)
        elif callback == "pure_callback":
            y = jax.pure_callback(python, shape, y)
        else:
            y = jax.experimental.io_callback(python, shape, y)
        a.assign(y)
        b.assign_add(y[0] * 0 + 1.0)

    step = px.function(lambda: strategy.run(replica))
    step()
    fails.append(True)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="in a callback"):
        step()
    assert (a.numpy()[0], float(b)) == (1.0, 1.0)
    fails.clear()
    step()
    assert (a.numpy()[0], float(b)) == (2.0, 2.0)
    capfd.readouterr()


# -- deleted arrays ---------------------------------------------------------------------------------


def test_a_deleted_argument_is_refused(strategy: px.Strategy) -> None:
    value = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(3))
    step = px.function(lambda x: strategy.run(lambda x: x + 1.0, args=(x,)))
    step(value)
    jax.tree.leaves(value)[0].delete()
    with pytest.raises(ValueError, match="deleted"):
        step(value)


def test_a_variable_whose_array_was_deleted_says_so_and_can_be_assigned(strategy: px.Strategy) -> None:
    with strategy.scope():
        v = px.Variable(jnp.zeros(3), aggregation=MEAN)

    @px.function
    def step() -> None:
        strategy.run(lambda: v.assign_add(jnp.ones(3)))

    step()
    with strategy.scope():
        v.assign(jnp.ones(3))
    jax.tree.leaves(v._value)[0].delete()
    with pytest.raises(ValueError, match="'Variable:0' has been deleted"):
        step()
    with strategy.scope():
        v.assign(jnp.full(3, 5.0))
    step()
    assert v.numpy().tolist() == [6.0, 6.0, 6.0]


def test_one_function_on_two_lists_of_devices_is_refused() -> None:
    one, other = px.MirroredStrategy(["CPU:0", "CPU:1"]), px.MirroredStrategy(["CPU:2", "CPU:3"])
    with one.scope():
        a = px.Variable(1.0)
    with other.scope():
        b = px.Variable(1.0)
    runs = px.function(lambda: [s.run(lambda: jnp.ones(2)) for s in (one, other)])
    reads = px.function(lambda: (a.read_value(), b.read_value()))
    for function in (runs, reads):
        with pytest.raises(ValueError, match="one list of devices"):
            function()


# -- threads ----------------------------------------------------------------------------------------


def in_threads(*tasks: Callable[[], None]) -> None:
    """Run functions at the same time; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_updates_of_many_threads_all_arrive() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = px.Variable(0.0)
    plain = px.Variable(0.0)

    def add() -> None:
        for _ in range(20):
            v.assign_add(1.0)
            plain.assign_add(1.0)

    in_threads(*[add] * 6)
    assert (float(v), float(plain)) == (120.0, 120.0)


@pytest.mark.parametrize("steps", [15, pytest.param(500, marks=pytest.mark.soak)])
def test_steps_reads_and_evaluations_of_many_threads(strategy: px.Strategy, steps: int) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        a, b = px.Variable(jnp.zeros(64), aggregation=SUM), px.Variable(0.0, aggregation=SUM)
        alone = px.Variable(0.0)
    x = jnp.ones(64) / n

    def replica(x: jax.Array) -> None:
        a.assign_add(x * 1.0)
        b.assign_add(x[0] * 1.0)

    def eager() -> None:
        strategy.run(replica, args=(x,))

    compiled = px.function(eager)
    evaluation = px.function(lambda: strategy.run(lambda: jnp.stack([a.sum() / 64, b * 1.0])))
    left = [4]

    def repeat(step: Callable[[], None], count: int) -> Callable[[], None]:
        def task() -> None:
            try:
                for _ in range(count):
                    step()
            finally:
                left[0] -= 1

        return task

    def read() -> None:
        while left[0]:
            values = a.numpy()
            assert np.all(values == values[0])
            both = px.train.snapshot([a, b])
            assert np.all(both[0] == both[1])

    def evaluate() -> None:
        while left[0]:
            for result in strategy.experimental_local_results(evaluation()):
                assert result[0] == result[1]

    few = steps // 3
    writers = repeat(compiled, steps), repeat(compiled, steps), repeat(eager, few)
    assign = repeat(lambda: alone.assign_add(1.0), steps)
    in_threads(*writers, assign, read, read, evaluate, evaluate)
    assert float(b) == 2 * steps + few
    assert np.all(a.numpy() == 2 * steps + few)
    assert float(alone) == steps


def test_a_step_that_repeats_the_last_one_waits_for_its_turn(
    strategy: px.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        v, other = px.Variable(0.0), px.Variable(0.0)
    moved = threading.Event()  # the other thread waits, or does not

    @px.function
    def add() -> None:
        strategy.run(lambda: v.assign_add(1.0))

    def add_elsewhere() -> None:
        add()
        moved.set()

    for _ in range(3):
        add()
    wait = transactions.STEPS._until

    def wait_now(begin: Callable[[], None]) -> None:
        moved.set()
        wait(begin)

    thread = threading.Thread(target=add_elsewhere)

    def step() -> float:
        other.assign(1.0)
        monkeypatch.setattr(transactions.STEPS, "_until", wait_now)
        thread.start()
        assert moved.wait(DEADLINE)
        return float(v)

    seen = transactions.atomically(step)
    thread.join(DEADLINE)
    assert (seen, float(v)) == (3.0, 4.0)


def test_functions_may_be_traced_from_many_threads() -> None:
    v = px.Variable(0.0)
    step = px.function(v.assign_add)
    started = threading.Barrier(4)

    def call() -> None:
        started.wait(DEADLINE)
        step(1.0 * np.ones((), np.float32))

    in_threads(*[call] * 4)
    assert float(v) == 4.0
    assert step.trace_count == 1


# -- turns ------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_REPLICA_DEADLINE", "0.3")


def test_waiting_for_a_turn_ends_and_says_where_the_other_thread_is(impatient: None) -> None:
    inside, leave = threading.Event(), threading.Event()
    v = px.Variable(0.0)

    def hold() -> None:
        v.assign_add(1.0)
        inside.set()
        assert leave.wait(DEADLINE)

    thread = threading.Thread(target=transactions.atomically, args=(hold,))
    thread.start()
    try:
        assert inside.wait(DEADLINE)
        with pytest.raises(px.errors.DeadlineExceededError, match=r"test_whole_steps\.py"):
            v.assign_add(1.0)
        assert float(v) == 0.0  # reading does not wait
    finally:
        leave.set()
        thread.join(DEADLINE)
    assert float(v) == 1.0


def test_a_turn_in_a_turn_of_the_same_thread_is_refused() -> None:
    turns = Turns("do it")
    turn = Turn(turns)
    turn.take()
    with pytest.raises(RuntimeError):
        Turn(turns).take()
    turn.end()
    Turn(turns).take()


def test_a_turn_that_was_never_given_back_ends_with_its_holder() -> None:
    turns = Turns("do it")
    turn = Turn(turns)
    turn.take()
    del turn
    turn = Turn(turns)
    turn.take()
    remains: list[Any] = [turn]  # as an exception may refer to its own traceback
    remains.append(remains)
    gc.disable()
    try:
        del turn, remains
        Turn(turns).take()
    finally:
        gc.enable()


# -- interrupts ------------------------------------------------------------------------------------


def run(program: str, *arguments: object, timeout: float) -> None:
    """Run a program that stands beside this file."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS")}
    path = Path(__file__).with_name(program)
    done = subprocess.run(
        [sys.executable, str(path), *map(str, arguments)],
        env=inherited,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.endswith("done\n")


@pytest.mark.parametrize(("kind", "replicas"), [("compiled", 2), ("eager", 2), ("input", 2)])
def test_an_interrupted_step_has_happened_or_not(kind: str, replicas: int) -> None:
    run("interrupt_program.py", kind, replicas, 60, 0, timeout=120.0)


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("kind", ["compiled", "eager", "loop", "callback", "plain", "input"])
def test_thousands_of_interrupts(kind: str, replicas: int) -> None:
    run("interrupt_program.py", kind, replicas, 700, replicas, timeout=900.0)


@pytest.mark.soak
def test_memory_threads_and_descriptors_do_not_grow() -> None:
    run("endurance_program.py", 20_000, timeout=1800.0)
