"""One thread that waits for sockets, timers and calls of other threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from phalanx.net.spinning import Spinner
from phalanx.net.wakeup import Wakeup
from phalanx.runtime.futures import settle

_log = logging.getLogger(__name__)

READ, WRITE = select.POLLIN, select.POLLOUT
"""What a socket is ready for; epoll has the same numbers."""
ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL
"""What is told of a connection that has ended, whether it was asked for or not."""

_CALL = 30.0  # seconds within which the thread does what another asks for

T = TypeVar("T")


class Poller:
    """Which sockets can be read or written: epoll where the system has it, else poll."""

    def __init__(self) -> None:
        self._poll: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._is_epoll = hasattr(self._poll, "close")
        self._masks: dict[int, int] = {}
        self.spinner: Spinner | None = None
        """If it shall look for what comes soon, instead of sleeping."""

    def watch(self, descriptor: int, mask: int) -> None:
        """Wait for `READ` and `WRITE` of a descriptor, or for neither. Do that before it is closed."""
        known = self._masks.get(descriptor, 0)
        if mask == known:
            return
        if not mask:
            del self._masks[descriptor]
            with contextlib.suppress(OSError, KeyError):  # another thread has closed it
                self._poll.unregister(descriptor)
            return
        try:
            (self._poll.modify if known else self._poll.register)(descriptor, mask)
        except FileNotFoundError:  # another thread has closed it, and its number was given again
            self._poll.register(descriptor, mask)
        self._masks[descriptor] = mask

    def mask(self, descriptor: int) -> int:
        """What is waited for."""
        return self._masks.get(descriptor, 0)

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """The descriptors that are ready, and for what; [] if none is in time."""
        if self.spinner is None or not seconds:
            return self._sleep(seconds)
        return self.spinner.wait(lambda: self._sleep(0), lambda: self._sleep(seconds))

    def _sleep(self, seconds: float) -> list[tuple[int, int]]:
        timeout = seconds if self._is_epoll else math.ceil(seconds * 1000)
        ready: list[tuple[int, int]] = self._poll.poll(timeout)
        return ready

    def close(self) -> None:
        """Wait for nothing any more."""
        self._masks.clear()
        if self._is_epoll:
            self._poll.close()


class EventLoop:
    """Calls handlers in one thread, so that what they share needs no lock.

    Handlers must not wait. One that raises is not called again, and the others go on.

    Args:
        name: of the thread.
        after_round: called in the thread after each round of handlers.
        tick: seconds after which there is a round although nothing has happened.
    """

    def __init__(
        self, name: str, after_round: Callable[[], None] | None = None, tick: float = 1.0
    ) -> None:
        self._poller = Poller()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._lock = threading.Lock()  # for `_is_over`
        self._is_over = False
        self._stop = False
        self._after_round, self._tick = after_round, tick
        self._wakeup: Wakeup | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> EventLoop:
        """Start the thread."""
        self._wakeup = Wakeup()
        self.watch(self._wakeup, READ, self._run_calls)
        self._thread.start()
        return self

    def close(self, timeout: float = _CALL) -> None:
        """End the thread; the sockets stay open."""
        self._stop = True
        self._wake()
        if self._thread.is_alive():
            if not self.is_current:
                self._thread.join(timeout)
        elif not self._is_over:
            self._end()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the loop's own."""
        return threading.current_thread() is self._thread

    # -- for any thread --------------------------------------------------------------------------

    def spin(self) -> None:
        """Look for what comes soon, instead of sleeping: for processes that do nothing else."""
        self._poller.spinner = Spinner()

    def call_soon(self, action: Callable[[], None]) -> None:
        """Call something in the thread; nothing happens if the loop is over."""
        if self._is_over:
            return
        self._calls.append(action)
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def call(self, action: Callable[[], T]) -> T:
        """Call something in the thread, or here if there is none, and return its result."""
        future: Future[T] = Future()
        with self._lock:
            is_there = self._thread.is_alive() and not self.is_current and not self._is_over
            if is_there:
                self.call_soon(lambda: settle(future, action))
        return future.result(_CALL) if is_there else action()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.ring()

    # -- for the thread, or before it runs ---------------------------------------------------------

    def watch(self, sock: socket.socket | Wakeup, mask: int, handler: Callable[[int], None]) -> None:
        """Call a handler, with what a socket is ready for, when it is ready for any of `mask`."""
        descriptor = sock.fileno()
        self._poller.watch(descriptor, mask)
        if mask:
            self._handlers[descriptor] = handler
        else:
            self._handlers.pop(descriptor, None)

    def forget(self, sock: socket.socket) -> None:
        """Call no handler for a socket any more. Do that before it is closed."""
        self._forget(sock.fileno())

    def _forget(self, descriptor: int) -> None:
        self._poller.watch(descriptor, 0)
        self._handlers.pop(descriptor, None)

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call something once, after some time."""
        when = time.monotonic() + seconds
        heapq.heappush(self._timers, (when, next(self._numbers), action))

    def repeat(self, seconds: float, action: Callable[[], None]) -> None:
        """Call something again and again."""

        def act() -> None:
            self.call_later(seconds, act)
            action()

        self.call_later(seconds, act)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._run_calls(0)
            while not self._stop:
                for descriptor, mask in self._poller.wait(self._patience()):
                    handler = self._handlers.get(descriptor)
                    if handler is not None and not self._try(handler, mask):
                        self._forget(descriptor)
                while self._timers and self._timers[0][0] <= time.monotonic():
                    self._try(heapq.heappop(self._timers)[2])
                if self._after_round is not None:
                    self._try(self._after_round)
        finally:
            self._end()

    def _patience(self) -> float:
        """How long to wait for sockets."""
        if not self._timers:
            return self._tick
        return min(self._tick, max(0.0, self._timers[0][0] - time.monotonic()))

    def _try(self, action: Callable[..., None], *args: Any) -> bool:
        try:
            action(*args)
        except Exception:  # noqa: BLE001 - the other connections must go on
            _log.exception("A handler in the thread %s failed", self._thread.name)
            return False
        return True

    def _run_calls(self, _: int) -> None:
        assert self._wakeup is not None
        self._wakeup.clear()
        self._is_woken = False
        while self._calls:
            self._try(self._calls.popleft())

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
        while self._calls:
            self._try(self._calls.popleft())
        self._poller.close()
        self._handlers.clear()
        if self._wakeup is not None:
            self._wakeup.close()
