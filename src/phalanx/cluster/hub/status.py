"""What a worker is doing, written by its training thread at almost no cost.

The training thread writes plain attributes; the thread of the member reads them a few times per second.
A torn read shows a step next to the site of the one before, which does no harm.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from phalanx.cluster.hub.client import Member

__all__ = ["Status", "Waiting", "all_stacks"]

_REMEMBERED = 1024  # programs; more than are begun between two looks at the status


class Status:
    """What this worker is doing at the moment.

    Attributes:
        phase: one of `phalanx.cluster.hub.facts.PHASES`.
        step: the number of the training step, for people.
        sequence: the number of the last program between workers that was begun.
        site: the line of the user's program that is being executed.
        pending: the newest result of such a program, an array or anything else with ``is_ready()``;
            lets the watchdog see that the devices wait although Python does not.

    >>> status = Status()
    >>> status.begin(3, {"operation": "all_reduce"})
    >>> status.ran(3)
    {'operation': 'all_reduce'}
    """

    __slots__ = ("_programs", "pending", "phase", "sequence", "site", "step")

    def __init__(self) -> None:
        self.phase = "start"
        self.step: int | None = None
        self.sequence = 0
        self.site = ""
        self.pending: Any = None
        self._programs: list[tuple[int, Any]] = [(-1, None)] * _REMEMBERED

    def begin(self, sequence: int, details: Any) -> None:
        """A program between workers is begun; `details` is what `describe_program` shows."""
        self._programs[sequence % _REMEMBERED] = (sequence, details)
        self.sequence = sequence
        self.phase = "step"

    def ran(self, sequence: int) -> Any:
        """The details of a program that was begun not long ago, or None."""
        number, details = self._programs[sequence % _REMEMBERED]
        return details if number == sequence else None

    def begun_after(self, sequence: int) -> range:
        """The numbers of the programs begun after the given one, as far as they are remembered."""
        return range(max(sequence, self.sequence - _REMEMBERED) + 1, self.sequence + 1)

    def snapshot(self) -> tuple[Any, ...]:
        """What the others should know."""
        return (self.phase, self.step, self.sequence, self.site)


class Waiting:
    """A wait for other workers, in Python or in native code; a context manager.

    An error of a broken connection inside it becomes the job's failure, if the hub knows of one.
    """

    __slots__ = ("_member", "_phase", "_previous", "since", "site")

    def __init__(self, member: Member, site: str) -> None:
        self._member = member
        self.site = site
        self.since = 0.0

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


def all_stacks() -> str:
    """The Python stacks of all threads of this process, except the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sorted(sys._current_frames().items()):
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            texts.append(f"Thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(texts)
