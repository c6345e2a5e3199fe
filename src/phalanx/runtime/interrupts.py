"""Interrupts: exceptions that signal handlers raise, such as KeyboardInterrupt.

CPython runs signal handlers in the main thread only, between two steps of whatever Python code runs
there: after a call, at the beginning of a function and at the end of a round of a loop. What they raise
can therefore leave any two statements apart that belong together. Code that must not be left half done
has three ways out, the cheapest first:

* Change state in one step: build the new state aside, and store it in one attribute. Loading, storing,
  subscripts and ``return`` are no places for handlers, calls are.
* Let another thread do it. Handlers never run there.
* `uninterrupted`, for a few steps that never wait.

Since Python 3.12 the jump at the end of a loop's round is not covered by a ``try`` or ``with`` around
the loop in the same function. Where it matters, the loop is a function of its own.

Locks of C (`threading.Lock`, `threading.RLock`, `queue.SimpleQueue`) in a ``with`` statement of their
own are safe. `threading.Condition`, `Event`, `Semaphore` and `concurrent.futures.Future` are written in
Python: an interrupt in one of their methods can leave its lock locked forever. `Bell` stands in for
them, and `start` starts threads without such a risk.
"""

from __future__ import annotations

import _signal  # what `signal` is made of, without its conversions to enums, which cost 8 µs each
import _thread
import contextlib
import operator
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

_FAULTS = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP"}
_NUMBERS = tuple(sorted(int(s) for s in signal.Signals if s.name not in _FAULTS and s < 32))
"""The signals whose handlers wait: all but faults and real-time signals."""


class _Delayed:
    """Stands in for a handler while a section is under way, and does what it does afterwards.

    So nothing is wrong if an interrupt keeps the handler from being put back: the next section does.
    """

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        section = _main.section
        late = None if section is None else section.late
        if late is None:
            self.handler(number, frame)
        else:
            late[number] = self.handler, frame


class _StandIns:
    """What stands in for the handlers that a process has; mostly they are the same as the last time."""

    __slots__ = ("handlers", "pairs")

    def __init__(self, handlers: tuple[Any, ...]) -> None:
        self.handlers = handlers
        self.pairs: tuple[tuple[int, _Delayed], ...] = tuple(
            # A stand-in that was found belongs to a section that is over.
            (number, handler if isinstance(handler, _Delayed) else _Delayed(handler))
            for number, handler in zip(_NUMBERS, handlers, strict=True)
            if callable(handler)
        )


class uninterrupted:  # noqa: N801 - reads as a statement
    """A section that no signal handler interrupts: handlers wait until it is over.

    They then run where the ``with`` statement ends, each once, in the order of the signals; what one
    raises is raised there, and the section has been done completely. An exception of the section itself
    becomes its context. A section in another section ends with the outer one. In other threads than the
    main thread it does nothing, because no handler runs there.

    It costs about 2 µs, because each handler is replaced and put back. It holds off Ctrl-C, so never
    wait in it for anything that may not come.

    Examples:
        >>> import signal
        >>> done = []
        >>> before = signal.signal(signal.SIGUSR1, lambda number, frame: done.append("handler"))
        >>> with uninterrupted():
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     done.append("section")
        >>> done
        ['section', 'handler']
        >>> _ = signal.signal(signal.SIGUSR1, before)
    """

    __slots__ = ("_pairs", "late")

    late: dict[int, tuple[Handler, FrameType | None]] | None
    _pairs: tuple[tuple[int, _Delayed], ...]

    def __enter__(self) -> None:
        outer = _main.section
        if _thread.get_ident() != _main.ident or (outer is not None and outer.late is not None):
            self.late = None  # no handler runs here, or they wait already
            return
        self.late, self._pairs = {}, ()
        _main.section = self
        try:
            self._delay()
        except BaseException:  # of a signal that was not delayed yet
            self._end()
            raise

    def _delay(self) -> None:
        known = _main.stand_ins
        if any(map(operator.is_not, map(_signal.getsignal, _NUMBERS), known.handlers)):
            known = _main.stand_ins = _StandIns(tuple(map(_signal.getsignal, _NUMBERS)))
        self._pairs = known.pairs
        for number, delayed in known.pairs:
            _signal.signal(number, delayed)

    def __exit__(self, *error: object) -> None:
        if self.late is not None:
            self._end()

    def _end(self) -> None:
        _main.section = None
        late, self.late = self.late, None  # from here on handlers run
        try:
            self._put_back()
        finally:
            if late:
                _run([(handler, n, frame) for n, (handler, frame) in late.items()])

    def _put_back(self) -> None:
        for number, delayed in self._pairs:
            if _signal.getsignal(number) is delayed:
                _signal.signal(number, delayed.handler)


class _Main:
    """What is known of the main thread.

    Attributes of an object: each change of a class makes Python look up all of its attributes anew.
    """

    __slots__ = ("ident", "section", "stand_ins")

    def __init__(self) -> None:
        self.ident = threading.main_thread().ident
        self.section: uninterrupted | None = None  # the one that is under way
        self.stand_ins = _StandIns((None,) * len(_NUMBERS))

    def forked(self) -> None:
        """The thread that has forked is the main thread of the child."""
        self.ident = threading.main_thread().ident


_main = _Main()
os.register_at_fork(after_in_child=_main.forked)


def let_handlers_run() -> None:
    """Run the handlers that wait, at a place in a section where everything is in order.

    For sections that may take long: what a handler raises is raised here.
    """
    section = _main.section
    if section is None or not section.late or _thread.get_ident() != _main.ident:
        return
    late, section.late = section.late, {}
    _run([(handler, n, frame) for n, (handler, frame) in late.items()])


def _run(late: list[tuple[Handler, int, FrameType | None]]) -> None:
    """Run handlers; one that raises keeps none of the others from running."""
    if late:
        (handler, number, frame), *others = late
        try:
            handler(number, frame)
        finally:
            _run(others)


class Bell:
    """Wakes one waiter; the next wait returns at once if it was rung before.

    Ringing and waiting are single steps of C, so that an interrupt leaves nothing behind. A waiter
    looks for itself what has changed: a ring may be early, or one for several changes.

    Examples:
        >>> bell = Bell()
        >>> bell.ring(), bell.ring()
        (None, None)
        >>> bell.wait(10), bell.wait(0)
        (True, False)
    """

    __slots__ = ("_silence",)

    def __init__(self) -> None:
        self._silence = _thread.allocate_lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the waiter, or the next one."""
        if self._silence.locked():
            with contextlib.suppress(RuntimeError):  # another thread was quicker
                self._silence.release()

    def wait(self, seconds: float) -> bool:
        """Wait for a ring; whether there was one."""
        return self._silence.acquire(timeout=seconds)


def start(thread: threading.Thread) -> None:
    """Start a thread. `Thread.start` alone may, if interrupted, leave the thread waiting forever."""
    with uninterrupted():
        thread.start()
