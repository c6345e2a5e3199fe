"""Loops over `px.range` in compiled functions."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px

A, S = px.VariableAggregation, px.VariableSynchronization


@pytest.fixture
def strategy() -> px.Strategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def training(strategy: px.Strategy) -> tuple[Any, Any]:
    """A step, and what it changes: variables of every kind."""
    with strategy.scope():
        w = px.Variable(jnp.ones(3))
        summed = px.Variable(0.0, aggregation=A.SUM)
        on_read = px.Variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM)
        metric = px.train.Mean()
        optimizer = px.train.Optimizer(optax.adam(0.1))

    def step(x: jax.Array) -> None:
        loss, gradients = px.value_and_grad(lambda: jnp.sum((w.value() * x - 2.0) ** 2), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        summed.assign_add(x * 1.0)
        on_read.assign_add(x * 2.0)
        metric.update_state(loss)

    def state() -> list[Any]:
        held = [w, summed, on_read, *optimizer.variables]
        return [*(v.numpy() for v in held), float(metric.result())]

    return step, state


def test_a_loop_is_as_many_steps(strategy: px.Strategy) -> None:
    x = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.float32(0.3 + c.replica_id_in_sync_group)
    )
    step, state = training(strategy)
    once = px.function(lambda x: strategy.run(step, args=(x,)))
    for _ in range(12):
        once(x)
    wanted = state()
    step, state = training(strategy)

    @px.function
    def epoch(x: Any) -> None:
        for _ in px.range(4):
            strategy.run(step, args=(x,))

    for _ in range(3):
        epoch(x)
    assert epoch.trace_count <= 2  # the first makes the optimizer's state
    for a, b in zip(state(), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_size_of_a_program_does_not_depend_on_the_number_of_rounds(strategy: px.Strategy) -> None:
    with strategy.scope():
        v = px.Variable(0.0, aggregation=A.SUM)
    traced = []

    def size(count: int) -> int:
        @px.function
        def many(x: jax.Array) -> None:
            for _ in px.range(count):
                traced.append(count)
                strategy.run(v.assign_add, args=(x,))

        return len(many.lower(jnp.float32(1.0)).as_text())

    assert size(3) == size(5)
    assert traced == [3, 5]


def test_numbers_and_nested_loops(strategy: px.Strategy) -> None:
    with strategy.scope():
        v, w = px.Variable(0), px.Variable(0)

    @px.function
    def count() -> None:
        for i in px.range(2, 10, 3):  # 2, 5, 8
            v.assign_add(i)
            for j in px.range(4):
                w.assign_add(i * j)
        for _ in px.range(0):
            v.assign(-1)

    count()
    assert (int(v), int(w)) == (15, 15 * 6)
    assert list(px.range(2, 10, 3)) == [2, 5, 8]  # elsewhere it is Python's
    assert (len(px.range(7)), repr(px.range(7))) == (7, "px.range(0, 7)")


def test_a_loop_that_is_left_is_an_error(strategy: px.Strategy) -> None:
    with strategy.scope():
        v = px.Variable(0.0)

    @px.function
    def broken() -> None:
        for _ in px.range(4):
            v.assign_add(1.0)
            break

    with pytest.raises(px.errors.ContextError, match=r"left a loop over px\.range"):
        broken()

    @px.function
    def failing() -> None:
        for _ in px.range(4):
            raise KeyError("of the body")

    with pytest.raises(KeyError, match="of the body"):
        failing()

    @px.function
    def leaking(x: jax.Array) -> jax.Array:
        for _ in px.range(4):
            x = x + 1.0
        return x

    with pytest.raises(px.errors.ContextError, match=r"Only variables leave such a loop"):
        leaking(jnp.float32(1.0))
    with pytest.raises(px.errors.InvalidTypeError, match="whole numbers"):
        px.range(1.5)  # type: ignore[arg-type]
    assert float(v) == 0.0
    loops = [t for t in threading.enumerate() if t.name == "phalanx-loop"]
    for thread in loops:
        thread.join(10.0)  # those that have been told to end, also by tests before
    assert not any(thread.is_alive() for thread in loops)
    assert px.function(lambda: v + 1.0)() == 1.0  # the thread is out of all traces


# -- input -----------------------------------------------------------------------------------------


def batches(strategy: px.Strategy, rows: int = 4) -> Any:
    numbers = np.arange(48, dtype=np.float32)
    dataset = px.data.Dataset.from_tensor_slices(numbers).batch(rows)
    return iter(strategy.experimental_distribute_dataset(dataset))


def test_each_round_takes_its_own_element(strategy: px.Strategy) -> None:
    with strategy.scope():
        seen = px.Variable(0.0, aggregation=A.SUM)
        weighted = px.Variable(0.0, aggregation=A.SUM)
    iterator, other = batches(strategy), batches(strategy, 2)

    def step(x: jax.Array, y: jax.Array, i: Any) -> None:
        seen.assign_add(x.sum())
        weighted.assign_add(y.sum() * i)

    @px.function
    def epoch(iterator: Any) -> None:
        for i in px.range(1, 5):
            strategy.run(step, args=(next(iterator), next(other), jnp.float32(i)))

    epoch(iterator)
    assert float(seen) == sum(range(16))
    assert float(weighted) == sum(i * sum(range(2 * i - 2, 2 * i)) for i in range(1, 5))
    epoch(iterator)
    assert float(seen) == sum(range(32))
    np.testing.assert_array_equal(np.concatenate(next(iterator).values), [32, 33, 34, 35])
    assert epoch.trace_count <= 3


def test_nested_loops_take_in_order(strategy: px.Strategy) -> None:
    with strategy.scope():
        last = px.Variable(jnp.zeros(2), aggregation=A.ONLY_FIRST_REPLICA)
        total = px.Variable(0.0, aggregation=A.SUM)
    iterator = batches(strategy)

    def step(x: jax.Array) -> None:
        total.assign_add(x.sum())
        last.assign(x)

    @px.function
    def epochs() -> None:
        for _ in px.range(2):
            for _ in px.range(3):
                strategy.run(step, args=(next(iterator),))

    epochs()
    assert float(total) == sum(range(24))
    np.testing.assert_array_equal(last.numpy(), [20, 21])


def test_input_that_ends_too_early_changes_nothing(strategy: px.Strategy) -> None:
    with strategy.scope():
        total = px.Variable(0.0, aggregation=A.SUM)
    iterator = batches(strategy)

    @px.function
    def steps() -> None:
        for _ in px.range(8):
            strategy.run(lambda x: total.assign_add(x.sum()), args=(next(iterator),))

    steps()
    with pytest.raises(StopIteration):
        steps()
    assert float(total) == sum(range(32))
    assert len(list(iterator)) == 4  # they were given back


def test_rounds_with_other_shapes_run_as_python(strategy: px.Strategy, caplog: Any) -> None:
    with strategy.scope():
        total = px.Variable(0.0, aggregation=A.SUM)
    iterator = batches(strategy, 20)  # 20, 20 and 8 rows

    @px.function
    def uneven() -> None:
        for _ in px.range(3):
            strategy.run(lambda x: total.assign_add(x.sum()), args=(next(iterator),))

    uneven()
    assert float(total) == sum(range(48))
    assert caplog.text == ""  # each run is a program of its own
    first, second, third = iter(batches(strategy, 20)), px.Variable(0.0), []

    @px.function
    def without_runs() -> None:
        for _ in px.range(3):
            third.append(next(first))
            second.assign_add(1.0)

    without_runs()
    assert float(second) == 3.0
    assert "px.range takes differ in shape" in caplog.text
