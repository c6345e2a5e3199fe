"""Work that is done ahead, in a thread of its own, where no signal handler can interrupt it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from phalanx.core import compat, phases
from phalanx.core.errors import InternalError
from phalanx.core.interrupts import Bell, start
from phalanx.data.handover import Elements

P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)

_LOOK_SECONDS = 1.0
"""How often somebody who waits looks whether the thread still lives."""

_LEAVE_SECONDS = 10.0
"""How long to wait for the thread to end; a function of the user may hold it up longer."""


class Work(Protocol[P_co]):
    """What is to be done: elements to be made, one after the other."""

    def __call__(self) -> Iterator[tuple[Any, P_co]]:
        """Begin. Yields each element with the position behind it."""

    def cancel(self) -> None:
        """Wake whoever waits in it; may be called by any thread."""


class Ahead(Generic[P]):
    """Runs an iterator in a thread, some elements ahead of whoever asks.

    One thread at a time may wait, any may take. The thread knows this object only, so the owner can be
    collected; it must then call `stop`.

    Args:
        work: called, and its iterator closed, in the thread.
        depth: how many elements may wait while another is made. With 0, an element is made when it is
            asked for.
        elements: where the elements go; none waits there.
    """

    def __init__(self, work: Work[P], depth: int, elements: Elements[P]) -> None:
        self.elements = elements
        self._ahead = depth + 1 if depth else 0
        self._asked = elements.taken  # how many elements were asked for
        self._cancel = work.cancel
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._something, self._wanted = Bell(), Bell()  # for whoever waits, and for the thread
        tracing = compat.is_transformation(compat.current_trace())
        settings = None if tracing else compat.ThreadState()
        self._thread = threading.Thread(
            target=self._work, args=(work, settings), name="phalanx-input", daemon=True
        )
        start(self._thread)
        _RUNNING.add(self)

    def _work(self, work: Work[P], settings: compat.ThreadState | None) -> None:
        items: Iterator[tuple[Any, P]] | None = None
        made = self._asked
        try:
            if settings is not None:
                settings.apply()
            items = work()
            while self._is_wanted(made) and (item := next(items, None)) is not None:
                self.elements.waiting.append(item)
                del item  # it must not live longer than whoever takes it wants it
                made += 1
                self._something.ring()
        except BaseException as error:  # noqa: BLE001 - it is raised where the element was wanted
            self._error = error
        finally:
            try:
                _close(items)
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
        asked = self.elements.taken + 1
        if asked > self._asked:
            self._asked = asked
            self._wanted.ring()

    def wait(self) -> bool:
        """Wait for an element; False at the end. What the iterator raised is raised again and again."""
        while not self.elements.waiting:
            if self._stopped:
                return False
            if self._ended:
                if self.elements.waiting:  # the last one came in between
                    break
                if self._error is not None:
                    raise self._error
                return False
            self.ask()
            self._wanted.ring()  # an interrupt may have kept `ask` from it
            if self._something.wait(_LOOK_SECONDS):
                continue
            phases.check()
            if self._thread.is_alive():
                continue
            if not self._ended and not self.elements.waiting:
                raise InternalError(
                    "The thread that reads input ahead is gone. A process that was forked must "
                    "make iterators of its own."
                )
        return True

    def get(self) -> Any | None:
        """The next element, None at the end; for a single thread."""
        self.ask()
        return self.elements.take() if self.wait() else None

    def stop(self, wait: bool = True) -> None:
        """End the thread; what waits is lost. Safe to call twice, and from any thread."""
        self._stopped = True
        self.elements.waiting.clear()
        self._wanted.ring()
        self._something.ring()
        self._cancel()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_SECONDS)
            self.elements.waiting.clear()


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
