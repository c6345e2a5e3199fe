"""Steps written as for TensorFlow give what Keras's own do; cases.py has a GAN."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import keras
import numpy as np
import pytest

import phalanx as px
from tests.integrations.keras.cases import BATCH, EPOCHS, TwoNetworks, X, Y, classifier


class AsKeras(keras.Sequential):
    """Computes what Keras computes by itself."""

    @px.keras.stateful
    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

        def compute_loss() -> Any:
            y_pred = self(x, training=True)
            return self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight), y_pred

        found = px.keras.value_and_grad(compute_loss, self.trainable_variables, has_aux=True)()
        (loss, y_pred), gradients = found
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, len(x))
            else:
                metric.update_state(y, y_pred, sample_weight=weight)
        return {m.name: m.result() for m in self.metrics}


def layers() -> list[Any]:
    dense = keras.layers.Dense(4, activation="relu", activity_regularizer="l2")
    return [keras.Input((6,)), dense, keras.layers.BatchNormalization(), keras.layers.Dense(3)]


def trained(kind: type[Any]) -> tuple[Any, Any]:
    keras.utils.set_random_seed(1)
    model = kind(layers())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=["accuracy"])
    model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return model.get_weights(), model.evaluate(X, Y, verbose=0)


def test_a_step_of_ones_own_gives_what_keras_gives() -> None:
    expected = trained(keras.Sequential)
    with px.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        found = trained(AsKeras)
    for a, b in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def gan() -> Any:
    model = TwoNetworks()
    model.compile(keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1))
    return model


def test_a_failing_callback_keeps_what_other_optimizers_have() -> None:
    with px.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = gan()

    def fail(batch: int, logs: Any) -> None:
        if batch == 2:
            raise ZeroDivisionError("after three steps")

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(ZeroDivisionError):
        model.fit(X, batch_size=BATCH, verbose=0, callbacks=[callback])
    assert int(model.d_optimizer.iterations.numpy()) == int(model.g_optimizer.iterations.numpy()) == 3
    model.fit(X, batch_size=BATCH, verbose=0)
    assert int(model.g_optimizer.iterations.numpy()) == 8


def test_single_batches_and_other_random_numbers_in_each() -> None:
    model = gan()
    model.d_optimizer.learning_rate = model.g_optimizer.learning_rate = 0.0
    rates = [float(model.train_on_batch(X[:4], return_dict=True)["d_loss"]) for _ in range(3)]
    assert len(set(rates)) == 3
    assert int(model.g_optimizer.iterations.numpy()) == 3


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
def test_random_numbers_of_predictions(devices: list[str]) -> None:
    """Also of a model that has done nothing before."""

    class Noisy(keras.Sequential):
        @px.keras.stateful
        def predict_step(self, data: Any) -> Any:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return self(x) * 0 + jax.random.uniform(px.random.next_key())

    with px.MirroredStrategy(devices).scope() if devices[1:] else contextlib.nullcontext():
        model = Noisy([keras.Input((6,)), keras.layers.Dense(1)])
    found = model.predict(X[:4], verbose=0)
    assert 0 < found[0, 0] < 1
    assert (found == found[0]).all()


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="stateful is for methods named train_step, test_step"):
        px.keras.stateful(trained)
    model = classifier()
    with pytest.raises(RuntimeError, match=r"px\.keras\.stateful decorates"):
        px.keras.value_and_grad(lambda: model(X), model.trainable_variables)()
    with pytest.raises(TypeError, match="a list of variables of a Keras model"):
        px.keras.value_and_grad(lambda: 1.0, [px.Variable(1.0)])


@pytest.mark.parametrize(
    ("of_another", "losses", "words"),
    [
        (True, lambda _: (1.0,), "do not belong to the model whose step this is"),
        (False, lambda _: (1.0, 2.0), "must return 1 scalars"),
        (False, lambda _: 1.0, "must return 1 scalars"),
        (False, lambda _: (None,), "must return 1 scalars"),
        (False, lambda model: (model.layers[0].kernel * 2,), "must return 1 scalars"),
    ],
    ids=["strange", "more", "one", "none", "matrix"],
)
def test_losses_of_steps_that_cannot_be(of_another: bool, losses: Any, words: str) -> None:
    another = classifier()

    class Takes(keras.Sequential):
        @px.keras.stateful
        def train_step(self, data: Any) -> Any:
            variables = (another if of_another else self).trainable_variables
            px.keras.values_and_grads(lambda: losses(self), [variables])()
            return {}

    model = Takes([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises((TypeError, ValueError), match=words):
        model.fit(X, Y, verbose=0)


class ReturnsItsLoss(AsKeras):
    """Returns a loss, and counts nothing, as many steps for TensorFlow do."""

    @px.keras.stateful
    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def compute_loss() -> Any:
            return self.compute_loss(y=y, y_pred=self(x, training=True))

        loss, gradients = px.keras.value_and_grad(compute_loss, self.trainable_variables)()
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}

    @px.keras.stateful
    def test_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"loss": self.compute_loss(y=y, y_pred=self(x))}


@pytest.mark.parametrize("compiled", [True, False])
def test_a_loss_that_a_step_returns_is_counted(compiled: bool) -> None:
    """It is the mean over the epoch, for the rows of batches, as if Keras had counted it."""
    shown = []
    for kind in (keras.Sequential, ReturnsItsLoss):
        with px.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            keras.utils.set_random_seed(1)
            model = kind([keras.Input((6,)), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, jit_compile=compiled)
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, epochs=2, validation_data=(X, Y), **options).history
        single = model.train_on_batch(X[:3], Y[:3])
        shown.append([*history["loss"], *history["val_loss"], single, model.evaluate(X, Y, verbose=0)])
    np.testing.assert_allclose(shown[1], shown[0], rtol=1e-5)
    assert len(X) % BATCH
