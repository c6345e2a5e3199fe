"""What has happened in a job, as those saw it who took part: plain values, in any order.

All moments are seconds of `time.monotonic`, which processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = [
    "ClosureEnded",
    "ClosureRaised",
    "ClosureSubmitted",
    "CoordinatorRestarted",
    "Event",
    "Happened",
    "History",
    "Named",
    "ServersAtEnd",
    "ServersRead",
]


@dataclass(frozen=True)
class ServersRead:
    """What one read of the servers has seen.

    Args:
        run: of the coordinator; a restart begins another one.
        reader: reads of one reader come after each other.
        order: the place among the reads of the reader.
        begun: when, at the latest, the read had not yet happened.
        seen: of each server, the closures whose effects were there.
    """

    run: int
    reader: str
    order: int
    begun: float
    seen: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class ClosureSubmitted:
    """A closure was scheduled.

    Args:
        run: of the coordinator.
        closure: which.
        servers: those that it changes.
        needs: closures whose values it needs.
    """

    run: int
    closure: int
    servers: tuple[int, ...]
    needs: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClosureEnded:
    """The coordinator said what has become of a closure.

    Args:
        run: of the coordinator.
        closure: which.
        at: when it was known, at the latest.
        outcome: "done", "failed" or "cancelled".
        view: what it read, if it is done.
    """

    run: int
    closure: int
    at: float
    outcome: str
    view: ServersRead | None = None


@dataclass(frozen=True)
class CoordinatorRestarted:
    """The coordinator began again with what was at a checkpoint.

    Args:
        run: the one that begins.
        since: closures from this one on had not been scheduled.
    """

    run: int
    since: int


@dataclass(frozen=True)
class ClosureRaised:
    """The coordinator raised the error of a closure.

    Args:
        run: of the coordinator.
        closure: which.
    """

    run: int
    closure: int


@dataclass(frozen=True)
class Happened:
    """A fault was there.

    Args:
        kind: what went wrong.
        task: with which task.
        begun: when it began, at the latest.
        ended: when it was over, at the earliest.
    """

    kind: str
    task: str
    begun: float
    ended: float


@dataclass(frozen=True)
class Named:
    """Some process has written a warning.

    Args:
        at: when.
        text: the warning.
    """

    at: float
    text: str


@dataclass(frozen=True)
class ServersAtEnd:
    """What servers hold when all is over.

    Args:
        at: when the program came to its end.
        effects: of each server, how often each closure has had its effect there.
        later: of each server, how many other closures had their effects after each closure.
    """

    at: float
    effects: tuple[tuple[int, ...], ...]
    later: tuple[tuple[int, ...], ...]


Event = (
    ServersRead
    | ClosureSubmitted
    | ClosureEnded
    | CoordinatorRestarted
    | ClosureRaised
    | Happened
    | Named
    | ServersAtEnd
)
AnEvent = TypeVar(
    "AnEvent",
    ServersRead,
    ClosureSubmitted,
    ClosureEnded,
    CoordinatorRestarted,
    ClosureRaised,
    Happened,
    Named,
    ServersAtEnd,
)

AClosure = TypeVar("AClosure", ClosureSubmitted, ClosureEnded)


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
    def submitted(self) -> dict[int, ClosureSubmitted]:
        """The closures that count: not those that a restart has forgotten."""
        return self._latest(ClosureSubmitted)

    @property
    def outcomes(self) -> dict[int, ClosureEnded]:
        """What became of each closure that counts."""
        return self._latest(ClosureEnded)

    def _latest(self, kind: type[AClosure]) -> dict[int, AClosure]:
        found: dict[int, AClosure] = {}
        for event in self.events:
            if isinstance(event, kind):
                found[event.closure] = event
            elif isinstance(event, CoordinatorRestarted):
                found = {closure: e for closure, e in found.items() if closure < event.since}
        return found

    @property
    def views(self) -> list[ServersRead]:
        """All reads, also those of closures."""
        views = list(self.all(ServersRead))
        return views + [event.view for event in self.all(ClosureEnded) if event.view is not None]
