"""What users hand over: `EstimatorSpec` from `model_fn`, and `TrainSpec` and `EvalSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.integrations.estimator.hooks import SessionRunHook
from phalanx.runtime.formatting import shown
from phalanx.train.optimizer import Optimizer


class ModeKeys:
    """What `model_fn` is called for.

    Examples:
        >>> import phalanx as px
        >>> px.estimator.ModeKeys.TRAIN
        'train'
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)


@dataclass(frozen=True)
class EstimatorSpec:
    """What `model_fn` returns: the results of a model on the rows of one replica.

    Args:
        mode: one of `ModeKeys`.
        predictions: an array, or a dict of arrays, with a row for each example; for PREDICT.
        loss: for TRAIN and EVAL. An array with a loss for each example, or the mean over the examples
            that were given. The loss of a step is the mean over all examples of the batch, on any
            number of replicas.
        train_op: how to make the loss smaller, for TRAIN: a transformation of optax, or a
            `px.train.Optimizer` that was made outside with ``aggregate="sum"``. The one of the first
            call is used.
        eval_metric_ops: for EVAL, by name: an array with a value for each example, whose mean counts;
            a pair of such values and their weights; or a metric of `get_metric`, which was updated.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> spec = px.estimator.EstimatorSpec("eval", loss=jnp.ones(3))
        >>> spec.mode
        'eval'
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: optax.GradientTransformation | Optimizer | None = None
    eval_metric_ops: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise InvalidValueError(f"mode must be one of {_MODES}. Received: {shown(self.mode)}")
        needed = {ModeKeys.TRAIN: ("loss", "train_op"), ModeKeys.EVAL: ("loss",)}
        missing = [n for n in needed.get(self.mode, ("predictions",)) if getattr(self, n) is None]
        if missing:
            raise InvalidValueError(
                f"An EstimatorSpec for {self.mode!r} needs {' and '.join(missing)}. Received: None"
            )
        known = isinstance(self.train_op, Optimizer) or hasattr(self.train_op, "update")
        if self.train_op is not None and not known:
            raise InvalidTypeError(
                "train_op says how to make the loss smaller: an optax transformation, such as "
                f"optax.adam(1e-3), or a px.train.Optimizer. Received: {shown(self.train_op)}"
            )
        if "loss" in (self.eval_metric_ops or ()) or "global_step" in (self.eval_metric_ops or ()):
            raise InvalidValueError(
                "`evaluate` gives 'loss' and 'global_step' itself; choose other names. "
                f"Received: {sorted(self.eval_metric_ops or ())}"
            )


@dataclass(frozen=True)
class TrainSpec:
    """How `train_and_evaluate` trains.

    Args:
        input_fn: gives the training data; see `Estimator.train`.
        max_steps: at which global step training ends; None: when the data do.
        hooks: called between steps, in tasks that train.

    Examples:
        >>> import phalanx as px
        >>> px.estimator.TrainSpec(lambda: [], max_steps=10).max_steps
        10
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[SessionRunHook] = ()

    def __post_init__(self) -> None:
        _check(self.input_fn, self.max_steps, "max_steps")


@dataclass(frozen=True)
class EvalSpec:
    """How `train_and_evaluate` evaluates.

    Args:
        input_fn: gives the data to evaluate on.
        steps: how many batches to take; None takes all.
        name: of the folder of the results, ``eval_NAME``.
        hooks: called between steps.
        start_delay_secs: how long an evaluation waits at least after training began.
        throttle_secs: how many seconds lie at least between two evaluations, but for the last one.

    Examples:
        >>> import phalanx as px
        >>> px.estimator.EvalSpec(lambda: []).steps
        100
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[SessionRunHook] = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        _check(self.input_fn, self.steps, "steps")


def _check(input_fn: Any, count: Any, name: str) -> None:
    if not callable(input_fn):
        raise InvalidTypeError(f"input_fn must be a function. Received: {shown(input_fn)}")
    check_count(count, name)


def check_count(count: Any, name: str) -> None:
    """Require a positive number, or None."""
    if count is not None and not count > 0:
        raise InvalidValueError(f"{name} must be positive or None. Received: {shown(count)}")
