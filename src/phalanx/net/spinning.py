"""Waits for what comes soon without sleeping.

A process that sleeps finds its caches cold when it wakes up, and then takes up to twice as long for the
same work. So one that waits may look again and again for a moment, before it sleeps. It lets other
processes go first each time, and sleeps at once if the last thing that it waited for took longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Spinner"]

_MOMENT = 0.0005  # seconds to look before sleeping
_yield_processor: Callable[[], object] = getattr(
    os, "sched_yield", lambda: time.sleep(0)
)  # not on every system

T = TypeVar("T")


class Spinner:
    """Waits, one time after the other, for one thread.

    >>> spinner, answers = Spinner(clock=lambda: 0.0), iter([[], [], ["soon"]])
    >>> spinner.wait(lambda: next(answers), lambda: ["now"])  # nothing is known yet
    ['now']
    >>> spinner.wait(lambda: next(answers), lambda: ["late"])
    ['soon']

    Args:
        clock: the seconds now.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._comes_soon = False  # whether what was waited for last did

    def wait(self, look: Callable[[], T], sleep: Callable[[], T]) -> T:
        """What `look` finds within a moment, else what `sleep` returns.

        Args:
            look: returns at once, with something that is true if it has found it.
            sleep: returns when it has found it, or for its own reasons.
        """
        clock = self._clock
        end = clock() + _MOMENT
        while self._comes_soon:
            found = look()
            if found:
                return found
            if clock() > end:
                break
            _yield_processor()
        found = sleep()
        self._comes_soon = clock() < end
        return found
