"""One thread at a time, for as long as it takes.

Unlike waiting for a plain lock, waiting for a `Turn` warns, says where the thread is that has it, and
ends with an error. A turn survives interrupts: it is never taken without its holder knowing, so it is
always given back.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from phalanx.errors import ContextError, DeadlineExceededError
from phalanx.runtime.call_site import where_is
from phalanx.runtime.deadlines import replica_patience
from phalanx.runtime.interrupts import uninterrupted

P = ParamSpec("P")
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
        self.is_taken: Callable[[], bool] = self._lock.locked
        self._looking = threading.Lock()  # whether the holder has gone
        self._thread: int | None = None  # which has its turn
        self._holder: weakref.ref[Turn] | None = None

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a short function in a turn of its own; no signal handler interrupts it."""
        with uninterrupted():
            if self._lock.acquire(False):
                try:
                    self._thread = threading.get_ident()
                    return fn(*args, **kwargs)
                finally:
                    self._release()
        result: list[T] = []

        def run() -> None:
            try:
                result.append(fn(*args, **kwargs))
            finally:
                self._release()

        self._until(run)
        return result[0]

    def begin(self, turn: Turn) -> None:
        """Wait until a turn can begin."""

        def taken() -> None:
            turn.taken = True
            self._holder = weakref.ref(turn)

        self._until(taken)

    def end(self, turn: Turn) -> None:
        """Let others have their turn."""
        with uninterrupted():
            if turn.taken:
                turn.taken = False
                self._release()

    def _release(self) -> None:
        self._thread = self._holder = None
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

    def _was_left(self) -> bool:
        """Give a turn back if its holder has gone: interrupts can keep it from doing so."""
        with self._looking:
            if self._holder is None or self._holder() is not None:
                return False
            self._release()
            return True

    def _complain(self, started: float, warned: float) -> float:
        holder = self._thread
        if self._was_left():
            return warned
        if holder == threading.get_ident():
            gc.collect()  # the holder may be gone, but for what refers to itself
            if self._was_left():
                return warned
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
            self._turns.begin(self)

    def end(self) -> None:
        """Let others have theirs."""
        if self.taken:
            self._turns.end(self)
