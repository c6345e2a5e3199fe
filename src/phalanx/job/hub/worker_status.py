"""What a worker is doing, written by its training thread at almost no cost.

The training thread writes plain attributes; the thread of the member reads them a few times per second.
A torn read shows a step next to the site of the one before, which does no harm.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from phalanx.job.hub.client import Member

_LONGEST = 1000  # characters of a text in a report
_MOMENT = 0.2  # seconds
_MOST_REPORTED = 16
_OWN = "phalanx-"  # how the names of threads begin that Phalanx starts
_REMEMBERED = 1024  # programs; more than are begun between two looks at the status


class WorkerStatus:
    """What this worker is doing at the moment.

    Attributes:
        phase: one of `phalanx.job.hub.descriptions.PHASES`.
        step: the number of the training step, for people.
        sequence: the number of the last program between workers that was begun.
        site: the line of the user's program that is being executed.
        pending: the newest result of such a program, an array or anything else with ``is_ready()``;
            lets the watchdog see that the devices wait although Python does not.
        thread: the thread that began the last program.
        threads: all threads that communicate with other workers.
        peer_waits: the operations of px.comm that are under way.
        operations: how many operations of px.comm this worker has begun, by their members.
        promised: the messages to others whose contents are still being computed.
        kept: when the last of them was computed.

    >>> status = WorkerStatus()
    >>> status.begin(3, {"operation": "all_reduce"})
    >>> status.ran(3)
    {'operation': 'all_reduce'}
    """

    __slots__ = (
        "_programs",
        "kept",
        "operations",
        "peer_waits",
        "pending",
        "phase",
        "promised",
        "sequence",
        "site",
        "step",
        "thread",
        "threads",
    )

    def __init__(self) -> None:
        self.phase = "start"
        self.step: int | None = None
        self.sequence = 0
        self.site = ""
        self.pending: Any = None
        self.thread = threading.main_thread().ident or 0
        self.threads: set[int] = set()
        self.peer_waits: dict[int, PeerWait] = {}
        self.operations: Callable[[], dict[str, int]] = dict
        self.promised: dict[int, str] = {}
        self.kept = 0.0
        self._programs: list[tuple[int, Any]] = [(-1, None)] * _REMEMBERED

    def begin(self, sequence: int, details: Any) -> None:
        """A program between workers is begun; `details` is what `describe_program` shows."""
        self._programs[sequence % _REMEMBERED] = (sequence, details)
        self.thread = threading.get_ident()
        self.threads.add(self.thread)
        self.sequence = sequence
        self.phase = "step"

    def ran(self, sequence: int) -> Any:
        """The details of a program that was begun not long ago, or None."""
        number, details = self._programs[sequence % _REMEMBERED]
        return details if number == sequence else None

    def begun_after(self, sequence: int) -> range:
        """The numbers of the programs begun after the given one, as far as they are remembered."""
        return range(max(sequence, self.sequence - _REMEMBERED) + 1, self.sequence + 1)

    def long_peer_waits(self, now: float) -> list[PeerWait]:
        """The operations of px.comm that have waited for others for a moment.

        There is none while this worker owes others a message: it computes, and they wait for it.
        """
        if self.promised:
            return []
        waits = list(self.peer_waits.values())  # at once: other threads change it
        waits = sorted((w for w in waits if now - w.since >= _MOMENT), key=lambda wait: wait.since)
        return [w for w in waits if w.ranks()][:_MOST_REPORTED]

    @contextlib.contextmanager
    def keeping(self, number: int) -> Iterator[None]:
        """Compute a message that was promised; a context manager."""
        try:
            yield
        finally:
            if number in self.promised:
                self.kept = time.monotonic()
                del self.promised[number]

    @property
    def is_single(self) -> bool:
        """Whether one thread of the program communicates, so that all else waits with it."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        alive = [i for i in tuple(self.threads) if not names.get(i, _OWN).startswith(_OWN)]
        return len(alive) <= 1

    def snapshot(self) -> tuple[Any, ...]:
        """What the others should know."""
        return (self.phase, self.step, self.sequence, self.site)


class PeerWait:
    """An operation of px.comm that waits for other ranks; a context manager.

    Args:
        status: where it is shown.
        what: the operation, in words.
        site: where it was called.
        missing: who is waited for at the moment; called in another thread.
        channel: the members of the operation, as all of them name it; '' if they do not count it.
        number: which operation of the members it is; called in another thread.

    Attributes:
        moved: when something last moved, as far as that is known; called in another thread.
    """

    __slots__ = (
        "_begun",
        "_blocked",
        "_status",
        "channel",
        "missing",
        "moved",
        "number",
        "site",
        "what",
    )

    def __init__(
        self,
        status: WorkerStatus,
        what: str,
        site: str,
        missing: Callable[[], Sequence[int]],
        channel: str = "",
        number: Callable[[], int] = int,
    ) -> None:
        self._status, self.what, self.site = status, what, site
        self.missing, self.channel, self.number = missing, channel, number
        self.moved: Callable[[], float] = float
        self._begun = 0.0
        self._blocked: set[int] = set()

    @property
    def since(self) -> float:
        """Since when nothing has moved."""
        return max(self._begun, self.moved(), self._status.kept)

    def __enter__(self) -> PeerWait:
        self._begun = time.monotonic()
        self._status.peer_waits[id(self)] = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._status.peer_waits.pop(id(self), None)

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """The calling thread can do nothing else until the operation is over; a context manager."""
        me = threading.get_ident()
        self._status.threads.add(me)
        self._blocked.add(me)
        try:
            yield
        finally:
            self._blocked.discard(me)

    @property
    def blocks(self) -> bool:
        """Whether some thread of the program waits for the operation."""
        return bool(self._blocked)

    def ranks(self) -> list[int]:
        """Who is waited for at the moment."""
        try:
            return list(self.missing())
        except RuntimeError:  # it changes just now
            return []

    def report(self, now: float, is_single: bool) -> dict[str, Any]:
        """The wait as the hub is told."""
        return {
            "what": self.what[:_LONGEST],
            "site": self.site[:_LONGEST],
            "ranks": self.ranks(),
            "seconds": now - self.since,
            "blocks": self.blocks and is_single,
            "channel": self.channel,
            "number": self.number(),
        }


class Waiting:
    """A wait for other workers, in Python or in native code; a context manager.

    An error of a broken connection inside it becomes the job's failure, if the hub knows of one.
    """

    __slots__ = ("_member", "_phase", "_previous", "seconds", "since", "site")

    def __init__(self, member: Member, site: str) -> None:
        self._member = member
        self.site = site
        self.since = 0.0
        self.seconds: float | None = None
        """How long it may take; None for the usual deadline."""

    def __enter__(self) -> Waiting:
        status = self._member.status
        self._phase, self._previous = status.phase, self._member.wait
        status.phase = "wait"
        if self.site:
            status.site = self.site
        self.since = time.monotonic()
        self._member.wait = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> Literal[False]:
        self._member.wait = self._previous
        self._member.status.phase = self._phase
        if isinstance(error, Exception):
            cause = self._member.cause_of(error)
            if cause is not None:
                raise cause from error
        return False
