"""Whether a process of which nothing is heard computes: native code may hold Python's lock."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.runtime.processes import cpu_seconds

_SECONDS = 2.0  # between looks
_LONGEST = 5  # times as many seconds; after that the two say nothing of what the process does now
_SHARE = 0.1  # of a processor, in that time


class Idleness:
    """Sees by two looks whether processes of this machine have computed in between.

    Args:
        used: for how many seconds a process has computed; None if that cannot be seen.
        clock: the time.

    Examples:
        >>> used, now = [1.0, 3.0, 3.1, 3.1], [0.0, 2.0, 4.0, 5.0]
        >>> process = Idleness(lambda pid: used.pop(0), lambda: now.pop(0))
        >>> [process.computes(7) for _ in range(4)]
        [None, True, False, None]
    """

    def __init__(
        self,
        used: Callable[[int], float | None] = cpu_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._used, self._clock = used, clock
        self._seen: dict[int, tuple[float, float]] = {}

    def computes(self, pid: int) -> bool | None:
        """Whether a process has computed since the last look.

        A process of which nothing is known does not. None if the last look was only a moment ago or
        long ago, or at another process that had the same number.
        """
        used, now = self._used(pid), self._clock()
        if used is None:
            return False
        before, since = self._seen.setdefault(pid, (used, now))
        passed = now - since
        if passed < _SECONDS and used >= before:
            return None
        self._seen[pid] = used, now
        if passed > _LONGEST * _SECONDS or used < before:
            return None
        return used - before >= _SHARE * passed

    def is_idle(self, pid: int) -> bool:
        """Whether a process is known not to have computed since the last look."""
        return self.computes(pid) is False
