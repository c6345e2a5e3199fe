"""The mean of losses as metrics, with Keras's names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from phalanx.runtime import compat
from phalanx.train import loss_functions as functions
from phalanx.train.loss_functions import LossFunction, as_numbers, same_rank
from phalanx.train.metrics import Mean, MeanMetricWrapper, known


class _MeanOf(MeanMetricWrapper):
    """Base of means of losses without arguments of their own."""

    function: LossFunction

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(type(self).function, name, dtype)


class MeanSquaredError(_MeanOf):
    """The mean of squared differences.

    Examples:
        >>> import phalanx as px
        >>> float(px.metrics.MeanSquaredError()([[0.0], [1.0]], [[1.0], [1.0]]))
        0.5
    """

    function = functions.mean_squared_error


class MeanAbsoluteError(_MeanOf):
    """The mean of absolute differences."""

    function = functions.mean_absolute_error


class CosineSimilarity(MeanMetricWrapper):
    """The mean cosine of the angle between labels and predictions."""

    def __init__(self, name: str = "cosine_similarity", dtype: Any = None, axis: int = -1) -> None:
        super().__init__(functions.cosine, name, dtype, axis=axis)


class RootMeanSquaredError(Mean):
    """The root of the mean of squared differences."""

    def __init__(self, name: str = "root_mean_squared_error", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Count labels and predictions, each with its weight (1 by default)."""
        labels, predictions = same_rank(
            as_numbers(known(y_true), "y_true"), as_numbers(known(y_pred), "y_pred")
        )
        with compat.without_differentiation():
            squares = jnp.square(predictions - labels)
        super().update_state(squares, sample_weight)

    def result(self) -> jax.Array:
        """The root so far."""
        return jnp.sqrt(super().result())


class BinaryCrossentropy(MeanMetricWrapper):
    """The mean cross entropy of labels 0 and 1 with probabilities, or with logits."""

    def __init__(
        self,
        name: str = "binary_crossentropy",
        dtype: Any = None,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            functions.binary_crossentropy,
            name,
            dtype,
            from_logits=from_logits,
            label_smoothing=label_smoothing,
        )


class CategoricalCrossentropy(MeanMetricWrapper):
    """The mean cross entropy of one-hot labels with probabilities, or with logits."""

    def __init__(
        self,
        name: str = "categorical_crossentropy",
        dtype: Any = None,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
    ) -> None:
        super().__init__(
            functions.categorical_crossentropy,
            name,
            dtype,
            from_logits=from_logits,
            label_smoothing=label_smoothing,
            axis=axis,
        )


class SparseCategoricalCrossentropy(MeanMetricWrapper):
    """The mean cross entropy of the numbers of classes with probabilities, or with logits."""

    def __init__(
        self,
        name: str = "sparse_categorical_crossentropy",
        dtype: Any = None,
        from_logits: bool = False,
        axis: int = -1,
    ) -> None:
        super().__init__(
            functions.sparse_categorical_crossentropy, name, dtype, from_logits=from_logits, axis=axis
        )
