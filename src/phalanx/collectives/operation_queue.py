"""Order: operations run one after another, as they were launched."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from phalanx.runtime.futures import settle
from phalanx.runtime.interrupts import uninterrupted

T = TypeVar("T")


class OperationQueue:
    """Runs operations in their order, which all ranks must share.

    An operation that its caller waits for runs in the caller's own thread if nothing is under way.
    All others run in the queue's thread, which is started for the first of them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # how many wait for `_changed`
        self._turn = threading.Lock()  # held by the thread that runs an operation
        self._under_way = 0
        self._thread: threading.Thread | None = None

    def try_now(self, work: Callable[[], T]) -> tuple[bool, T | None]:
        """Run `work` here if nothing is under way; returns whether it was, and its result."""
        if not self.enter():
            return False, None
        try:
            return True, work()
        finally:
            self.leave()

    def enter(self) -> bool:
        """Begin an operation in this thread if nothing is under way; returns whether it has begun.

        Only for the main thread inside `uninterrupted`, and for other threads.
        """
        with self._lock:
            if self._under_way:
                return False
            self._under_way = 1
            self._turn.acquire()  # free, as nothing is under way
        return True

    def leave(self) -> None:
        """End an operation that `enter` has begun."""
        self._turn.release()
        self._ended()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the queue's thread when everything before it is done."""
        future: Future[T] = Future()
        with uninterrupted(), self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"phalanx-comm-{self._name}", daemon=True
                )
                self._thread.start()
            self._under_way += 1
            self._queue.put((work, future))
        return future

    def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing is under way; returns whether it is so."""
        with self._lock:
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: not self._under_way, seconds)
            finally:
                self._waiting -= 1

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the queue's own."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Let the thread end after what has been launched."""
        self._queue.put(None)

    def _ended(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._waiting:
                self._changed.notify_all()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            with self._turn:
                settle(item[1], item[0])
            del item
            self._ended()
