"""Metrics over replicas, uneven batches and both executors."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.contract.conftest import STRATEGIES

import phalanx as px


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_example_counts_once(name: str, compiled: bool) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        mean, total, accuracy = px.train.Mean(), px.train.Sum(), px.train.Accuracy()
    n = strategy.num_replicas_in_sync
    labels = np.arange(8 if compiled else 7) % 3
    scores = np.eye(3, dtype=np.float32)[(np.arange(len(labels)) // 2) % 3]
    if len(labels) % n and compiled:
        labels, scores = labels[:6], scores[:6]
    parts = np.array_split(np.arange(len(labels)), n)
    batch = strategy.experimental_distribute_values_from_function(
        lambda c: (
            jnp.asarray(labels[parts[c.replica_id_in_sync_group]]),
            jnp.asarray(scores[parts[c.replica_id_in_sync_group]]),
        )
    )

    def step(labels: Any, scores: Any) -> None:
        mean.update_state(labels)
        total.update_state(labels, sample_weight=0.5)
        accuracy.update_state(labels, scores)

    def run(*batch: Any) -> None:
        strategy.run(step, args=batch)

    go = px.function(run) if compiled else run
    for _ in range(2):
        go(*batch)
    assert float(mean.result()) == pytest.approx(labels.mean())
    assert float(total.result()) == pytest.approx(labels.sum())
    assert float(accuracy.result()) == pytest.approx(np.mean(scores.argmax(1) == labels))
    mean.reset_state()
    assert float(mean.result()) == 0.0


def test_weights_and_mistakes() -> None:
    mean = px.train.Mean()
    mean.update_state([1.0, 3.0], sample_weight=[3.0, 1.0])
    assert float(mean.result()) == 1.5
    with pytest.raises(ValueError, match="shape"):
        px.train.Accuracy().update_state([1, 2], [1, 2, 3])
