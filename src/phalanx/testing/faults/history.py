"""What has happened in a job, as those saw it who took part: plain values, in any order.

All moments are seconds of `time.monotonic`, which processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = [
    "Ended",
    "Event",
    "Final",
    "Happened",
    "History",
    "Named",
    "Raised",
    "Restarted",
    "Submitted",
    "View",
]


@dataclass(frozen=True)
class View:
    """What one read of the servers has seen."""

    run: int  # of the coordinator; a restart begins another one
    reader: str  # reads of one reader come after each other
    order: int  # the place among the reads of the reader
    begun: float  # when, at the latest, the read had not yet happened
    seen: tuple[frozenset[int], ...]  # of each server, the closures whose effects were there


@dataclass(frozen=True)
class Submitted:
    """A closure was scheduled."""

    run: int  # of the coordinator
    closure: int  # which
    servers: tuple[int, ...]  # those that it changes
    needs: tuple[int, ...] = ()  # closures whose values it needs


@dataclass(frozen=True)
class Ended:
    """The coordinator said what has become of a closure."""

    run: int  # of the coordinator
    closure: int  # which
    at: float  # when it was known, at the latest
    outcome: str  # "done", "failed" or "cancelled"
    view: View | None = None  # what it read, if it is done


@dataclass(frozen=True)
class Restarted:
    """The coordinator began again with what was at a checkpoint."""

    run: int  # the one that begins
    since: int  # closures from this one on had not been scheduled


@dataclass(frozen=True)
class Raised:
    """The coordinator raised the error of a closure."""

    run: int  # of the coordinator
    closure: int  # which


@dataclass(frozen=True)
class Happened:
    """A fault was there."""

    kind: str  # what went wrong
    task: str  # with which task
    begun: float  # when it began, at the latest
    ended: float  # when it was over, at the earliest


@dataclass(frozen=True)
class Named:
    """Some process has written a warning."""

    at: float  # when
    text: str  # the warning


@dataclass(frozen=True)
class Final:
    """What servers hold when all is over.

    Args:
        at: when the program came to its end.
        effects: of each server, how often each closure has had its effect there.
        later: of each server, how many other closures had their effects after each closure.
    """

    at: float
    effects: tuple[tuple[int, ...], ...]
    later: tuple[tuple[int, ...], ...]


Event = View | Submitted | Ended | Restarted | Raised | Happened | Named | Final
AnEvent = TypeVar("AnEvent", View, Submitted, Ended, Restarted, Raised, Happened, Named, Final)

AClosure = TypeVar("AClosure", Submitted, Ended)


@dataclass
class History:
    """Events, in the order in which they became known."""

    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Note an event."""
        self.events.append(event)

    def all(self, kind: type[AnEvent]) -> Iterator[AnEvent]:
        """The events of one kind."""
        return (event for event in self.events if isinstance(event, kind))

    @property
    def submitted(self) -> dict[int, Submitted]:
        """The closures that count: not those that a restart has forgotten."""
        return self._latest(Submitted)

    @property
    def outcomes(self) -> dict[int, Ended]:
        """What became of each closure that counts."""
        return self._latest(Ended)

    def _latest(self, kind: type[AClosure]) -> dict[int, AClosure]:
        found: dict[int, AClosure] = {}
        for event in self.events:
            if isinstance(event, kind):
                found[event.closure] = event
            elif isinstance(event, Restarted):
                found = {closure: e for closure, e in found.items() if closure < event.since}
        return found

    @property
    def views(self) -> list[View]:
        """All reads, also those of closures."""
        views = list(self.all(View))
        return views + [event.view for event in self.all(Ended) if event.view is not None]
