"""Threads of a run: a few workers that do tasks, and stop when nobody needs them any more.

They are daemons, so a user's function that never returns cannot keep the program from ending.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from phalanx.data.checks import AUTOTUNE

T = TypeVar("T")

PATIENCE = 10.0
"""How many seconds closing waits for a function of the user that is still running."""

MOST_THREADS = 512
"""How many threads one node of a plan starts, however many calls it may make at a time."""

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]
_Tasks = queue.SimpleQueue["_Task | None"]


def threads_for(parallel_calls: int) -> int:
    """How many threads `num_parallel_calls` asks for."""
    if parallel_calls == AUTOTUNE:
        return len(os.sched_getaffinity(0))
    return min(parallel_calls, MOST_THREADS)


class Pool:
    """Some threads that do tasks in the order in which they come. They end with the pool.

    Args:
        count: how many threads.
        name: what to call them.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        self._stop = weakref.finalize(self, _stop, self._tasks, count)
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., T], *args: Any) -> Future[T]:
        """Let a thread call `fn`."""
        future: Future[T] = Future()
        self._tasks.put((future, fn, args))
        return future

    def stop(self) -> None:
        """Drop tasks that have not begun, and tell the threads to end. Any thread may call this."""
        self._stop()

    def close(self) -> None:
        """Stop, and wait for the threads to end."""
        self._stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(PATIENCE)


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        future, fn, args = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(fn(*args))
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)
        del task, future, fn, args


def _stop(tasks: _Tasks, count: int) -> None:
    try:
        while (task := tasks.get_nowait()) is not None:
            task[0].cancel()
    except queue.Empty:
        pass
    for _ in range(count):
        tasks.put(None)
