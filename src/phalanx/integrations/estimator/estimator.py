"""`Estimator`: trains, evaluates and predicts with what a `model_fn` says."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from phalanx.core.strategy import Strategy
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError, InvalidValueError, NotFoundError, UnsupportedError
from phalanx.integrations.estimator.hooks import (
    CheckpointSaverHook,
    LoggingTensorHook,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
)
from phalanx.integrations.estimator.input_functions import distributed_input
from phalanx.integrations.estimator.replica_steps import ReplicaSteps, examples
from phalanx.integrations.estimator.run_config import RunConfig, made
from phalanx.integrations.estimator.specs import ModeKeys, check_count
from phalanx.integrations.estimator.summaries import SummaryHook, summaries
from phalanx.job.connection import connected
from phalanx.runtime.formatting import shown
from phalanx.strategies.old_parameter_server import OldParameterServerStrategy
from phalanx.strategies.parameter_server import ParameterServerStrategy
from phalanx.train.checkpoints.checkpoint import Checkpoint
from phalanx.train.checkpoints.manager import CheckpointManager
from phalanx.train.checkpoints.reader import CheckpointReader, load_checkpoint
from phalanx.train.checkpoints.state import latest_checkpoint

_log = logging.getLogger("phalanx")
_NAME = "model.ckpt"
_MODEL = "model/"


class Estimator:
    """Trains, evaluates and predicts with a model that a function describes.

    `model_fn` is called on each replica, with the rows of a batch that are its own, while the step is
    compiled. It asks for variables by name (`get_variable`, `get_parameters`) and returns an
    `EstimatorSpec`. The estimator differentiates the loss, and divides batches by the strategy of its
    configuration. Losses, metrics and weights do not depend on the number of replicas.

    All that it knows is in checkpoints: `train` goes on from the newest one of `model_dir`, and
    `evaluate` and `predict` read it.

    Args:
        model_fn: a function of ``features``, and of those of ``labels``, ``mode``, ``params`` and
            ``config`` that it has arguments for.
        model_dir: where checkpoints and summaries are. Without it, and without that of `config`, a new
            temporary folder.
        config: a `RunConfig`.
        params: passed on to `model_fn` and `input_fn`.
        warm_start_from: a checkpoint whose values the model begins with, if `model_dir` has none.

    Examples:
        >>> import tempfile
        >>> import numpy as np, optax, phalanx as px
        >>> def model_fn(features, labels, mode, params):
        ...     w = px.estimator.get_variable("w", (2,))
        ...     outputs = features @ w
        ...     if mode == px.estimator.ModeKeys.PREDICT:
        ...         return px.estimator.EstimatorSpec(mode, predictions=outputs)
        ...     losses = (outputs - labels) ** 2
        ...     return px.estimator.EstimatorSpec(mode, loss=losses, train_op=optax.sgd(params["rate"]))
        >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], np.float32)
        >>> def input_fn():
        ...     return px.data.Dataset.from_tensor_slices((x, x @ [2.0, 3.0])).repeat(100).batch(2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     estimator = px.estimator.Estimator(model_fn, folder, params={"rate": 0.3})
        ...     _ = estimator.train(input_fn, steps=60)
        ...     results = estimator.evaluate(input_fn, steps=1)
        ...     estimator.get_variable_value("w").round(2).tolist(), results["global_step"]
        ([2.0, 3.0], 60)
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: RunConfig | None = None,
        params: Any = None,
        warm_start_from: str | None = None,
    ) -> None:
        if not callable(model_fn):
            raise InvalidTypeError(f"model_fn must be a function. Received: {shown(model_fn)}")
        if config is not None and not isinstance(config, RunConfig):
            raise InvalidTypeError(
                f"config must be a px.estimator.RunConfig or None. Received: {shown(config)}"
            )
        config = config or RunConfig()
        folder = model_dir or config.model_dir
        if model_dir and config.model_dir and model_dir != config.model_dir:
            raise InvalidValueError(
                "The estimator and its configuration name different folders. "
                f"Received: model_dir={model_dir!r} and {config.model_dir!r}"
            )
        if folder is None:
            folder = tempfile.mkdtemp(prefix="estimator-")
            _log.warning("The estimator has no model_dir: it keeps checkpoints in %s.", folder)
        self._config = config.replace(model_dir=os.fspath(folder))
        self._model_fn, self._params, self._warm = model_fn, params, warm_start_from
        self._models: dict[str, ReplicaSteps] = {}
        self._strategies: dict[str, Strategy] = {}

    def __repr__(self) -> str:
        return f"<px.estimator.Estimator in {self.model_dir!r}>"

    @property
    def model_dir(self) -> str:
        """Where checkpoints are."""
        assert self._config.model_dir is not None
        return self._config.model_dir

    @property
    def config(self) -> RunConfig:
        """How it runs."""
        return self._config

    @property
    def params(self) -> Any:
        """What `model_fn` gets as ``params``."""
        return self._params

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The function that describes the model."""
        return self._model_fn

    # -- training --------------------------------------------------------------------------------

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Callable[[str], None]] | None = None,
    ) -> Estimator:
        """Train, from the newest checkpoint on, until the steps are done or the data end.

        Args:
            input_fn: returns a `px.data.Dataset` of global batches, or another iterable of batches, of
                features, or pairs of features and labels. It may have the arguments ``mode``,
                ``params`` and ``config``. With an argument ``input_context`` it returns the dataset of
                one input pipeline, in batches for one replica.
            hooks: called between steps.
            steps: how many steps to make.
            max_steps: at which global step to stop; at most one of the two.
            saving_listeners: called with the path of each checkpoint.
        """
        check_count(steps, "steps")
        check_count(max_steps, "max_steps")
        if steps is not None and max_steps is not None:
            raise InvalidValueError(
                "train takes steps or max_steps, not both. "
                f"Received: steps={steps}, max_steps={max_steps}"
            )
        if max_steps is not None and self._saved_step() >= max_steps:
            _log.info("Training is done: the newest checkpoint is at step %d.", self._saved_step())
            return self
        if self.latest_checkpoint() is None and not self._trains_on_servers():
            self._forget(ModeKeys.TRAIN)  # whose values are older, or those of a run that failed
        model, elements = self._opened(ModeKeys.TRAIN, input_fn)
        checkpoint = model.checkpoint
        assert checkpoint is not None
        saves = _takes_part_in_saving(model.strategy)
        manager = self._restored(model, checkpoint) if saves else None
        if self._trains_on_servers():
            with model.strategy.scope():  # others wait for it, and so for the restored values
                Variable(True, trainable=False, name="estimator_is_ready")
        begun = int(model.state.global_step)
        last = max_steps if steps is None else begun + steps
        saved: list[int] = [] if manager is None or manager.latest_checkpoint is None else [begun]

        def save() -> str | None:
            number = int(model.state.global_step)
            if manager is None or saved[-1:] == [number]:
                return None
            path = manager.save(number, check_interval=False)
            saved.append(number)
            if path is not None:
                for listener in saving_listeners or ():
                    listener(path)
            return path

        context = SessionRunContext(lambda name: _value(model, name), save, begun)
        with contextlib.ExitStack() as stack:
            own = self._own_hooks(model.strategy, stack)
            given = list(hooks or ())
            agrees = any(
                _exchanged(model.strategy, bool(given))
            )  # hooks may ask to stop on one worker only
            self._loop(model, elements, [*given, *own], context, last, agrees)
        return self

    def _loop(
        self,
        model: ReplicaSteps,
        elements: Iterator[Any],
        hooks: Sequence[SessionRunHook],
        context: SessionRunContext,
        last: int | None,
        agrees: bool = False,
    ) -> None:
        shares_steps = self._trains_on_servers()
        for hook in hooks:
            hook.begin()
        for hook in hooks:
            hook.after_create_session(context, None)
        while not context.stop_requested and (last is None or context.global_step < last):
            element = next(elements, None)
            if element is None:
                break
            for hook in hooks:
                hook.before_run(context)
            loss = model.strategy.experimental_local_results(model.run(element))[0]
            step = int(model.state.global_step) if shares_steps else context.global_step + 1
            context.global_step = step
            values = SessionRunValues({"loss": loss, "global_step": step})
            for hook in hooks:
                hook.after_run(context, values)
            if agrees and any(_exchanged(model.strategy, context.stop_requested)):
                context.request_stop()
        context.save_checkpoint()
        for hook in hooks:
            hook.end(context)

    def _own_hooks(self, strategy: Strategy, stack: contextlib.ExitStack) -> list[SessionRunHook]:
        """What the configuration asks for: logs and summaries on one task, and checkpoints."""
        config, hooks = self._config, list[SessionRunHook]()
        if strategy.extended.should_save_summary:
            write = None
            if config.save_summary_steps:
                write = stack.enter_context(summaries(self.model_dir))
                hooks.append(SummaryHook(config.save_summary_steps, write))
            if config.log_step_count_steps is not None:
                hooks.append(StepCounterHook(config.log_step_count_steps, write=write))
                every = config.log_step_count_steps
                hooks.append(LoggingTensorHook({"loss": "loss", "step": "global_step"}, every))
        steps, seconds = config.save_checkpoints_steps, config.save_checkpoints_secs
        if steps is not None or seconds is not None:
            hooks.append(CheckpointSaverHook(seconds, steps, agree=lambda due: _agreed(strategy, due)))
        return hooks

    def _restored(self, model: ReplicaSteps, checkpoint: Checkpoint) -> CheckpointManager:
        """Go on with the newest checkpoint; gives who saves others."""
        config = self._config
        manager = CheckpointManager(
            checkpoint,
            self.model_dir,
            max_to_keep=config.keep_checkpoint_max or None,
            keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
            checkpoint_name=_NAME,
        )
        if self._trains_on_servers() and int(model.state.global_step) > 0:
            return manager  # this task was started again, and the servers know more
        if manager.restore_or_initialize() is None and self._warm is not None:
            warm = Checkpoint(model=model.state.variables)
            warm.restore(self._warm).expect_partial()
        return manager

    # -- evaluating ------------------------------------------------------------------------------

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, float]:
        """The loss and the metrics of a checkpoint, over all examples, and its global step.

        Args:
            input_fn: gives the data; see `train`.
            steps: how many batches to take; None takes all.
            hooks: called between steps.
            checkpoint_path: which checkpoint; the newest one by default.
            name: of the folder of the results, ``eval_NAME``.
        """
        path = self._path(checkpoint_path)
        model, elements = self._opened(ModeKeys.EVAL, input_fn)
        assert model.checkpoint is not None
        model.checkpoint.restore(path).assert_existing_objects_matched()
        return self.evaluate_restored(model, elements, steps, hooks or (), name)

    def evaluate_restored(
        self,
        model: ReplicaSteps,
        elements: Iterator[Any],
        steps: int | None,
        hooks: Sequence[SessionRunHook],
        name: str | None,
    ) -> dict[str, float]:
        """As `evaluate`, with the values that a model has."""
        check_count(steps, "steps")
        step = int(model.state.global_step)
        context = SessionRunContext(lambda n: _value(model, n), lambda: None, step)
        model.reset_metrics()
        for hook in hooks:
            hook.begin()
            hook.after_create_session(context, None)
        for element in itertools.islice(elements, steps):
            for hook in hooks:
                hook.before_run(context)
            model.run(element)
            for hook in hooks:
                hook.after_run(context, SessionRunValues({"global_step": step}))
            if context.stop_requested:
                break
        results = model.results()
        for hook in hooks:
            hook.end(context)
        if model.strategy.extended.should_save_summary and _writes(self._config):
            with summaries(self.eval_dir(name)) as write:
                for key, value in results.items():
                    if isinstance(value, float):
                        write(key, value, step)
        _log.info("Evaluated step %d: %s", step, results)
        return results

    def eval_dir(self, name: str | None = None) -> str:
        """Where the results of evaluations are."""
        return str(Path(self.model_dir) / (f"eval_{name}" if name else "eval"))

    def open_evaluation(self, input_fn: Callable[..., Any]) -> tuple[ReplicaSteps, Iterator[Any]]:
        """A model to evaluate, with all its variables, and the data for it."""
        return self._opened(ModeKeys.EVAL, input_fn)

    # -- predicting ------------------------------------------------------------------------------

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields the predictions of each example, in order; in this process, on one device.

        Args:
            input_fn: gives features, or pairs, of which the first part counts.
            predict_keys: which predictions; all by default.
            hooks: called between steps.
            checkpoint_path: which checkpoint; the newest one by default.
            yield_single_examples: False yields the predictions of whole batches.
        """
        path = self._path(checkpoint_path)
        model, elements = self._opened(ModeKeys.PREDICT, input_fn)
        assert model.checkpoint is not None
        model.checkpoint.restore(path).assert_existing_objects_matched()
        context = SessionRunContext(
            lambda n: _value(model, n), lambda: None, int(model.state.global_step)
        )
        for hook in hooks or ():
            hook.begin()
            hook.after_create_session(context, None)
        for element in elements:
            for hook in hooks or ():
                hook.before_run(context)
            predictions = jax.tree.map(np.asarray, model.run(element))
            for hook in hooks or ():
                hook.after_run(context, SessionRunValues({"global_step": context.global_step}))
            if yield_single_examples:
                yield from examples(predictions, predict_keys)
            else:
                yield predictions
            if context.stop_requested:
                break
        for hook in hooks or ():
            hook.end(context)

    # -- checkpoints -----------------------------------------------------------------------------

    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint, None if there is none."""
        return latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """The names of all variables in the newest checkpoint."""
        return [name.removeprefix(_MODEL) for name in self._reader().get_variable_to_shape_map()]

    def get_variable_value(self, name: str) -> np.ndarray[Any, Any]:
        """The value of a variable in the newest checkpoint."""
        reader = self._reader()
        return reader.get_tensor(_MODEL + name if reader.has_tensor(_MODEL + name) else name)

    def _reader(self) -> CheckpointReader:
        return load_checkpoint(self._path(None))

    def _path(self, given: str | None) -> str:
        path = given or self.latest_checkpoint()
        if path is None:
            raise NotFoundError(
                f"There is no checkpoint in the folder: train first. Received: {self.model_dir!r}"
            )
        return path

    def _saved_step(self) -> int:
        path = self.latest_checkpoint()
        return -1 if path is None else int(load_checkpoint(path).get_tensor("global_step"))

    # -- models and input ------------------------------------------------------------------------

    def _opened(self, mode: str, input_fn: Callable[..., Any]) -> tuple[ReplicaSteps, Iterator[Any]]:
        """The model of a mode, with its variables, and the elements for it."""
        strategy = self._strategy(mode)
        known = {"mode": mode, "params": self._params, "config": self._config}
        elements = iter(distributed_input(input_fn, known, strategy))
        try:
            first = next(elements)
        except StopIteration:
            raise InvalidValueError(
                f"input_fn gives no batch for {mode!r}. Received: {shown(input_fn)}"
            ) from None
        model = self._models.get(mode)
        if model is None:
            model = ReplicaSteps(self._model_fn, mode, self._params, self._config, strategy)
            model.build(first)
            self._models[mode] = model
        return model, itertools.chain([first], elements)

    def _trains_on_servers(self) -> bool:
        return isinstance(self._strategy(ModeKeys.TRAIN), ParameterServerStrategy)

    def _forget(self, mode: str) -> None:
        self._models.pop(mode, None)

    def _strategy(self, mode: str) -> Strategy:
        given = {
            ModeKeys.TRAIN: self._config.train_distribute,
            ModeKeys.EVAL: self._config.eval_distribute,
        }
        if mode not in self._strategies:
            strategy = made(given.get(mode))
            servers = isinstance(strategy, ParameterServerStrategy)
            if servers and (
                mode == ModeKeys.EVAL or not isinstance(strategy, OldParameterServerStrategy)
            ):
                raise UnsupportedError(
                    "Under an estimator every task that trains runs the whole program: train with "
                    "px.experimental.ParameterServerStrategy, which has no coordinator, and evaluate "
                    f"without parameter servers. Received: {strategy!r} for {mode!r}"
                )
            self._strategies[mode] = strategy
        return self._strategies[mode]


def _writes(config: RunConfig) -> bool:
    """Whether this process writes results: an evaluator does, and one worker of all."""
    return config.is_chief or config.task_type == "evaluator"


def _value(model: ReplicaSteps, name: str) -> Any:
    known = {**model.state.variables, "global_step": model.state.global_step}
    if name not in known:
        raise NotFoundError(f"The model has the variables {sorted(known)}. Received: {name!r}")
    return known[name].numpy()


def _takes_part_in_saving(strategy: Strategy) -> bool:
    """Whether this process saves: with others, or as the only one with parameter servers."""
    return not isinstance(strategy, ParameterServerStrategy) or strategy.extended.should_checkpoint


def _agreed(strategy: Strategy, answer: bool) -> bool:
    """The answer of the first worker, if workers train together."""
    return bool(_exchanged(strategy, answer)[0])


def _exchanged(strategy: Strategy, answer: bool) -> list[bool]:
    """The answers of all workers that train together; else this one's."""
    connection = connected()
    together = len(strategy.extended._replica_devices) != strategy.num_replicas_in_sync
    if connection is None or not together:
        return [answer]
    return list(connection.member.exchange("estimator", answer))
