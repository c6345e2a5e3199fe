"""Keras models in loops of one's own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import optax
import pytest

import phalanx as px
from tests.integrations.keras.cases import T, X


def model_of(*hidden: Any) -> Any:
    """A model of hidden layers, which are given as functions that make them."""
    keras.utils.set_random_seed(1)
    made = [make() for make in hidden]
    model = keras.Sequential([keras.Input((6,)), *made, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_custom_loop_equals_fit(compiled: bool) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = model_of(lambda: keras.layers.Dense(3, activation="tanh"))
        lifted = px.keras.lift(model)
        optimizer = px.train.Optimizer(optax.sgd(0.05))

    def on_replica(x: Any, y: Any) -> Any:
        def loss() -> Any:
            return px.nn.compute_average_loss((model(x) - y)[:, 0] ** 2, global_batch_size=10)

        value, gradients = px.value_and_grad(loss, lifted.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, lifted.trainable_variables, strict=True))
        return value

    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(on_replica, args=(x, y)), axis=None)

    step = px.function(step) if compiled else step
    data = px.data.Dataset.from_tensor_slices((X, T)).batch(10)
    losses = [float(step(x, y)) for x, y in strategy.experimental_distribute_dataset(data)]
    expected = model_of(lambda: keras.layers.Dense(3, activation="tanh"))
    batches = []
    for i in range(0, 50, 10):
        expected.reset_metrics()  # older versions go on with the mean of the losses before
        batches.append(expected.train_on_batch(X[i : i + 10], T[i : i + 10]))
    np.testing.assert_allclose(losses, batches, rtol=1e-5)
    for a, b in zip(lifted.update_model().get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_what_layers_write_is_kept() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = model_of(
            lambda: keras.layers.BatchNormalization(momentum=0.5), lambda: keras.layers.Dropout(0.5)
        )
        lifted = px.keras.lift(model)
    x = strategy.experimental_distribute_values_from_function(
        lambda context: X[:4] - X[:4].mean(0) + 1.0 + 2 * context.replica_id_in_sync_group
    )
    run = px.function(lambda: strategy.run(lambda x: model(x, training=True), args=(x,)))
    first, second = (strategy.experimental_local_results(run()) for _ in range(2))
    mean = next(v for v in lifted.non_trainable_variables if "moving_mean" in v.name)
    np.testing.assert_allclose(mean.numpy(), 2.0 * 0.75, rtol=1e-6)
    assert not np.allclose(first[0], second[0])  # dropout goes on
    assert not np.allclose(model.layers[0].moving_mean.numpy(), mean.numpy())
    lifted.update_model()
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), mean.numpy())


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_model_that_is_not_lifted_is_refused(compiled: bool) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = model_of()

    def call() -> Any:
        return strategy.run(lambda: model(X[:2]))

    with pytest.raises(px.errors.ContextError, match=r"px\.keras\.lift"):
        (px.function(call) if compiled else call)()
    with pytest.raises(px.errors.ContextError, match=r"px\.keras\.lift"):
        px.function(lambda: keras.layers.Dense(2)(X[:2]))()
    assert model(X[:2]).shape == (2, 1)
    relu = keras.layers.ReLU()
    relu(X)
    assert px.function(lambda: relu(X))().shape == X.shape


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_metrics_of_keras_are_refused_on_replicas(compiled: bool) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        metric = keras.metrics.Mean()

    def call() -> Any:
        return strategy.run(lambda: metric.update_state(1.0))

    with pytest.raises(px.errors.ContextError, match=r"px\.metrics.*Received: 'mean"):
        (px.function(call) if compiled else call)()
    metric.update_state(3.0)
    assert float(metric.result()) == 3.0


def test_only_models_with_weights_can_be_lifted() -> None:
    with pytest.raises(ValueError, match="is not built"):
        px.keras.lift(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(TypeError, match="Keras model or layer"):
        px.keras.lift("model")
