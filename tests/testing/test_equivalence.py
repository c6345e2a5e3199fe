"""`px.testing.assert_equivalent`: what passes, and what it says about what does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx import VariableAggregation as A, VariableSynchronization as S


def strategies() -> list[px.Strategy]:
    return [
        px.get_strategy(),
        px.MirroredStrategy([f"CPU:{i}" for i in range(4)]),
        px.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    ]


def two() -> list[px.Strategy]:
    return [px.OneDeviceStrategy("CPU:0"), px.MirroredStrategy(["CPU:0", "CPU:1"])]


def ctx() -> px.ReplicaContext:
    context = px.get_replica_context()
    assert context is not None
    return context


def on_replica(index: int) -> Any:
    return jnp.asarray(ctx().replica_id_in_sync_group) == index


RNG = np.random.default_rng(0)
BATCHES = [
    (RNG.normal(size=(8, 3)).astype(np.float32), RNG.normal(size=8).astype(np.float32))
    for _ in range(3)
]
NUMBERS = [np.arange(4, dtype=np.float32) + i for i in range(3)]


class Model:
    """A linear model with an optimizer and a metric, as users write them."""

    def __init__(self) -> None:
        self.w = px.Variable(np.ones(3, np.float32))
        self.optimizer = px.train.Optimizer(optax.adam(0.1))
        self.metric = px.train.Mean()

    @property
    def variables(self) -> Any:
        return {"w": self.w, "optimizer": self.optimizer, "metric": self.metric}

    def step(self, x: jax.Array, y: jax.Array) -> Any:
        def loss() -> Any:
            return jnp.sum((x @ self.w.value() - y) ** 2) / 8

        value = self.optimizer.minimize(loss, [self.w])
        self.metric.update_state(y)
        return {"loss": value, "predictions": x @ self.w.value(), "name": "linear"}


def test_training_is_the_same_everywhere() -> None:
    px.testing.assert_equivalent(
        Model.step, strategies(), setup=lambda _: Model(), batches=BATCHES, rtol=1e-4, atol=1e-5
    )


def test_uneven_batches_and_nests() -> None:
    def setup(strategy: px.Strategy) -> Any:
        assert px.get_strategy() is strategy
        return [px.Variable(0.0, aggregation=A.SUM)]

    def step(state: Any, batch: Any) -> Any:
        (total,) = state
        total.assign_add(jnp.sum(batch["x"]) * batch["scale"])
        return batch["x"] * 2

    batches = [{"x": np.arange(n, dtype=np.float32), "scale": 0.5} for n in (8, 7, 3, 1)]
    px.testing.assert_equivalent(step, strategies(), setup=setup, batches=batches)


def test_random_numbers_of_global_indices() -> None:
    def noise(_: Any, indices: jax.Array) -> Any:
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(indices)
        return jax.vmap(jax.random.normal)(keys)

    px.testing.assert_equivalent(
        noise, two(), setup=lambda _: None, batches=[np.arange(4), np.arange(4, 8)]
    )

    def own_stream(_: Any, indices: jax.Array) -> Any:
        return jax.random.normal(px.random.replica_key(0), indices.shape)

    with pytest.raises(AssertionError, match=r"strategies\[1\]"):
        px.testing.assert_equivalent(own_stream, two(), setup=lambda _: None, batches=[np.arange(4)])


# -- failing -------------------------------------------------------------------------------------


def failure(step: Any, setup: Any = lambda _: None, batches: Any = NUMBERS, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        px.testing.assert_equivalent(step, two(), setup=setup, batches=batches, **kwargs)
    return str(caught.value)


def test_a_step_that_depends_on_the_number_of_replicas() -> None:
    assert failure(lambda _, x: jnp.mean(x)) == (
        "strategies[1] (MirroredStrategy, 2 replicas), eager, step 0: the result differs from "
        "strategies[0] (OneDeviceStrategy, 1 replica), eager. The largest difference is 1.5: 3.0 "
        "instead of 1.5."
    )


def test_an_executor_that_computes_something_else() -> None:
    calls: list[int] = []

    def impure(_: Any, x: jax.Array) -> Any:
        calls.append(1)
        return x + (100.0 if len(calls) == 5 else 0.0)  # after three eager steps, tracing is the fourth

    def more(_: Any, x: jax.Array) -> Any:
        calls.append(1)
        return x + (2.0 if len(calls) == 4 else 0.0)

    assert "strategies[0] (OneDeviceStrategy, 1 replica), compiled, step 0" in failure(more)
    calls.clear()
    assert "strategies[1] (MirroredStrategy, 2 replicas), eager, step 0" in failure(impure)


def test_the_first_step_that_differs_and_the_place() -> None:
    def step(_: Any, x: jax.Array) -> Any:
        return {"same": x, "other": x + jnp.where(on_replica(1) & (x == 5.0), 7.0, 0.0)}

    message = failure(step)
    assert "eager, step 2: the result['other'] differs" in message
    assert "The largest difference is 7 at [3]: 12.0 instead of 5.0." in message


def test_variables_after_the_last_step() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        w: px.Variable
        n: px.Variable

    def setup(_: px.Strategy) -> State:
        return State(px.Variable(0.0, aggregation=A.SUM), px.Variable(0))

    def step(state: State, x: jax.Array) -> None:
        state.w.assign_add(jnp.mean(x))
        state.n.assign_add(1)

    message = failure(step, setup)
    assert (
        "strategies[1] (MirroredStrategy, 2 replicas), eager, after step 2: the variable.w" in message
    )
    assert "The largest difference is 7.5: 15.0 instead of 7.5." in message


def test_the_largest_of_several_differences() -> None:
    def step(_: Any, x: jax.Array) -> Any:
        return jnp.max(x), jnp.max(x) * 10, jnp.sum(x)

    message = failure(step)
    assert "the result[1]" in message
    assert "difference is 10: 40.0 instead of 30.0" in message


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (lambda _, x: jnp.ones(3), "float32[6] instead of float32[3]"),
        (lambda _, x: x.sum() if x.size > 2 else x.sum().astype(int), "int32[] instead of float32[]"),
        (lambda _, x: x.size, "It is 2 instead of 4."),
        (lambda _, x: [x] if x.size > 2 else [x, x], "['[0]', '[1]'] instead of ['[0]']"),
        (lambda _, x: jnp.where(x > 1, jnp.nan if x.size > 2 else x, x), "difference is inf"),
        (lambda _, x: x.astype(int) + (x.size == 2), "1 instead of 0"),
        (lambda _, x: (x > 0) & (x.size == 2), "True instead of False"),
    ],
)
def test_results_of_different_kinds(step: Any, what: str) -> None:
    assert what in failure(step, rtol=10.0, atol=10.0 if "float" in what else 0.0)


def test_tolerances() -> None:
    def step(_: Any, x: jax.Array) -> Any:
        return x * (1.0 if x.size > 2 else 1.001)

    assert "difference is 0.00" in failure(step)
    for tolerance in ({"rtol": 0.01}, {"atol": 0.1}):
        px.testing.assert_equivalent(step, two(), setup=lambda _: None, batches=NUMBERS, **tolerance)


def test_what_is_not_a_number_agrees_with_itself() -> None:
    px.testing.assert_equivalent(
        lambda _, x: (x / 0.0 - x / 0.0, None, "text"), two(), setup=lambda _: None, batches=NUMBERS
    )


def test_variables_without_one_value_are_not_compared() -> None:
    def setup(_: px.Strategy) -> Any:
        return px.Variable(0.0, synchronization=S.ON_READ), px.Variable(jax.random.key(3))

    def step(state: Any, x: jax.Array) -> Any:
        state[0].assign_add(jnp.mean(x))

    px.testing.assert_equivalent(step, two(), setup=setup, batches=NUMBERS)


def test_misuse() -> None:
    def run(step: Any = lambda _, x: x, which: Any = None, **kwargs: Any) -> None:
        options = {"setup": lambda _: None, "batches": NUMBERS, **kwargs}
        px.testing.assert_equivalent(step, two() if which is None else which, **options)

    with pytest.raises(ValueError, match="nothing to compare"):
        run(lambda _, x: None)
    with pytest.raises(ValueError, match="at least one batch"):
        run(batches=[])
    with pytest.raises(TypeError, match="strategies"):
        run(which=[])
    with pytest.raises(TypeError, match="strategies"):
        run(which=["CPU:0"])
    with pytest.raises(TypeError, match="callable"):
        run(setup=[])
    with pytest.raises(TypeError, match="same on all replicas"):
        run(lambda _, x: f"{x.sum()}", which=[px.MirroredStrategy(["CPU:0", "CPU:1"])])
