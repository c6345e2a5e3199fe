"""Losses as Keras names and defines them: from labels and predictions to one number per example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.errors import InvalidTypeError, InvalidValueError, PhalanxError
from phalanx.runtime.formatting import shown

EPSILON = 1e-7
"""What Keras keeps probabilities away from 0 and 1 by."""

LossFunction = Callable[..., jax.Array]


def as_array(x: Any, what: str) -> jax.Array:
    """An array of numbers."""
    try:
        return jnp.asarray(x)
    except (PhalanxError, SystemError):  # the latter is what NumPy makes of an interrupt
        raise
    except Exception as error:
        raise InvalidTypeError(f"{what} must be an array of numbers. Received: {shown(x)}") from error


def as_numbers(x: Any, what: str) -> jax.Array:
    """An array of floating numbers; whole numbers become float32."""
    array = as_array(x, what)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def same_rank(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two arrays, where a last dimension of size 1 that only one of them has is evened out."""
    if a.ndim == b.ndim + 1 and a.shape[-1] == 1:
        return (a, b[:, None]) if b.ndim == 1 else (jnp.squeeze(a, -1), b)
    if b.ndim == a.ndim + 1 and b.shape[-1] == 1:
        return (a[:, None], b) if a.ndim == 1 else (a, jnp.squeeze(b, -1))
    return a, b


def _pair(y_true: Any, y_pred: Any) -> tuple[jax.Array, jax.Array]:
    predictions = as_numbers(y_pred, "y_pred")
    labels = as_numbers(y_true, "y_true").astype(predictions.dtype)
    labels, predictions = same_rank(labels, predictions)
    try:
        jnp.broadcast_shapes(labels.shape, predictions.shape)
    except ValueError as error:
        raise InvalidValueError(
            "y_true and y_pred must have shapes that fit together. "
            f"Received: {labels.shape} and {predictions.shape}"
        ) from error
    return labels, predictions


def _last_mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=-1) if x.ndim else x


def mean_squared_error(y_true: Any, y_pred: Any) -> jax.Array:
    """The mean of squared differences over the last dimension.

    Examples:
        >>> import phalanx as px
        >>> px.losses.mean_squared_error([[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 0.0]]).tolist()
        [0.5, 0.5]
    """
    labels, predictions = _pair(y_true, y_pred)
    return _last_mean(jnp.square(predictions - labels))


def mean_absolute_error(y_true: Any, y_pred: Any) -> jax.Array:
    """The mean of absolute differences over the last dimension."""
    labels, predictions = _pair(y_true, y_pred)
    return _last_mean(jnp.abs(predictions - labels))


def mean_absolute_percentage_error(y_true: Any, y_pred: Any) -> jax.Array:
    """The mean of absolute differences, in percent of the labels."""
    labels, predictions = _pair(y_true, y_pred)
    return 100.0 * _last_mean(jnp.abs((labels - predictions) / jnp.maximum(jnp.abs(labels), EPSILON)))


def mean_squared_logarithmic_error(y_true: Any, y_pred: Any) -> jax.Array:
    """The mean of squared differences of logarithms of 1 more than the values."""
    labels, predictions = (jnp.log(jnp.maximum(x, EPSILON) + 1.0) for x in _pair(y_true, y_pred))
    return _last_mean(jnp.square(predictions - labels))


def huber(y_true: Any, y_pred: Any, delta: float = 1.0) -> jax.Array:
    """Squared where the difference is at most `delta`, linear beyond."""
    labels, predictions = _pair(y_true, y_pred)
    error = jnp.abs(predictions - labels)
    squared, linear = 0.5 * jnp.square(error), delta * error - 0.5 * delta * delta
    return _last_mean(jnp.where(error <= delta, squared, linear))


def log_cosh(y_true: Any, y_pred: Any) -> jax.Array:
    """The mean of the logarithm of the hyperbolic cosine of differences."""
    labels, predictions = _pair(y_true, y_pred)
    error = predictions - labels
    return _last_mean(jnp.logaddexp(error, -error) - jnp.log(jnp.asarray(2.0, error.dtype)))


def hinge(y_true: Any, y_pred: Any) -> jax.Array:
    """The hinge loss; labels are -1 and 1, or 0 and 1."""
    labels, predictions = _pair(y_true, y_pred)
    return _last_mean(jnp.maximum(1.0 - _as_signs(labels) * predictions, 0.0))


def squared_hinge(y_true: Any, y_pred: Any) -> jax.Array:
    """The hinge loss of each element squared; labels are -1 and 1, or 0 and 1."""
    labels, predictions = _pair(y_true, y_pred)
    return _last_mean(jnp.square(jnp.maximum(1.0 - _as_signs(labels) * predictions, 0.0)))


def _as_signs(labels: jax.Array) -> jax.Array:
    is_binary = jnp.all((labels == 0) | (labels == 1))
    return jnp.where(is_binary, 2.0 * labels - 1.0, labels)


def categorical_hinge(y_true: Any, y_pred: Any) -> jax.Array:
    """By how much the right class fails to exceed the best wrong one by 1."""
    labels, predictions = _pair(y_true, y_pred)
    right = jnp.sum(labels * predictions, axis=-1)
    wrong = jnp.max((1.0 - labels) * predictions, axis=-1)
    return jnp.maximum(wrong - right + 1.0, 0.0)


def kl_divergence(y_true: Any, y_pred: Any) -> jax.Array:
    """The Kullback-Leibler divergence of two distributions over the last dimension."""
    labels, predictions = (jnp.clip(x, EPSILON, 1.0) for x in _pair(y_true, y_pred))
    return jnp.sum(labels * jnp.log(labels / predictions), axis=-1)


def poisson(y_true: Any, y_pred: Any) -> jax.Array:
    """The negative log likelihood of Poisson's distribution, without its constant part."""
    labels, predictions = _pair(y_true, y_pred)
    return _last_mean(predictions - labels * jnp.log(predictions + EPSILON))


def cosine_similarity(y_true: Any, y_pred: Any, axis: int = -1) -> jax.Array:
    """Minus the cosine of the angle between labels and predictions: -1 where they are most alike."""
    return -cosine(y_true, y_pred, axis)


def cosine(y_true: Any, y_pred: Any, axis: int = -1) -> jax.Array:
    """The cosine of the angle between labels and predictions."""
    labels, predictions = (_unit(x, axis) for x in _pair(y_true, y_pred))
    return jnp.sum(labels * predictions, axis=axis)


def _unit(x: jax.Array, axis: int) -> jax.Array:
    squares = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))


def binary_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0, axis: int = -1
) -> jax.Array:
    """The cross entropy of labels 0 and 1 with probabilities, or with logits.

    Examples:
        >>> import phalanx as px
        >>> round(float(px.losses.binary_crossentropy([1.0], [0.5])), 4)
        0.6931
    """
    labels, predictions = _pair(y_true, y_pred)
    labels = labels * (1.0 - label_smoothing) + 0.5 * label_smoothing
    if from_logits:
        right, wrong = jax.nn.log_sigmoid(predictions), jax.nn.log_sigmoid(-predictions)
    else:
        known = jnp.clip(predictions, EPSILON, 1.0 - EPSILON)
        right, wrong = jnp.log(known), jnp.log1p(-known)
    entropy = -(labels * right + (1.0 - labels) * wrong)
    return jnp.mean(entropy, axis=axis) if entropy.ndim else entropy


def categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0, axis: int = -1
) -> jax.Array:
    """The cross entropy of one-hot labels, or of distributions, with probabilities or logits."""
    labels, predictions = _pair(y_true, y_pred)
    if labels.ndim == 0 or labels.shape != predictions.shape:
        raise InvalidValueError(
            "categorical_crossentropy needs labels and predictions of one shape, with the classes in "
            f"one dimension. Received: {labels.shape} and {predictions.shape}"
        )
    if label_smoothing:
        classes = predictions.shape[axis]
        labels = labels * (1.0 - label_smoothing) + label_smoothing / classes
    return -jnp.sum(labels * _log_probabilities(predictions, from_logits, axis, True), axis=axis)


def _log_probabilities(x: jax.Array, from_logits: bool, axis: int, divide: bool) -> jax.Array:
    if from_logits:
        return jax.nn.log_softmax(x, axis=axis)
    if divide:
        x = x / jnp.sum(x, axis=axis, keepdims=True)
    return jnp.log(jnp.clip(x, EPSILON, 1.0 - EPSILON))


def sparse_categorical_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,
    ignore_class: int | None = None,
    axis: int = -1,
) -> jax.Array:
    """The cross entropy of the numbers of classes with probabilities, or with logits.

    Args:
        y_true: numbers of classes.
        y_pred: with one dimension more, which is that of the classes.
        from_logits: whether `y_pred` holds logits.
        ignore_class: a label whose loss is 0.
        axis: the dimension of the classes.

    Examples:
        >>> import phalanx as px
        >>> round(float(px.losses.sparse_categorical_crossentropy(1, [0.25, 0.5, 0.25])), 4)
        0.6931
    """
    predictions = as_numbers(y_pred, "y_pred")
    labels = as_array(y_true, "y_true")
    if labels.ndim == predictions.ndim and labels.ndim and labels.shape[-1] == 1:
        labels = jnp.squeeze(labels, -1)
    labels = labels.astype(jnp.int32)
    if labels.ndim != predictions.ndim - 1:
        raise InvalidValueError(
            "sparse_categorical_crossentropy needs predictions with one dimension more than labels. "
            f"Received: labels {labels.shape} and predictions {predictions.shape}"
        )
    logs = _log_probabilities(predictions, from_logits, axis, False)
    chosen = jax.nn.one_hot(labels, predictions.shape[axis], axis=axis, dtype=logs.dtype)
    loss = -jnp.sum(chosen * logs, axis=axis)
    return loss if ignore_class is None else jnp.where(labels == ignore_class, 0.0, loss)
