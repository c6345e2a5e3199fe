"""What a member tells the hub of its worker, a few times per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.job.hub.descriptions import describe_program
from phalanx.job.hub.program_order import CODE, UNKNOWN
from phalanx.job.hub.worker_status import WorkerStatus
from phalanx.runtime.call_site import lines_of, where_is

LONGEST_SITE = 2000
"""How many characters of a place in a program are told."""

_SIGN_OF_LIFE = 1.0  # seconds after which the status is sent although nothing has changed
_SAME = 0.5  # seconds after which a worker that does the same says more of it
_READERS = ("phalanx-input", "px-")  # how the names of threads begin that read input


class Reporter:
    """Turns the status of a worker into messages, whenever there is something to say."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
        self._codes: dict[int, tuple[Any, str]] = {}  # by the identity of a program's details
        self._told_programs = 0
        self._last: Any = ()
        self._last_change = self._last_sent = 0.0
        self._told_details = False

    def remember(self, details: Any, digest: str) -> None:
        """A program has a code from now on; `details` is the object given to `WorkerStatus.begin`."""
        self._codes[id(details)] = (details, digest[:CODE].ljust(CODE, "0"))

    def message(self, now: float) -> dict[str, Any] | None:
        """What is new, or None."""
        status, waits = self._status, self._status.long_peer_waits(now)
        current = (*status.snapshot(), [(id(w), w.ranks()) for w in waits])
        if current != self._last:
            self._last, self._last_change = current, now
            self._told_details = False
        elif now - self._last_sent < _SIGN_OF_LIFE and not self._has_details(now):
            return None
        self._last_sent = now
        phase, step, sequence, site, _ = current
        message = {
            "type": "status",
            "phase": phase,
            "step": None if step is None else int(step),
            "sequence": int(sequence),
            "site": site[:LONGEST_SITE],
            "seconds": now - self._last_change,
            **self._new_codes(),
        }
        if waits:
            is_single = status.is_single
            message["waits"] = [wait.report(now, is_single) for wait in waits]
        if now - self._last_change >= _SAME:
            message |= self._details()
            self._told_details = True
        return message

    def _has_details(self, now: float) -> bool:
        return not self._told_details and now - self._last_change >= _SAME

    def _details(self) -> dict[str, str]:
        """What is told of a worker that does the same for a while: where it is, and in what program."""
        status = self._status
        place = where_is(status.thread)
        reading = [line for line in lines_of(_READERS) if line != place]
        if status.phase == "input" and reading:
            place += f", which reads its input at {' and '.join(reading[:2])}"
        ran = status.ran(status.sequence) if status.phase == "wait" else None
        doing = describe_program({**ran, "site": ""}) if isinstance(ran, Mapping) else ""
        return {"place": place[:LONGEST_SITE], "doing": doing[:LONGEST_SITE]}

    def _new_codes(self) -> dict[str, Any]:
        """Which programs were begun since the last report."""
        numbers = self._status.begun_after(self._told_programs)
        if not numbers:
            return {}
        self._told_programs = numbers[-1]
        known = (self._codes.get(id(self._status.ran(n)), (None, UNKNOWN))[1] for n in numbers)
        return {"first": numbers[0], "codes": "".join(known)}
