"""Metrics of right and wrong decisions: positives and negatives at thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core.variables import transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer, check_number
from phalanx.train.loss_functions import same_rank
from phalanx.train.metrics import Metric, divide, known

_LOWEST = -1e10
"""What Keras gives to predictions that do not count."""


def _checked_thresholds(given: Any, usual: float) -> list[float]:
    listed = [usual] if given is None else given if isinstance(given, Sequence) else [given]
    if not len(listed):
        raise InvalidValueError(f"There must be at least one threshold. Received: {shown(given)}")
    return [
        usual if x is None or x == usual else check_number(x, "A threshold", 0.0, 1.0) for x in listed
    ]


def flat_weights(weights: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """One weight for each of the elements of examples."""
    if weights is None:
        return jnp.ones(shape, dtype)
    array = known(weights, dtype)
    if array.ndim < len(shape) and array.shape == shape[: array.ndim]:
        array = array.reshape(*array.shape, *[1] * (len(shape) - array.ndim))
    elif array.ndim == len(shape) + 1 and array.shape[-1] == 1:
        array = jnp.squeeze(array, -1)
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError as error:
        raise InvalidValueError(
            "sample_weight must be one weight per example, or broadcast to the predictions. "
            f"Received: weights of shape {array.shape} for predictions of shape {shape}"
        ) from error


def _pair(y_true: Any, y_pred: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    labels, predictions = same_rank(known(y_true), known(y_pred, dtype))
    if labels.shape != predictions.shape:
        raise InvalidValueError(
            "Predictions must have the shape of the labels. "
            f"Received: labels {labels.shape} and predictions {predictions.shape}"
        )
    return labels.astype(bool), predictions


class _Counts(Metric):
    """Base of metrics that count decisions: predictions above a threshold are positive."""

    kinds: tuple[str, ...] = ()

    def __init__(
        self,
        name: str | None,
        dtype: Any,
        thresholds: Any,
        usual: float = 0.5,
        top_k: int | None = None,
        class_id: int | None = None,
    ) -> None:
        super().__init__(name, dtype)
        self._given = thresholds
        self.thresholds = _checked_thresholds(thresholds, usual)
        self.top_k = None if top_k is None else check_integer(top_k, "top_k", 1, 2**31 - 1)
        self.class_id = None if class_id is None else check_integer(class_id, "class_id", 0, 2**31 - 1)
        shape = (len(self.thresholds),)
        self._counts: dict[str, Variable] = {kind: self.add_weight(kind, shape) for kind in self.kinds}

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count labels (0 or 1) and predictions (from 0 to 1), each with its weight."""
        labels, predictions = _pair(y_true, y_pred, self.dtype)
        weights = flat_weights(sample_weight, predictions.shape, self.dtype)
        with compat.without_differentiation():
            if self.top_k is not None:
                _, best = jax.lax.top_k(predictions, self.top_k)
                kept = jnp.sum(jax.nn.one_hot(best, predictions.shape[-1]), axis=-2) > 0
                predictions = jnp.where(kept, predictions, _LOWEST)
            if self.class_id is not None:
                labels, predictions, weights = (
                    x[..., self.class_id] for x in (labels, predictions, weights)
                )
            counts = _decisions(labels, predictions, weights, jnp.asarray(self.thresholds, self.dtype))

        def add() -> None:
            for kind, variable in self._counts.items():
                variable.assign_add(counts[kind])

        transactions.atomically(add)

    def _one_or_all(self, x: jax.Array) -> jax.Array:
        """A number if there is one threshold, else an array with one for each."""
        return x[0] if len(self.thresholds) == 1 else x

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same metric of."""
        return super().get_config() | {"thresholds": self._given}


def _decisions(
    labels: jax.Array, predictions: jax.Array, weights: jax.Array, thresholds: jax.Array
) -> dict[str, jax.Array]:
    """The weight of each kind of decision, at each threshold."""
    positive = jnp.ravel(predictions)[None, :] > thresholds[:, None]
    right, weight = jnp.ravel(labels)[None, :], jnp.ravel(weights)[None, :]

    def total(chosen: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, weight, 0.0), axis=1)

    return {
        "true_positives": total(right & positive),
        "false_positives": total(~right & positive),
        "true_negatives": total(~right & ~positive),
        "false_negatives": total(right & ~positive),
    }


class _Count(_Counts):
    """Base of metrics that are one of the counts."""

    def __init__(self, thresholds: Any = None, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name or self.kinds[0], dtype, thresholds)

    def result(self) -> jax.Array:
        """The count so far."""
        return self._one_or_all(*self._values())


class TruePositives(_Count):
    """How many ones were predicted to be ones.

    Examples:
        >>> import phalanx as px
        >>> float(px.metrics.TruePositives()([0, 1, 1], [0.9, 0.8, 0.1]))
        1.0
    """

    kinds = ("true_positives",)


class TrueNegatives(_Count):
    """How many zeros were predicted to be zeros."""

    kinds = ("true_negatives",)


class FalsePositives(_Count):
    """How many zeros were predicted to be ones."""

    kinds = ("false_positives",)


class FalseNegatives(_Count):
    """How many ones were predicted to be zeros."""

    kinds = ("false_negatives",)


class Precision(_Counts):
    """Which part of the predicted ones are ones.

    Args:
        thresholds: predictions above it mean 1; a number, a list of them, or 0.5 by default.
        top_k: count the `top_k` highest predictions of each example only, as ones.
        class_id: count this class only, of the last dimension.
        name: a name.
        dtype: of the variables.

    Examples:
        >>> import phalanx as px
        >>> round(float(px.metrics.Precision()([0, 1, 1, 1], [1, 0, 1, 1])), 4)
        0.6667
    """

    kinds = ("true_positives", "false_positives")

    def __init__(
        self,
        thresholds: Any = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        usual = 0.5 if top_k is None else _LOWEST
        name = name or type(self).__name__.lower()
        super().__init__(name, dtype, thresholds, usual, top_k, class_id)

    def result(self) -> jax.Array:
        """The part so far; 0 if there is nothing to divide."""
        right, wrong = self._values()
        return self._one_or_all(divide(right, right + wrong))

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same metric of."""
        return super().get_config() | {"top_k": self.top_k, "class_id": self.class_id}


class Recall(Precision):
    """Which part of the ones were predicted to be ones; see `Precision` for the arguments."""

    kinds = ("true_positives", "false_negatives")


class AUC(Metric):
    """The area under a curve: of true over false positives, or of precision over recall.

    Args:
        num_thresholds: at how many thresholds decisions are counted; more are more exact.
        curve: "ROC" or "PR".
        summation_method: "interpolation", "minoring" (a lower bound) or "majoring" (an upper one).
        name: a name.
        dtype: of the variables.
        thresholds: the thresholds between 0 and 1, in place of `num_thresholds`.
        multi_label: whether each column of the predictions has an area of its own, whose mean counts.
        num_labels: how many columns there are; needed for `multi_label`.
        label_weights: the weights of the columns in that mean.
        from_logits: whether predictions are logits.

    Examples:
        >>> import phalanx as px
        >>> round(float(px.metrics.AUC(num_thresholds=3)([0, 0, 1, 1], [0, 0.5, 0.3, 0.9])), 4)
        0.75
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = "auc",
        dtype: Any = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Sequence[float] | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(name, dtype)
        self.curve = _one_of(curve, "curve", ("ROC", "PR"))
        self.summation_method = _one_of(
            summation_method, "summation_method", ("interpolation", "minoring", "majoring")
        )
        if thresholds is None:
            count = check_integer(num_thresholds, "num_thresholds", 2, 2**20)
            inner = [(i + 1) / (count - 1) for i in range(count - 2)]
        else:
            inner = sorted(check_number(x, "A threshold", 0.0, 1.0) for x in thresholds)
        self._given = None if thresholds is None else inner
        self.thresholds = [-1e-7, *inner, 1.0 + 1e-7]
        self.num_thresholds = len(self.thresholds)
        if multi_label and num_labels is None:
            raise InvalidValueError(
                "With multi_label, num_labels says how many columns the predictions have. "
                "Received: num_labels=None"
            )
        self.multi_label, self.from_logits = bool(multi_label), bool(from_logits)
        self.num_labels = None if num_labels is None else check_integer(num_labels, "num_labels", 1)
        self.label_weights = None if label_weights is None else [float(x) for x in label_weights]
        columns = self.num_labels if self.multi_label else 1
        for kind in ("true_positives", "false_positives", "true_negatives", "false_negatives"):
            self.add_weight(kind, (self.num_thresholds, columns))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count labels (0 or 1) and predictions (from 0 to 1, or logits), each with its weight."""
        labels, predictions = _pair(y_true, y_pred, self.dtype)
        weights = flat_weights(sample_weight, predictions.shape, self.dtype)
        with compat.without_differentiation():
            if self.from_logits:
                predictions = jax.nn.sigmoid(predictions)
            if self.label_weights is not None and not self.multi_label:
                weights = weights * jnp.asarray(self.label_weights, self.dtype)
            columns = (self.num_labels or 1) if self.multi_label else 1
            labels, predictions, weights = (
                x.reshape(-1, columns) for x in (labels, predictions, weights)
            )
            counts = jax.vmap(self._count, in_axes=1, out_axes=1)(labels, predictions, weights)

        def add() -> None:
            for variable, count in zip(self.variables, counts, strict=True):
                variable.assign_add(count)

        transactions.atomically(add)

    def _count(self, labels: jax.Array, predictions: jax.Array, weights: jax.Array) -> Any:
        """The decisions of one column at all thresholds, by where predictions lie between them."""
        limits = jnp.asarray(self.thresholds, self.dtype)
        below = jnp.searchsorted(limits, jnp.clip(predictions, 0.0, 1.0), side="left") - 1

        def above(weight: jax.Array) -> jax.Array:
            each = jnp.zeros(len(self.thresholds), self.dtype).at[jnp.maximum(below, 0)].add(weight)
            return jnp.cumsum(each[::-1])[::-1]

        ones, zeros = jnp.where(labels, weights, 0.0), jnp.where(labels, 0.0, weights)
        hits, alarms = above(ones), above(zeros)
        return hits, alarms, jnp.sum(zeros) - alarms, jnp.sum(ones) - hits

    def result(self) -> jax.Array:
        """The area so far."""
        hits, alarms, rejections, misses = self._values()
        recall = divide(hits, hits + misses)
        if self.curve == "PR" and self.summation_method == "interpolation":
            areas = _interpolated_precision(hits, alarms, misses)
        elif self.curve == "PR":
            areas = self._area(recall, divide(hits, hits + alarms))
        else:
            areas = self._area(divide(alarms, alarms + rejections), recall)
        if self.multi_label and self.label_weights is not None:
            weights = jnp.asarray(self.label_weights, self.dtype)
            return divide(jnp.sum(areas * weights), jnp.sum(weights))
        return jnp.mean(areas)

    def _area(self, x: jax.Array, y: jax.Array) -> jax.Array:
        here, there = y[:-1], y[1:]
        heights = {
            "interpolation": (here + there) / 2.0,
            "minoring": jnp.minimum(here, there),
            "majoring": jnp.maximum(here, there),
        }[self.summation_method]
        return jnp.sum((x[:-1] - x[1:]) * heights, axis=0)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same metric of."""
        return super().get_config() | {
            "num_thresholds": self.num_thresholds,
            "curve": self.curve,
            "summation_method": self.summation_method,
            "thresholds": self._given,
            "multi_label": self.multi_label,
            "num_labels": self.num_labels,
            "label_weights": self.label_weights,
            "from_logits": self.from_logits,
        }


def _interpolated_precision(hits: jax.Array, alarms: jax.Array, misses: jax.Array) -> jax.Array:
    """The area under precision over recall where counts, not their ratio, change evenly."""
    positives = hits + alarms
    more_hits, more = hits[:-1] - hits[1:], positives[:-1] - positives[1:]
    slope = divide(more_hits, jnp.maximum(more, 0.0))
    intercept = hits[1:] - slope * positives[1:]
    both = (positives[:-1] > 0) & (positives[1:] > 0)
    ratio = jnp.where(both, divide(positives[:-1], jnp.maximum(positives[1:], 0.0)), 1.0)
    parts = divide(
        slope * (more_hits + intercept * jnp.log(jnp.where(both, ratio, 1.0))),
        jnp.maximum(hits[1:] + misses[1:], 0.0),
    )
    return jnp.sum(parts, axis=0)


def _one_of(given: Any, name: str, allowed: tuple[str, ...]) -> str:
    found = [x for x in allowed if isinstance(given, str) and x.lower() == given.lower()]
    if not found:
        raise InvalidValueError(f"{name} must be one of {list(allowed)}. Received: {shown(given)}")
    return found[0]
