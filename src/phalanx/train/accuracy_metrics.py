"""How often predictions are right, in the ways that Keras has names for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from phalanx.errors import InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.numbers import check_integer, check_number
from phalanx.train.loss_functions import same_rank
from phalanx.train.metrics import Mean, MeanMetricWrapper, known

_LARGEST = 2**31 - 1


class Accuracy(Mean):
    """How often predictions were right.

    Examples:
        >>> import phalanx as px
        >>> accuracy = px.train.Accuracy()
        >>> accuracy.update_state([0, 1, 2], [0, 1, 1])
        >>> round(float(accuracy.result()), 3)
        0.667
    """

    def __init__(self, name: str = "accuracy", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Compare labels with predicted labels, or with scores whose last dimension is the class."""
        wanted, given = known(labels), known(predictions)
        with compat.without_differentiation():
            if given.ndim == wanted.ndim + 1:
                given = jnp.argmax(given, axis=-1)
            right = (given == wanted).astype(self.dtype) if given.shape == wanted.shape else None
        if right is None:
            raise InvalidValueError(
                "Predictions must have the shape of the labels, or one dimension more for scores. "
                f"Received: labels {wanted.shape} and predictions {given.shape}"
            )
        super().update_state(right, sample_weight)


def binary_accuracy(y_true: jax.Array, y_pred: jax.Array, threshold: float = 0.5) -> jax.Array:
    """Whether predictions above a threshold, and only those, belong to labels that are 1."""
    labels, predictions = same_rank(y_true, y_pred)
    return (labels == (predictions > threshold).astype(labels.dtype)).astype(jnp.float32)


def categorical_accuracy(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Whether the class of the highest score is that of the one-hot label."""
    return sparse_categorical_accuracy(jnp.argmax(y_true, axis=-1), y_pred)


def sparse_categorical_accuracy(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Whether the class of the highest score is the label."""
    labels = _as_classes(y_true, y_pred)
    return (labels == jnp.argmax(y_pred, axis=-1).astype(labels.dtype)).astype(jnp.float32)


def top_k_categorical_accuracy(y_true: jax.Array, y_pred: jax.Array, k: int = 5) -> jax.Array:
    """Whether the class of the one-hot label has one of the `k` highest scores."""
    return sparse_top_k_categorical_accuracy(jnp.argmax(y_true, axis=-1), y_pred, k)


def sparse_top_k_categorical_accuracy(y_true: jax.Array, y_pred: jax.Array, k: int = 5) -> jax.Array:
    """Whether the label has one of the `k` highest scores; of equal scores all count."""
    labels = _as_classes(y_true, y_pred).astype(jnp.int32)
    classes = y_pred.shape[-1]
    inside = (labels >= 0) & (labels < classes)
    own = jnp.take_along_axis(y_pred, jnp.clip(labels, 0, classes - 1)[..., None], axis=-1)
    higher = jnp.sum(y_pred > own, axis=-1)
    # Keras counts no example whose score is not a number.
    return (inside & (higher < k) & jnp.isfinite(own[..., 0])).astype(jnp.float32)


def _as_classes(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    if y_true.ndim == y_pred.ndim and y_true.ndim and y_true.shape[-1] == 1:
        y_true = jnp.squeeze(y_true, -1)
    if y_pred.ndim == 0 or y_true.shape != y_pred.shape[:-1]:
        raise InvalidValueError(
            "Scores must have the shape of the labels and one dimension more, that of the classes. "
            f"Received: labels {y_true.shape} and scores {y_pred.shape}"
        )
    return y_true


class BinaryAccuracy(MeanMetricWrapper):
    """How often predictions of 0 or 1 were right.

    Args:
        name: a name.
        dtype: of the variables.
        threshold: predictions above it mean 1.
    """

    def __init__(
        self, name: str = "binary_accuracy", dtype: Any = None, threshold: float = 0.5
    ) -> None:
        level = check_number(threshold, "threshold", 0.0, 1.0)
        super().__init__(binary_accuracy, name, dtype, threshold=level)


class CategoricalAccuracy(MeanMetricWrapper):
    """How often the highest score is that of the one-hot label.

    Examples:
        >>> import phalanx as px
        >>> float(px.metrics.CategoricalAccuracy()([[0, 1], [1, 0]], [[0.1, 0.9], [0.2, 0.8]]))
        0.5
    """

    def __init__(self, name: str = "categorical_accuracy", dtype: Any = None) -> None:
        super().__init__(categorical_accuracy, name, dtype)


class SparseCategoricalAccuracy(MeanMetricWrapper):
    """How often the highest score is that of the label."""

    def __init__(self, name: str = "sparse_categorical_accuracy", dtype: Any = None) -> None:
        super().__init__(sparse_categorical_accuracy, name, dtype)


class TopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the one-hot label has one of the `k` highest scores."""

    def __init__(self, k: int = 5, name: str = "top_k_categorical_accuracy", dtype: Any = None) -> None:
        k = check_integer(k, "k", 1, _LARGEST)
        super().__init__(top_k_categorical_accuracy, name, dtype, k=k)


class SparseTopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the label has one of the `k` highest scores."""

    def __init__(
        self, k: int = 5, name: str = "sparse_top_k_categorical_accuracy", dtype: Any = None
    ) -> None:
        k = check_integer(k, "k", 1, _LARGEST)
        super().__init__(sparse_top_k_categorical_accuracy, name, dtype, k=k)
