"""The time in which this process has run: while it is frozen it hears nothing."""

from __future__ import annotations

import time
from collections.abc import Callable


class ObservedTime:
    """A clock for those that wait to hear of others, and give up those that are silent.

    Args:
        longest: seconds between two looks at the clock that count at most. Who looks more often loses
            nothing as long as the process runs.
        clock: the time.

    Examples:
        >>> times = [10.0, 10.5, 70.5, 71.0]
        >>> now = ObservedTime(2.0, lambda: times.pop(0))
        >>> now(), now(), now(), now()
        (10.0, 10.5, 12.5, 13.0)
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._looked: float | None = None
        self._now = 0.0

    def __call__(self) -> float:
        """The time, less that in which none looked."""
        looked = self._clock()
        if self._looked is None:
            self._now = looked
        else:
            self._now += min(looked - self._looked, self._longest)
        self._looked = looked
        return self._now
