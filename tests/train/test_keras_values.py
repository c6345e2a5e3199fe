"""Metrics, losses and optimizers give what Keras's own give, under every number of replicas."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.contract.conftest import STRATEGIES
from tests.train import keras_cases as cases

import phalanx as px

RECORDED = json.loads((Path(__file__).parent / "data" / "keras.json").read_text())


def split(strategy: px.Strategy, *arrays: Any) -> Any:
    """The rows of arrays, divided over replicas as evenly as they go."""
    n = strategy.num_replicas_in_sync
    parts = [np.array_split(np.asarray(x), n) for x in arrays]
    return strategy.experimental_distribute_values_from_function(
        lambda c: tuple(jnp.asarray(p[c.replica_id_in_sync_group]) for p in parts)
    )


@pytest.mark.parametrize("name", cases.METRICS)
def test_metrics_give_what_keras_gives(name: str) -> None:
    kind, arguments, labels, predictions = cases.METRICS[name]
    metric = getattr(px.metrics, kind)(**arguments)
    np.testing.assert_allclose(
        metric(labels, predictions), RECORDED["metrics"][name]["whole"], rtol=2e-6, atol=1e-6
    )
    again = type(metric).from_config(metric.get_config())
    again.update_state(labels, predictions, sample_weight=cases.WEIGHTS)
    np.testing.assert_allclose(
        again.result(), RECORDED["metrics"][name]["weighted"], rtol=2e-6, atol=1e-6
    )
    metric.reset_states()
    assert all(not np.any(v.numpy()) for v in metric.variables)


SOME = ["binary_accuracy_matrix", "sparse_top_3", "precision_at", "auc_labels", "mean_iou", "accuracy"]


def test_metrics_do_not_depend_on_replicas() -> None:
    strategy = STRATEGIES["mirrored_3"]()
    with strategy.scope():
        metrics = [
            getattr(px.metrics, cases.METRICS[name][0])(**cases.METRICS[name][1]) for name in SOME
        ]
    rows = [cases.METRICS[name][2:] for name in SOME]
    batch = split(strategy, cases.WEIGHTS, *(x for pair in rows for x in pair))

    def step(weights: Any, *given: Any) -> None:
        for i, metric in enumerate(metrics):
            metric.update_state(given[2 * i], given[2 * i + 1], weights)

    px.function(lambda *batch: strategy.run(step, args=batch))(*batch)
    for name, metric in zip(SOME, metrics, strict=True):
        expected = RECORDED["metrics"][name]["weighted"]
        np.testing.assert_allclose(metric.result(), expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", cases.LOSSES)
def test_losses_give_what_keras_gives(name: str) -> None:
    kind, arguments, labels, predictions = cases.LOSSES[name]
    recorded = RECORDED["losses"][name]
    each = getattr(px.losses, kind)(reduction=px.losses.Reduction.NONE, **arguments)
    np.testing.assert_allclose(each(labels, predictions), recorded["each"], rtol=1e-5, atol=2e-6)
    mean = type(each).from_config(each.get_config() | {"reduction": "auto"})
    np.testing.assert_allclose(mean(labels, predictions), recorded["mean"], rtol=1e-5, atol=1e-6)
    weighted = mean(labels, predictions, sample_weight=cases.WEIGHTS)
    np.testing.assert_allclose(weighted, recorded["weighted"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_optimizers_give_what_keras_gives(name: str) -> None:
    kind, arguments = cases.OPTIMIZERS[name]
    variables = [px.Variable(x) for x in cases.START]
    optimizer = getattr(px.optimizers, kind)(**arguments)
    assert int(optimizer.iterations) == 0
    for step in range(cases.STEPS):
        if step == 2:
            optimizer.learning_rate = arguments["learning_rate"] / 2
        optimizer.apply_gradients(zip(cases.gradients(step), variables, strict=True))
    assert int(optimizer.iterations) == cases.STEPS
    for variable, expected in zip(variables, RECORDED["optimizers"][name], strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5)
    again = type(optimizer).from_config(optimizer.get_config())
    assert float(again.learning_rate) == pytest.approx(arguments["learning_rate"] / 2)


@pytest.mark.parametrize("name", cases.SCHEDULES)
def test_schedules_give_what_keras_gives(name: str) -> None:
    kind, arguments = cases.SCHEDULES[name]
    schedule = getattr(px.optimizers.schedules, kind)(**arguments)
    again = type(schedule).from_config(schedule.get_config())
    found = [float(again(step)) for step in range(9)]
    np.testing.assert_allclose(found, RECORDED["schedules"][name], rtol=1e-5, atol=1e-8)


# -- beside the installed Keras, in one process ------------------------------------------------------


@pytest.fixture(scope="module")
def keras() -> Any:
    return importlib.import_module("keras")


IOU = {
    "ignored": ({"ignore_class": 1}, cases.CLASSES, cases.GUESSES),
    "ignored -1": (
        {"ignore_class": -1},
        np.where(cases.CLASSES == 2, -1, cases.CLASSES),
        cases.GUESSES,
    ),
    "no class": ({}, cases.CLASSES + 2, cases.GUESSES - 1),
    "one-hot": ({"sparse_y_true": False, "sparse_y_pred": False}, cases.ONE_HOT, cases.SCORES),
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # by Keras
@pytest.mark.parametrize("name", IOU)
def test_mean_iou_counts_what_keras_counts(name: str, keras: Any) -> None:
    arguments, labels, predictions = IOU[name]
    theirs = keras.metrics.MeanIoU(4, dtype="float32", **arguments)
    first = px.metrics.MeanIoU(4, **arguments)
    ours = px.metrics.MeanIoU.from_config(first.get_config())
    for weights in (None, cases.WEIGHTS):
        theirs.update_state(labels, predictions, sample_weight=weights)
        ours.update_state(labels, predictions, sample_weight=weights)
        np.testing.assert_allclose(ours.result(), theirs.result(), rtol=1e-5)
    # Keras 3 counts in whole numbers by default.
    theirs = keras.metrics.MeanIoU(4, dtype="int32", **arguments)
    with pytest.warns(UserWarning, match="dtype is `int`"):
        theirs.update_state(labels, predictions, sample_weight=cases.WEIGHTS)
    assert float(theirs.result()) == 0.0


def test_numbers_of_no_class_do_not_count() -> None:
    labels, predictions = [0, -1, 1, 2], [0, 1, -1, 1]
    assert px.metrics.ConfusionMatrix(2)(labels, predictions).tolist() == [[1, 0], [0, 0]]
    assert px.metrics.confusion_matrix(labels, predictions, 2).tolist() == [[1, 0], [0, 0]]


def test_cosine_similarity_has_the_sign_of_keras(keras: Any) -> None:
    """As a loss it is negative, as a metric positive."""
    for ours, theirs in ((px.losses, keras.losses), (px.metrics, keras.metrics)):
        a = ours.CosineSimilarity()(cases.REAL, cases.OTHER)
        b = theirs.CosineSimilarity()(cases.REAL, cases.OTHER)
        np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(
        px.losses.cosine_similarity(cases.REAL, cases.OTHER),
        keras.losses.cosine_similarity(cases.REAL, cases.OTHER),
        rtol=1e-4,
        atol=1e-6,
    )


FUNCTIONS = {kind: case for kind, arguments, *case in cases.LOSSES.values() if not arguments}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_of_losses_give_what_keras_gives(kind: str, keras: Any) -> None:
    name = type(getattr(px.losses, kind)()).__name__
    name = keras.losses.get(name).name.removesuffix("_loss")
    name = "huber" if kind == "Huber" else name
    found = getattr(px.losses, name)(*FUNCTIONS[kind])
    np.testing.assert_allclose(
        found, getattr(keras.losses, name)(*FUNCTIONS[kind]), rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("reduction", ["mean", "mean_with_sample_weight", "sum", "none"])
@pytest.mark.parametrize(
    "name", ["mean_squared_error", "huber", "categorical_logits", "sparse_ignoring", "sparse_logits"]
)
def test_reductions_of_keras_3(name: str, reduction: str, keras: Any) -> None:
    kind, arguments, labels, predictions = cases.LOSSES[name]
    arguments = arguments | {"reduction": reduction}
    theirs, ours = (getattr(x.losses, kind)(**arguments) for x in (keras, px))
    ours = type(ours).from_config(ours.get_config())
    for weights in (None, cases.WEIGHTS, cases.WEIGHTS[:, None], 0.0 * cases.WEIGHTS):
        found = ours(labels, predictions, sample_weight=weights)
        expected = theirs(labels, predictions, sample_weight=weights)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_dtype_of_losses(keras: Any) -> None:
    for kind in ("float16", "float32"):
        theirs, ours = (x.losses.MeanSquaredError(dtype=kind) for x in (keras, px))
        half = cases.OTHER.astype("float16")
        found, expected = ours(cases.REAL, half), theirs(cases.REAL, half)
        assert found.dtype == expected.dtype == kind
        np.testing.assert_allclose(found, expected, rtol=1e-3)
        assert type(ours).from_config(ours.get_config()).dtype == kind
    many = px.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float16")
    assert float(many([2049], jnp.eye(2050, dtype="float32")[2049:] * 20)) < 0.1  # no float16
    wide = px.losses.MeanSquaredError()(cases.REAL, cases.OTHER.astype("float16"))
    assert wide.dtype == "float16"
    with pytest.raises(TypeError, match="must be that of floating numbers"):
        px.losses.Huber(dtype="int32")


def test_means_by_weights_are_refused_on_replicas() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    loss = px.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with pytest.raises(ValueError, match="A replica sees only its part"):
        strategy.run(lambda: loss(cases.REAL, cases.OTHER, cases.WEIGHTS))
