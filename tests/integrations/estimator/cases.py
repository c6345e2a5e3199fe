"""A model that has all that an estimator can ask for, and data for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

ROWS = 22  # batches of 8, 8 and 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> px.estimator.EstimatorSpec:
    """Two layers, a running mean, a metric of each kind."""
    x = features["x"]
    kernel = px.estimator.get_variable("hidden/kernel", (3, 4))
    bias = px.estimator.get_variable("hidden/bias", (4,))
    out = px.estimator.get_parameters("out", lambda key: {"w": 0.1 * jax.random.normal(key, (4, 2))})
    seen = px.estimator.get_variable(
        "seen", (), initializer=0.0, trainable=False, aggregation=px.VariableAggregation.SUM
    )
    logits = jnp.tanh(x @ kernel + bias) @ out["w"]
    classes = logits.argmax(-1)
    if mode == px.estimator.ModeKeys.PREDICT:
        return px.estimator.EstimatorSpec(mode, predictions={"class": classes, "logits": logits})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    loss = losses if params["per_example"] else losses.mean()
    if mode == px.estimator.ModeKeys.TRAIN:
        seen.assign_add(jnp.ones_like(x[:, 0]).sum())
        return px.estimator.EstimatorSpec(mode, loss=loss, train_op=optax.adam(params["rate"]))
    right = px.estimator.get_metric("accuracy", px.train.Accuracy)
    right.update_state(labels, logits)
    same = (classes == labels).astype(jnp.float32)
    metrics = {"accuracy": right, "same": same, "positive": (same, labels), "mean": same.mean()}
    return px.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)


def input_fn(mode: str) -> px.data.Dataset:
    """Three batches, again and again for training; the last one is uneven."""
    data = px.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(8)
    return data.repeat() if mode == px.estimator.ModeKeys.TRAIN else data


def made(folder: Path, strategy: Any = None, per_example: bool = True, **config: Any) -> Any:
    """An estimator of this model."""
    return px.estimator.Estimator(
        model_fn,
        str(folder),
        px.estimator.RunConfig(
            tf_random_seed=3, train_distribute=strategy, eval_distribute=strategy, **config
        ),
        {"per_example": per_example, "rate": 0.05},
    )


def weights(estimator: Any) -> dict[str, Any]:
    """The variables of the newest checkpoint."""
    names = ("hidden/kernel", "hidden/bias", "out/w", "seen", "global_step")
    return {name: estimator.get_variable_value(name) for name in names}
