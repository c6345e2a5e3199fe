"""Waiting for a program in such a way that one can leave.

JAX waits for an array in native code, which neither Ctrl-C nor the failure of the job can end. A
program between workers may never finish: gloo does not free a send that was under way when its
connection ended. So another thread waits in native code, and the one that called looks around from
time to time.

Such a thread must be back before Python ends: CPython up to 3.13 aborts the process if it comes back
later. One that is not, some seconds after the program's own end, ends with the process.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.runtime.deadlines import STUCK_EXIT_CODE
from phalanx.runtime.interrupts import Bell, start

__all__ = ["Waiter", "is_any_left"]

_LOOK_EVERY = 0.1  # seconds
_PATIENCE_AT_EXIT = 5.0  # seconds


class _Awaited:
    """An array that is waited for, and what became of it."""

    __slots__ = ("array", "error", "is_over", "over")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.error: BaseException | None = None
        self.is_over = False
        self.over = Bell()


_left: list[_Awaited] = []
"""Those for which a thread may still wait, although the program no longer waits for that thread."""


class Waiter:
    """A thread that waits for arrays, one after the other."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[_Awaited | None] | None = None

    def wait(self, array: Any, look: Callable[[], None]) -> None:
        """Wait until an array is there; raises what its program raised.

        Args:
            array: what to wait for.
            look: called from time to time. If it raises, the wait ends, and the program, if it should
                never finish, keeps a thread forever.
        """
        awaited = _Awaited(array)
        work = self._work
        if work is None:
            work = self._work = _new_thread()
        work.put(awaited)
        try:
            _look_until_over(awaited, look)
        except BaseException:
            # That thread may never come back: the next wait has a new one.
            self._work = None
            work.put(None)
            _left[:] = [*(each for each in _left if not each.is_over), awaited]
            raise
        if awaited.error is not None:
            raise awaited.error


def is_any_left() -> bool:
    """Whether a thread waits for a program that the process has left."""
    return any(not each.is_over for each in _left)


def _look_until_over(awaited: _Awaited, look: Callable[[], None]) -> None:
    while not awaited.over.wait(_LOOK_EVERY):
        look()


def _new_thread() -> queue.SimpleQueue[_Awaited | None]:
    """A thread that waits for what is put into the queue, until that is None."""
    work: queue.SimpleQueue[_Awaited | None] = queue.SimpleQueue()
    start(threading.Thread(target=_serve, args=(work,), name="phalanx-waiter", daemon=True))
    return work


def _serve(work: queue.SimpleQueue[_Awaited | None]) -> None:
    while (awaited := work.get()) is not None:
        try:
            awaited.array.block_until_ready()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            awaited.error = error
        awaited.array = None
        awaited.is_over = True
        awaited.over.ring()
        del awaited


@atexit.register
def _end() -> None:
    end = time.monotonic() + _PATIENCE_AT_EXIT
    for awaited in _left:
        if not awaited.is_over and not awaited.over.wait(max(0.0, end - time.monotonic())):
            print(
                "phalanx: A program between workers has not come back, although this process has left "
                f"it and is at its end. It ends with exit code {STUCK_EXIT_CODE}.",
                file=sys.stderr,
            )
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(STUCK_EXIT_CODE)
