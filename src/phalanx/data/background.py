"""Work that is done ahead, in a thread of its own."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from phalanx.core import compat, phases
from phalanx.core.errors import InternalError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_LOOK_SECONDS = 1.0
"""How often somebody who waits looks whether the thread still lives."""

_LEAVE_SECONDS = 10.0
"""How long to wait for the thread to end; a function of the user may hold it up longer."""


class Work(Protocol[T_co]):
    """What is to be done: items to be made, one after the other."""

    def __call__(self) -> Iterator[T_co]:
        """Begin."""

    def cancel(self) -> None:
        """Wake whoever waits in it; may be called by any thread."""


class Items(Protocol[T_co]):
    """Where items are taken from."""

    def get(self) -> T_co | None:
        """The next item; None at the end."""

    def stop(self, wait: bool = True) -> None:
        """Give up; what was not taken is lost."""


class AtOnce(Generic[T]):
    """Makes each item when it is asked for."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self._items: Iterator[T] | None = None
        self._error: BaseException | None = None

    def get(self) -> T | None:
        """The next item; None at the end. What the iterator raised is raised again and again."""
        if self._error is not None:
            raise self._error
        if self._items is None:
            self._items = self._work()
        try:
            return next(self._items, None)
        except BaseException as error:
            self._error = error
            raise

    def stop(self, wait: bool = True) -> None:
        """Close the iterator."""
        _close(self._items)
        self._items = iter(())


class Ahead(Generic[T]):
    """Runs an iterator in a thread, at most `depth` items ahead of whoever asks.

    The thread knows this object only, so the owner can be collected; it must then call `stop`.

    Args:
        work: called, and its iterator closed, in the thread.
        depth: how many items may wait.
    """

    def __init__(self, work: Work[T], depth: int) -> None:
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._depth = depth
        self._cancel = work.cancel
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        tracing = compat.is_transformation(compat.current_trace())
        settings = None if tracing else compat.ThreadState()
        self._thread = threading.Thread(
            target=self._work, args=(work, settings), name="phalanx-input", daemon=True
        )
        self._thread.start()
        _RUNNING.add(self)

    def _work(self, work: Work[T], settings: compat.ThreadState | None) -> None:
        items: Iterator[T] | None = None
        try:
            if settings is not None:
                settings.apply()
            items = work()
            for item in items:
                if not self._put(item):
                    break
        except BaseException as error:  # noqa: BLE001 - it is raised where the item was wanted
            self._error = error
        finally:
            _close(items)
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: T) -> bool:
        with self._changed:
            while len(self._items) >= self._depth and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> T | None:
        """The next item; None at the end. What the iterator raised is raised here, again and again."""
        with self._changed:
            while not self._items and not self._ended and not self._stopped:
                if self._changed.wait(_LOOK_SECONDS):
                    continue
                phases.check()
                if not self._thread.is_alive():
                    if self._ended or self._items:
                        break
                    raise InternalError(
                        "The thread that reads input ahead is gone. A process that was forked must "
                        "make iterators of its own."
                    )
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            return None

    def stop(self, wait: bool = True) -> None:
        """End the thread; what waits is lost. Safe to call twice, and from any thread."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()
        self._cancel()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_SECONDS)


_RUNNING: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Threads must not call JAX while the interpreter shuts down."""
    for ahead in list(_RUNNING):
        ahead.stop()


def _close(items: Any) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()
