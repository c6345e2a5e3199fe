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


class AddsLoss(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def regularized() -> Any:
    """A model without weights as yet, whose layers add to the loss."""
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(3, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1))
    model = keras.Sequential([dense, AddsLoss(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.parametrize(("compiled", "name"), [(True, "lifted"), (False, "model")])
def test_a_model_gets_weights_when_it_is_called_and_its_losses_count(compiled: bool, name: str) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = regularized()
        lifted = px.keras.lift(model)
        optimizer = px.optimizers.SGD(0.05)
    called = lifted if name == "lifted" else model

    def on_replica(x: Any, y: Any) -> Any:
        def loss() -> Any:
            value = px.nn.compute_average_loss((called(x, training=True) - y)[:, 0] ** 2)
            return value + px.nn.scale_regularization_loss(sum(called.losses))

        value, gradients = px.value_and_grad(loss, lifted.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, lifted.trainable_variables, strict=True))
        return value

    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(on_replica, args=(x, y)), axis=None)

    step = px.function(step) if compiled else step
    data = px.data.Dataset.from_tensor_slices((X[:30], T[:30])).batch(10)
    losses = [float(step(x, y)) for x, y in strategy.experimental_distribute_dataset(data)]
    expected = regularized()
    batches = []
    for i in range(0, 30, 10):
        expected.reset_metrics()
        batches.append(expected.train_on_batch(X[i : i + 10], T[i : i + 10]))
    np.testing.assert_allclose(losses, batches, rtol=1e-5)
    for a, b in zip(lifted.update_model().get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_models_without_weights() -> None:
    g, d = (px.keras.lift(keras.Sequential([keras.layers.Dense(2)])) for _ in range(2))
    with pytest.raises(px.errors.ContextError, match=r"no variables yet.*Received: <Sequential"):
        len(g.trainable_variables)
    with pytest.raises(px.errors.ContextError, match="no variables yet"):
        px.value_and_grad(lambda: g.trainable_variables, d.trainable_variables)()
    calls = []

    def losses() -> Any:
        calls.append(0)
        made = g(X[:3])
        return made.sum(), d(made).sum()

    both = px.values_and_grads(losses, [g.trainable_variables, d.trainable_variables])
    _, (of_g, of_d) = both()
    assert [x.shape for x in (*of_g, *of_d)] == [(6, 2), (2,), (2, 2), (2,)]
    assert len(calls) == 3  # up to each of the models, and then the whole
    both()
    assert len(calls) == 4


def test_checkpoints_of_models(tmp_path: Any) -> None:
    saved: list[Any] = []

    class Saves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            saved.append(checkpoint.save(str(tmp_path / "ckpt")))

    def made(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    with px.OneDeviceStrategy("CPU:0").scope():
        model = made(1)
    checkpoint = px.train.Checkpoint(model=model)
    model.fit(X, T, epochs=2, verbose=0, shuffle=False, callbacks=[Saves()])
    again = made(2)
    px.train.Checkpoint(model=again).restore(saved[0]).assert_consumed()
    again.fit(X, T, verbose=0, shuffle=False)
    for a, b in zip(model.variables, again.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    assert int(again.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy())
    assert px.train.list_variables(saved[0])[:2] == [("model/0", [6, 1]), ("model/1", [1])]


def test_a_model_without_weights_takes_those_of_a_checkpoint(tmp_path: Any) -> None:
    first = px.keras.lift(model_of(lambda: keras.layers.Dense(3)))
    path = px.train.Checkpoint(model=first).save(str(tmp_path / "ckpt"))
    second = px.keras.lift(keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)]))
    status = px.train.Checkpoint(model=second).restore(path)
    with pytest.raises(ValueError, match="no object takes"):
        status.assert_consumed()
    np.testing.assert_allclose(px.function(lambda: second(X))(), first(X), rtol=1e-6)
    status.assert_consumed()


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


def test_only_models_can_be_lifted() -> None:
    with pytest.raises(TypeError, match="Keras model or layer"):
        px.keras.lift("model")
