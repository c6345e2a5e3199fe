"""Losses as objects, with Keras's names: a function, weights, and a reduction."""

from __future__ import annotations

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core import context as ctx
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.train import loss_functions as functions
from phalanx.train.loss_functions import LossFunction, as_array, as_numbers, same_rank
from phalanx.train.metrics import divide


class Reduction(enum.StrEnum):
    """What a loss makes of the losses of its examples.

    `SUM_OVER_BATCH_SIZE`, which `AUTO` and `MEAN` mean too, is their mean. `MEAN_WITH_SAMPLE_WEIGHT`
    divides by the sum of the sample weights instead. A replica sees only its own part of a batch, so
    means are refused inside `Strategy.run` with several replicas, as in TensorFlow. Use `SUM` or `NONE`
    there, and divide by the global batch size, as `px.nn.compute_average_loss` does.

    Examples:
        >>> import phalanx as px
        >>> total = px.losses.MeanSquaredError(reduction=px.losses.Reduction.SUM)
        >>> float(total([[1.0], [2.0]], [[0.0], [0.0]]))
        5.0
    """

    AUTO = "auto"
    NONE = "none"
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"
    MEAN = "mean"
    MEAN_WITH_SAMPLE_WEIGHT = "mean_with_sample_weight"

    @classmethod
    def of(cls, given: Any) -> Reduction:
        """The reduction that a name or None stands for."""
        try:
            return cls.NONE if given is None else cls(given)
        except ValueError:
            raise InvalidValueError(
                f"reduction must be one of {[kind.value for kind in cls]} or None. "
                f"Received: {shown(given)}"
            ) from None


class Loss:
    """Base of losses. Subclasses implement `call`, which gives one loss per example.

    Args:
        name: a name.
        reduction: a `Reduction`, or its name.
        dtype: what predictions and losses are converted to; that of the predictions by default.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> class Cubed(px.losses.Loss):
        ...     def call(self, y_true, y_pred):
        ...         return jnp.mean(jnp.abs(y_true - y_pred) ** 3, axis=-1)
        >>> Cubed(reduction="none")([[0.0], [0.0]], [[1.0], [2.0]]).tolist()
        [1.0, 8.0]
    """

    def __init__(
        self, name: str | None = None, reduction: Any = Reduction.AUTO, dtype: Any = None
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise InvalidTypeError(f"The name of a loss must be a string. Received: {shown(name)}")
        self.name = name or _snake(type(self).__name__)
        self.reduction = Reduction.of(reduction)
        self.dtype = None if dtype is None else _floating(dtype)

    def __repr__(self) -> str:
        return f"<px.losses.{type(self).__name__} {self.name!r}, reduction={self.reduction.value!r}>"

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """One loss per example."""
        raise NotImplementedError(f"{type(self).__name__} must implement call(y_true, y_pred).")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> jax.Array:
        """The loss, reduced."""
        labels, predictions = (
            jax.tree.map(functools.partial(self._converted, what=what), y, is_leaf=_is_numbers)
            for y, what in ((y_true, "y_true"), (y_pred, "y_pred"))
        )
        losses = as_numbers(self.call(labels, predictions), "what call returns")
        losses = losses.astype(self.dtype or losses.dtype)
        weights = None if sample_weight is None else as_numbers(sample_weight, "sample_weight")
        if weights is not None:
            losses, weights = self._weighted(losses, weights)
        if self.reduction is Reduction.NONE:
            return losses
        if self.reduction is Reduction.SUM:
            return jnp.sum(losses)
        self._check_place()
        if self.reduction is not Reduction.MEAN_WITH_SAMPLE_WEIGHT:
            weights = None
        total = jnp.sum(losses)
        return divide(total, jnp.asarray(self._divisor(y_true, losses, weights), total.dtype))

    def _converted(self, x: Any, what: str) -> jax.Array:
        """An array; predictions, and labels that are no whole numbers, in the dtype of the loss."""
        array = as_array(x, what)
        is_whole = what == "y_true" and not jnp.issubdtype(array.dtype, jnp.floating)
        return array if self.dtype is None or is_whole else array.astype(self.dtype)

    def _divisor(self, y_true: Any, losses: jax.Array, weights: jax.Array | None) -> Any:
        """What the sum of losses becomes a mean by: the sum of the weights, or how many there are."""
        return losses.size if weights is None else jnp.sum(weights)

    def _weighted(self, losses: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Losses times their weights, and the weights in as many dimensions."""
        losses, weights = same_rank(losses, weights)
        if weights.ndim < losses.ndim and weights.shape == losses.shape[: weights.ndim]:
            weights = weights.reshape(*weights.shape, *[1] * (losses.ndim - weights.ndim))
        try:
            shape = jnp.broadcast_shapes(losses.shape, weights.shape)
        except ValueError:
            shape = None
        if shape != losses.shape:
            raise InvalidValueError(
                "sample_weight must be one weight per example, or broadcast against the losses. "
                f"Received: weights of shape {weights.shape} for losses of shape {losses.shape}"
            )
        return losses * weights.astype(losses.dtype), weights

    def _check_place(self) -> None:
        replica = ctx.active_replica()
        if replica is not None and replica.num_replicas_in_sync > 1:
            raise InvalidValueError(
                "A replica sees only its part of the batch, so a loss that it averages would count as "
                "many times as there are replicas. Use px.losses.Reduction.SUM or NONE there, "
                "and divide by the global batch size: px.nn.compute_average_loss(losses, "
                f"global_batch_size=…). Received: reduction={self.reduction.value!r} with "
                f"{replica.num_replicas_in_sync} replicas"
            )

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same loss of."""
        kind = {} if self.dtype is None else {"dtype": self.dtype.name}
        return {"name": self.name, "reduction": self.reduction.value} | kind

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """A loss with what `get_config` returned."""
        return cls(**config)


def _floating(dtype: Any) -> jnp.dtype[Any]:
    """The dtype of a loss."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise InvalidTypeError(
            f"The dtype of a loss must be that of floating numbers. Received: {shown(dtype)}"
        )
    return found


def _is_numbers(x: Any) -> bool:
    """Whether something is one array, though it may be written as a list."""
    return not isinstance(x, dict | tuple)


def _snake(name: str) -> str:
    """How Keras writes the name of a class.

    >>> _snake("MeanSquaredError"), _snake("KLDivergence")
    ('mean_squared_error', 'kl_divergence')
    """
    text = ""
    for i, letter in enumerate(name):
        after_small = i > 0 and not name[i - 1].isupper()
        before_small = i > 0 and i + 1 < len(name) and name[i + 1].islower()
        text += "_" * (letter.isupper() and (after_small or before_small)) + letter.lower()
    return text


class LossFunctionWrapper(Loss):
    """A loss of a function of labels and predictions.

    Args:
        fn: the function, called with labels, predictions and the other arguments.
        reduction: a `Reduction`, or its name.
        name: a name.
        dtype: see `Loss`.
        **kwargs: more arguments of the function.
    """

    def __init__(
        self,
        fn: LossFunction,
        reduction: Any = Reduction.AUTO,
        name: str | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name or getattr(fn, "__name__", None), reduction, dtype)
        self._fn, self._kwargs = fn, kwargs

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """What the function gives."""
        return self._fn(y_true, y_pred, **self._kwargs)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same loss of."""
        given = {"fn": self._fn} if type(self) is LossFunctionWrapper else {}
        return super().get_config() | given | self._kwargs


class _Plain(LossFunctionWrapper):
    """Base of losses without arguments of their own."""

    function: LossFunction

    def __init__(
        self, reduction: Any = Reduction.AUTO, name: str | None = None, dtype: Any = None
    ) -> None:
        super().__init__(type(self).function, reduction, name, dtype)


class MeanSquaredError(_Plain):
    """The mean of squared differences."""

    function = functions.mean_squared_error


class MeanAbsoluteError(_Plain):
    """The mean of absolute differences."""

    function = functions.mean_absolute_error


class MeanAbsolutePercentageError(_Plain):
    """The mean of absolute differences, in percent of the labels."""

    function = functions.mean_absolute_percentage_error


class MeanSquaredLogarithmicError(_Plain):
    """The mean of squared differences of logarithms."""

    function = functions.mean_squared_logarithmic_error


class LogCosh(_Plain):
    """The mean of the logarithm of the hyperbolic cosine of differences."""

    function = functions.log_cosh


class Hinge(_Plain):
    """The hinge loss."""

    function = functions.hinge


class SquaredHinge(_Plain):
    """The hinge loss of each element squared."""

    function = functions.squared_hinge


class CategoricalHinge(_Plain):
    """By how much the right class fails to exceed the best wrong one by 1."""

    function = functions.categorical_hinge


class KLDivergence(_Plain):
    """The Kullback-Leibler divergence of two distributions."""

    function = functions.kl_divergence


class Poisson(_Plain):
    """The negative log likelihood of Poisson's distribution."""

    function = functions.poisson


class Huber(LossFunctionWrapper):
    """Squared where the difference is at most `delta`, linear beyond."""

    def __init__(
        self,
        delta: float = 1.0,
        reduction: Any = Reduction.AUTO,
        name: str | None = "huber_loss",
        dtype: Any = None,
    ) -> None:
        super().__init__(functions.huber, reduction, name, dtype, delta=delta)


class CosineSimilarity(LossFunctionWrapper):
    """Minus the cosine of the angle between labels and predictions."""

    def __init__(
        self,
        axis: int = -1,
        reduction: Any = Reduction.AUTO,
        name: str | None = "cosine_similarity",
        dtype: Any = None,
    ) -> None:
        super().__init__(functions.cosine_similarity, reduction, name, dtype, axis=axis)


class BinaryCrossentropy(LossFunctionWrapper):
    """The cross entropy of labels 0 and 1 with probabilities, or with logits."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: Any = Reduction.AUTO,
        name: str | None = "binary_crossentropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(
            functions.binary_crossentropy,
            reduction,
            name,
            dtype,
            from_logits=from_logits,
            label_smoothing=label_smoothing,
            axis=axis,
        )


class CategoricalCrossentropy(LossFunctionWrapper):
    """The cross entropy of one-hot labels, or of distributions, with probabilities or logits."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: Any = Reduction.AUTO,
        name: str | None = "categorical_crossentropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(
            functions.categorical_crossentropy,
            reduction,
            name,
            dtype,
            from_logits=from_logits,
            label_smoothing=label_smoothing,
            axis=axis,
        )


class SparseCategoricalCrossentropy(LossFunctionWrapper):
    """The cross entropy of the numbers of classes with probabilities, or with logits.

    Examples:
        >>> import phalanx as px
        >>> loss = px.losses.SparseCategoricalCrossentropy(from_logits=True)
        >>> round(float(loss([0, 1], [[0.0, 0.0], [0.0, 0.0]])), 4)
        0.6931
    """

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: Any = Reduction.AUTO,
        axis: int = -1,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(
            functions.sparse_categorical_crossentropy,
            reduction,
            name,
            dtype,
            from_logits=from_logits,
            ignore_class=ignore_class,
            axis=axis,
        )

    def _divisor(self, y_true: Any, losses: jax.Array, weights: jax.Array | None) -> Any:
        """Examples with the label to be ignored are none."""
        ignored = self._kwargs["ignore_class"]
        if ignored is None:
            return super()._divisor(y_true, losses, weights)
        counts, weights = same_rank(
            jnp.asarray(y_true) != ignored, jnp.ones_like(losses) if weights is None else weights
        )
        return jnp.sum(counts * (1.0 if weights is None else weights))
