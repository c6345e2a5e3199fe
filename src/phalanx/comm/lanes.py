"""Threads that run operations one after another, in the order in which they were launched."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Lane:
    """One thread with a queue. Its operations keep their order, which all ranks must share."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._queue = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"phalanx-comm-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` when everything before it is done."""
        future: Future[Any] = Future()
        with self._lock:
            self._last = future
            self._queue.put((work, future))
        return future

    @property
    def last(self) -> Future[Any] | None:
        """The newest operation, or None."""
        return self._last

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the lane's own."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Let the thread end after what has been launched."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - the future has it
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, work, future
