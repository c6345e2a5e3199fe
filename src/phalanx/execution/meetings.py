"""Programs that run on several workers together: what they are, so that workers can compare them.

XLA does not check that all workers run the same program. A `Meeting` says what a worker is about to
run; who knows the other workers puts a `Ledger` into the throttle, which compares.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.core.callsite import call_site


@dataclass(frozen=True)
class Meeting:
    """A program in which all workers take part.

    Args:
        key: tells programs apart within this process; cheap to make and to compare.
        operation: what it does, for people.
        arrays: what goes in.
        content: gives everything that must be the same on all workers, as text.
        seconds: how long to wait for the others; None for the usual deadline.
    """

    key: Hashable
    operation: str
    arrays: Sequence[Any]
    content: Callable[[], str] = str
    seconds: float | None = None

    def details(self) -> dict[str, Any]:
        """What people are shown of it."""
        kinds = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in self.arrays]
        site = str(call_site(until=Meeting.digest.__code__))  # which is not being called
        return {"operation": self.operation, "arrays": kinds, "site": site}

    def digest(self, details: dict[str, Any]) -> str:
        """A hash of what must be the same on all workers; where it was called may differ."""
        text = f"{details['operation']}|{details['arrays']}|{_without_addresses(self.content())}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Ledger(Protocol):
    """Who compares programs with the other workers."""

    def meet(self, meeting: Meeting) -> AbstractContextManager[Any]:
        """Make sure that all workers come to the same program; the program runs inside."""
        ...

    def begun(self, token: Any) -> None:
        """The program was dispatched; `token` is ready when it has finished."""
        ...


def _without_addresses(text: str) -> str:
    """Text of a program without what differs from process to process."""
    return re.sub(r"0x[0-9a-f]+|id=\d+|/[^\s'\"]+\.py", "", text)
