"""Metrics over replicas, uneven batches and both executors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.contract.conftest import STRATEGIES

import phalanx as px
from phalanx.execution.throttle import MAX_IN_FLIGHT


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


def made_metrics() -> dict[str, list[px.metrics.Metric]]:
    """Metrics of scores, of decisions between two, and of numbers of classes."""
    known = px.metrics
    return {
        "scores": [known.CategoricalAccuracy(), known.TopKCategoricalAccuracy(k=2)],
        "sparse": [known.SparseCategoricalAccuracy(), known.SparseTopKCategoricalAccuracy(k=2)],
        "binary": [known.BinaryAccuracy(), known.AUC(num_thresholds=9), known.Precision()],
        "classes": [known.ConfusionMatrix(3), known.MeanIoU(3)],
        "errors": [known.MeanMetricWrapper(px.losses.huber, "huber", delta=2.0)],
    }


def arguments_of(kind: str, labels: Any, scores: Any) -> tuple[Any, Any]:
    if kind == "sparse":
        return labels, scores
    if kind == "classes":
        return labels, jnp.argmax(scores, -1)
    if kind == "binary":
        return labels > 0, scores[:, 0]
    return jax.nn.one_hot(labels, 3), scores


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.soak), True])
def test_metrics_of_replicas_are_those_of_one_device(compiled: bool) -> None:
    strategy, random = STRATEGIES["mirrored_2"](), np.random.default_rng(1)
    labels = random.integers(0, 3, 11)
    scores = random.dirichlet(np.ones(3), 11).astype(np.float32)
    with strategy.scope():
        metrics = made_metrics()
    rows = px.data.Dataset.from_tensor_slices((labels, scores)).batch(4)  # the last batch has three

    def replica_step(labels: Any, scores: Any) -> None:
        for kind, group in metrics.items():
            for metric in group:
                metric(*arguments_of(kind, labels, scores))

    def step(batch: Any) -> None:
        strategy.run(replica_step, args=batch)

    go = px.function(step) if compiled else step
    for batch in strategy.experimental_distribute_dataset(rows):
        go(batch)
    for kind, group in made_metrics().items():
        for expected, metric in zip(group, metrics[kind], strict=True):
            expected.update_state(*arguments_of(kind, jnp.asarray(labels), jnp.asarray(scores)))
            np.testing.assert_allclose(metric.result(), expected.result(), 1e-6, err_msg=metric.name)
            metric.reset_states()
            assert not np.any(metric.result())
    predicted = scores.argmax(1)
    matrix = np.zeros((3, 3), int)
    np.add.at(matrix, (labels, predicted), 1)
    assert px.metrics.confusion_matrix(labels, predicted).tolist() == matrix.tolist()


class Above(px.metrics.Metric):
    """A metric as users write them."""

    def __init__(self, level: float) -> None:
        super().__init__("above", dtype="int32")
        self.level = level
        self.hits = self.add_weight(name="hits", initializer="zeros")

    def update_state(self, values: Any) -> None:
        self.hits.assign_add(jnp.sum(jnp.asarray(values) > self.level, dtype=jnp.int32))

    def result(self) -> Any:
        return self.hits.value()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_updates_outside_of_replicas_count_once(name: str, compiled: bool) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        mean, above = px.metrics.Mean(), Above(2.0)

    def update(x: Any) -> Any:
        with strategy.scope():
            above.update_state(x)
            return mean(x), above.result()

    go = px.function(update) if compiled else update
    assert [float(x) for x in go(jnp.float32([1.0, 2.0, 6.0]))] == [3.0, 1.0]
    assert [float(x) for x in go(jnp.float32([1.0, 2.0, 6.0]))] == [3.0, 2.0]
    if not compiled:
        mean.update_state(jnp.float32([12.0]))  # outside of the scope too
        assert [float(v.numpy()) for v in mean.variables] == [30.0, 7.0]
    mean.reset_states()
    each = strategy.run(lambda: px.get_replica_context().replica_id_in_sync_group + 1.0)
    mean.update_state(each)  # a value per replica counts for each of them
    n = strategy.num_replicas_in_sync
    assert [float(v.numpy()) for v in mean.variables] == [n * (n + 1) / 2, n]


def test_what_metrics_are_made_of() -> None:
    mean = px.metrics.Mean(name="loss", dtype="bfloat16")
    assert (mean.dtype, mean.total.dtype, mean.name) == (jnp.bfloat16, jnp.bfloat16, "loss")
    assert mean.get_config() == {"name": "loss", "dtype": "bfloat16"}
    assert px.metrics.Mean.from_config(mean.get_config()).dtype == jnp.bfloat16
    assert mean.variables == mean.weights
    assert not mean.trainable_variables
    assert px.train.Mean is px.metrics.Mean
    counted = px.metrics.Metric("counted")
    assert counted.add_weight(shape=(2,), initializer="ones").numpy().tolist() == [1.0, 1.0]
    assert counted.add_weight((3,), initializer=lambda shape, dtype: jnp.arange(3.0)).shape == (3,)
    with pytest.raises(NotImplementedError, match="update_state"):
        counted.update_state(1)
    with pytest.raises(ValueError, match="initializer"):
        counted.add_weight("x", initializer="twos")
    with pytest.raises(TypeError, match="dtype"):
        px.metrics.Mean(dtype="float33")


def test_a_replica_must_not_average_a_loss() -> None:
    strategy = STRATEGIES["mirrored_2"]()
    loss = px.losses.MeanSquaredError()
    with pytest.raises(ValueError, match=r"Reduction\.SUM or NONE"):
        strategy.run(lambda: loss([[1.0]], [[0.0]]))
    total = px.losses.MeanSquaredError(reduction="sum")
    assert (
        float(strategy.reduce("sum", strategy.run(lambda: total([[1.0]], [[0.0]])), axis=None)) == 2.0
    )
    assert float(loss([[1.0], [3.0]], [[0.0], [0.0]])) == 5.0


def test_weights_and_mistakes() -> None:
    mean = px.train.Mean()
    mean.update_state([1.0, 3.0], sample_weight=[3.0, 1.0])
    assert float(mean.result()) == 1.5
    with pytest.raises(ValueError, match="shape"):
        px.train.Accuracy().update_state([1, 2], [1, 2, 3])


def growth(step: Callable[[], Any], steps: int) -> tuple[int, int]:
    """How many objects and arrays stay behind."""
    for _ in range(20):
        step()
    gc.collect()
    before = len(gc.get_objects()), len(jax.live_arrays())
    for _ in range(steps):
        step()
    gc.collect()
    return len(gc.get_objects()) - before[0], len(jax.live_arrays()) - before[1]


@pytest.mark.parametrize("replicas", [0, 2])
def test_updates_inside_of_gradients_leave_nothing_behind(replicas: int) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"]) if replicas else px.get_strategy()
    with strategy.scope():
        w = px.Variable(jnp.ones(4))
        rows = px.Variable(jnp.ones(4), aggregation=px.VariableAggregation.SUM)
        mean, accuracy = px.train.Mean(), px.train.Accuracy()
    x, labels, weights = jnp.ones(4), jnp.zeros(4, jnp.int32), jnp.ones(4)

    def loss() -> Any:
        scores = w * x
        mean.update_state(scores, sample_weight=weights)
        accuracy.update_state(labels, scores > 2.0, sample_weight=weights)
        rows.assign_add(scores)
        return scores.sum()

    objects, arrays = growth(lambda: strategy.run(px.value_and_grad(loss, w)), 40)
    assert objects < 20  # one for each step would be 40
    assert arrays <= MAX_IN_FLIGHT  # which have a token each
    assert float(mean.result()) == 1.0
    assert float(accuracy.result()) == 1.0
    if not replicas:
        pure = jax.grad(lambda a: mean.update_state(a * x) or (a * x).sum())
        objects, _ = growth(lambda: pure(x), 40)
        assert objects < 20  # one for each step would be 40


def test_a_result_does_not_change_afterwards() -> None:
    class Seen(px.metrics.Metric):
        def __init__(self) -> None:
            super().__init__("seen")
            self.count = self.add_weight("count")

        def update_state(self, values: Any) -> None:
            self.count.assign_add(float(len(values)))

        def result(self) -> Any:
            return {"count": self.count}

    with px.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        metric = Seen()
    found = metric([1, 2, 3])
    metric.reset_states()
    assert float(found["count"]) == 3.0
    assert isinstance(found["count"], jax.Array)
