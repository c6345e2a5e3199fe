"""`SidecarEvaluator`: a task that evaluates the checkpoints of a training, beside it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

from phalanx.errors import DeadlineExceededError, InvalidTypeError, InvalidValueError, NotFoundError
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import Bell
from phalanx.train.checkpoints.checkpoint import Checkpoint
from phalanx.train.checkpoints.manager import wait_for_new_checkpoint
from phalanx.train.checkpoints.state import latest_checkpoint

__all__ = ["SidecarEvaluator"]

_TIMEOUT = 3600.0  # seconds
_LOG = "evaluations.jsonl"


class SidecarEvaluator:
    """Evaluates each new checkpoint of a directory, while other tasks train.

    The evaluator is the task ``evaluator`` of the cluster. It knows nothing of the others but the
    directory in which they save checkpoints, so neither holds up the other. Only the newest checkpoint
    is evaluated if there are several new ones.

    `start` returns after `max_evaluations`, or after `stop`, or when the process gets SIGTERM, which
    ``phalanx run --evaluator`` sends when training is done. If there is a checkpoint then that was not
    evaluated, it is, so the last one always counts.

    Args:
        checkpoint: the objects that take the values; what a checkpoint has besides is passed over.
        evaluate_fn: called after each restoring; what it returns, numbers by name for example, is the
            result.
        checkpoint_dir: where training saves checkpoints, by `px.train.CheckpointManager` for example.
        max_evaluations: how many checkpoints are evaluated; None has no limit.
        timeout: after how many seconds without a new checkpoint to raise `DeadlineExceededError`.
        on_result: called with the path of the checkpoint and the result.
        log_dir: where results are appended to the file ``evaluations.jsonl``; None writes none.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> w = px.Variable(3.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = px.train.Checkpoint(w=w).save(f"{folder}/ckpt")
        ...     evaluator = px.coordinator.SidecarEvaluator(
        ...         px.train.Checkpoint(w=w), lambda: {"loss": float(w) ** 2}, folder, max_evaluations=1
        ...     )
        ...     evaluator.start()
        [('ckpt-1', {'loss': 9.0})]
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        evaluate_fn: Callable[[], Any],
        checkpoint_dir: str,
        max_evaluations: int | None = None,
        *,
        timeout: float = _TIMEOUT,
        on_result: Callable[[str, Any], None] | None = None,
        log_dir: str | None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidTypeError(
                f"`checkpoint` must be a px.train.Checkpoint. Received: {shown(checkpoint)}"
            )
        if not callable(evaluate_fn):
            raise InvalidTypeError(f"`evaluate_fn` must be a function. Received: {shown(evaluate_fn)}")
        if max_evaluations is not None and max_evaluations < 1:
            raise InvalidValueError(
                f"`max_evaluations` must be positive or None. Received: {shown(max_evaluations)}"
            )
        self._checkpoint, self._evaluate, self._folder = checkpoint, evaluate_fn, checkpoint_dir
        self._most, self._timeout = max_evaluations, timeout
        self._on_result = on_result
        self._log = None if log_dir is None else Path(log_dir) / _LOG
        self._stop = False
        self._bell = Bell()

    def start(self) -> list[tuple[str, Any]]:
        """Evaluate checkpoints until it is time to stop; returns their names, with the results."""
        results: list[tuple[str, Any]] = []
        last: str | None = None
        with self._stopping_at_sigterm():
            while self._most is None or len(results) < self._most:
                path = self._next(last)
                if path is None:
                    break
                last = path
                try:
                    self._checkpoint.restore(path).expect_partial()
                except NotFoundError:  # training has removed it; there is a newer one
                    continue
                results.append((Path(path).name, self._evaluate_one(path)))
        return results

    def stop(self) -> None:
        """Let `start` return, after the newest checkpoint was evaluated. Any thread may call this."""
        self._stop = True
        self._bell.ring()

    def _next(self, last: str | None) -> str | None:
        """The next checkpoint to evaluate; None if it is time to stop."""
        path = None
        if not self._stop:
            path = wait_for_new_checkpoint(self._folder, last, timeout=self._timeout, bell=self._bell)
        if path is not None:
            return path
        if not self._stop:
            raise DeadlineExceededError(
                f"There was no new checkpoint in {self._folder!r} for {self._timeout:g} seconds. Is "
                f"the training over? Received: timeout={self._timeout:g}"
            )
        newest = latest_checkpoint(self._folder)
        return None if newest == last else newest

    def _evaluate_one(self, path: str) -> Any:
        result = self._evaluate()
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"checkpoint": Path(path).name, "result": jax.tree.map(_plain, result)})
            with open(self._log, "a") as file:
                file.write(f"{line}\n")
        if self._on_result is not None:
            self._on_result(path, result)
        return result

    @contextmanager
    def _stopping_at_sigterm(self) -> Iterator[None]:
        """In the main thread, SIGTERM means `stop`; other threads get none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self.stop()

        before = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def _plain(x: Any) -> Any:
    """A number or an array as JSON has it."""
    return np.asarray(x).tolist() if hasattr(x, "dtype") else x
