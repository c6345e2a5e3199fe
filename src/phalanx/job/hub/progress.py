"""How far each task of a job has come, and for how long the others have been further."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.job.hub.descriptions import Task
from phalanx.job.hub.worker_table import phase_text

if TYPE_CHECKING:
    from phalanx.job.hub.wait_graph import WaitEdge

_QUIET = 3.0  # seconds without any message after which the table says so


@dataclass
class TaskRecord:
    """One expected task and what is known of it."""

    task: Task
    rank: int
    peer: int | None = None
    state: str = "absent"  # then joined, and then left or dead
    info: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    sequence: int = 0  # the last program that it has begun or wants to begin
    last: int | None = None  # the last program that it will ever run, once it is known
    operations: Mapping[str, int] = field(default_factory=dict)  # of px.comm, once that is known
    waits: list[WaitEdge] = field(default_factory=list)  # for other members, as it has reported them
    heard: float = 0.0
    reported: float = 0.0  # when its status came
    exit: str = ""  # how its process ended, if a launcher has told
    patience: float | None = None  # if it has come to its end: for how long it would wait for others

    @property
    def is_gone(self) -> bool:
        """Whether the task was there and will not come back."""
        return self.state in ("left", "dead")

    def has_ended(self, want: WaitEdge) -> bool:
        """Whether it has come to its end without the operation that another waits for."""
        return self.last is not None and self.operations.get(want.channel, 0) < want.number

    def silence(self, now: float) -> float:
        """For how many seconds nothing was heard of it; 0 unless that is strange."""
        seconds = now - self.heard if self.state == "joined" else 0.0
        return seconds if seconds > _QUIET else 0.0

    @property
    def phase(self) -> str:
        """What it does, as it has reported."""
        return str(self.status.get("phase", ""))

    @property
    def since(self) -> float:
        """Since when it has done that."""
        return self.reported - float(self.status.get("seconds", 0.0))

    @property
    def place(self) -> str:
        """Where in the user's program it is, as far as that is known."""
        return str(self.status.get("place") or self.status.get("site", ""))

    def __str__(self) -> str:
        host, pid = self.info.get("host"), self.info.get("pid")
        return f"{self.task} (pid {pid} on {host})" if host else str(self.task)


class Frontier:
    """Remembers when the first task reached each number.

    >>> fast, slow = TaskRecord(Task("worker", 0), 0), TaskRecord(Task("worker", 1), 1)
    >>> progress = Frontier()
    >>> progress.reach(fast, 5, now=10.0)
    >>> progress.behind(slow, (), now=12.5)
    2.5
    """

    def __init__(self) -> None:
        self._front: deque[tuple[int, float]] = deque([(0, 0.0)], maxlen=256)

    def reach(self, record: TaskRecord, sequence: int, now: float) -> None:
        """A task has begun, or wants to begin, the program with this number."""
        record.sequence = max(record.sequence, sequence)
        if record.sequence > self._front[-1][0]:
            self._front.append((record.sequence, now))

    def behind(self, record: TaskRecord, awaited_since: Iterable[float], now: float) -> float:
        """For how many seconds another has been further than this task, or has waited for it."""
        if record.is_gone:
            return 0.0
        waits = list(awaited_since)
        overtaken = next((when for number, when in self._front if number > record.sequence), None)
        if overtaken is not None:
            waits.append(overtaken)
        return max(0.0, now - min(waits)) if waits else 0.0

    def row(self, record: TaskRecord, awaited_since: Iterable[float], now: float) -> dict[str, Any]:
        """A line of the table of workers."""
        silence = now - record.heard if record.state == "joined" else 0.0
        return {
            "worker": str(record.task),
            "address": record.task.address,
            "host": record.info.get("host") or "",
            "pid": record.info.get("pid"),
            "state": record.state,
            "phase": "wait" if any(w.blocks for w in record.waits) else record.phase,
            "step": record.status.get("step"),
            "sequence": record.sequence,
            "site": record.place,
            "seconds": round(record.status.get("seconds", 0.0) + silence, 3),
            "quiet": round(record.silence(now), 3),
            "behind": round(self.behind(record, awaited_since, now), 3),
        }


def describe_place(record: TaskRecord, row: Mapping[str, Any]) -> str:
    """Where a late task is, in words."""
    quiet = f", silent for {row['quiet']:.0f} seconds" if row["quiet"] else ""
    return f"{record}, {row['behind']:.0f} seconds behind, {phase_text(row)}{quiet}"


def describe_deadline(
    waiting: Mapping[str, Any], late: Sequence[TaskRecord], rows: Sequence[Mapping[str, Any]]
) -> str:
    """That a member has waited for too long, for whom, and who waits for whom.

    `waiting` is what the member has said, and `rows` is the table of workers.
    """
    places = [describe_place(record, rows[record.rank]) for record in late]
    what = f" in {waiting['what']}" if waiting["what"] else ""
    source = "PHALANX_DEADLINE" + (", or the timeout of the call" if what else "")
    text = (
        f"{waiting['waiting']} waited for {waiting['seconds']:g} seconds{what} at "
        f"{waiting['site'] or 'an unknown place'}, which is the deadline ({source}). "
        f"Late: {', '.join(places) or 'no known task'}."
    )
    waits = [f"\n  {row['worker']} {wait}" for row in rows for wait in row["waits"]]
    return text + ("\nWho waits:" + "".join(waits) if waits else "")
