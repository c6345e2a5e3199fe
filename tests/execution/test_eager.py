"""The eager executor: merge points that do not fit, failures, and the deadline."""

from __future__ import annotations

import logging
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import phalanx as px


def mirrored(n: int) -> px.MirroredStrategy:
    return px.MirroredStrategy([f"CPU:{i}" for i in range(n)])


def ctx() -> px.ReplicaContext:
    context = px.get_replica_context()
    assert context is not None
    return context


def rid() -> int:
    return int(ctx().replica_id_in_sync_group)


@pytest.fixture(autouse=True)
def _no_threads_left() -> Any:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("lazy", [0, 1])
def test_different_numbers_of_meetings(n: int, lazy: int) -> None:
    def step() -> None:
        ctx().merge_call(lambda s: None)
        if rid() != lazy:
            ctx().merge_call(lambda s: None)  # the lazy replica returns instead

    with pytest.raises(px.errors.MergeMismatchError, match="met more often") as caught:
        mirrored(n).run(step)
    text = str(caught.value)
    assert "test_eager.py" in text
    assert f"replica {lazy}" in text


def test_a_meeting_after_replica_0_met_nobody() -> None:
    def step() -> None:
        if rid() == 1:
            ctx().all_reduce("sum", 1.0)

    with pytest.raises(RuntimeError, match="0 meeting"):
        mirrored(2).run(step)


def test_a_mismatch_cannot_be_swallowed() -> None:
    def step() -> None:
        try:
            if rid() == 1:
                ctx().all_reduce("sum", 1.0)
        except Exception:  # noqa: BLE001
            pass

    with pytest.raises(px.errors.MergeMismatchError):
        mirrored(2).run(step)


def test_swapped_order_is_not_a_sum() -> None:
    def step() -> Any:
        a, b = jnp.float32(1.0), jnp.float32(10.0)
        if rid() == 0:
            x = ctx().all_reduce("sum", a)
            y = ctx().all_reduce("sum", b)
        else:
            y = ctx().all_reduce("sum", b)
            x = ctx().all_reduce("sum", a)
        return x, y

    with pytest.raises(px.errors.MergeMismatchError, match="different places") as caught:
        mirrored(2).run(step)
    assert str(caught.value).count("test_eager.py:") == 2


def test_two_calls_on_one_line_are_two_places() -> None:
    def step() -> Any:
        pair = (lambda: ctx().all_reduce("sum", 1.0), lambda: ctx().all_reduce("sum", 10.0))
        first, second = (pair[0], pair[1]) if rid() == 0 else (pair[1], pair[0])
        return first(), second()

    with pytest.raises(px.errors.MergeMismatchError):
        mirrored(2).run(step)


@pytest.mark.parametrize(
    "other",
    [
        lambda: ctx().all_reduce("mean", 1.0),
        lambda: ctx().all_reduce("sum", jnp.int32(1)),
        lambda: ctx().all_gather(jnp.ones(1), axis=0),
        lambda: ctx().merge_call(lambda s: None),
    ],
)
def test_different_kinds_of_meetings(other: Any) -> None:
    def step() -> None:
        (lambda: ctx().all_reduce("sum", 1.0)) if rid() == 0 else other
        call = (lambda: ctx().all_reduce("sum", 1.0)) if rid() == 0 else other
        call()

    with pytest.raises(px.errors.MergeMismatchError):
        mirrored(2).run(step)


def test_writing_different_variables_is_a_mismatch() -> None:
    s = mirrored(2)
    with s.scope():
        a = px.Variable(0.0, name="a", aggregation=px.VariableAggregation.SUM)
        b = px.Variable(0.0, name="b", aggregation=px.VariableAggregation.SUM)
    with pytest.raises(px.errors.MergeMismatchError, match=r"'a:0'.*'b:0'"):
        s.run(lambda: (a if rid() == 0 else b).assign_add(jnp.float32(1.0)))
    assert (float(a), float(b)) == (0.0, 0.0)


def test_loops_meet_at_one_place() -> None:
    def step() -> Any:
        total = jnp.float32(0.0)
        for _ in range(5):
            total = ctx().all_reduce("sum", total + 1.0)
        return total

    result = mirrored(3).run(step)
    assert {float(x) for x in result.values} == {363.0}


def test_the_traceback_shows_the_users_line() -> None:
    def inner() -> None:
        if rid() == 1:
            raise ZeroDivisionError("on purpose")

    def step() -> None:
        ctx().merge_call(lambda s: None)
        inner()

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        mirrored(3).run(step)
    assert any(entry.name == "inner" for entry in caught.traceback)
    assert any("replica 1 (CPU:1)" in note for note in caught.value.__notes__)


def test_an_error_of_the_merge_function_reaches_every_replica() -> None:
    caught = []

    def explode(strategy: px.Strategy) -> None:
        raise LookupError("in merge")

    def step() -> int:
        try:
            ctx().merge_call(explode)
        except LookupError:
            caught.append(rid())
        return int(ctx().all_reduce("sum", 1.0))

    result = mirrored(3).run(step)
    assert caught == [0, 1, 2]
    assert result == 3
    with pytest.raises(LookupError, match="in merge"):
        mirrored(3).run(lambda: ctx().merge_call(explode))


def test_a_failed_collective_poisons_nothing() -> None:
    s = mirrored(2)
    uneven = s.experimental_distribute_values_from_function(
        lambda c: jnp.ones(c.replica_id_in_sync_group + 1)
    )
    for _ in range(3):
        with pytest.raises(px.errors.InvalidArgumentError):
            s.run(lambda x: ctx().all_reduce("sum", x), args=(uneven,))
        for strategy in (s, mirrored(4)):
            result = strategy.run(lambda: ctx().all_reduce("sum", jnp.float32(1.0)))
            assert {float(x) for x in result.values} == {float(strategy.num_replicas_in_sync)}


def test_waiting_replicas_run_their_cleanup() -> None:
    cleaned = []

    def step() -> None:
        try:
            ctx().merge_call(lambda s: None)
            ctx().merge_call(lambda s: None)
        finally:
            cleaned.append(rid())
        if rid() == 0:
            raise ValueError("after the meetings")

    with pytest.raises(ValueError, match="after the meetings"):
        mirrored(3).run(step)
    assert sorted(cleaned) == [0, 1, 2]


def test_keyboard_interrupts_stop_all_replicas() -> None:
    def step() -> None:
        ctx().merge_call(lambda s: None)
        if rid() == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mirrored(2).run(step)


def test_a_late_replica_is_named(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("PHALANX_REPLICA_DEADLINE", "0.2")
    release = threading.Event()

    def step() -> None:
        if rid() == 1:
            release.wait(timeout=30)  # hangs here
        ctx().merge_call(lambda s: None)

    timer = threading.Timer(2.0, release.set)
    timer.start()
    with (
        caplog.at_level(logging.WARNING, logger="phalanx"),
        pytest.raises(px.errors.DeadlineExceededError, match=r"replica 1 \(CPU:1\)") as caught,
    ):
        mirrored(2).run(step)
    timer.join(timeout=30)
    assert "test_eager.py" in str(caught.value)
    assert "PHALANX_REPLICA_DEADLINE" in str(caught.value)
    assert any("has not reached" in message for message in caplog.messages)


@pytest.mark.parametrize("text", ["0", "-1", "soon"])
def test_bad_deadlines(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PHALANX_REPLICA_DEADLINE", text)
    with pytest.raises(ValueError, match="PHALANX_REPLICA_DEADLINE"):
        mirrored(2).run(lambda: ctx().all_reduce("sum", 1.0))


def test_collectives_inside_staged_code_are_refused() -> None:
    def staged() -> Any:
        return jax.jit(lambda x: ctx().all_reduce("sum", x))(jnp.float32(1.0))

    def mapped() -> Any:
        return jax.vmap(lambda x: ctx().all_reduce("sum", x))(jnp.ones(3))

    def branch() -> Any:
        return jax.lax.cond(True, lambda x: ctx().all_reduce("sum", x), lambda x: x, 1.0)

    for step in (staged, mapped, branch):
        with pytest.raises(RuntimeError, match="staging"):
            mirrored(2).run(step)


def test_nested_runs_and_many_steps() -> None:
    s = mirrored(4)
    with s.scope():
        v = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)

    def step() -> None:
        v.assign_add(jnp.float32(1.0))

    for _ in range(60):
        s.run(step)
    assert float(v) == 240.0


def test_no_meeting_and_no_write_inside_staged_code() -> None:
    s = mirrored(2)
    with s.scope():
        summed = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
        local = px.Variable(0.0, synchronization=px.VariableSynchronization.ON_READ)
    plain = px.Variable(0.0)

    @jax.jit
    def meet() -> Any:
        return ctx().merge_call(lambda s: 1)

    for step in (
        meet,
        jax.jit(lambda: summed.assign_add(1.0) + 0.0),
        jax.jit(lambda: summed.assign_add(jnp.ones(())) + 0.0),
        jax.jit(lambda: local.assign_add(1.0) + 0.0),
        jax.jit(lambda: plain.assign_add(1.0) + 0.0),
    ):
        with pytest.raises(RuntimeError, match="stag"):
            s.run(lambda step=step: step())
    with pytest.raises(RuntimeError, match="stag"):
        jax.jit(lambda x: plain.assign(x) + 0.0)(1.0)
    assert float(plain) == 0.0
    assert [float(c) for v in (summed, local) for c in v.values] == [0.0] * 4


def test_writing_inside_a_gradient_writes_the_value() -> None:
    """A moving average inside the loss function: the usual place of batch normalization."""
    s = mirrored(2)
    with s.scope():
        mean = px.Variable(0.0, aggregation=px.VariableAggregation.MEAN)

    def step() -> Any:
        def loss(w: jax.Array) -> jax.Array:
            activation = w * (rid() + 1.0)
            mean.assign(activation)
            return activation**2 + mean * 0.0

        return jax.grad(loss)(jnp.float32(2.0))

    result = s.run(step)
    assert [float(x) for x in result.values] == [4.0, 16.0]
    assert float(mean) == 3.0


def test_a_captured_array_comes_back_on_every_device() -> None:
    s = mirrored(2)
    c = jnp.ones(2)
    for call in (
        lambda: ctx().all_reduce("sum", c),
        lambda: ctx().all_reduce("mean", c),
        lambda: ctx().all_gather(c, axis=0),
        lambda: ctx().all_reduce("sum", px.IndexedSlices(c, jnp.array([0, 1]))).values,
    ):
        result = s.run(call)
        assert [next(iter(x.devices())).id for x in result.values] == [0, 1]


def test_stopped_replicas_run_no_further() -> None:
    went_on = []

    def step() -> None:
        ctx().merge_call(lambda s: None)
        if rid() == 0:
            raise ValueError("stop")
        went_on.append(rid())

    with pytest.raises(ValueError, match="stop"):
        mirrored(3).run(step)
    assert went_on == []
