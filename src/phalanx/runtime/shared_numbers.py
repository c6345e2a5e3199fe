"""Numbers that all workers of a job count alike, so that they can name what they do together."""

from __future__ import annotations

import itertools

__all__ = ["SharedCount", "begin_anew"]

_counts: list[SharedCount] = []


class SharedCount:
    """Counts from 0, in every process of a job.

    >>> count = SharedCount()
    >>> count.next(), count.next()
    (0, 1)
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        _counts.append(self)

    def next(self) -> int:
        """The next number."""
        return next(self._numbers)

    def reset(self) -> None:
        """Count from 0 again."""
        self._numbers = itertools.count()


def begin_anew() -> None:
    """Count everything from 0 again: this process joins others that have counted less, or nothing."""
    for count in _counts:
        count.reset()
