"""The coordinator's connection to one worker: made again and again, as often as it is lost."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from phalanx.coordinator.messages import LIMITS, PURPOSE, MessageKind
from phalanx.coordinator.values import load_error
from phalanx.coordinator.worker_service import Greeting
from phalanx.errors import DeadlineExceededError, PhalanxError, ServerStateLostError
from phalanx.job.hub.descriptions import Task
from phalanx.net.endpoint import dial
from phalanx.net.stream import Stream
from phalanx.runtime.interrupts import Bell, start

__all__ = ["WorkerLink"]

_log = logging.getLogger(__name__)

_ATTEMPT = 4.5  # seconds after which a missing worker is named, again and again
_PAUSE = 0.2  # seconds between tries
_BEAT = 1.0  # seconds between questions whether a worker lives
_LATE = 3.0  # seconds of silence after which a worker is named; that is noticed a little later


class WorkerLink:
    """Keeps the connection to a worker, in a thread of its own.

    The thread dials the worker, greets it, hands the connection over, and then asks from time to time
    whether the worker lives. When the connection is lost it begins anew.

    Args:
        task: the worker.
        key: the job's secret.
        greeting: what the worker is told first.
        up: called in the thread with each connection on which the worker is ready.
        silent: called in the thread when the worker does not answer any more.
        doomed: called in the thread, each time, if the worker can never get ready: a parameter server
            that it needs has lost what it held.
        patience: seconds that a worker may take to get ready, and seconds of silence that it may have.
    """

    def __init__(
        self,
        task: Task,
        key: bytes,
        greeting: Greeting,
        up: Callable[[socket.socket], None],
        silent: Callable[[], None],
        doomed: Callable[[ServerStateLostError], None],
        patience: tuple[float, float],
    ) -> None:
        self.task = task
        self._key, self._greeting = key, greeting
        self._up, self._silent, self._doomed = up, silent, doomed
        self._ready_within, self._silence = patience
        self._lost = Bell()
        self._is_closed = False
        self.missing_since: float | None = time.monotonic()
        """Since when there is no connection."""
        self.reason = "it has not been dialled yet"
        """Why there is none."""
        self.doing: dict[str, Any] = {}
        """What the worker said last of what it does."""
        self._thread = threading.Thread(
            target=self._run, name=f"phalanx-{task.type}-{task.id}", daemon=True
        )

    def start(self) -> None:
        """Begin to dial."""
        start(self._thread)

    def lose(self, reason: str) -> None:
        """The connection has ended; called in any thread."""
        self.reason = reason
        self.missing_since = time.monotonic()
        self._lost.ring()

    def close(self) -> None:
        """Dial no more."""
        self._is_closed = True
        self._lost.ring()

    def describe(self) -> str:
        """What the worker does, or why it is not there."""
        if self.missing_since is not None:
            return f"{self} is missing: {self.reason}"
        function = self.doing.get("function")
        if function is None:
            return f"{self} has nothing to do"
        return f"{self} has been running {function} for {self.doing['seconds']:.0f} s"

    def __str__(self) -> str:
        return f"{self.task} at {self.task.address}"

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        named = 0.0  # when it was said last that the worker is missing
        while not self._is_closed:
            try:
                sock = self._connect()
            except (PhalanxError, OSError) as error:
                self.reason = str(error)
                if not self._is_closed:
                    now = time.monotonic()
                    if now - named >= _ATTEMPT:
                        named, missing = now, now - (self.missing_since or now)
                        _log.warning("%s is missing for %.0f seconds: %s", self, missing, error)
                    if isinstance(error, ServerStateLostError):
                        self._doomed(error)
                    self._lost.wait(_PAUSE)
                continue
            named = 0.0
            self._lost.wait(0)  # of the connection before
            self.missing_since = None
            self._up(sock)
            self._watch()

    def _connect(self) -> socket.socket:
        """A connection on which the worker is ready."""
        purpose = {"for": PURPOSE}
        sock = dial(self.task.address, self._key, purpose, _ATTEMPT, peer=str(self.task))
        stream = Stream(sock, LIMITS)
        stream.send([cloudpickle.dumps(self._greeting)], MessageKind.HELLO, _ATTEMPT)
        answer = stream.receive(self._ready_within, self._remind)
        if answer.number == MessageKind.REFUSED:
            stream.close()
            error = load_error(bytes(answer.buffers[0]))
            raise error if isinstance(error, PhalanxError) else DeadlineExceededError(str(error))
        if self._is_closed:
            sock.close()
            raise ConnectionAbortedError("the coordinator is closed")
        return sock

    def _remind(self, seconds: float) -> None:
        """Say who is not ready; no wait is silent."""
        self.reason = f"it has been getting ready for {seconds:.0f} seconds"
        _log.warning("%s has been getting ready for %.0f seconds.", self, seconds)

    def _watch(self) -> None:
        """Ask whether the worker lives, until the connection is lost."""
        pulse: Stream | None = None
        heard = time.monotonic()
        late = _LATE  # seconds of silence after which to name it next
        while not self._is_closed and not self._lost.wait(_BEAT if pulse is not None else _PAUSE):
            try:
                if pulse is None:
                    purpose = {"for": PURPOSE, "pulse": True}
                    pulse = Stream(dial(self.task.address, self._key, purpose, _BEAT), LIMITS)
                pulse.send([b""], MessageKind.PING, _BEAT)
                self.doing = json.loads(bytes(pulse.receive(_BEAT).buffers[0]))
                heard, late = time.monotonic(), _LATE
            except (PhalanxError, OSError):
                pulse = None
            silent = time.monotonic() - heard
            if silent > late:
                late = silent + _ATTEMPT
                _log.warning("%s has not answered for %.0f seconds.", self, silent)
            if silent > self._silence and not self._lost.wait(0):
                self._silent()
                self._lost.wait(_ATTEMPT)
                break
        self.doing = {}
        if pulse is not None:
            with contextlib.suppress(OSError):
                pulse.close()
