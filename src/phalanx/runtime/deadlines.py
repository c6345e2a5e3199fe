"""How long Phalanx waits, in one place.

Nothing waits forever. A wait first warns, naming who is late and where they are, and then raises.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown

STUCK_EXIT_CODE = 70
"""How a process ends that hangs in native code after its job has failed."""

TERMINATE_GRACE = "PHALANX_TERMINATE_GRACE"
"""How many seconds after SIGTERM the launcher kills a process, for programs that save then."""

_LONGEST = 1e9  # seconds


@dataclass(frozen=True)
class WaitLimits:
    """After how many seconds a wait warns, and after how many it gives up."""

    warn_after: float
    give_up_after: float


class limited:  # noqa: N801 - reads as a statement
    """Programs between workers that begin inside have so many seconds; None changes nothing.

    >>> with limited(5.0), limited(None):
    ...     limit()
    5.0
    """

    __slots__ = ("_before", "_seconds")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = _thread.limit
        if self._seconds is not None:
            _thread.limit = self._seconds

    def __exit__(self, *exc_info: object) -> None:
        _thread.limit = self._before


class _Thread(threading.local):
    limit: float | None = None


_thread = _Thread()


def limit() -> float | None:
    """How many seconds a program between workers has that begins here; None for the usual deadline."""
    return _thread.limit


def worker_deadline() -> float:
    """How many seconds a worker waits for other workers before the job gives up.

    Ten minutes, or what the environment variable PHALANX_DEADLINE says.
    """
    return _seconds("PHALANX_DEADLINE", "600")


def terminate_patience() -> float | None:
    """How many seconds after SIGTERM the launcher kills this process; None if there is none."""
    if TERMINATE_GRACE not in os.environ:
        return None
    return _seconds(TERMINATE_GRACE, "", may_be_zero=True)


def replica_patience() -> WaitLimits:
    """How long replicas of one process wait for each other at a merge point.

    The default gives a slow replica (compiling, reading data) half an hour, with a warning each
    minute. The environment variable PHALANX_REPLICA_DEADLINE sets another number of seconds.
    """
    seconds = _seconds("PHALANX_REPLICA_DEADLINE", "1800")
    return WaitLimits(warn_after=min(60.0, seconds / 2), give_up_after=seconds)


def _seconds(variable: str, default: str, may_be_zero: bool = False) -> float:
    text = os.environ.get(variable, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _LONGEST and not (may_be_zero and seconds == 0):
        raise InvalidValueError(
            f"The environment variable {variable} must be a positive number of seconds, at most "
            f"{_LONGEST:g}: nothing waits forever. Received: {shown(text)}"
        )
    return seconds
