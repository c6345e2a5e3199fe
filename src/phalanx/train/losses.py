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


class Reduction(enum.StrEnum):
    """What a loss makes of the losses of its examples.

    `SUM_OVER_BATCH_SIZE`, which `AUTO` means, is their mean. A replica sees only its own part of a
    batch, so these two are refused inside `Strategy.run` with several replicas, as in TensorFlow. Use
    `SUM` or `NONE` there, and divide by the global batch size, as `px.nn.compute_average_loss` does.

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

    @classmethod
    def of(cls, given: Any) -> Reduction:
        """The reduction that a name or None stands for."""
        try:
            return (
                cls.NONE if given is None else cls("sum_over_batch_size" if given == "mean" else given)
            )
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

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> class Cubed(px.losses.Loss):
        ...     def call(self, y_true, y_pred):
        ...         return jnp.mean(jnp.abs(y_true - y_pred) ** 3, axis=-1)
        >>> Cubed(reduction="none")([[0.0], [0.0]], [[1.0], [2.0]]).tolist()
        [1.0, 8.0]
    """

    def __init__(self, name: str | None = None, reduction: Any = Reduction.AUTO) -> None:
        if name is not None and not isinstance(name, str):
            raise InvalidTypeError(f"The name of a loss must be a string. Received: {shown(name)}")
        self.name = name or _snake(type(self).__name__)
        self.reduction = Reduction.of(reduction)

    def __repr__(self) -> str:
        return f"<px.losses.{type(self).__name__} {self.name!r}, reduction={self.reduction.value!r}>"

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """One loss per example."""
        raise NotImplementedError(f"{type(self).__name__} must implement call(y_true, y_pred).")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> jax.Array:
        """The loss, reduced."""
        labels, predictions = (
            jax.tree.map(functools.partial(as_array, what=what), y, is_leaf=_is_numbers)
            for y, what in ((y_true, "y_true"), (y_pred, "y_pred"))
        )
        losses = as_numbers(self.call(labels, predictions), "what call returns")
        if sample_weight is not None:
            losses = self._weighted(losses, as_numbers(sample_weight, "sample_weight"))
        if self.reduction is Reduction.NONE:
            return losses
        if self.reduction is Reduction.SUM:
            return jnp.sum(losses)
        self._check_place()
        return jnp.sum(losses) / self._examples(y_true, losses)

    def _examples(self, y_true: Any, losses: jax.Array) -> Any:
        """How many losses a mean is over."""
        return max(losses.size, 1)

    def _weighted(self, losses: jax.Array, weights: jax.Array) -> jax.Array:
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
        return losses * weights.astype(losses.dtype)

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
        return {"name": self.name, "reduction": self.reduction.value}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """A loss with what `get_config` returned."""
        return cls(**config)


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
        **kwargs: more arguments of the function.
    """

    def __init__(
        self,
        fn: LossFunction,
        reduction: Any = Reduction.AUTO,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name or getattr(fn, "__name__", None), reduction)
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

    def __init__(self, reduction: Any = Reduction.AUTO, name: str | None = None) -> None:
        super().__init__(type(self).function, reduction, name)


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
        self, delta: float = 1.0, reduction: Any = Reduction.AUTO, name: str | None = "huber_loss"
    ) -> None:
        super().__init__(functions.huber, reduction, name, delta=delta)


class CosineSimilarity(LossFunctionWrapper):
    """Minus the cosine of the angle between labels and predictions."""

    def __init__(
        self, axis: int = -1, reduction: Any = Reduction.AUTO, name: str | None = "cosine_similarity"
    ) -> None:
        super().__init__(functions.cosine_similarity, reduction, name, axis=axis)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """What becomes smaller the more alike they are."""
        return -super().call(y_true, y_pred)


class BinaryCrossentropy(LossFunctionWrapper):
    """The cross entropy of labels 0 and 1 with probabilities, or with logits."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: Any = Reduction.AUTO,
        name: str | None = "binary_crossentropy",
    ) -> None:
        super().__init__(
            functions.binary_crossentropy,
            reduction,
            name,
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
    ) -> None:
        super().__init__(
            functions.categorical_crossentropy,
            reduction,
            name,
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
    ) -> None:
        super().__init__(
            functions.sparse_categorical_crossentropy,
            reduction,
            name,
            from_logits=from_logits,
            ignore_class=ignore_class,
            axis=axis,
        )

    def _examples(self, y_true: Any, losses: jax.Array) -> Any:
        """Those with the label to be ignored are none."""
        ignored = self._kwargs["ignore_class"]
        if ignored is None:
            return super()._examples(y_true, losses)
        return jnp.maximum(jnp.sum(jnp.asarray(y_true) != ignored), 1)
