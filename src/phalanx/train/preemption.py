"""`PreemptionCheckpointHandler`: saves before machines are taken away, and goes on from there."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.core import context as ctx
from phalanx.core.variables.variable import Variable
from phalanx.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    PhalanxError,
    UnsupportedError,
)
from phalanx.job.connection import connected
from phalanx.job.hub.descriptions import PREEMPTION
from phalanx.runtime.deadlines import terminate_patience
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import Bell, start
from phalanx.train.agreed_stop import AgreedStop
from phalanx.train.checkpoints.checkpoint import Checkpoint
from phalanx.train.checkpoints.manager import CheckpointManager
from phalanx.train.checkpoints.saving_again import save_surely, settle
from phalanx.train.termination import (
    RESTARTABLE_EXIT_CODE,
    LoopPace,
    Notices,
    TerminationConfig,
)

__all__ = ["PreemptionCheckpointHandler"]

T = TypeVar("T")

_log = logging.getLogger("phalanx")

_PROMISE = "preemption promise"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_POLL = 1.0  # seconds between questions to the watch function
_COUNTER = "preemption_run_calls"


class _NoDirectoryError(InvalidTypeError, InvalidArgumentError):
    """A checkpoint needs a directory."""


class PreemptionCheckpointHandler:
    """Saves a checkpoint when the machine of a worker is about to be taken away, and ends the program.

    Make it after the objects of the checkpoint: it restores the newest checkpoint, and so a program
    that is started again goes on where it was, with the positions of its iterators. Call each step, or
    a fixed number of steps, through `run`.

    A notice is SIGTERM or SIGUSR1, what `TerminationConfig.termination_watcher_fn` finds, or what
    ``phalanx run`` passes on. It may reach a single worker. All workers then agree on the step after
    which they save, at the beginning of the next `run`, and end with code 143, for which launchers
    start a job again.

    Args:
        cluster_resolver: finds the workers, as for the strategy; None will do.
        checkpoint_or_checkpoint_manager: what is saved.
        checkpoint_dir: where, if it is a `px.train.Checkpoint`.
        termination_config: a `TerminationConfig`.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> step = px.Variable(0)
        >>> folder = tempfile.TemporaryDirectory()
        >>> config = px.experimental.TerminationConfig(exit_fn=lambda: print("saved"))
        >>> handler = px.experimental.PreemptionCheckpointHandler(
        ...     None, px.train.Checkpoint(step=step), folder.name, config
        ... )
        >>> for i in range(3):
        ...     _ = handler.run(step.assign_add, 1)
        ...     if i == 0:
        ...         handler.notify()
        saved
        >>> int(px.train.load_variable(folder.name, "step"))
        2
        >>> handler.close()
        >>> folder.cleanup()
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        if not isinstance(termination_config, TerminationConfig | None):
            raise InvalidTypeError(
                "`termination_config` must be a px.experimental.TerminationConfig or None. "
                f"Received: {shown(termination_config)}"
            )
        _check_cluster(cluster_resolver)
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._config = termination_config or TerminationConfig()
        checkpoint = self._manager.checkpoint
        if not hasattr(checkpoint, _COUNTER):
            with ctx.push(ctx.default_mode()):
                setattr(checkpoint, _COUNTER, Variable(np.int32(0), trainable=False, name=_COUNTER))
        self._calls: Variable = getattr(checkpoint, _COUNTER)
        self._connection = connected()
        remedy = "Make a PreemptionCheckpointHandler on every worker."
        self._stop = AgreedStop(self._connection, _PROMISE, remedy)
        self._positions: dict[str, Any] | None = None
        self._notices = Notices(self._config.grace_period, terminate_patience())
        self._pace = LoopPace()
        self._is_closed = self._is_saved = self._is_warned = self._is_cut = False
        self._bell = Bell()
        self._before: dict[int, Any] = {}
        self._manager.restore_or_initialize()
        self._listen()

    # -- training --------------------------------------------------------------------------------

    @property
    def total_run_calls(self) -> int:
        """How often `run` was called, also before the program was started again."""
        return int(self._calls)

    def run(self, distributed_train_function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that makes a step; saves and ends the program first if it is time.

        Args:
            distributed_train_function: makes a step, or several.
            *args: its arguments. An element that was taken from an iterator for this call counts as
                not taken if the program ends.
            **kwargs: its keyword arguments.
        """
        self._stop_if_over(self._positions)
        self._stop.begin()
        result = distributed_train_function(*args, **kwargs)
        self._calls.assign_add(1)
        if self._notices.is_noted or self._stop.is_pending:
            self._positions = self._manager.checkpoint.positions()
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Say that a step has been made; saves and ends the program if it is time.

        For programs that do not use `run`. The arguments are those of `CheckpointManager.save`, or of
        `TerminationConfig.save_fn`.
        """
        self._stop.begin()
        self._calls.assign_add(1)
        self._stop_if_over(None, *args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """A block in which notices count; they count outside too."""
        yield

    def notify(self) -> None:
        """Give a notice, as a signal would. Any thread may call this."""
        self._notices.note(time.monotonic())
        self._bell.ring()

    def close(self) -> None:
        """Give back signal handlers and the thread."""
        self._is_closed = True
        self._bell.ring()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        self._stop.close()
        if self._connection is not None:
            self._connection.member.when_told(PREEMPTION, None)

    # -- notices ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        if self._connection is not None:
            member = self._connection.member
            member.when_told(PREEMPTION, lambda rank, value: self.notify())
        thread = threading.Thread(target=self._watch, name="phalanx-preemption", daemon=True)
        start(thread)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The lock may be held by the code that is interrupted, so another thread goes on from here.
        self._notices.note(time.monotonic(), number == signal.SIGTERM)
        self._bell.ring()

    def _watch(self) -> None:
        """Wait for a notice, and then for the time to stop."""
        while not self._notices.is_noted and not self._is_closed:
            self._bell.wait(_POLL)
            if not self._notices.is_noted and self._asked():
                self._notices.note(time.monotonic())
        if self._is_closed:
            return
        seconds = self._seconds_left()
        _log.warning(
            "There is a notice that this machine will be taken away. A checkpoint is saved after %s.",
            f"{seconds:.0f} seconds" if seconds > 0 else "the next step",
        )
        self._warn_if_cut()
        while not self._is_closed and (left := self._seconds_left()) > 0:
            self._bell.wait(min(left, _POLL))  # meanwhile steps may turn out to be slower
            self._warn_if_cut()
        if not self._is_closed:
            with contextlib.suppress(PhalanxError):  # the job has failed, as its training is told
                self._stop.announce()

    def _warn_if_cut(self) -> None:
        if self._notices.is_cut and not self._is_cut:
            self._is_cut = True
            _log.warning(
                "The launcher kills this process %g seconds after SIGTERM, before its grace period of "
                "%g seconds is over, so it saves earlier. Give phalanx run --terminate-grace %g.",
                self._notices.patience,
                self._config.grace_period,
                self._config.grace_period,
            )

    def _seconds_left(self) -> float:
        """Until the time to stop, of which there was a notice, by what is measured now."""
        now = time.monotonic()
        return self._notices.seconds_left(now, self._manager.save_seconds, self._pace.two_steps(now))

    def _asked(self) -> bool:
        """What the watch function says. One that fails is asked again: signals count all the same."""
        watcher = self._config.termination_watcher_fn
        try:
            return watcher is not None and bool(watcher())
        except Exception as error:  # noqa: BLE001 - it is the user's, and a network may be slow
            if not self._is_warned:
                _log.warning(
                    "`termination_watcher_fn` failed, and is asked again each second; this is said "
                    "once: %r",
                    error,
                )
            self._is_warned = True
            return False

    # -- the end ---------------------------------------------------------------------------------

    def _stop_if_over(self, positions: dict[str, Any] | None, *args: Any, **kwargs: Any) -> None:
        self._pace.begin(time.monotonic())
        if self._notices.is_noted and self._seconds_left() <= 0:
            self._stop.announce()
        self._stop.wait_for_answers()
        if self._stop.is_over and not self._is_saved:
            begun = time.monotonic()
            self._save(positions, *args, **kwargs)
            self._is_saved = True
            _log.warning(
                "Saved %s after %d calls, in %.1f seconds, because of a notice.",
                self._manager.latest_checkpoint,
                self.total_run_calls,
                time.monotonic() - begun,
            )
            exit_fn = self._config.exit_fn
            sys.exit(RESTARTABLE_EXIT_CODE) if exit_fn is None else exit_fn()

    def _save(self, positions: dict[str, Any] | None, *args: Any, **kwargs: Any) -> None:
        manager = self._manager
        if self._config.save_fn is not None:  # which may not be called twice
            settle(manager, self._connection)
            self._config.save_fn(*args, **kwargs)
            manager.sync()
        elif args or kwargs:
            given = {"check_interval": False, **kwargs}
            save_surely(manager, self._connection, lambda: manager.save(*args, **given))
        else:
            save_surely(manager, self._connection, lambda: manager.save_at(positions=positions))


def _check_cluster(resolver: ClusterResolver | None) -> None:
    if resolver is None:
        return
    spec = resolver.cluster_spec()
    if spec and "ps" in spec.jobs:
        raise UnsupportedError(
            "PreemptionCheckpointHandler is for workers that train together. A coordinator goes on "
            "without a worker, and ClusterCoordinator.checkpoint saves what parameter servers hold. "
            f"Received: {spec}"
        )


def _manager_of(given: Any, folder: str | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        return given
    if not isinstance(given, Checkpoint):
        raise InvalidTypeError(
            "`checkpoint_or_checkpoint_manager` must be a px.train.Checkpoint or a "
            f"px.train.CheckpointManager. Received: {shown(given)}"
        )
    if folder is None:
        raise _NoDirectoryError(
            "With a px.train.Checkpoint, `checkpoint_dir` must say where to save it. Received: None"
        )
    return CheckpointManager(given, folder, max_to_keep=1)
