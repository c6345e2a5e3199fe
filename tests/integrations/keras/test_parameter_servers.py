"""Keras under `px.ParameterServerStrategy`, with tasks in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import phalanx as px
from tests.integrations.keras.cases import BATCH, X, Y, classifier


@pytest.fixture
def strategy() -> Iterator[px.ParameterServerStrategy]:
    tasks = [px.Server({job: ["localhost:0"]}) for job in ("worker", "worker", "ps")]
    *workers, ps = (task.target.removeprefix("grpc://") for task in tasks)
    cluster = px.train.ClusterSpec({"worker": workers, "ps": [ps]})
    made = px.ParameterServerStrategy(px.cluster_resolver.SimpleClusterResolver(cluster))
    yield made
    made.close()
    for task in tasks:
        task.stop()


def test_fit_with_a_dataset_creator(strategy: px.ParameterServerStrategy) -> None:
    def batches(context: px.InputContext) -> px.data.Dataset:
        assert context.num_input_pipelines == 1
        return px.data.Dataset.from_tensor_slices((X[:BATCH], Y[:BATCH])).batch(BATCH).repeat()

    with strategy.scope():
        model = classifier(metrics=["accuracy"], optimizer=keras.optimizers.SGD(0.2))
        start = model.get_weights()
    history = model.fit(px.keras.DatasetCreator(batches), steps_per_epoch=6, epochs=3, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 18  # none is lost, none counts twice
    losses = history.history["loss"]
    assert losses[2] < losses[0]
    assert set(history.history) == {"loss", "accuracy"}
    found = model.evaluate(X[:BATCH], Y[:BATCH], verbose=0)
    assert found[0] < losses[0]
    assert not np.allclose(model.get_weights()[0], start[0])
    assert model.predict(X, verbose=0).shape == (50, 3)
    # With steps that come one after the other, it is training on one device.
    expected = classifier(metrics=["accuracy"], optimizer=keras.optimizers.SGD(0.2))
    expected.set_weights(start)
    expected.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, epochs=18, verbose=0)
    np.testing.assert_allclose(
        found[0], expected.evaluate(X[:BATCH], Y[:BATCH], verbose=0)[0], rtol=0.1
    )


def test_what_fit_needs(strategy: px.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = classifier()
    data = px.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
    with pytest.raises(ValueError, match="needs steps_per_epoch"):
        model.fit(data)
    with pytest.raises(TypeError, match=r"pass a px\.keras\.DatasetCreator"):
        model.fit(X, Y, steps_per_epoch=2)
    with pytest.raises(ValueError, match="train with fit alone"):
        model.train_on_batch(X, Y)
    with pytest.raises(TypeError, match="must be callable"):
        px.keras.DatasetCreator(3)
    with pytest.raises(TypeError, match=r"must be px\.InputOptions"):
        px.keras.DatasetCreator(lambda context: data, input_options=3)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failing_callback_keeps_the_weights(
    strategy: px.ParameterServerStrategy, error: type[BaseException]
) -> None:
    class Fails(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.epoch, batch) == (1, 2):
                raise error("in the middle")

    with strategy.scope():
        model = classifier()
    data = px.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
    with pytest.raises(error, match="in the middle"):
        model.fit(data, steps_per_epoch=5, epochs=3, verbose=0, callbacks=[Fails()])
    assert int(model.optimizer.iterations.numpy()) == 8  # what was scheduled has been done
    assert all(np.isfinite(x).all() for x in model.get_weights())
    model.fit(data, steps_per_epoch=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 10
    px.coordinator.ClusterCoordinator(strategy).close()
    model.fit(data, steps_per_epoch=2, verbose=0)  # by another coordinator
    assert int(model.optimizer.iterations.numpy()) == 12


def test_failing_input_of_a_worker_is_told_and_weights_are_kept(
    strategy: px.ParameterServerStrategy,
) -> None:
    def batches(context: px.InputContext) -> px.data.Dataset:
        def rows() -> Any:
            for _ in range(4):
                yield X[:BATCH], Y[:BATCH]
            raise OSError("the disk is gone")

        return px.data.Dataset.from_generator(
            rows,
            output_signature=(
                px.TensorSpec((BATCH, 6), np.float32),
                px.TensorSpec((BATCH,), np.int64),
            ),
        )

    with strategy.scope():
        model = classifier()
    start = model.get_weights()
    with pytest.raises(Exception, match="the disk is gone"):
        model.fit(px.keras.DatasetCreator(batches), steps_per_epoch=5, epochs=4, verbose=0)
    steps = int(model.optimizer.iterations.numpy())
    assert 5 <= steps <= 8
    assert not np.allclose(model.get_weights()[0], start[0])


def test_a_lifted_model_in_a_loop_of_its_own(strategy: px.ParameterServerStrategy) -> None:
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = px.keras.lift(classifier())
        optimizer = px.optimizers.SGD(0.1)
    expected = classifier(optimizer=keras.optimizers.SGD(0.1))
    expected.set_weights(model.update_model().get_weights())
    coordinator = px.coordinator.ClusterCoordinator(strategy)
    entropy = px.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def on_replica() -> Any:
        def loss() -> Any:
            return px.nn.compute_average_loss(entropy(Y[:BATCH], model(X[:BATCH])))

        value, gradients = px.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    step = px.function(lambda: strategy.run(on_replica))
    for _ in range(4):  # one after the other, so that it is training on one device
        value = coordinator.schedule(step)
        coordinator.join()
        wanted = expected.evaluate(X[:BATCH], Y[:BATCH], verbose=0)
        np.testing.assert_allclose(value.fetch(), wanted, rtol=1e-5)
        expected.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
    for a, b in zip(model.update_model().get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
