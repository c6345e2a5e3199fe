"""When a job waits for nothing but members of which nothing is heard: they are frozen, or cut off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.job.hub.descriptions import Task
from phalanx.job.hub.progress import TaskRecord

_LONGEST_LOOK = 1.0  # seconds between two looks that count as observed; the hub may have been frozen
_LEAST = 5.0  # seconds; members are heard of once a second, and machines may be busy


@dataclass(frozen=True)
class Abandoned:
    """A member for which nothing is left to wait.

    Args:
        task: which one.
        pid: of its process, on its machine; 0 if it is not known.
        why: in words.
    """

    task: Task
    pid: int
    why: str


class SilentMembers:
    """Finds the members for which the others, who have come to their end, need not wait any longer.

    They are given up when nothing has been heard of them for as long as those that have ended would
    have waited for them, and no other member has something left to do. One that freezes after it has
    come to its end is given up, too. Only time counts in which the hub itself has run.

    >>> done, frozen = TaskRecord(Task("worker", 0), 0), TaskRecord(Task("worker", 1), 1)
    >>> done.state, frozen.state = "left", "joined"
    >>> done.patience, silent = 6.0, SilentMembers()
    >>> [silent.look([done, frozen], float(now)) == [frozen] for now in range(8)]
    [False, False, False, False, False, False, True, True]
    """

    def __init__(self) -> None:
        self._silence: dict[int, float] = {}  # for how many seconds nothing was heard, by rank
        self._looked = 0.0

    def look(self, records: Sequence[TaskRecord], now: float) -> list[TaskRecord]:
        """The members that are given up, until something is heard of them."""
        looked, self._looked = self._looked, now
        there = [record for record in records if not record.is_gone]
        self._silence = {
            x.rank: self._silence.get(x.rank, 0.0) + min(now - looked, _LONGEST_LOOK)
            for x in there
            if x.state == "joined" and x.heard <= looked
        }
        patience = [record.patience for record in records if record.patience is not None]
        limit = max(_LEAST, *patience) if patience else math.inf
        silent = [x for x in there if self._silence.get(x.rank, 0.0) >= limit]
        is_over = all(x in silent or x.patience is not None for x in there)
        return silent if is_over else []


def abandoned(silent: TaskRecord, others: Sequence[TaskRecord]) -> Abandoned:
    """Says why a silent member is given up."""
    patience = max((other.patience for other in others if other.patience is not None), default=0.0)
    seconds = max(_LEAST, patience)
    where = f" It was at {silent.place}." if silent.place else ""
    why = (
        f"Nothing has been heard of {silent} for {seconds:g} seconds (PHALANX_DEADLINE, but "
        f"{_LEAST:g} at least), and the others have come to their end. It is frozen, its connection is "
        f"cut, or it waits in native code that holds Python's lock.{where}"
    )
    return Abandoned(silent.task, int(silent.info.get("pid") or 0), why)
