"""Waiting for a program in such a way that one can leave.

JAX waits for an array in native code, which neither Ctrl-C nor the failure of the job can end. A
program between workers may never finish: gloo does not free a send that was under way when its
connection ended. So another thread waits in native code, and the one that called looks around from
time to time.

Such a thread should be back before Python ends: CPython up to 3.13 aborts the process if it comes back
while Python ends, and C++ may wait for it afterwards. One that is not, a moment after the program's own
end, is put to sleep where it is. The process ends as soon as Python has, with the program's own code.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.runtime.deadlines import STUCK_EXIT_CODE
from phalanx.runtime.interrupts import Bell, start

__all__ = ["Waiter", "is_any_left"]

_LOOK_EVERY = 0.1  # seconds
_PATIENCE_AT_EXIT = 2.0  # seconds


class _Awaited:
    """An array that is waited for, and what became of it."""

    __slots__ = ("array", "error", "is_over", "over", "thread")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.thread = 0
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

    def close(self) -> None:
        """End the thread, when it has come back."""
        work, self._work = self._work, None
        if work is not None:
            work.put(None)


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
        awaited.thread = threading.get_ident()
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
    stuck = [x for x in _left if not x.is_over and not x.over.wait(max(0.0, end - time.monotonic()))]
    if not stuck:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # there is none, or no more
            stream.flush()
    if not _leave_behind(stuck):
        print(
            "phalanx: A program between workers has not come back, although this process has left it "
            f"and is at its end. It ends with exit code {STUCK_EXIT_CODE}.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(STUCK_EXIT_CODE)


def _leave_behind(stuck: list[_Awaited]) -> bool:
    """Let the process be gone when Python has ended, with its exit code; whether the system can.

    The C library calls `_exit` with the code then, before it destroys what threads may still use. Only
    that of GNU passes the code on. Until then the threads must not come back to Python. A signal makes
    them sleep in native code: its handler is `sleep`, which takes the signal's number for seconds.
    """
    library = ctypes.CDLL(None)
    try:
        on_exit, handle = library.on_exit, library.signal
        leave, sleep = (ctypes.cast(x, ctypes.c_void_p) for x in (library._exit, library.sleep))
    except AttributeError:
        return False
    library.fflush(None)
    number = signal.SIGRTMAX
    handle.restype = ctypes.c_void_p
    handle(int(number), sleep)
    for awaited in stuck:
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(awaited.thread, number)
    return int(on_exit(leave, None)) == 0
