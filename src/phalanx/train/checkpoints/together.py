"""Waiting for workers that write a checkpoint, as long as they make progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from phalanx.errors import PhalanxError
from phalanx.runtime.observed_time import ObservedTime

__all__ = ["FROZEN", "Pulse", "hear_from_writers"]

_TELL_EVERY = 1.0  # seconds
FROZEN = 2 * _TELL_EVERY
"""How many seconds between two looks mean that this process did not run."""


class _Member(Protocol):
    """What is needed of the connection to the hub."""

    def tell(self, name: str, value: Any = None) -> None: ...

    def hear(self, name: str, ranks: Sequence[int], timeout: float) -> dict[int, Any]: ...


class Pulse:
    """Tells the other workers, now and then, that this one writes.

    Args:
        member: the connection to them.
        number: of the checkpoint.
        clock: the time.
    """

    def __init__(
        self, member: _Member, number: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._member, self._name, self._clock = member, f"writing {number}", clock
        self._told = clock()

    def beat(self) -> None:
        """Something has been written."""
        now = self._clock()
        if now - self._told >= _TELL_EVERY:
            self._told = now
            with contextlib.suppress(PhalanxError):  # the job has failed; the checkpoint may be whole
                self._member.tell(self._name)


def hear_from_writers(
    member: _Member,
    name: str,
    ranks: Sequence[int],
    number: str,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, Any]:
    """What workers tell under a name, by rank; those are missing that have not for too long.

    Args:
        member: the connection to them.
        name: what they tell in the end.
        ranks: which workers.
        number: of the checkpoint that they write meanwhile, with a `Pulse`.
        seconds: how long one may neither tell it nor write.
        clock: the time.
    """
    told: dict[int, Any] = {}
    observed = ObservedTime(FROZEN, clock)
    since = dict.fromkeys(ranks, observed())
    while True:
        left = [rank for rank in ranks if rank not in told]
        now = observed()
        rest = max((since[rank] + seconds - now for rank in left), default=0.0)
        if not left or rest <= 0:
            return told
        told |= member.hear(name, left, min(rest, _TELL_EVERY))
        for rank in member.hear(f"writing {number}", left, 0.0):
            since[rank] = observed()
