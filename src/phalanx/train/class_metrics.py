"""Metrics of pairs of classes: labels, and what was predicted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.errors import InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.numbers import check_integer
from phalanx.train.confusion_metrics import flat_weights
from phalanx.train.metrics import Metric, divide, known


class ConfusionMatrix(Metric):
    """How often each class was predicted as each class: rows are labels, columns predictions.

    Args:
        num_classes: how many classes there are.
        name: a name.
        dtype: of the variable.

    Examples:
        >>> import phalanx as px
        >>> px.metrics.ConfusionMatrix(2)([0, 1, 1], [0, 0, 1]).tolist()
        [[1.0, 0.0], [1.0, 1.0]]
    """

    def __init__(
        self, num_classes: int, name: str | None = "confusion_matrix", dtype: Any = None
    ) -> None:
        super().__init__(name, dtype)
        self.num_classes = check_integer(num_classes, "num_classes", 1, 2**20)
        self.total = self.add_weight("total", (self.num_classes, self.num_classes))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count labels and predicted labels, or scores whose last dimension is the class."""
        labels, predictions = known(y_true), known(y_pred)
        with compat.without_differentiation():
            if predictions.ndim == labels.ndim + 1:
                predictions = jnp.argmax(predictions, axis=-1)
            if predictions.shape != labels.shape:
                raise InvalidValueError(
                    "Predictions must have the shape of the labels, or one dimension more for scores. "
                    f"Received: labels {labels.shape} and predictions {predictions.shape}"
                )
            weights = flat_weights(sample_weight, labels.shape, self.dtype)
            counts = _pairs(labels, predictions, weights, self.num_classes)
        self.total.assign_add(counts)

    def result(self) -> jax.Array:
        """The matrix so far."""
        return self._values()[0]

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same metric of."""
        return super().get_config() | {"num_classes": self.num_classes}


class MeanIoU(ConfusionMatrix):
    """The mean over classes of intersection over union; classes that never occur do not count.

    Args:
        num_classes: how many classes there are; other labels do not count.
        name: a name.
        dtype: of the variable. Weights are counted as they are, as `tf.keras` does; Keras 3 makes whole
            numbers of them, unless it is given a dtype of floating numbers.
        ignore_class: a label that does not count, such as 255 or -1.
        sparse_y_true: whether labels are numbers of classes; if not, a dimension has the classes.
        sparse_y_pred: the same for predictions.
        axis: which dimension that is.

    Examples:
        >>> import phalanx as px
        >>> metric = px.metrics.MeanIoU(2, ignore_class=0)
        >>> round(float(metric([0, 0, 1, 1], [0, 1, 0, 1])), 2)
        0.25
    """

    def __init__(
        self,
        num_classes: int,
        name: str | None = "mean_io_u",
        dtype: Any = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        super().__init__(num_classes, name, dtype)
        limit = 2**31 - 1
        self.ignore_class = (
            None if ignore_class is None else check_integer(ignore_class, "ignore_class", -limit, limit)
        )
        self.sparse_y_true, self.sparse_y_pred = bool(sparse_y_true), bool(sparse_y_pred)
        self.axis = axis

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count labels and predictions, each with its weight (1 by default)."""
        labels, predictions = known(y_true), known(y_pred)
        with compat.without_differentiation():
            if not self.sparse_y_true:
                labels = jnp.argmax(labels, axis=self.axis)
            if not self.sparse_y_pred:
                predictions = jnp.argmax(predictions, axis=self.axis)
            if self.ignore_class is not None:
                labels = jnp.where(labels == self.ignore_class, -1, labels.astype(jnp.int32))
        super().update_state(labels, predictions, sample_weight)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same metric of."""
        own = ("ignore_class", "sparse_y_true", "sparse_y_pred", "axis")
        return super().get_config() | {name: getattr(self, name) for name in own}

    def result(self) -> jax.Array:
        """The mean so far."""
        matrix = super().result()
        hits = jnp.diagonal(matrix)
        union = jnp.sum(matrix, axis=0) + jnp.sum(matrix, axis=1) - hits
        return divide(jnp.sum(divide(hits, union)), jnp.sum(union != 0).astype(self.dtype))


def confusion_matrix(
    labels: Any, predictions: Any, num_classes: int | None = None, weights: Any = None
) -> jax.Array:
    """How often each class was predicted as each class in one batch.

    Args:
        labels: numbers of classes.
        predictions: as many.
        num_classes: one more than the largest number by default, which must be known then.
        weights: one per example.

    Examples:
        >>> import phalanx as px
        >>> px.metrics.confusion_matrix([1, 2, 2], [2, 2, 0]).tolist()
        [[0, 0, 0], [0, 0, 1], [1, 0, 1]]
    """
    rows, columns = (known(x) for x in (labels, predictions))
    if num_classes is None:
        largest = max(int(np.max(np.asarray(x), initial=-1)) for x in (rows, columns))
        num_classes = largest + 1
    counts = jnp.ones(rows.shape, jnp.int32) if weights is None else known(weights)
    return _pairs(rows, columns, counts, num_classes)


def _pairs(labels: jax.Array, predictions: jax.Array, weights: jax.Array, classes: int) -> jax.Array:
    """The weight of each pair of a label and a prediction; numbers of no class do not count."""
    rows, columns = (jnp.ravel(x).astype(jnp.int32) for x in (labels, predictions))
    # JAX counts negative indices from the end.
    rows, columns = (jnp.where(x < 0, classes, x) for x in (rows, columns))
    matrix = jnp.zeros((classes, classes), weights.dtype)
    return matrix.at[rows, columns].add(jnp.ravel(weights), mode="drop")
