"""`train_and_evaluate`: what each task of a cluster does for an estimator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from phalanx.coordinator.evaluator import SidecarEvaluator
from phalanx.coordinator.server import Server
from phalanx.errors import InvalidTypeError
from phalanx.integrations.estimator.estimator import Estimator
from phalanx.integrations.estimator.run_config import RunConfig
from phalanx.integrations.estimator.specs import EvalSpec, TrainSpec
from phalanx.runtime.formatting import shown
from phalanx.train.checkpoints.checkpoint import Checkpoint


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> dict[str, float] | None:
    """Train, and evaluate the checkpoints; each task of the cluster does its part.

    Call it in every task. The chief and the workers train. An evaluator follows the checkpoints until
    the one of `max_steps`, or until ``phalanx run`` ends it. A parameter server serves until the job
    is over. A process that is alone evaluates between steps.

    Returns:
        The results of the last evaluation; None in tasks that have not evaluated.

    Examples:
        >>> import tempfile
        >>> import numpy as np, optax, phalanx as px
        >>> def model_fn(features, labels, mode):
        ...     w = px.estimator.get_variable("w", ())
        ...     losses = (w * features - labels) ** 2
        ...     return px.estimator.EstimatorSpec(mode, loss=losses, train_op=optax.sgd(0.1))
        >>> x = np.ones(4, np.float32)
        >>> def input_fn():
        ...     return px.data.Dataset.from_tensor_slices((x, 3 * x)).repeat(50).batch(4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = px.estimator.train_and_evaluate(
        ...         px.estimator.Estimator(model_fn, folder),
        ...         px.estimator.TrainSpec(input_fn, max_steps=30),
        ...         px.estimator.EvalSpec(input_fn, steps=1),
        ...     )
        >>> results["loss"] < 1e-3, results["global_step"]
        (True, 30)
    """
    for given, kind in ((estimator, Estimator), (train_spec, TrainSpec), (eval_spec, EvalSpec)):
        if not isinstance(given, kind):
            raise InvalidTypeError(
                "train_and_evaluate takes an Estimator, a TrainSpec and an EvalSpec. "
                f"Received: {shown(given)} in place of a {kind.__name__}"
            )
    config = estimator.config
    if config.task_type == "ps":
        _serve(config)
        return None
    if config.task_type == "evaluator":
        return _follow(estimator, train_spec, eval_spec)
    if config.num_worker_replicas + config.num_ps_replicas > 1:  # evaluators are unknown to others
        estimator.train(train_spec.input_fn, train_spec.hooks, max_steps=train_spec.max_steps)
        return None
    return _between_steps(estimator, train_spec, eval_spec)


def _serve(config: RunConfig) -> None:
    assert config.task_id is not None
    Server(config.cluster_spec, job_name="ps", task_index=config.task_id).join()


def _follow(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> dict[str, float] | None:
    """Evaluate the checkpoints of others."""
    model, elements = estimator.open_evaluation(eval_spec.input_fn)
    opened = [elements]

    def evaluate() -> dict[str, float]:
        data = opened.pop() if opened else estimator.open_evaluation(eval_spec.input_fn)[1]
        return estimator.evaluate_restored(
            model, data, eval_spec.steps, eval_spec.hooks, eval_spec.name
        )

    def ended(path: str, results: Any) -> None:
        if train_spec.max_steps is not None and results["global_step"] >= train_spec.max_steps:
            evaluator.stop()

    checkpoint = model.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    folder = estimator.eval_dir(eval_spec.name)
    evaluator = SidecarEvaluator(
        checkpoint, evaluate, estimator.model_dir, on_result=ended, log_dir=folder
    )
    results = evaluator.start()
    return results[-1][1] if results else None


def _between_steps(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> dict[str, float] | None:
    """Train, and evaluate checkpoints when they were saved, not too often."""
    throttle = EvaluationPauses(eval_spec.start_delay_secs, eval_spec.throttle_secs)
    done: dict[str, dict[str, float]] = {}

    def evaluate(path: str) -> None:
        done.clear()
        done[path] = estimator.evaluate(
            eval_spec.input_fn, eval_spec.steps, eval_spec.hooks, path, eval_spec.name
        )

    def saved(path: str) -> None:
        if throttle.is_due():
            evaluate(path)
            throttle.evaluated()

    estimator.train(
        train_spec.input_fn,
        train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=[saved],
    )
    newest = estimator.latest_checkpoint()
    if newest is not None and newest not in done:
        evaluate(newest)
    return next(iter(done.values()), None)


class EvaluationPauses:
    """Says when it is time for another evaluation.

    Args:
        delay: seconds before the first.
        pause: seconds between two.
        clock: gives the time in seconds.
    """

    def __init__(self, delay: float, pause: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause, self._clock = pause, clock
        self._next = clock() + delay

    def is_due(self) -> bool:
        """Whether it is time."""
        return self._clock() >= self._next

    def evaluated(self) -> None:
        """An evaluation has just ended."""
        self._next = self._clock() + self._pause
