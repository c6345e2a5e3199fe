"""What a worker does: it runs the closures of a coordinator, one after the other.

One thread takes attempts, makes them and reports them, many in one message. It waits for the answers
to its pushes only when there is nothing else to do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.coordinator.messages import (
    LIMITS,
    PURPOSE,
    Attempt,
    MessageKind,
    Report,
    Status,
    attempts_in,
    report_message,
)
from phalanx.coordinator.values import (
    NOTHING,
    load_arguments,
    load_value,
    pack_error,
    pack_value,
)
from phalanx.coordinator.worker_index import on_worker
from phalanx.errors import ClosureInputError, NotFoundError
from phalanx.net.stream import Stream
from phalanx.parameter_server.closure import closure as closure_of
from phalanx.parameter_server.requests import Commit, PipelinedServers, Token
from phalanx.runtime.interrupts import start

__all__ = ["Greeting", "WorkerService"]

_log = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds for a message that must come, or be taken
_FOREVER = 7 * 24 * 3600.0  # seconds without work; that the coordinator is gone is noticed elsewhere
_BATCH = 16  # reports in one message
_LATEST = 0.004  # seconds after which a report is sent, and after which messages are looked for
_QUICK = 0.01  # seconds that updates may wait for the reads of the next closure
_FEW = 4  # attempts left when to look for more
_LARGEST_KEPT = 1 << 20  # bytes of a value that servers keep until the coordinator has it


@dataclass(frozen=True)
class Greeting:
    """What a coordinator tells a worker first.

    Args:
        worker: the worker's index.
        connect: reaches the parameter servers.
    """

    worker: int
    connect: Callable[[], PipelinedServers]


class WorkerService:
    """Runs closures for the connections that an endpoint admits. The latest coordinator counts."""

    purpose = PURPOSE

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: _Session | None = None  # of the coordinator that was ready last
        self._sessions: set[_Session] = set()
        self._pulses: set[socket.socket] = set()
        self._is_closed = False

    def admit(self, sock: socket.socket, purpose: Mapping[str, Any]) -> None:
        """Take a connection: for closures, or to see whether the process lives."""
        if purpose.get("pulse"):
            self._pulses.add(sock)
            target: Callable[[], None] = partial(self._beat, sock)
        else:
            session = _Session(sock, self._take_over)
            self._sessions.add(session)
            session.when_over = self._sessions.discard
            target = session.run
        if self._is_closed:
            self.close()
        start(threading.Thread(target=target, name="phalanx-closures", daemon=True))

    def status(self) -> dict[str, Any]:
        """What the worker is doing."""
        session = self._session
        return {} if session is None else session.status()

    @property
    def connections(self) -> int:
        """How many coordinators are connected."""
        return len(self._sessions)

    def close(self) -> None:
        """End all connections. A closure that runs goes on, and the coordinator does not hear of it."""
        self._is_closed = True
        for session in list(self._sessions):
            session.close()
        for sock in list(self._pulses):
            _shut(sock)

    def _take_over(self, session: _Session) -> None:
        """A coordinator is ready, whose run the servers know: others are of runs that are over."""
        with self._lock:
            before, self._session = self._session, session
        if before is not None:
            before.close()

    def _beat(self, sock: socket.socket) -> None:
        """Answer the coordinator, which wants to know whether the process lives."""
        stream = Stream(sock, LIMITS)
        with contextlib.suppress(OSError):
            while True:
                stream.receive(_FOREVER)
                stream.send([json.dumps(self.status()).encode()], MessageKind.PONG, _PATIENCE)
        self._pulses.discard(sock)
        stream.close()


def _shut(sock: socket.socket) -> None:
    """End a connection that another thread waits for."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Session:
    """The work for one connection of a coordinator.

    Args:
        sock: the connection.
        ready: called when the servers have been reached.
    """

    def __init__(self, sock: socket.socket, ready: Callable[[_Session], None]) -> None:
        self._ready = ready
        self.when_over: Callable[[_Session], None] = lambda _: None
        """Called at the end."""
        self._socket = sock
        self._stream = Stream(sock, LIMITS)
        self._functions: dict[int, Callable[..., Any]] = {}
        self._resources: dict[int, Callable[[], Any]] = {}  # each returns it, or raises why not
        self._todo: deque[Attempt] = deque()
        self._quick: set[int] = set()  # functions that took no longer than `_QUICK` the last time
        self._reports: list[Report] = []
        self._halted = -1  # the latest era of which nothing is begun any more
        self._servers: PipelinedServers
        self._close_servers: Callable[[], None] = _nothing
        self._worker = -1
        self._sent = self._looked = time.perf_counter()
        self._busy = 0.0
        self._count = self._total = 0
        self._now: tuple[str, int, float] | None = None  # what runs, and since when
        self._is_closed = False

    def close(self) -> None:
        """End the connection, from another thread."""
        self._is_closed = True
        _shut(self._socket)

    def status(self) -> dict[str, Any]:
        """What it is doing."""
        now = self._now
        doing = {} if now is None else {"function": now[0], "closure": now[1]}
        seconds = 0.0 if now is None else time.perf_counter() - now[2]
        return {
            "worker": self._worker,
            "pid": os.getpid(),
            "closures": self._total,
            "waiting": len(self._todo),
            "seconds": seconds,
            **doing,
        }

    def run(self) -> None:
        """Work until the connection ends."""
        try:
            if self._greet():
                self._ready(self)
                self._work()
        except OSError as error:
            if not self._is_closed:
                _log.info("The coordinator's connection ended: %s", error)
        except Exception:  # noqa: BLE001 - the next connection has a thread of its own
            _log.exception("A worker cannot go on with its closures")
        finally:
            self._stream.close()
            self._close_servers()
            self.when_over(self)

    def _greet(self) -> bool:
        """Hear of the coordinator, and reach the servers; whether that was possible."""
        message = self._stream.receive(_PATIENCE)
        greeting = pickle.loads(message.buffers[0])
        self._worker = greeting.worker
        try:
            self._servers = greeting.connect()
        except Exception as error:  # noqa: BLE001 - the coordinator names it
            self._stream.send([pack_error(error)], MessageKind.REFUSED, _PATIENCE)
            return False
        self._close_servers = getattr(self._servers, "close", _nothing)
        self._stream.send([b""], MessageKind.READY, _PATIENCE)
        return True

    def _work(self) -> None:
        todo, clock = self._todo, time.perf_counter
        with on_worker(self._worker):
            while True:
                if not todo:
                    self._servers.collect(True)
                    self._send()
                    self._take(self._stream.receive(_FOREVER))
                    continue
                attempt = todo.popleft()
                if attempt.era <= self._halted:
                    self._reports.append(Report(*attempt[:2], Status.RETURNED, b""))
                    continue
                began = clock()
                self._make(attempt, began)
                now = clock()
                self._busy += now - began
                (self._quick.add if now - began < _QUICK else self._quick.discard)(attempt.function)
                self._count += 1
                if len(self._reports) >= _BATCH or now - self._sent > _LATEST:
                    self._servers.collect()
                    self._send()
                if len(todo) < _FEW or now - self._looked > _LATEST:
                    self._look()

    # -- messages --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take the messages that are there."""
        self._looked = time.perf_counter()
        while (message := self._stream.poll()) is not None:
            self._take(message)

    def _send(self) -> None:
        """Report what has ended."""
        self._sent = time.perf_counter()
        if not self._reports:
            return
        reports, self._reports = self._reports, []
        pace = self._busy / self._count if self._count else -1.0
        self._busy, self._count = 0.0, 0
        self._stream.send(report_message(pace, reports), MessageKind.REPORT, _PATIENCE)

    def _take(self, message: Any) -> None:
        kind, buffers = message.number, message.buffers
        if kind == MessageKind.RUN:
            self._todo.extend(attempts_in(buffers))
        elif kind == MessageKind.DEFINE:
            number, blob = int(bytes(buffers[0])), buffers[1]
            self._define(number, bytes(blob))
        elif kind == MessageKind.BUILD:
            number, function = map(int, bytes(buffers[0]).split())
            self._build(number, function, bytes(buffers[1]))
        elif kind == MessageKind.RECALL:
            self._halted = max(self._halted, int(bytes(buffers[0])))
        elif kind == MessageKind.RELEASE:
            what, number = pickle.loads(buffers[0])
            if what == "variable":
                self._servers.drop_known(number)
            else:
                (self._functions if what == "function" else self._resources).pop(number, None)

    def _define(self, number: int, blob: bytes) -> None:
        try:
            self._functions[number] = pickle.loads(blob)
        except Exception as error:  # noqa: BLE001 - each closure of it fails with this
            self._functions[number] = partial(_raise, error)

    def _build(self, number: int, function: int, arguments: bytes) -> None:
        try:
            args, kwargs = load_arguments(arguments, partial(self._resolve, ()))
            with closure_of(Token(0), self._servers):
                resource = self._functions[function](*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - told to those who use it
            data = pack_error(error)
            self._resources[number] = partial(_raise, _input_error(error))
            self._reports.append(Report(number, 0, Status.NOT_BUILT, data))
        else:
            self._resources[number] = partial(_same, resource)
            self._reports.append(Report(number, 0, Status.BUILT, b""))

    def _resolve(self, inputs: Sequence[Any], kind: str, number: int) -> Any:
        if kind == "input":
            if isinstance(inputs[number], BaseException):
                raise inputs[number]
            return load_value(inputs[number])
        found = self._resources.get(number)
        if found is None:
            raise NotFoundError(f"The worker does not have a resource any more. Received: {number}")
        return found()

    # -- closures --------------------------------------------------------------------------------

    def _make(self, attempt: Attempt, began: float) -> None:
        """Make an attempt: run the function, and push what it has done to variables."""
        closure, number, function, has_inputs, arguments, _ = attempt
        token = Token(closure, number)
        try:
            run = self._functions[function]
            self._now = (getattr(run, "__name__", "function"), closure, began)
            with closure_of(token, self._servers) as running:
                if not arguments:
                    result = run()
                else:
                    inputs: Sequence[Any] = ()
                    if has_inputs:
                        arguments, inputs = pickle.loads(arguments)
                    args, kwargs = load_arguments(arguments, partial(self._resolve, inputs))
                    result = run(*args, **kwargs)
            value = pack_value(result)
            updates = running.updates
            if updates or self._servers.is_ahead:
                kept = (value or NOTHING) if len(value) <= _LARGEST_KEPT else b""
                then = partial(self._pushed, attempt, value)
                self._servers.push_later(token, updates, kept, then, self._reads_soon())
            else:
                self._reports.append(Report(closure, number, Status.DONE, value))
        except BaseException as error:  # noqa: BLE001 - whatever the user's function raises
            self._fail(attempt, error)
        self._total += 1
        self._now = None

    def _reads_soon(self) -> bool:
        """Whether the next closure is about to ask servers for something, or soon over."""
        return bool(self._todo) and self._todo[0].function in self._quick

    def _pushed(self, attempt: Attempt, value: bytes, commit: Commit) -> None:
        if commit.error is not None:
            self._fail(attempt, commit.error)
            return
        status = Status.DONE if commit.applied else Status.REFUSED
        self._reports.append(Report(attempt.closure, attempt.attempt, status, value))

    def _fail(self, attempt: Attempt, error: BaseException) -> None:
        self._halted = max(self._halted, attempt.era)
        report = Report(attempt.closure, attempt.attempt, Status.FAILED, pack_error(error))
        self._reports.append(report)
        self._sent = 0.0  # tell it at once


def _nothing() -> None:
    """There is nothing to close."""


def _raise(error: BaseException, *args: Any, **kwargs: Any) -> Any:
    raise error


def _same(x: Any) -> Any:
    return x


def _input_error(error: Exception) -> ClosureInputError:
    if isinstance(error, ClosureInputError):
        return error
    return ClosureInputError(
        "A scheduled function uses what create_per_worker_dataset or create_per_worker_resource could "
        f"not make on this worker: {type(error).__name__}: {error}"
    )
