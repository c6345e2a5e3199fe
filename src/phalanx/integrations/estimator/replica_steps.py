"""The steps of an estimator: `model_fn`, called on each replica, in compiled functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.core.options import VariableAggregation
from phalanx.core.strategy import Strategy
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.execution.function import function
from phalanx.execution.gradients import value_and_grad
from phalanx.integrations.estimator.input_functions import argument_names
from phalanx.integrations.estimator.named_state import NamedState
from phalanx.integrations.estimator.run_config import RunConfig
from phalanx.integrations.estimator.specs import EstimatorSpec, ModeKeys
from phalanx.runtime.formatting import shown
from phalanx.train.checkpoints.checkpoint import Checkpoint
from phalanx.train.metrics import Mean
from phalanx.train.optimizer import Optimizer

LOSS = "loss"


class ReplicaSteps:
    """A model under a strategy, in one mode: its variables and its compiled step.

    `build` traces `model_fn` once, without running it, which makes the variables. Then a checkpoint can
    be restored before the first step.

    Args:
        model_fn: the user's function.
        mode: one of `ModeKeys`.
        params: passed on to `model_fn`.
        config: passed on, too; has the seed.
        strategy: where the model lives.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        mode: str,
        params: Any,
        config: RunConfig,
        strategy: Strategy,
    ) -> None:
        self._model_fn, self.mode, self.strategy = model_fn, mode, strategy
        self._names = argument_names(model_fn)
        self._given = {"mode": mode, "params": params, "config": config}
        with _scope(strategy):
            step = Variable(
                jnp.int32(0),
                trainable=False,
                name="global_step",
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )
        self.state = NamedState(config.tf_random_seed or 0, step)
        self._train_op: Any = None
        self.optimizer: Optimizer | None = None
        self.checkpoint: Checkpoint | None = None
        steps = {
            ModeKeys.TRAIN: self._train,
            ModeKeys.EVAL: self._evaluate,
            ModeKeys.PREDICT: self._predict,
        }
        chosen = steps[mode]
        self.run = function(lambda element: strategy.run(chosen, args=(element,)))

    # -- making the variables --------------------------------------------------------------------

    def build(self, element: Any) -> Checkpoint:
        """Make the variables that `model_fn` asks for on an element; gives what holds them."""
        if self.checkpoint is not None:
            return self.checkpoint
        forward = function(lambda x: self.strategy.run(self._forward, args=(x,)))
        try:
            forward.lower(element)
        except ContextError:  # what cannot be traced runs as Python, or says what is wrong
            self.strategy.run(self._forward, args=(element,))
            for name, value in self.state.initial.items():
                self.state.variables[name].assign(value)
        self.state.complete = True
        objects: dict[str, Any] = {"global_step": self.state.global_step, "model": self.state.variables}
        if self.mode == ModeKeys.TRAIN:
            objects["optimizer"] = self.optimizer = self._made_optimizer()
        self.checkpoint = Checkpoint(**objects)
        return self.checkpoint

    def _made_optimizer(self) -> Optimizer:
        if not self.state.trainable:
            raise InvalidValueError(
                "model_fn has no variables to train. Ask for them by px.estimator.get_variable or "
                f"get_parameters. Received: {sorted(self.state.variables)}"
            )
        given = self._train_op
        with _scope(self.strategy):
            optimizer = given if isinstance(given, Optimizer) else Optimizer(given)
        optimizer.build(self.state.trainable)
        return optimizer

    def _forward(self, element: Any) -> None:
        spec = self._called(*parts(element))
        if self.mode == ModeKeys.TRAIN:
            self._train_op = spec.train_op
        elif self.mode == ModeKeys.EVAL:
            self._count(spec, rows(element))

    # -- on replicas -----------------------------------------------------------------------------

    def _called(self, features: Any, labels: Any) -> EstimatorSpec:
        """Call `model_fn` with the arguments that it has."""
        given = {**self._given, "labels": labels}
        if labels is not None and "labels" not in self._names and self.mode != ModeKeys.PREDICT:
            raise InvalidValueError(
                "input_fn gives labels, but model_fn has no argument `labels`. "
                f"Received: model_fn{tuple(self._names)}"
            )
        chosen = {name: given[name] for name in self._names[1:] if name in given}
        with self.state.current():
            spec = self._model_fn(features, **chosen)
        if not isinstance(spec, EstimatorSpec):
            raise InvalidTypeError(
                f"model_fn must return a px.estimator.EstimatorSpec. Received: {shown(spec)}"
            )
        if spec.mode != self.mode:
            raise InvalidValueError(
                f"model_fn was called for {self.mode!r}: pass that on to the EstimatorSpec. "
                f"Received: an EstimatorSpec for {spec.mode!r}"
            )
        return spec

    def _train(self, element: Any) -> jax.Array:
        """One step; gives the mean loss over all examples of all replicas."""
        replica = ctx.get_replica_context()
        assert replica is not None
        assert self.optimizer is not None
        count = rows(element)
        total = jnp.maximum(replica.all_reduce("sum", jnp.float32(count)), 1.0)

        def loss_fn() -> jax.Array:
            loss = mean_loss(self._called(*parts(element)).loss, count)
            assert self.optimizer is not None
            return self.optimizer.scale_loss(loss * (count / total))

        variables = self.state.trainable
        share, gradients = value_and_grad(loss_fn, variables)()
        scale = 1.0 if self.optimizer.loss_scale is None else self.optimizer.loss_scale.value
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.state.global_step.assign_add(1)
        return replica.all_reduce("sum", share / scale)

    def _evaluate(self, element: Any) -> None:
        self._count(self._called(*parts(element)), rows(element))

    def _count(self, spec: EstimatorSpec, count: int) -> None:
        """Add what an element gives to the metrics."""
        self.state.metric(LOSS, lambda: Mean(LOSS)).update_state(mean_loss(spec.loss, count), count)
        for name, value in (spec.eval_metric_ops or {}).items():
            if hasattr(value, "update_state"):
                if self.state.metrics.get(name) is not value:
                    self.state.metrics[name] = value
                continue
            values, weights = value if isinstance(value, tuple) else (value, None)
            if jnp.ndim(values) == 0 and weights is None:  # the mean over these examples
                values, weights = mean_loss(values, count), count
            self.state.metric(name, functools.partial(Mean, name)).update_state(values, weights)

    def _predict(self, element: Any) -> Any:
        return self._called(*parts(element)).predictions

    # -- outside ---------------------------------------------------------------------------------

    def reset_metrics(self) -> None:
        """Begin a new evaluation."""
        for metric in self.state.metrics.values():
            metric.reset_state()

    def results(self) -> dict[str, Any]:
        """What the metrics say, and the global step."""
        found = {name: _plain(metric.result()) for name, metric in sorted(self.state.metrics.items())}
        return {**found, "global_step": int(self.state.global_step)}


def _scope(strategy: Strategy) -> Any:
    """The scope of a strategy; of the default one it is none."""
    return ctx.push(ctx.default_mode()) if strategy is ctx.default_mode().strategy else strategy.scope()


def _plain(result: Any) -> Any:
    """A number, or an array of several."""
    value = np.asarray(result)
    return float(value) if value.ndim == 0 else value


def parts(element: Any) -> tuple[Any, Any]:
    """The features and the labels of an element.

    >>> parts((1, 2)), parts({"x": 1})
    ((1, 2), ({'x': 1}, None))
    """
    if isinstance(element, tuple) and len(element) == 2:
        return element
    return element, None


def rows(element: Any) -> int:
    """How many examples an element has."""
    leaves = [x for x in jax.tree.leaves(element) if hasattr(x, "shape")]
    if not leaves or not leaves[0].shape:
        raise InvalidTypeError(
            "input_fn must give batches: arrays whose first dimension counts the examples. "
            f"Received: {shown(element)}"
        )
    return int(leaves[0].shape[0])


def mean_loss(loss: Any, count: int) -> jax.Array:
    """The mean of losses, which are one per example or a mean already; 0 if there is no example.

    >>> float(mean_loss(jnp.array([1.0, 3.0]), 2)), float(mean_loss(jnp.float32(jnp.nan), 0))
    (2.0, 0.0)
    """
    if count == 0:
        return jnp.float32(0)
    return jnp.mean(jnp.asarray(loss))


def examples(predictions: Any, keys: Any = None) -> list[Any]:
    """The predictions of each example of a batch.

    >>> import numpy as np
    >>> examples({"a": np.array([1, 2]), "b": np.array([3, 4])}, ["b"])
    [{'b': np.int64(3)}, {'b': np.int64(4)}]
    """
    if keys is not None:
        if not isinstance(predictions, Mapping) or set(keys) - set(predictions):
            raise InvalidValueError(
                "predict_keys must be keys of the predictions of model_fn. "
                f"Received: predict_keys={shown(keys)} for {shown(predictions)}"
            )
        predictions = {key: predictions[key] for key in keys}
    leaves, structure = jax.tree.flatten(predictions)
    return [jax.tree.unflatten(structure, row) for row in zip(*leaves, strict=True)]
