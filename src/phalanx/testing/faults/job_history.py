"""What has happened in a job under a schedule, as its processes and its launcher saw it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.runtime.laboratory import HISTORY
from phalanx.testing.faults import elastic_history

__all__ = ["JobHistory", "Life"]

_HARMLESS = ("corrupt", "truncate", "clock")  # no job ends because of them alone

Event = Mapping[str, Any]
"""What happened: its name is "event", its moment "at"."""


@dataclass(frozen=True)
class Life:
    """One process of a job, from its start to its end.

    Args:
        worker: which worker it was.
        attempt: in which start of the job.
        events: what it wrote down, in order.
    """

    worker: int
    attempt: int
    events: tuple[Event, ...]

    def all(self, *names: str) -> Iterator[Event]:
        """The events with one of these names."""
        return (event for event in self.events if event["event"] in names)


@dataclass(frozen=True)
class JobHistory:
    """All that was written down of a job.

    Args:
        lives: its processes, in the order of their starts.
        launcher: what the launcher has seen: "attempt", "failed" and "ended", and of an elastic job
            "generation", "lost" and "starts".

    Examples:
        >>> from phalanx.testing import faults
        >>> events = ({"event": "record", "at": 1.0, "epoch": 0, "examples": [0, 1]},)
        >>> history = faults.JobHistory((faults.Life(0, 0, events),), ())
        >>> history.applied()
        Counter({(0, 0): 1, (0, 1): 1})
    """

    lives: tuple[Life, ...] = ()
    launcher: tuple[Event, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, folder: Path, launcher: Iterable[Event] = ()) -> JobHistory:
        """The history in the folder of a laboratory."""
        lives = [_life(path) for path in folder.glob(f"{HISTORY}*")]
        found = sorted((x for x in lives if x.events), key=lambda x: float(x.events[0]["at"]))
        return cls(tuple(found), tuple(launcher))

    def lines(self) -> str:
        """The history as lines of JSON, in the order of time."""
        own = [
            {**event, "worker": life.worker, "attempt": life.attempt}
            for life in self.lives
            for event in life.events
        ]
        ordered = sorted([*own, *self.launcher], key=lambda event: event["at"])
        return "".join(f"{json.dumps(event)}\n" for event in ordered)

    def all(self, *names: str) -> list[tuple[Life, Event]]:
        """The events of processes with one of these names, in the order of time."""
        found = [(life, event) for life in self.lives for event in life.all(*names)]
        return sorted(found, key=lambda pair: float(pair[1]["at"]))

    def faults(self) -> list[tuple[Life, Event]]:
        """The faults that have happened."""
        return self.all("fault")

    @property
    def end(self) -> Event:
        """What was left when the job had ended; empty if it has not."""
        return next((event for event in self.launcher if event["event"] == "ended"), {})

    @property
    def attempts(self) -> int:
        """How often the job was started."""
        return 1 + max((life.attempt for life in self.lives), default=0)

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go in this job."""
        return any(True for life in self.lives for _ in life.all("join"))

    def phases(self) -> dict[str, int]:
        """Where workers came to, and how often at most: known phases, and those named by `point`."""
        found: Counter[str] = Counter()
        for life in self.lives:
            names = [x["event"] for x in life.events if "step" in x and x["event"] != "fault"]
            found |= Counter(names)
        return dict(sorted(found.items()))

    # -- what counts -----------------------------------------------------------------------------

    def applied(self) -> Counter[tuple[int, int | str]]:
        """How often each example of each epoch counts in the end, as far as it was recorded.

        What a process has applied after its last checkpoint is lost with it; a process that restores
        a checkpoint goes on with what had been applied when its values were taken. In an elastic job,
        what was recorded for a step by the last generation that made it counts.
        """
        if self.is_elastic:
            return elastic_history.applied_by_generations(self.lives)
        return self._until(self.attempts - 1, None, self.attempts)[0]

    def unrecorded(self) -> int:
        """How many examples may count without a record.

        The first worker may have saved a step whose record another worker did not live to write. In an
        elastic job records come before the step, so there are none.
        """
        if self.is_elastic:
            return 0
        return self._until(self.attempts - 1, None, self.attempts)[1]

    def _until(
        self, attempt: int, path: str | None, most: int
    ) -> tuple[Counter[tuple[int, int | str]], int]:
        """What had been applied when an attempt took the values of a checkpoint, or in its end."""
        found: Counter[tuple[int, int | str]] = Counter()
        lost = 0
        origins: set[tuple[int, str]] = set()
        lives = [life for life in self.lives if life.attempt == attempt]
        count = None
        for life in sorted(lives, key=lambda x: x.worker):
            events, is_cut = _before_save(life.events, path)
            begun, origin = self._origin(events)
            records = [x for x in events[begun:] if x["event"] == "record" and "examples" in x]
            if is_cut and count is None:
                count = len(records)
            elif path is not None and not is_cut:
                # A worker that does not save is as far as the first, but may not have said so.
                lost += max(0, (count or 0) - len(records)) * self._largest_record()
                records = records[: count or 0]
            for record in records:
                found.update((record["epoch"], example) for example in record["examples"])
            if origin is not None:
                origins.add(origin)
        for source, name in sorted(origins)[:1]:
            if most > 0:
                earlier, more = self._until(source, name, most - 1)
                found.update(earlier)
                lost += more
        return found, lost

    def _largest_record(self) -> int:
        return max((len(x["examples"]) for _, x in self.all("record") if "examples" in x), default=0)

    def _origin(self, events: tuple[Event, ...]) -> tuple[int, tuple[int, str] | None]:
        """After which event a process goes on from a checkpoint, and which attempt saved that one."""
        for i in range(len(events) - 1, -1, -1):
            if events[i]["event"] == "restored":
                return i + 1, (self._saver_of(events[i]), str(events[i]["path"]))
        return 0, None

    def _saver_of(self, restored: Event) -> int:
        """The attempt that has saved what was restored."""
        path, before = restored["path"], float(restored["at"])
        for name in ("committed", "save"):  # a process may have been killed before it wrote it down
            for life, event in reversed(self.all(name)):
                is_same = event.get("digest", restored["digest"]) == restored["digest"]
                if event["path"] == path and float(event["at"]) < before and is_same:
                    return life.attempt
        return -1

    def final_states(self) -> dict[int, Mapping[str, Any]]:
        """The last state that each worker has told, by worker."""
        found: dict[int, Mapping[str, Any]] = {}
        for life, event in self.all("record"):
            if "state" in event and life.attempt == self.attempts - 1:
                found[life.worker] = event["state"]
        return found

    # -- how long things took --------------------------------------------------------------------

    def has_ended_attempt(self, life: Life, fault: Event) -> bool:
        """Whether a fault was the last one before its attempt failed, of those that end attempts.

        In an elastic job: before its generation ended.
        """
        if self.is_elastic and fault["kind"] not in _HARMLESS:
            return elastic_history.has_changed_generation(self, life, fault)
        if life.attempt == self.attempts - 1 or fault["kind"] in _HARMLESS:
            return False
        return not any(
            other.attempt == life.attempt
            and event["kind"] not in _HARMLESS
            and float(event["at"]) > float(fault["at"])
            for other, event in self.faults()
        )

    def named(self, life: Life, fault: Event) -> float | None:
        """Seconds from a fault to the first word that names its worker; None if there is none."""
        if self.is_elastic:
            return elastic_history.change_named(self, life, fault)
        name = f"worker {life.worker}"
        moments = [
            float(event["at"])
            for other, event in self.all("failure")
            if other.attempt == life.attempt and name in event["text"]
        ]
        moments += [
            float(event["at"])
            for event in self.launcher
            if event["event"] == "failed" and event["attempt"] == life.attempt and name in event["text"]
        ]
        later = [moment - float(fault["at"]) for moment in moments if moment >= float(fault["at"])]
        return min(later, default=None)

    def recovered(self, life: Life, fault: Event) -> float | None:
        """Seconds from a fault to the next step of all workers, in the next attempt; None if none."""
        if self.is_elastic:
            return elastic_history.change_recovered(self, life, fault)
        ends = []
        for other in self.lives:
            if other.attempt != life.attempt + 1:
                continue
            restored = max((float(x["at"]) for x in other.all("restored")), default=0.0)
            steps = [float(x["at"]) for x in other.all("record", "step") if float(x["at"]) > restored]
            if not steps:
                return None
            ends.append(steps[0])
        return max(ends) - float(fault["at"]) if ends else None


def _life(path: Path) -> Life:
    *_, worker, attempt, _ = path.stem.split("-")
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:  # half written by a process that was killed
            break
    return Life(int(worker), int(attempt), tuple(events))


def _before_save(events: tuple[Event, ...], path: str | None) -> tuple[tuple[Event, ...], bool]:
    """The events before the values of a checkpoint were taken, and whether they were."""
    if path is not None:
        for i in range(len(events) - 1, -1, -1):
            if events[i]["event"] == "save" and events[i]["path"] == path:
                return events[:i], True
    return events, False
