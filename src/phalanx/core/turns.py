"""One thread at a time, for as long as it takes.

Unlike waiting for a plain lock, waiting for a `Turn` warns, says where the thread is that has it, and
ends with an error. A turn survives interrupts: it is never taken without its holder knowing, so it is
always given back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from phalanx.core.callsite import where_is
from phalanx.core.deadlines import replica_patience
from phalanx.core.errors import ContextError, DeadlineExceededError
from phalanx.core.interrupts import uninterrupted

T = TypeVar("T")

_log = logging.getLogger("phalanx")


class Turns:
    """What only one thread at a time may do.

    Args:
        doing: what it is, for people, as in "change variables".
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._lock = threading.Lock()
        self._thread: int | None = None  # which has its turn

    def run(self, fn: Callable[[], T]) -> T:
        """Call a short function in a turn of its own; no signal handler interrupts it."""
        result: list[T] = []

        def in_turn() -> None:
            try:
                result.append(fn())
            finally:
                self._release()

        self._until(in_turn)
        return result[0]

    def _release(self) -> None:
        self._thread = None
        self._lock.release()

    def _until(self, begin: Callable[[], None]) -> None:
        """Take the lock, and do at once what must be done with it."""
        started = time.monotonic()
        warned = started
        while True:
            with uninterrupted():
                # In short pieces, because Ctrl-C waits as long.
                if self._lock.acquire(timeout=0.1):
                    self._thread = threading.get_ident()
                    begin()
                    return
            warned = self._complain(started, warned)

    def _complain(self, started: float, warned: float) -> float:
        holder = self._thread
        if holder == threading.get_ident():
            raise ContextError(
                f"Code that should {self._doing} was called in the middle of code of the same thread "
                "that does, by a signal handler perhaps. Note in the handler what must be done, and do "
                "it between two steps."
            )
        now, patience = time.monotonic(), replica_patience()
        text = (
            f"A thread has waited for {now - started:.0f} s to {self._doing}, which another thread "
            f"does meanwhile. That one is at {where_is(holder)}"
        )
        if now - started >= patience.give_up_after:
            raise DeadlineExceededError(f"{text}. Set PHALANX_REPLICA_DEADLINE to wait longer.")
        if now - warned < patience.warn_after:
            return warned
        _log.warning("%s", text)
        return now


class Turn:
    """A turn of one thread, and of those that work for it."""

    taken = False

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def take(self) -> None:
        """Wait for the turn, unless it is taken."""
        if not self.taken:
            self._turns._until(self._begin)

    def end(self) -> None:
        """Let others have theirs."""
        if self.taken:
            with uninterrupted():
                if self.taken:
                    self.taken = False
                    self._turns._release()

    def _begin(self) -> None:
        self.taken = True

    def __del__(self) -> None:
        self.end()  # only if interrupts kept it from being called
