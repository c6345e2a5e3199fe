"""What users read, set and pass on besides gradients: counts, learning rates, extra arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.contract.conftest import EXECUTORS, STRATEGIES

import phalanx as px

HERE = [name for name in STRATEGIES if not name.startswith("parameter_server")]


def step_of(strategy: px.Strategy, executor: str, fn: Any) -> Any:
    return lambda *args: EXECUTORS[executor]().run(strategy, fn, args)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", HERE)
def test_the_learning_rate_is_read_and_set(name: str, executor: str) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        w = px.Variable(jnp.ones(2))
        optimizer = px.optimizers.SGD(0.5, aggregate="mean")
        assert int(optimizer.iterations) == 0
        before = optimizer.iterations
    optimizer.learning_rate = 0.25  # before there is a state
    assert optimizer.learning_rate == 0.25
    optimizer.learning_rate.assign(0.5)
    assert optimizer.lr.numpy() == np.float32(0.5)
    assert jnp.multiply(optimizer.learning_rate, jnp.float32(2)).dtype == np.float32
    optimizer.lr.assign(0.25)

    def step() -> Any:
        optimizer.apply_gradients([(jnp.ones(2), w)])
        return optimizer.learning_rate + 0.0

    run = step_of(strategy, executor, step)
    run()
    assert float(optimizer.lr) == 0.25
    optimizer.learning_rate.assign(0.125)
    run()
    np.testing.assert_allclose(w.numpy(), 1 - 0.25 - 0.125)
    assert optimizer.iterations is before
    assert int(before) == 2


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["default", "mirrored_2", "central_storage_3", "parameter_server_2"])
def test_schedules_and_gradients_that_are_combined_already(name: str, executor: str) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        w = px.Variable(0.0)
        rates = px.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
        optimizer = px.optimizers.SGD(rates)

    def step() -> None:
        context = px.get_replica_context()
        gradient = context.all_reduce("mean", context.replica_id_in_sync_group * 0.0 + 4.0)
        optimizer.apply_gradients([(gradient, w)], experimental_aggregate_gradients=False)

    run = step_of(strategy, executor, step)
    run()
    run()
    assert float(w) == -(4.0 + 2.0)
    with pytest.raises(TypeError if not name.startswith("parameter") else Exception, match="schedule"):
        optimizer.learning_rate = 1.0


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["default", "mirrored_2", "central_storage_3"])
def test_transformations_that_ask_for_the_loss(name: str, executor: str) -> None:
    """`reduce_on_plateau` sees the loss of the whole batch, the same on every replica."""
    strategy = STRATEGIES[name]()
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        w = px.Variable(jnp.float32(8.0))
        plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
        optimizer = px.train.Optimizer(optax.chain(optax.sgd(1.0), plateau))

    def step() -> Any:
        return optimizer.minimize(lambda: (w * 0.0 + 3.0) / n + w / n, [w])

    run = step_of(strategy, executor, step)
    losses = [float(strategy.reduce("sum", run(), axis=None)) for _ in range(3)]
    np.testing.assert_allclose(losses, [11.0, 10.0, 9.0], rtol=1e-6)
    values = [v for v in optimizer.variables if "best_value" in v.name]
    assert [float(v.numpy()) for v in values] == [9.0]
    with pytest.raises(TypeError, match="value=loss"):
        strategy.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), w)]))


def test_lbfgs_searches_along_its_direction() -> None:
    center = jnp.float32([1.0, -2.0, 3.0])
    w = px.Variable(jnp.zeros(3))
    optimizer = px.train.Optimizer(optax.lbfgs())

    def loss() -> Any:
        return jnp.sum((w - center) ** 2 * jnp.float32([1.0, 10.0, 0.1]))

    step = px.function(lambda: optimizer.minimize(loss, [w]))
    for _ in range(8):
        step()
    np.testing.assert_allclose(w.numpy(), center, atol=1e-3)
    strategy = STRATEGIES["mirrored_2"]()
    with strategy.scope():
        v = px.Variable(jnp.zeros(3))
        divided = px.train.Optimizer(optax.lbfgs(0.1, linesearch=None))
        searching = px.train.Optimizer(optax.lbfgs())
    strategy.run(lambda: divided.apply_gradients([(jnp.ones(3), v)]))
    assert np.all(v.numpy() < 0)
    with pytest.raises(NotImplementedError, match=r"optimizer\.minimize"):
        strategy.run(
            lambda: searching.apply_gradients(
                [(jnp.ones(3), v)], value=0.0, grad=[jnp.ones(3)], value_fn=lambda x: x[0].sum()
            )
        )


def searched(replicas: int, compiled: bool, shard: Any = None) -> Any:
    """Weights after two steps with a line search, over rows that replicas share."""
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    rows = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
    data = px.data.Dataset.from_tensor_slices((rows, rows @ np.float32([1, -2, 3]))).batch(4)
    with strategy.scope():
        w = px.Variable(jnp.zeros(3))
        optimizer = px.train.Optimizer(optax.lbfgs(), shard=shard)

    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            return px.nn.compute_average_loss((x @ w.value() - y) ** 2, global_batch_size=4)

        return optimizer.minimize(loss, [w])

    run = px.function(lambda x, y: strategy.run(step, args=(x, y))) if compiled else None
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(data):
            run(*batch) if run else strategy.run(step, args=batch)
    return w.numpy()


def test_line_searches_ask_all_replicas() -> None:
    alone = searched(1, True)
    assert np.abs(alone).max() > 0.1
    whole = px.train.OptimizerSharding("parameters", threshold=0)
    for shard in (None, whole):
        np.testing.assert_allclose(searched(2, True, shard), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.soak
def test_line_searches_of_eager_replicas() -> None:
    np.testing.assert_allclose(searched(2, False), searched(1, True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_divided_optimizers_are_told_of_the_loss(executor: str) -> None:
    strategy = STRATEGIES["mirrored_2"]()
    with strategy.scope():
        w = px.Variable(jnp.full(4, 8.0))
        plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
        sharding = px.train.OptimizerSharding("gradients", threshold=0)
        optimizer = px.train.Optimizer(optax.chain(optax.sgd(1.0), plateau), shard=sharding)
    run = step_of(strategy, executor, lambda: optimizer.minimize(lambda: jnp.sum(w) / 2, [w]))
    for _ in range(2):
        run()
    (best,) = (v for v in optimizer.variables if "best_value" in v.name)
    assert float(best.numpy()) == 28.0
    np.testing.assert_allclose(w.numpy(), 6.0)


@pytest.mark.parametrize("name", ["parameter_server_1", "parameter_server_2"])
def test_servers_have_the_learning_rate_that_is_set(name: str) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        w, late = px.Variable(jnp.ones(2)), px.Variable(1.0)
        optimizer = px.optimizers.SGD(0.5, momentum=0.0, aggregate="mean")
    assert float(optimizer.learning_rate) == 0.5
    strategy.run(lambda: optimizer.apply_gradients([(jnp.ones(2), w)]))
    optimizer.learning_rate = 0.125
    assert optimizer.learning_rate == 0.125
    strategy.run(lambda: optimizer.apply_gradients([(jnp.ones(2), w), (1.0, late)]))
    np.testing.assert_allclose(w.numpy(), 1 - 0.5 - 0.125)
    assert float(late) == 1 - 0.125  # which had no slots before
    optimizer.learning_rate = 0.25
    strategy.run(lambda: optimizer.apply_gradients([(1.0, late)]))
    assert float(late) == 1 - 0.125 - 0.25


def test_mistakes_name_what_to_write() -> None:
    fixed = px.train.Optimizer(optax.sgd(0.1))
    with pytest.raises(RuntimeError, match=r"px\.optimizers"):
        _ = fixed.learning_rate
    with pytest.raises(RuntimeError, match="inject_hyperparams"):
        fixed.learning_rate = 0.1
    injected = px.train.Optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=0.5))
    assert float(injected.learning_rate) == 0.5
    with pytest.raises(ValueError, match="learning_rate"):
        injected.learning_rate = -1.0
    with pytest.raises(ValueError, match="Only one of"):
        px.optimizers.SGD(clipnorm=1.0, clipvalue=1.0)
    w = px.Variable(1.0)
    optimizer = px.optimizers.Adam(0.1, name="mine")
    optimizer.apply_gradients([(1.0, w)])
    assert {v.name.split(":")[0] for v in optimizer.variables} == {
        "iterations",
        "optimizer/count",
        "optimizer/learning_rate",
        "Variable/mean",
        "Variable/square",
    }


def test_a_schedule_counts_from_the_updates() -> None:
    """A step may compute with the number of updates before there were any."""
    strategy = STRATEGIES["mirrored_2"]()
    with strategy.scope():
        w, optimizer = px.Variable(1.0), px.optimizers.SGD(1.0)

    @px.function
    def step() -> Any:
        def on_replica() -> Any:
            scale = 1.0 / (1.0 + optimizer.iterations.value())
            optimizer.apply_gradients([(scale, w)])
            return scale

        return strategy.run(on_replica)

    assert [float(step().values[0]) for _ in range(3)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert jax.tree.leaves(w.numpy())[0] == pytest.approx(1 - 2 * (1 + 0.5 + 1 / 3))


def test_names_that_keras_has_for_arguments() -> None:
    w = px.Variable(2.0)
    px.optimizers.SGD(0.5).minimize(lambda: w * w, var_list=[w])
    assert float(w) == 0.0
    with pytest.raises(TypeError, match=r"SGD does not take 'lr'.*learning_rate.*Received: .*0\.1"):
        px.optimizers.SGD(lr=0.1)
