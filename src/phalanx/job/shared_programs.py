"""Programs that run on several workers together: what they are, so that workers can compare them.

XLA does not check that all workers run the same program. A `SharedProgram` says what a worker is about
to run, and a `Ledger` compares it with what the others run.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.runtime.call_site import call_site
from phalanx.runtime.formatting import array_text


@dataclass(frozen=True)
class SharedProgram:
    """A program in which all workers take part."""

    key: Hashable  # tells programs apart within this process; cheap to make and to compare
    operation: str  # what it does, for people
    arrays: Sequence[Any]  # what goes in
    content: Callable[[], str] = str  # everything that must be the same on all workers, as text
    seconds: float | None = None  # how long to wait for the others; None for the usual deadline

    def details(self) -> dict[str, Any]:
        """What people are shown of it."""
        kinds = [array_text(x.dtype, x.shape) for x in self.arrays]
        site = str(call_site(until=SharedProgram.digest.__code__))  # which is not being called
        return {"operation": self.operation, "arrays": kinds, "site": site}

    def digest(self, details: dict[str, Any]) -> str:
        """A hash of what must be the same on all workers; where it was called may differ."""
        text = f"{details['operation']}|{details['arrays']}|{_without_addresses(self.content())}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Ledger(Protocol):
    """Who compares programs with the other workers."""

    def meet(self, shared: SharedProgram) -> AbstractContextManager[Any]:
        """Make sure that all workers come to the same program; the program runs inside."""

    def begun(self, token: Any, may_return: bool) -> None:
        """The program was dispatched; `token` is ready when it has finished.

        Args:
            token: an array.
            may_return: whether the caller may go on while the program runs.
        """


class _Current:
    ledger: Ledger | None = None


def ledger() -> Ledger | None:
    """What compares the programs of this process with other workers, if there are any."""
    return _Current.ledger


def use_ledger(ledger: Ledger | None) -> None:
    """Let all programs from now on be compared by a ledger, or by none."""
    _Current.ledger = ledger


_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def serial_of(thing: Any) -> int:
    """A number for the key of a program: that of an object, which no other object ever gets.

    An address is not: an object that is made later may get it, and its program would be taken for one
    that the workers have compared already.

    >>> import jax
    >>> first, second = jax.jit(abs), jax.jit(abs)
    >>> serial_of(first) == serial_of(first), serial_of(first) == serial_of(second)
    (True, False)
    """
    number = _serials.get(thing)
    if number is None:
        number = _serials[thing] = next(_numbers)
    return number


def _without_addresses(text: str) -> str:
    """Text of a program without what differs from process to process."""
    return re.sub(r"0x[0-9a-f]+|id=\d+|/[^\s'\"]+\.py", "", text)
