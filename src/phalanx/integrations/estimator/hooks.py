"""What happens between steps: `SessionRunHook` and the usual ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.errors import DataLossError, InvalidValueError
from phalanx.runtime.formatting import shown

_log = logging.getLogger("phalanx")


class SessionRunContext:
    """Where training is; hooks get it, and may ask to stop.

    Args:
        read: gives the value of a variable by its name.
        save: saves a checkpoint, and returns its path.
        global_step: how many steps have been made.
    """

    def __init__(
        self, read: Callable[[str], Any], save: Callable[[], str | None], global_step: int = 0
    ) -> None:
        self._read, self._save = read, save
        self.global_step = global_step
        self._stop = False

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has asked to stop."""
        return self._stop

    @property
    def session(self) -> SessionRunContext:
        """This object, which stands for a session of TensorFlow."""
        return self

    def request_stop(self) -> None:
        """Let this step be the last one, on all workers that train together, if one of them asks."""
        self._stop = True

    def variable_value(self, name: str) -> np.ndarray[Any, Any]:
        """The value of a variable now."""
        return np.asarray(self._read(name))

    def save_checkpoint(self) -> str | None:
        """Save a checkpoint now, and return its path. With several workers, all of them must save."""
        return self._save()


@dataclass(frozen=True)
class SessionRunValues:
    """What a step has given.

    Args:
        results: by name: ``loss`` and ``global_step``. The loss is an array; reading it waits for the
            step.
    """

    results: Mapping[str, Any]


class SessionRunHook:
    """Called between steps; override what you need.

    Examples:
        >>> import phalanx as px
        >>> class StopWhenGood(px.estimator.SessionRunHook):
        ...     def after_run(self, run_context, run_values):
        ...         if float(run_values.results["loss"]) < 0.01:
        ...             run_context.request_stop()
    """

    def begin(self) -> None:
        """Called once, before anything else."""

    def after_create_session(self, session: SessionRunContext, coord: Any) -> None:
        """Called once, when all variables have their values; `coord` is None."""

    def before_run(self, run_context: SessionRunContext) -> None:
        """Called before each step."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each step."""

    def end(self, session: SessionRunContext) -> None:
        """Called once, after the last step; not if a step has failed."""


class _Timer:
    """Says when it is time again, by steps or by seconds."""

    def __init__(self, steps: int | None, seconds: float | None, what: str) -> None:
        if (steps is None) == (seconds is None):
            raise InvalidValueError(
                f"{what} needs a number of steps or of seconds, one of them. "
                f"Received: {shown(steps)} steps, {shown(seconds)} seconds"
            )
        self.steps, self.seconds = steps, seconds
        self.last_step, self.last_time = 0, 0.0

    def reset(self, step: int) -> tuple[int, float]:
        """Begin anew; gives how many steps and seconds have passed."""
        now = time.monotonic()
        passed = step - self.last_step, now - self.last_time
        self.last_step, self.last_time = step, now
        return passed

    def is_due(self, step: int) -> bool:
        if self.steps is not None:
            return step - self.last_step >= self.steps
        assert self.seconds is not None
        return time.monotonic() - self.last_time >= self.seconds


class StopAtStepHook(SessionRunHook):
    """Stops after a number of steps, or at a step.

    Args:
        num_steps: how many steps to make.
        last_step: at which global step to stop.

    Examples:
        >>> import phalanx as px
        >>> hook = px.estimator.StopAtStepHook(last_step=100)
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise InvalidValueError(
                "StopAtStepHook needs num_steps or last_step, one of them. "
                f"Received: num_steps={shown(num_steps)}, last_step={shown(last_step)}"
            )
        self._count, self._last = num_steps, last_step

    def after_create_session(self, session: SessionRunContext, coord: Any) -> None:
        """Count from here."""
        if self._count is not None:
            self._last = session.global_step + self._count

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Stop, if it is time."""
        assert self._last is not None
        if run_context.global_step >= self._last:
            run_context.request_stop()


class NanTensorHook(SessionRunHook):
    """Stops, or fails, if the loss is not a number. It waits for each step.

    Args:
        fail_on_nan_loss: whether to raise an error.

    Examples:
        >>> import phalanx as px
        >>> hook = px.estimator.NanTensorHook(fail_on_nan_loss=False)
    """

    def __init__(self, fail_on_nan_loss: bool = True) -> None:
        self._fail = fail_on_nan_loss

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Look at the loss."""
        loss = float(run_values.results["loss"])
        if not np.isnan(loss):
            return
        if self._fail:
            raise DataLossError(f"The loss is not a number at step {run_context.global_step}.")
        run_context.request_stop()


class LoggingTensorHook(SessionRunHook):
    """Logs results and variables.

    Args:
        tensors: names: ``loss``, ``global_step``, or names of variables; or a dict of labels and names.
        every_n_iter: after how many steps.
        every_n_secs: after how many seconds.
        at_end: whether to log at the end, too.
        formatter: makes the text, of the values by their labels.

    Examples:
        >>> import phalanx as px
        >>> hook = px.estimator.LoggingTensorHook(["loss"], every_n_iter=10)
    """

    def __init__(
        self,
        tensors: Mapping[str, str] | Iterable[str],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        self._names = dict(tensors) if isinstance(tensors, Mapping) else {n: n for n in tensors}
        self._timer = _Timer(every_n_iter, every_n_secs, "LoggingTensorHook")
        self._at_end, self._formatter = at_end, formatter
        self._values: SessionRunValues | None = None

    def after_create_session(self, session: SessionRunContext, coord: Any) -> None:
        """Count from here."""
        self._timer.reset(session.global_step)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Log, if it is time."""
        self._values = run_values
        if self._timer.is_due(run_context.global_step):
            self._timer.reset(run_context.global_step)
            self._say(run_context)

    def end(self, session: SessionRunContext) -> None:
        """Log once more, if that was asked for."""
        if self._at_end and self._values is not None:
            self._say(session)

    def _say(self, context: SessionRunContext) -> None:
        results = {} if self._values is None else self._values.results
        values = {
            label: np.asarray(results[name]) if name in results else context.variable_value(name)
            for label, name in self._names.items()
        }
        if self._formatter is not None:
            text = self._formatter(values)
        else:
            text = ", ".join(f"{label} = {value}" for label, value in values.items())
        _log.info("%s", text)


class StepCounterHook(SessionRunHook):
    """Logs how many steps are made per second.

    Args:
        every_n_steps: after how many steps.
        every_n_secs: after how many seconds.
        write: called with the name, the value and the step, to write a summary.

    Examples:
        >>> import phalanx as px
        >>> hook = px.estimator.StepCounterHook(every_n_steps=50)
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        write: Callable[[str, float, int], None] | None = None,
    ) -> None:
        self._timer = _Timer(every_n_steps, every_n_secs, "StepCounterHook")
        self._write = write
        self.steps_per_second: float | None = None

    def after_create_session(self, session: SessionRunContext, coord: Any) -> None:
        """Count from here."""
        self._timer.reset(session.global_step)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Log, if it is time."""
        step = run_context.global_step
        if not self._timer.is_due(step):
            return
        steps, seconds = self._timer.reset(step)
        self.steps_per_second = steps / max(seconds, 1e-9)
        _log.info("global_step/sec: %.4g", self.steps_per_second)
        if self._write is not None:
            self._write("global_step/sec", self.steps_per_second, step)


class CheckpointSaverHook(SessionRunHook):
    """Saves checkpoints. An estimator has one of its own, as its configuration says.

    Args:
        save_secs: after how many seconds.
        save_steps: after how many steps.
        agree: called with whether it is time; gives the answer of the first worker. By default every
            process decides for itself.

    Examples:
        >>> import phalanx as px
        >>> hook = px.estimator.CheckpointSaverHook(save_steps=100)
    """

    def __init__(
        self,
        save_secs: float | None = None,
        save_steps: int | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._timer = _Timer(save_steps, save_secs, "CheckpointSaverHook")
        self._agree = agree

    def after_create_session(self, session: SessionRunContext, coord: Any) -> None:
        """Count from here."""
        self._timer.reset(session.global_step)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Save, if it is time."""
        due = self._timer.is_due(run_context.global_step)
        if self._agree is not None and self._timer.seconds is not None:  # clocks differ
            due = self._agree(due)
        if due:
            self._timer.reset(run_context.global_step)
            run_context.save_checkpoint()
