"""Input under every strategy and executor: the same training, whatever the division."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from tests.contract.conftest import STRATEGIES, EagerExecutor, World

X = np.random.default_rng(0).normal(size=(23, 5)).astype(np.float32)
Y = X @ np.arange(1.0, 6.0, dtype=np.float32)
BATCH = 8


def dataset(policy: str = "AUTO") -> Any:
    options = px.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    rows = px.data.Dataset.from_tensor_slices((X, Y)).shuffle(23, seed=4)
    return rows.batch(BATCH).with_options(options)


def runner(world: World, step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that is compiled once, if the executor compiles."""

    def run(*args: Any) -> Any:
        return world.strategy.run(step, args=args)

    return px.function(run) if world.executor.name == "compiled" else run


def reference(epochs: int) -> tuple[np.ndarray[Any, Any], list[float]]:
    """Plain JAX on one device."""
    w, losses = jnp.zeros(5), []
    batches = dataset()
    for _ in range(epochs):
        for x, y in batches:
            loss, g = jax.value_and_grad(lambda w, x=x, y=y: jnp.sum((x @ w - y) ** 2) / BATCH)(w)
            w, losses = w - 0.05 * g, [*losses, float(loss)]
    return np.asarray(w), losses


def check_training(world: World, policy: str) -> None:
    w = world.variable(jnp.zeros(5), aggregation=px.VariableAggregation.SUM)

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        errors = x @ w - y
        w.assign_sub(0.1 / BATCH * (errors @ x))
        return errors @ errors / BATCH

    run, losses = runner(world, step), []
    dist = world.strategy.experimental_distribute_dataset(dataset(policy))
    for _ in range(2):
        for x, y in dist:
            losses.append(float(world.strategy.reduce("sum", run(x, y), axis=None)))
    expected_w, expected_losses = reference(2)
    assert len(losses) == 6
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    np.testing.assert_allclose(w.numpy(), expected_w, rtol=2e-5)


def test_training_over_uneven_epochs_equals_one_device(reading: World) -> None:
    """The last batch of each epoch has 7 rows, which 2, 3 and 4 replicas cannot share evenly."""
    check_training(reading, "AUTO")


def test_an_epoch_in_a_function_is_compiled_step_by_step(reading: World) -> None:
    w = reading.variable(jnp.zeros(5), aggregation=px.VariableAggregation.SUM)
    calls = []

    def epoch(batches: Any) -> list[Any]:
        losses = []
        for x, y in batches:

            def step(x: jax.Array, y: jax.Array) -> jax.Array:  # another object in each round
                calls.append(x.shape)
                errors = x @ w - y
                w.assign_sub(0.1 / BATCH * (errors @ x))
                return errors @ errors / BATCH

            per_replica = reading.strategy.run(step, args=(x, y))
            losses.append(reading.strategy.reduce("sum", per_replica, axis=None))
        return losses

    run = px.function(epoch) if reading.executor.name == "compiled" else epoch
    dist = reading.strategy.experimental_distribute_dataset(dataset())
    losses = [*run(dist), *run(dist)]
    expected_w, expected_losses = reference(2)
    np.testing.assert_allclose([float(loss) for loss in losses], expected_losses, rtol=2e-5)
    np.testing.assert_allclose(w.numpy(), expected_w, rtol=2e-5)
    if reading.executor.name == "compiled":
        assert len(calls) <= 2 * len(set(calls))  # not once for each of the six steps


@pytest.mark.parametrize("policy", ["OFF", "DATA"])
def test_the_policy_makes_no_difference(policy: str) -> None:
    check_training(World(STRATEGIES["mirrored_3"](), EagerExecutor()), policy)


def test_means_over_an_uneven_epoch_count_every_example_once(reading: World) -> None:
    with reading.strategy.scope():
        mean = px.train.Mean()
    run = runner(reading, mean.update_state)
    for x, _ in reading.strategy.experimental_distribute_dataset(dataset()):
        run(x)
    assert float(mean.result()) == pytest.approx(float(X.mean()), abs=1e-6)


def test_uneven_batches_are_compiled(reading: World) -> None:
    """With sums over all replicas in the middle of the step, and results of different sizes."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    total = reading.variable(jnp.zeros(5), aggregation=px.VariableAggregation.SUM)

    def step(x: jax.Array, y: jax.Array) -> Any:
        context = px.get_replica_context()
        assert context is not None
        count = context.all_reduce("sum", jnp.float32(x.shape[0]))
        centered = x - context.all_reduce("sum", x.sum(0)) / count
        total.assign_add((centered**2).sum(0))
        return centered, jnp.stack([y, y * 2]).T, context.all_gather(y, axis=0).sum()

    run, squares, found = runner(reading, step), np.zeros(5), []
    logging.getLogger("phalanx").addHandler(handler)
    try:
        for x, y in reading.strategy.experimental_distribute_dataset(dataset()):
            centered, pairs, summed = run(x, y)
            whole = np.concatenate([np.asarray(part) for part in reading.local(x)])
            squares += ((whole - whole.mean(0)) ** 2).sum(0)
            joined = np.concatenate([np.asarray(part) for part in reading.local(centered)])
            np.testing.assert_allclose(joined, whole - whole.mean(0), atol=1e-6)
            found += np.concatenate([np.asarray(part) for part in reading.local(pairs)]).tolist()
            expected = sum(float(np.sum(part)) for part in reading.local(y))
            for one in reading.local(summed):
                assert float(one) == pytest.approx(expected, rel=1e-5)
    finally:
        logging.getLogger("phalanx").removeHandler(handler)
    np.testing.assert_allclose(total.numpy(), squares, rtol=1e-4)
    assert sorted(a for a, _ in found) == sorted(Y.tolist())
    assert all(b == 2 * a for a, b in found)
    assert said == [], said
