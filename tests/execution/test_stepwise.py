"""Functions that run as Python: each `Strategy.run` in them is a program of its own."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px

A = px.VariableAggregation


@pytest.fixture(params=["one", "mirrored", "central"])
def strategy(request: pytest.FixtureRequest) -> px.Strategy:
    return {
        "one": lambda: px.OneDeviceStrategy("CPU:1"),
        "mirrored": lambda: px.MirroredStrategy(["CPU:0", "CPU:1"]),
        "central": lambda: px.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    }[request.param]()


@pytest.fixture
def two() -> px.Strategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


class Counted:
    """A step that counts how often Python runs it: once for each trace and kind of batch."""

    def __init__(self, strategy: px.Strategy) -> None:
        self.calls = 0
        with strategy.scope():
            self.w = px.Variable(jnp.ones(3))
            self.optimizer = px.train.Optimizer(optax.sgd(0.01))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1

        def loss() -> jax.Array:
            return jnp.sum((x * self.w.value()) ** 2) / 4

        value, gradients = px.value_and_grad(loss, [self.w])()
        self.optimizer.apply_gradients(zip(gradients, [self.w], strict=True))
        return value


def batches(strategy: px.Strategy, rows: int = 42, size: int = 4) -> Any:
    data = np.linspace(0.0, 1.0, rows * 3, dtype=np.float32).reshape(rows, 3)
    dataset = px.data.Dataset.from_tensor_slices(data).batch(size)
    return strategy.experimental_distribute_dataset(dataset)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_an_epoch_in_a_function(strategy: px.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    wanted = Counted(strategy)
    once = px.function(lambda x: strategy.run(wanted, args=(x,)))
    losses = [strategy.reduce("sum", once(x), axis=None) for x in batches(strategy)]
    step = Counted(strategy)

    @px.function
    def epoch(dataset: Any) -> tuple[Any, int]:
        total, count = 0.0, 0
        for x in dataset:
            total += strategy.reduce("sum", strategy.run(step, args=(x,)), axis=None)
            count += 1
        return total, count

    total, count = epoch(batches(strategy))
    assert count == 11  # the last has two rows only
    np.testing.assert_allclose(total, sum(losses), rtol=1e-5)
    np.testing.assert_allclose(step.w.numpy(), wanted.w.numpy(), rtol=1e-5)
    assert step.calls <= 6  # twice for each shape, and once for the state of the optimizer
    calls = step.calls
    epoch(batches(strategy))
    assert step.calls == calls
    assert warnings_of(caplog) == []


def test_rounds_of_different_sizes(strategy: px.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    step = Counted(strategy)

    @px.function
    def epoch(iterator: Any) -> None:
        for _ in px.range(11):
            strategy.run(step, args=(next(iterator),))

    epoch(iter(batches(strategy)))
    wanted = Counted(strategy)
    for x in batches(strategy):
        strategy.run(wanted, args=(x,))
    np.testing.assert_allclose(step.w.numpy(), wanted.w.numpy(), rtol=1e-5)
    assert step.calls <= 8
    assert warnings_of(caplog) == []


def test_steps_that_are_made_in_the_loop(two: px.Strategy) -> None:
    traced = []

    @px.function
    def epoch(dataset: Any, factor: jax.Array) -> list[Any]:
        results = []
        for i, x in enumerate(dataset):
            scale, names = factor * i, {"a": jnp.float32(i)}

            def helper(x: Any) -> Any:
                return x * scale

            def step(x: Any, offset: float = 0.5) -> Any:
                traced.append(1)
                return jnp.sum(helper(x)) + names["a"] + offset

            results.append(two.run(step, args=(x,)))
            results.append(two.run(functools.partial(step, offset=1.5), args=(x,)))
        return results

    results = epoch(batches(two, rows=12), jnp.float32(2.0))
    assert len(traced) == 2  # one for each way to call it
    data = np.linspace(0.0, 1.0, 36, dtype=np.float32).reshape(3, 2, 6)
    for i, result in enumerate(results):
        wanted = data[i // 2].sum(-1) * 2.0 * (i // 2) + i // 2 + 0.5 + i % 2
        np.testing.assert_allclose([float(x) for x in result.values], wanted, rtol=1e-5)


def test_steps_with_a_state_of_their_own_are_taken_as_they_are(two: px.Strategy) -> None:
    count = 0
    seen: list[str] = []

    @px.function
    def epoch(dataset: Any) -> None:
        def assigns(x: Any) -> Any:
            nonlocal count
            count += 1
            return x

        def appends(x: Any) -> Any:
            seen.append("traced")
            return x

        def calls_itself(x: Any, depth: int = 2) -> Any:
            return x if depth == 0 else calls_itself(x, depth - 1)

        for x in dataset:
            two.run(assigns, args=(x,))
            two.run(appends, args=(x,))
            two.run(calls_itself, args=(x,))

    epoch(batches(two, rows=12))
    assert (count, seen) == (1, ["traced"])


def scaled_steps() -> dict[str, Any]:
    """Ways to write a step, given what returns the present scale."""

    def wrapped(scale: Any) -> Any:
        @functools.wraps(scale)
        def step(x: Any) -> Any:
            return x.sum() * scale()

        return step

    def gradient(scale: Any) -> Any:
        return lambda x: jax.grad(lambda y: jnp.sum(y * scale()))(x).sum() * x[0, 0] / 3

    def with_attribute(scale: Any) -> Any:
        def step(x: Any) -> Any:
            return x.sum() * scale()

        step.about = "a step"  # type: ignore[attr-defined]
        return step

    def recursive(scale: Any) -> Any:
        def step(x: Any, depth: int = 1) -> Any:
            return x.sum() * scale() if depth == 0 else step(x, depth - 1)

        return step

    def counting(scale: Any) -> Any:
        count = 0

        def step(x: Any) -> Any:
            nonlocal count
            count += 1
            return x.sum() * scale()

        return step

    def one_another(scale: Any) -> Any:
        def first(x: Any, depth: int) -> Any:
            return x.sum() * scale() if depth == 0 else second(x, depth - 1)

        def second(x: Any, depth: int) -> Any:
            return first(x, depth)

        return functools.partial(first, depth=2)

    made = (wrapped, gradient, with_attribute, recursive, counting, one_another)
    return {f.__name__: f for f in made}


@pytest.mark.parametrize("kind", scaled_steps())
def test_captured_values_are_those_of_the_round(two: px.Strategy, kind: str) -> None:
    @px.function
    def epoch(dataset: Any) -> list[Any]:
        results, scale = [], jnp.float32(1.0)
        step = scaled_steps()[kind](lambda: scale)
        for x in dataset:
            results.append(two.run(step, args=(x,)))
            scale = scale * 10
        return results

    ones = px.data.Dataset.from_tensor_slices(np.ones((12, 3), np.float32)).batch(4)
    results = epoch(two.experimental_distribute_dataset(ones))
    wanted = 2.0 if kind == "gradient" else 6.0
    for i, result in enumerate(results):
        assert float(result.values[1]) == pytest.approx(wanted * 10**i)


def test_captured_lists_that_a_step_changes(two: px.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    @px.function
    def epoch(dataset: Any) -> Any:
        total = [jnp.float32(0.0)]

        def step(x: Any) -> None:
            total[0] = total[0] + x.sum()

        for x in dataset:
            two.run(step, args=(x,))
        return total[0]

    ones = px.data.Dataset.from_tensor_slices(np.ones((12, 3), np.float32)).batch(4)
    assert float(epoch(two.experimental_distribute_dataset(ones))) == 36.0
    (said,) = warnings_of(caplog)
    assert "step runs eagerly" in said
    assert "changes a list or a dict" in said


def test_captured_values_that_a_step_looks_at(two: px.Strategy) -> None:
    @px.function
    def epoch(dataset: Any) -> list[Any]:
        results, best, size = [], jnp.float32(0.0), np.int64(2)
        mask = np.array([True, False, True])
        for i, x in enumerate(dataset):

            def step(x: Any) -> Any:
                if best > 1:
                    return jnp.float32(-1.0)
                return x[:, mask].sum() + jnp.zeros(int(size)).sum()

            results.append(two.run(step, args=(x,)))
            best = jnp.float32(i + 1)
        return results

    ones = px.data.Dataset.from_tensor_slices(np.ones((12, 3), np.float32)).batch(4)
    results = epoch(two.experimental_distribute_dataset(ones))
    assert [float(r.values[0]) for r in results] == [4.0, 4.0, -1.0]


def test_equal_tuples_need_no_new_program(two: px.Strategy) -> None:
    @px.function
    def epoch(dataset: Any) -> None:
        for x in dataset:
            shape = tuple(map(int, "12"))  # another object in each round
            two.run(lambda x: x.sum() * jnp.ones(shape).sum(), args=(x,))

    epoch(batches(two, rows=12))
    assert epoch.trace_count <= 2  # the function, and its step


def test_what_cannot_be_compiled_runs_eagerly_and_says_so(
    two: px.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    traced = []

    @px.function
    def epoch(dataset: Any) -> list[Any]:
        def names(x: Any) -> Any:
            return f"{float(x.sum()):.1f}"

        def doubled(x: Any) -> Any:
            traced.append(1)
            return x * 2

        results = []
        words = two.experimental_distribute_values_from_function(
            lambda c: "ab"[c.replica_id_in_sync_group]
        )
        for x in dataset:
            results.append(two.run(lambda w: w + "!", args=(words,)).values)
            two.run(doubled, args=(x,))
        return results

    assert epoch(batches(two, rows=12)) == [("a!", "b!")] * 3
    assert len(traced) == 1
    (said,) = warnings_of(caplog)
    assert "<lambda> runs eagerly" in said
    assert "values that are no arrays" in said


def test_a_function_without_runs_says_that_it_is_eager(caplog: pytest.LogCaptureFixture) -> None:
    total = px.Variable(0)

    @px.function
    def add(dataset: Any) -> None:
        for x in dataset:
            total.assign_add(x)

    add(px.data.Dataset.range(5))
    assert int(total) == 10
    (said,) = warnings_of(caplog)
    assert "add runs eagerly" in said
    assert "it loops over a dataset" in said


def test_steps_are_forgotten_with_what_they_captured(two: px.Strategy) -> None:
    class Model:
        def __init__(self) -> None:
            with two.scope():
                self.w = px.Variable(1.0, aggregation=A.SUM)

    @px.function
    def epoch(model: Any, dataset: Any) -> None:
        for x in dataset:
            two.run(lambda x: model.w.assign_add(x.sum()), args=(x,))

    model = Model()
    epoch(model, batches(two, rows=8))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_step_that_fails_says_where(two: px.Strategy) -> None:
    with two.scope():
        w = px.Variable(0.0, aggregation=A.SUM)

    @px.function
    def epoch(dataset: Any) -> None:
        for x in dataset:
            two.run(step, args=(x,))

    def step(x: Any) -> None:
        w.assign_add(x.sum() * 0 + 1)
        if x.shape[0] == 1:
            raise ZeroDivisionError("too small")

    with pytest.raises(ZeroDivisionError, match="too small"):
        epoch(batches(two, rows=10))
    assert float(w) == 4.0  # the steps before it have happened


def test_many_runs_in_one_program_are_worth_a_word(
    two: px.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    @px.function
    def unrolled(x: Any, count: int) -> Any:
        for _ in range(count):
            x = two.run(lambda x: x + 1, args=(x,))
        return x

    unrolled(jnp.float32(0), 5)
    assert warnings_of(caplog) == []
    result = unrolled(jnp.float32(0), 25)
    assert [float(x) for x in result.values] == [25.0, 25.0]
    (said,) = warnings_of(caplog)
    assert "px.range" in said


def test_many_eager_steps_are_worth_a_word(two: px.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    def hundreds_of_these() -> None:
        pass

    for _ in range(500):
        two.run(hundreds_of_these)
    (said,) = warnings_of(caplog)
    assert "hundreds_of_these has run eagerly 200 times" in said


class TestLoopsInFunctions:
    """`px.train.loop` inside of functions: one scan, as `px.range` is."""

    def test_it_is_one_loop_and_returns_all_results(self, two: px.Strategy) -> None:
        step = Counted(two)
        compiled = px.function(lambda x: two.run(step, args=(x,)))

        @px.function
        def epoch(iterator: Any) -> Any:
            return px.train.loop(compiled, iterator, steps=10)

        results = epoch(iter(batches(two, rows=40)))
        assert step.calls <= 3
        assert len(results) == 10
        wanted = Counted(two)
        for x, result in zip(batches(two, rows=40), results, strict=True):
            loss = two.run(wanted, args=(x,))
            for a, b in zip(result.values, loss.values, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4)
        np.testing.assert_allclose(step.w.numpy(), wanted.w.numpy(), rtol=1e-5)

    def test_results_can_be_used_in_the_function(self, two: px.Strategy) -> None:
        rows = px.function(lambda x: two.run(lambda x: x.sum(1), args=(x,)))

        @px.function
        def total(iterator: Any) -> Any:
            results = px.train.loop(rows, iterator, steps=5)
            return sum(two.reduce("sum", result, axis=0) for result in results), results[-1]

        found, last = total(iter(batches(two, rows=20)))
        np.testing.assert_allclose(found, 30.0, rtol=1e-5)
        data = np.linspace(0.0, 1.0, 60, dtype=np.float32).reshape(20, 3).sum(1)
        np.testing.assert_allclose(np.concatenate(last.values), data[-4:], rtol=1e-5)

    def test_it_ends_with_its_input(self, two: px.Strategy) -> None:
        compiled = px.function(lambda x: two.run(lambda x: x.sum(), args=(x,)))

        @px.function
        def epoch(iterator: Any) -> int:
            return len(px.train.loop(compiled, iterator, steps=4))

        iterator = iter(batches(two, rows=42))  # the third call gets three, the last one is partial
        assert [epoch(iterator) for _ in range(4)] == [4, 4, 3, 0]

    def test_single_steps_and_other_iterators(self, two: px.Strategy) -> None:
        compiled = px.function(lambda x: two.run(lambda x: x.sum(), args=(x,)))
        once = px.function(lambda iterator: px.train.loop(compiled, iterator, steps=1))
        (result,) = once(iter(batches(two, rows=4)))
        assert float(sum(result.values)) == pytest.approx(6.0)
        several = px.function(lambda x: px.train.loop(compiled, iter([x, x * 2]), steps=2))
        first, second = several(jnp.ones((2, 3)))
        assert [float(first.values[0]), float(second.values[1])] == [6.0, 12.0]
