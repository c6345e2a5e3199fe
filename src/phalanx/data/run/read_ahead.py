"""Reading ahead: elements are made in a thread of their own, where no signal handler can interrupt it.

Everything that reads ahead in one thread does so here: `prefetch`, files that are read side by side,
distributed iterators, and iterators that interrupts would keep from getting any further. What is made,
and where its position is, a `Producer` says. Several threads for one task are a `ThreadPool`.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from phalanx.data.run.element_queue import ElementQueue
from phalanx.data.run.thread_pool import LEAVE_SECONDS, forked
from phalanx.runtime import activity, compat
from phalanx.runtime.interrupts import Bell, start

P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)

_LOOK_SECONDS = 1.0
"""How often a waiting thread looks whether the other one still lives, or wants something."""


class Producer(Protocol[P_co]):
    """What is to be done: elements to be made, one after the other."""

    def __iter__(self) -> Iterator[tuple[Any, P_co]]:
        """Begin. Yields each element with the position behind it. If it has `close`, that is called."""

    def cancel(self) -> None:
        """Wake the thread that waits in it; may be called by any thread."""


class ReadAhead(Generic[P]):
    """Runs an iterator in a thread, some elements ahead of its reader.

    One thread at a time may wait, any may take. The thread knows this object only, so the owner can be
    collected; it must then call `stop`.

    Args:
        producer: iterated, and its iterator closed, in the thread.
        depth: how many elements may wait while another is made. With 0, an element is made when it is
            asked for; with None, the producer itself waits until there is room.
        queue: where the elements go; none waits there.
        name: what to call the thread.
    """

    def __init__(
        self,
        producer: Producer[P],
        depth: int | None,
        queue: ElementQueue[P],
        name: str = "phalanx-input",
    ) -> None:
        self.queue = queue
        self._ahead = math.inf if depth is None else depth + 1 if depth else 0
        self._asked = queue.taken  # how many elements were asked for
        self._cancel = producer.cancel
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._something, self._wanted = Bell(), Bell()  # for the reader, and for the thread
        tracing = compat.in_transformation()
        settings = None if tracing else compat.ThreadState()
        self._thread = threading.Thread(
            target=self._work, args=(producer, settings), name=name, daemon=True
        )
        start(self._thread)
        _RUNNING.add(self)

    def _work(self, producer: Producer[P], settings: compat.ThreadState | None) -> None:
        items: Any = None
        made = self._asked
        try:
            if settings is not None:
                settings.apply()
            items = iter(producer)
            while self._is_wanted(made) and (item := next(items, None)) is not None:
                self.queue.waiting.append(item)
                del item  # it must not live longer than its reader wants it
                made += 1
                self._something.ring()
        except BaseException as error:  # noqa: BLE001 - it is raised where the element was wanted
            self._error = error
        finally:
            try:
                if hasattr(items, "close"):
                    items.close()
            except BaseException as error:  # noqa: BLE001 - the same
                self._error = self._error or error
            self._ended = True
            self._something.ring()

    def _is_wanted(self, made: int) -> bool:
        """Wait until another element is wanted; False if none will be."""
        while not self._stopped and made >= self._asked + self._ahead:
            self._wanted.wait(_LOOK_SECONDS)
        return not self._stopped

    def ask(self) -> None:
        """Let the thread know that one more element is wanted. To be called before each is taken."""
        asked = self.queue.taken + 1
        if asked > self._asked:
            self._asked = asked
            self._wanted.ring()

    def wait(self) -> bool:
        """Wait for an element; False at the end. What the iterator raised is raised again and again."""
        while not self.queue.waiting:
            if self._stopped:
                return False
            if self._ended:
                if self.queue.waiting:  # the last one came in between
                    break
                if self._error is not None:
                    raise self._error
                return False
            self.ask()
            self._wanted.ring()  # an interrupt may have kept `ask` from it
            if self._something.wait(_LOOK_SECONDS):
                continue
            activity.check()
            if self._thread.is_alive():
                continue
            if not self._ended and not self.queue.waiting:
                raise forked()
        return True

    def get(self) -> Any | None:
        """The next element, None at the end; for a single thread."""
        self.ask()
        while self.wait():
            try:
                return self.queue.take()
            except IndexError:  # another thread has stopped it
                pass
        return None

    def stop(self, wait: bool = True) -> None:
        """End the thread; what waits is lost. Safe to call twice, and from any thread."""
        self._stopped = True
        self.queue.waiting.clear()
        self._wanted.ring()
        self._something.ring()
        self._cancel()
        if wait:
            self.join(LEAVE_SECONDS)

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, after `stop`."""
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
            self.queue.waiting.clear()


_RUNNING: weakref.WeakSet[ReadAhead[Any]] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Threads must not call JAX while the interpreter shuts down."""
    running, end = list(_RUNNING), time.monotonic() + LEAVE_SECONDS
    for ahead in running:
        ahead.stop(wait=False)
    for ahead in running:
        ahead.join(max(0.0, end - time.monotonic()))
