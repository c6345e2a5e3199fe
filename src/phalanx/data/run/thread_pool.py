"""Threads of a run: a few workers that do tasks, and stop when their owner is gone.

They are daemons, so a user's function that never returns cannot keep the program from ending.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from phalanx.data.plan.argument_checks import AUTOTUNE
from phalanx.errors import AbortedError, CancelledError
from phalanx.runtime.interrupts import Bell, uninterrupted

T = TypeVar("T")

POLL_SECONDS = 0.2
"""How often a reader that waits for a task looks whether it was cancelled."""

LEAVE_SECONDS = 10.0
"""How long closing waits for a thread to end; a function of the user may hold it up longer."""

MOST_THREADS = 512
"""How many threads one node of a plan starts, however many calls it may make at a time."""

_LOOK_SECONDS = 5.0
"""How often a thread without tasks looks whether its pool is still there."""

_NAMES = ("phalanx-input", "px-")
"""How the names of threads that read input begin."""

_Tasks = queue.SimpleQueue["PendingCall[Any] | None"]


class PendingCall(Generic[T]):
    """A call that a thread of a pool makes. Unlike a `Future`, it has no lock to be left locked."""

    __slots__ = ("_bell", "_call", "_error", "_value", "done")

    def __init__(self, call: tuple[Callable[..., T], tuple[Any, ...]], bell: Bell) -> None:
        self._call: tuple[Callable[..., T], tuple[Any, ...]] | None = call
        self._bell = bell
        self._value: T | None = None
        self._error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        """Make the call."""
        assert self._call is not None
        fn, args = self._call
        try:
            self._value = fn(*args)
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        self._end()

    def cancel(self) -> None:
        """Never make the call."""
        self._error = CancelledError("The iterator was closed while it was read.")
        self._end()

    def _end(self) -> None:
        self._call = None
        self.done = True
        self._bell.ring()

    def result(self) -> T:
        """What the call returned or raised; for a task that is done."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def threads_for(parallel_calls: int) -> int:
    """How many threads `num_parallel_calls` asks for."""
    if parallel_calls == AUTOTUNE:
        return len(os.sched_getaffinity(0))
    return min(parallel_calls, MOST_THREADS)


def forked() -> AbortedError:
    """The error for threads that are gone, because a process was forked."""
    return AbortedError(
        "The thread that reads input ahead is gone. A process that was forked must make iterators of "
        "its own."
    )


def is_any_reading() -> bool:
    """Whether a thread of an iterator is there, and may hold elements; also of one that was dropped."""
    return any(thread.name.startswith(_NAMES) for thread in threading.enumerate())


class ThreadPool:
    """Some threads that do tasks in the order in which they come. They end with the pool.

    Args:
        count: how many threads.
        name: what to call them.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._finished = Bell()
        self._threads: list[threading.Thread] = []
        self._count = count
        weakref.finalize(self, _stop, self._tasks, count)
        for i in range(count):
            thread = threading.Thread(
                target=_work, args=(self._tasks, weakref.ref(self)), name=f"{name}-{i}", daemon=True
            )
            with uninterrupted():
                thread.start()
                self._threads.append(thread)

    def submit(self, fn: Callable[..., T], *args: Any) -> PendingCall[T]:
        """Let a thread call `fn`."""
        task = PendingCall((fn, args), self._finished)
        self._tasks.put(task)
        return task

    def wait(self, tasks: Sequence[PendingCall[Any]], seconds: float) -> bool:
        """Wait until one of some tasks is done; whether one is. For one thread at a time."""
        end = time.monotonic() + seconds
        while not any(task.done for task in tasks):
            left = end - time.monotonic()
            if left <= 0 or not self._finished.wait(left):
                gone = not any(thread.is_alive() for thread in self._threads)
                if any(task.done for task in tasks):
                    break
                if gone:
                    raise forked()
                return False
        return True

    def stop(self) -> None:
        """Drop tasks that have not begun, and tell the threads to end. Any thread may call this."""
        _stop(self._tasks, self._count)

    def close(self) -> None:
        """Stop, and wait for the threads to end."""
        self.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LEAVE_SECONDS)


def _work(tasks: _Tasks, pool: weakref.ref[ThreadPool]) -> None:
    while True:
        try:
            task = tasks.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            if pool() is None:
                return  # an interrupt may have kept it from telling
            continue
        if task is None:
            return
        task.run()
        del task


def _stop(tasks: _Tasks, count: int) -> None:
    try:
        while (task := tasks.get_nowait()) is not None:
            task.cancel()
    except queue.Empty:
        pass
    for _ in range(count):
        tasks.put(None)
