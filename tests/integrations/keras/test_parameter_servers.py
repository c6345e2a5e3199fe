"""Keras under `px.ParameterServerStrategy`, with tasks in this process."""

from __future__ import annotations

from collections.abc import Iterator

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
