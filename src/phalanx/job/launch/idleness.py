"""Whether a process of which nothing is heard computes: native code may hold Python's lock."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.runtime.processes import cpu_seconds

_SECONDS = 2.0  # between looks
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
        """Whether a process has computed since the last look; None if that was only a moment ago.

        A process of which nothing is known does not.
        """
        used, now = self._used(pid), self._clock()
        if used is None:
            return False
        before, since = self._seen.setdefault(pid, (used, now))
        if now - since < _SECONDS:
            return None
        self._seen[pid] = used, now
        return used - before >= _SHARE * (now - since)

    def is_idle(self, pid: int) -> bool:
        """Whether a process is known not to have computed since the last look."""
        return self.computes(pid) is False
