"""After which step a job that must end stops, the same on all workers. No clock, thread or socket."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = [
    "RESTARTABLE_EXIT_CODE",
    "LoopPace",
    "Notices",
    "StopAgreement",
    "TerminationConfig",
    "training_seconds",
]

RESTARTABLE_EXIT_CODE = 128 + int(signal.SIGTERM)
"""143, how a process ends that SIGTERM has ended: launchers and schedulers start such a job again."""

_SHARE_FOR_SAVING = 0.2  # of the grace period, at least
_SHARE_UNMEASURED = 0.5  # of the grace period, as long as nothing was saved
_MARGIN = 1.0  # seconds that a process needs to end before its launcher kills it


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
            as there is time left for two steps, with what is between them, and two saves, each as long
            as was measured; before a first save, for half of the period. A launcher that kills the
            program earlier after SIGTERM (``phalanx run --terminate-grace``) shortens it. None or 0
            saves after the next step.
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


def training_seconds(grace: float | None, save: float | None, two_steps: float) -> float:
    """How long training may go on after a notice.

    Reserved are the two steps that may be begun before all workers know of the last one, and two saves:
    one that may be under way, and the last.

    Args:
        grace: seconds from the notice to the end.
        save: seconds that a checkpoint takes; None if none was saved yet.
        two_steps: seconds that two steps take, with all that is between them.

    Examples:
        >>> training_seconds(60.0, save=4.0, two_steps=2.0), training_seconds(60.0, 29.0, 2.0)
        (48.0, 0.0)
        >>> training_seconds(60.0, save=None, two_steps=2.0)
        30.0
    """
    if not grace:
        return 0.0
    share = _SHARE_UNMEASURED if save is None else _SHARE_FOR_SAVING
    reserve = max(share * grace, 2 * (save or 0.0) + two_steps)
    return max(0.0, grace - reserve)


@dataclass
class LoopPace:
    """How long the loop of a training takes from the beginning of one step to that of the next.

    So input, evaluation, logging and saving between the steps count. The first step, which is compiled,
    counts as long as it is the only one.

    Examples:
        >>> pace = LoopPace()
        >>> [pace.begin(now) for now in (0.0, 30.0, 31.0, 36.0, 37.0)]
        [None, None, None, None, None]
        >>> pace.two_steps(now=37.0)
        6.0
    """

    _begun: float | None = None
    _last: float | None = None
    _first: float | None = None
    _longest: float | None = None  # of any two steps, one after the other

    def begin(self, now: float) -> None:
        """A step begins."""
        if self._begun is not None:
            period = now - self._begun
            if self._first is None:
                self._first = period
            else:
                two = period + (period if self._last is None else self._last)
                self._longest = two if self._longest is None else max(two, self._longest)
                self._last = period
        self._begun = now

    def two_steps(self, now: float) -> float:
        """The most seconds that two steps have taken; before there was one, what it takes so far."""
        if self._longest is not None:
            return self._longest
        if self._first is not None:
            return 2 * self._first
        return 0.0 if self._begun is None else 2 * (now - self._begun)


@dataclass
class Notices:
    """When there was a notice, and when the training is to stop because of it.

    Args:
        grace: seconds from a notice to the end; None or 0 stops at once.
        patience: seconds after which the launcher kills a process that it has sent SIGTERM; None if
            there is no launcher.

    Examples:
        >>> notices = Notices(grace=60.0, patience=11.0)
        >>> notices.note(0.0), notices.seconds_left(3.0, save=1.0, two_steps=0.5)
        (None, 45.0)
        >>> notices.note(5.0, is_terminated=True), notices.seconds_left(5.0, save=1.0, two_steps=0.5)
        (None, 7.5)
    """

    grace: float | None
    patience: float | None = None
    _noted: float | None = None
    _terminated: float | None = None

    @property
    def is_noted(self) -> bool:
        """Whether there was a notice."""
        return self._noted is not None

    @property
    def is_cut(self) -> bool:
        """Whether the launcher ends the process before the grace period is over."""
        is_shorter = self.patience is not None and self.patience < (self.grace or 0.0)
        return self._terminated is not None and is_shorter

    def note(self, now: float, is_terminated: bool = False) -> None:
        """There is a notice; `is_terminated` if it is SIGTERM. The first of each kind counts."""
        if is_terminated and self._terminated is None:
            self._terminated = now
        if self._noted is None:
            self._noted = now

    def seconds_left(self, now: float, save: float | None, two_steps: float) -> float:
        """How long training may still go on; see `training_seconds`. There was a notice."""
        assert self._noted is not None
        end = self._noted + training_seconds(self.grace, save, two_steps)
        if self._terminated is not None and self.patience is not None:
            left = min(self.grace or 0.0, max(0.0, self.patience - _MARGIN))
            end = min(end, self._terminated + training_seconds(left, save, two_steps))
        return end - now


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
