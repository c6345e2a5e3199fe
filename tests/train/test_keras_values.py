"""Metrics, losses and optimizers give what Keras's own give, under every number of replicas."""

from __future__ import annotations

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
