"""What the coordinator's machine wants to be done, and the states of what it knows."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.parameter_server.requests import Token

__all__ = [
    "Action",
    "Build",
    "ClosureOutcome",
    "ClosureSettled",
    "Inquire",
    "ReturnAttempts",
    "RunAttempts",
    "WorkerState",
]


class ClosureOutcome(enum.Enum):
    """What has become of a closure."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class WorkerState(enum.Enum):
    """What is known of a worker."""

    STARTING = "starting"
    UP = "up"
    LOST = "lost"


class RunAttempts(NamedTuple):
    """Send attempts to a worker, which makes them in this order.

    Args:
        worker: which.
        era: see `ReturnAttempts`.
        attempts: the closures, and the numbers of the attempts.
    """

    worker: int
    era: int
    attempts: Sequence[Token]


class ReturnAttempts(NamedTuple):
    """Let a worker return all attempts of this era, or of one before, that it has not begun.

    A worker of which an attempt has failed does so by itself.
    """

    worker: int
    era: int


class Build(NamedTuple):
    """Let a worker build resources, in this order, before it runs what is sent later."""

    worker: int
    resources: Sequence[int]


class Inquire(NamedTuple):
    """Find out what servers know of attempts whose worker was lost; from then on they refuse them."""

    worker: int
    attempts: Sequence[Token]


class ClosureSettled(NamedTuple):
    """It is known what has become of a closure; this is said once."""

    closure: int
    outcome: ClosureOutcome
    error: BaseException | None = None


Action = RunAttempts | ReturnAttempts | Build | Inquire | ClosureSettled
