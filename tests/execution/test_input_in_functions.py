"""Compiled functions that take elements from iterators themselves."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import phalanx as px


@pytest.fixture
def strategy() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def numbers(strategy: px.Strategy, count: int, batch: int) -> Any:
    return strategy.experimental_distribute_dataset(px.data.Dataset.range(count).batch(batch))


def summing(strategy: px.Strategy) -> px.Function:
    @px.function
    def step(iterator: Any) -> Any:
        per_replica = strategy.run(jnp.sum, args=(next(iterator),))
        return strategy.reduce("sum", per_replica, axis=None)

    return step  # type: ignore[no-any-return]


def test_each_call_takes_the_next_element(strategy: px.Strategy) -> None:
    step = summing(strategy)
    for _ in range(2):  # another iterator needs no other program
        iterator = iter(numbers(strategy, 8, 2))
        assert [int(step(iterator)) for _ in range(4)] == [1, 5, 9, 13]
        with pytest.raises(StopIteration):
            step(iterator)
    assert step.trace_count == 1


def test_captured_iterators_and_several_elements(strategy: px.Strategy) -> None:
    iterator = iter(numbers(strategy, 12, 2))

    @px.function
    def step() -> Any:
        first, second = iterator.get_next(), iterator.get_next()
        run = strategy.run(lambda a, b: jnp.sum(a) * 100 + jnp.sum(b), args=(first, second))
        return strategy.reduce("sum", run, axis=None)

    assert [int(step()) for _ in range(3)] == [105, 913, 1721]
    with pytest.raises(px.errors.OutOfRangeError):
        step()
    assert step.trace_count == 1


def test_a_partial_last_batch_gives_the_eager_result(
    strategy: px.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    step = summing(strategy)
    iterator = iter(numbers(strategy, 7, 4))
    with caplog.at_level(logging.WARNING, "phalanx"):
        assert [int(step(iterator)) for _ in range(2)] == [6, 15]


def test_optionals_choose_the_program(strategy: px.Strategy) -> None:
    iterator = iter(numbers(strategy, 4, 2))

    @px.function
    def step() -> Any:
        element = iterator.get_next_as_optional()
        if not element.has_value():
            return jnp.int32(-1)
        return strategy.reduce("sum", element.get_value(), axis=0)

    assert [int(step()) for _ in range(4)] == [1, 5, -1, -1]


def test_plain_iterators(strategy: px.Strategy) -> None:
    iterator = iter(px.data.Dataset.range(3))
    step = px.function(lambda: next(iterator) * 2)
    assert [int(step()) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(StopIteration):
        step()


def test_variables_are_untouched_at_the_end(strategy: px.Strategy) -> None:
    count = px.Variable(0)
    iterator = iter(numbers(strategy, 2, 2))

    @px.function
    def step() -> Any:
        count.assign_add(1)
        return strategy.reduce("sum", next(iterator), axis=0)

    step()
    with pytest.raises(StopIteration):
        step()
    assert int(count.value()) == 1


def test_replicas_cannot_take_elements(strategy: px.Strategy) -> None:
    iterator = iter(numbers(strategy, 4, 2))
    with pytest.raises(ValueError, match=r"strategy.run\(fn, args=\(next\(iterator\),\)\)"):
        px.function(lambda: strategy.run(lambda: next(iterator)))()
    plain = iter(px.data.Dataset.range(4))
    with pytest.raises(ValueError, match=r"strategy.run\(fn, args=\(next\(iterator\),\)\)"):
        px.function(lambda: strategy.run(lambda: jnp.asarray(next(plain))))()


def test_loops_run_as_python(strategy: px.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    total = px.Variable(0)

    @px.function
    def add(x: jax.Array) -> None:
        total.assign_add(strategy.reduce("sum", x, axis=0))

    @px.function
    def epoch(dataset: Any) -> None:
        for x in dataset:
            add(x)

    with caplog.at_level(logging.WARNING, "phalanx"):
        epoch(numbers(strategy, 8, 2))
        epoch(numbers(strategy, 8, 2))
    assert int(total.value()) == 56
    assert add.trace_count == 1
    assert sum("it loops over a dataset" in r.getMessage() for r in caplog.records) == 1


def test_programs_do_not_keep_iterators(strategy: px.Strategy) -> None:
    step = summing(strategy)
    iterator = iter(numbers(strategy, 8, 2))
    step(iterator)
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None


def test_another_order_is_refused(strategy: px.Strategy) -> None:
    # The second element of `second` has another shape, so that the function is traced again.
    first, second = iter(numbers(strategy, 8, 2)), iter(numbers(strategy, 6, 4))
    orders = [(first, second), (second, first)]

    @px.function
    def step() -> Any:
        return [strategy.reduce("sum", next(i), axis=0) for i in orders[0]]

    assert [int(x) for x in step()] == [1, 6]
    orders[0] = orders[1]
    with pytest.raises(px.errors.ContextError, match="in another order"):
        step()
