"""After which step a job that must end stops, the same on all workers. No clock, thread or socket."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = ["RESTARTABLE_EXIT_CODE", "StopAgreement", "TerminationConfig", "training_seconds"]

RESTARTABLE_EXIT_CODE = 128 + int(signal.SIGTERM)
"""143, how a process ends that SIGTERM has ended: launchers and schedulers start such a job again."""

_SHARE_FOR_SAVING = 0.2  # of the grace period, at least


@dataclass(frozen=True)
class TerminationConfig:
    """How a job notices that its machines will be taken away, and what it does then.

    SIGTERM and SIGUSR1 are always notices, and so is a notice that ``phalanx run`` passes on.

    Args:
        termination_watcher_fn: called about once a second in a thread; returns True once there is a
            notice. For clouds that announce the end in another way than by a signal. If it raises, it
            is asked again.
        exit_fn: called after the checkpoint was saved; by default the program ends with code 143.
        grace_period: how many seconds there are from the notice to the end. Training goes on as long
            as there is time left to save. None or 0 saves after the next step.
        save_fn: saves in place of `CheckpointManager.save`, and takes the arguments of
            `PreemptionCheckpointHandler.save_checkpoint_if_preempted`.

    Examples:
        >>> import phalanx as px
        >>> px.experimental.TerminationConfig(grace_period=30).grace_period
        30
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise InvalidTypeError(f"`{name}` must be a function or None. Received: {shown(given)}")
        grace = self.grace_period
        if grace is not None and (isinstance(grace, bool) or not isinstance(grace, int | float)):
            raise InvalidTypeError(
                f"`grace_period` must be a number of seconds. Received: {shown(grace)}"
            )
        if grace is not None and not 0 <= grace < float("inf"):
            raise InvalidValueError(
                f"`grace_period` must be a number of seconds, not negative. Received: {shown(grace)}"
            )


def training_seconds(grace: float | None, save: float, step: float) -> float:
    """How long training may go on after a notice.

    Args:
        grace: seconds from the notice to the end.
        save: seconds that a checkpoint is expected to take.
        step: seconds that a step takes.

    Examples:
        >>> training_seconds(60.0, save=4.0, step=1.0), training_seconds(60.0, save=50.0, step=1.0)
        (48.0, 0.0)
    """
    if not grace:
        return 0.0
    reserve = max(_SHARE_FOR_SAVING * grace, 2 * save + 2 * step)
    return max(0.0, grace - reserve)


@dataclass
class StopAgreement:
    """Which step is the last one, on one of several workers.

    Who gets a notice tells all others how many steps it has begun, and they answer with their own
    numbers. The last step is the one after the largest. No worker waits, unless it would begin a
    step which may turn out to be one too many.

    Args:
        rank: the number of this worker.
        size: how many workers there are.

    Examples:
        >>> one, other = StopAgreement(0, 2), StopAgreement(1, 2)
        >>> one.begin(), one.begin(), other.begin()
        (1, 2, 1)
        >>> promise = one.notice()  # to be told to the other
        >>> answer = other.told(0, promise)  # to be told to the one
        >>> one.told(1, answer), one.last, other.last
        (None, 3, 3)
    """

    rank: int
    size: int
    started: int = 0
    promises: dict[int, int] = field(default_factory=dict)

    @property
    def is_pending(self) -> bool:
        """Whether there is a notice."""
        return self.rank in self.promises

    @property
    def last(self) -> int | None:
        """The last step, if it is known."""
        return max(self.promises.values()) + 1 if len(self.promises) == self.size else None

    @property
    def is_over(self) -> bool:
        """Whether the last step has been made."""
        return self.last is not None and self.started >= self.last

    @property
    def may_begin(self) -> bool:
        """Whether the next step can be begun at once; if not, and it is not over, wait for answers."""
        if not self.is_pending:
            return True
        last = self.last
        # Before the others have answered, only the step after the promise is sure to be made.
        return self.started < (self.promises[self.rank] + 1 if last is None else last)

    def begin(self) -> int:
        """A step begins; returns its number."""
        self.started += 1
        return self.started

    def notice(self) -> int | None:
        """There is a notice; returns what to tell the others, None if they know."""
        if self.is_pending:
            return None
        self.promises[self.rank] = self.started
        return self.started

    def told(self, rank: int, promise: int) -> int | None:
        """Another worker has told its number; returns what to tell the others, None if they know."""
        self.promises[rank] = promise
        return self.notice()
