"""The hub: sockets and a thread around a board.

One thread serves all connections, so that a slow or broken peer cannot hold up the others, and the
board needs no lock. Other threads hand it what they want done.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from phalanx.cluster.hub.board import Board, Out
from phalanx.cluster.hub.facts import Failure, Task, describe_exit
from phalanx.cluster.hub.frames import ProtocolError, Stream
from phalanx.cluster.hub.service import start_coordination_service
from phalanx.cluster.hub.sockets import join_address, keep_alive, listen
from phalanx.cluster.hub.table import Table
from phalanx.cluster.hub.tunnel import REQUEST, PrivateSocket, Pump
from phalanx.core.errors import (
    ClusterEnvironmentError,
    DeadlineExceededError,
    InvalidValueError,
    UnauthenticatedError,
)

__all__ = ["Hub"]

_log = logging.getLogger(__name__)

_TICK = 0.25  # seconds
_PROOF_PATIENCE = 10.0  # seconds that a peer may take to show that it belongs to the job
_MOST_STRANGERS = 64  # connections that have not shown it yet
_LARGEST_BACKLOG = 32 * 1024 * 1024  # bytes that may wait for a peer that does not read
_CHUNK = 256 * 1024

T = TypeVar("T")


@dataclass
class _Connection:
    """One socket of the hub."""

    number: int
    socket: socket.socket
    stream: Stream
    since: float


class Hub:
    """The server that a job's workers tell what they do, and that tells them what went wrong.

    Args:
        expected: the tasks of the job, in the order of their ranks.
        token: what every process of the job knows and nobody else.
        host: the address to listen at.
        port: the port to listen at; 0 takes a free one.
        advertised: the name under which the others reach `host`, if it is another one.
        coordination: whether to run JAX's coordination service too, which the workers then use. It
            should run where it outlives every worker.
        on_event: called in the hub's thread with what happens: a dict whose "type" is joined, ready,
            left, failure or later (a failure after the first).
        cause_of_death: asked in the hub's thread how the process of a task ended, when its connection
            closes unexpectedly; returns an exit code or None. Must not wait for long.

    The hub listens once `start` has been called, also as a context manager.
    """

    def __init__(
        self,
        expected: Sequence[Task],
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertised: str | None = None,
        coordination: bool = True,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        cause_of_death: Callable[[Task], int | None] | None = None,
    ) -> None:
        self._expected = tuple(expected)
        self._token, self._host, self._port = token, host, port
        self._advertised = advertised or host
        self._coordination = coordination
        self.on_event = on_event
        self._cause_of_death = cause_of_death
        self._board = Board(self._expected)
        self._listener: socket.socket | None = None
        self._service: _Service | None = None
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count(1)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake_out: socket.socket | None = None
        self._wake_in: socket.socket | None = None
        self._stack_futures: dict[int, Future[dict[str, str]]] = {}
        self._changed = threading.Condition()
        self._stop = False
        self._rests = False  # does not listen, because it has no descriptor for who comes
        self._thread = threading.Thread(target=self._serve, name="phalanx-hub", daemon=True)

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> Hub:
        """Listen, start JAX's coordination service, and serve in a thread."""
        self._listener = listen(self._host, self._port)
        if self._coordination:
            try:
                self._service = _Service(len(self._expected))
            except BaseException:
                self._listener.close()
                raise
        self._board = Board(self._expected, has_service=self._coordination)
        self._wake_out, self._wake_in = socket.socketpair()
        for sock in (self._listener, self._wake_out):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, None)
        self._thread.start()
        return self

    def close(self, timeout: float = 5.0) -> None:
        """Stop serving. Gives members that are still there `timeout` seconds to leave.

        JAX aborts a process whose coordination service vanishes, so stop the workers first.
        """
        if self._stop:
            return
        if self._thread.is_alive():
            with self._changed:
                self._changed.wait_for(lambda: not self._board.present(), timeout)
        self._stop = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=30.0)
        for connection in list(self._connections.values()):
            connection.socket.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            if sock is not None:
                sock.close()
        self._selector.close()
        if self._service is not None:
            self._service.close()
            self._service = None

    def __enter__(self) -> Hub:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- questions -------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where members connect to, as ``host:port``."""
        if self._listener is None:
            raise InvalidValueError("The hub has no address before it is started. Call start() first.")
        return join_address(self._advertised, self._listener.getsockname()[1])

    @property
    def failure(self) -> Failure | None:
        """Why the job cannot go on, or None."""
        return self._board.failure

    @property
    def is_over(self) -> bool:
        """Whether all tasks have come and gone."""
        return self._board.is_over

    @property
    def is_used(self) -> bool:
        """Whether anybody is connected."""
        return bool(self._connections)

    def table(self) -> Table:
        """Who does what at this moment."""
        return self._call(lambda: Table(self._board.rows(time.monotonic())))

    def stacks(self, timeout: float = 5.0) -> dict[str, str]:
        """The Python stacks of all members, by task; those that do not answer in time say so."""
        future: Future[dict[str, str]] = Future()
        number = next(self._numbers)
        self._stack_futures[number] = future
        now = time.monotonic
        self._call(lambda: self._send(self._board.ask_stacks(number, now(), timeout)))
        return future.result(timeout + 10 * _TICK + 5.0)

    def wait_joined(self, timeout: float) -> None:
        """Wait until all tasks have joined; raises the job's failure, or who is missing in time."""

        def settled() -> bool:
            return self._stop or self._board.is_ready or self._board.failure is not None

        with self._changed:
            self._changed.wait_for(settled, timeout)
        if self._board.failure is not None:
            raise self._board.failure.error()
        if not self._board.is_ready:
            missing = ", ".join(str(task) for task in self._board.missing())
            raise DeadlineExceededError(
                f"Not all workers joined within {timeout:g} seconds. Missing: {missing}."
            )

    def wait_over(self, timeout: float | None = None) -> bool:
        """Wait until all tasks have come and gone, and are disconnected; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._stop or (self._board.is_over and not self._connections), timeout
            )

    # -- what a launcher tells the hub ---------------------------------------------------------------

    def exited(self, task: Task, code: int) -> None:
        """The process of a task has ended; `code` is its exit code as `subprocess` gives it."""
        self._call(lambda: self._send(self._board.exited(task, code, time.monotonic())))

    def fail(self, failure: Failure) -> None:
        """Tell all members that the job cannot go on."""
        self._call(lambda: self._send(self._board.declare(failure, time.monotonic())))

    # -- the thread --------------------------------------------------------------------------------

    def _call(self, action: Callable[[], T]) -> T:
        """Run an action in the hub's thread."""
        if threading.current_thread() is self._thread:
            return action()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                future.set_exception(error)

        if self._stop or not self._thread.is_alive():
            return action()
        self._commands.put(run)
        self._wake()
        return future.result(30.0)

    def _wake(self) -> None:
        if self._wake_in is not None:
            with contextlib.suppress(OSError):
                self._wake_in.send(b"!")

    def _serve(self) -> None:
        next_tick = time.monotonic() + _TICK
        while not self._stop:
            events = self._selector.select(max(0.0, next_tick - time.monotonic()))
            for key, mask in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_out:
                    self._run_commands()
                else:
                    self._serve_connection(key.data, mask)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + _TICK
                self._drop_strangers(_MOST_STRANGERS)
                self._listen_again()
                self._send(self._board.tick(time.monotonic()))
            with self._changed:
                self._changed.notify_all()

    def _listen_again(self) -> None:
        if self._rests and self._listener is not None:
            self._rests = False
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _run_commands(self) -> None:
        assert self._wake_out is not None
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        with contextlib.suppress(Empty):
            while True:
                self._commands.get_nowait()()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except ConnectionError:  # the peer is gone already
            return
        except OSError:  # this process has no descriptor left: wait for a while
            self._drop_strangers(0)
            self._selector.unregister(self._listener)
            self._rests = True
            return
        sock.setblocking(False)
        keep_alive(sock)
        number = next(self._numbers)
        stream = Stream(self._token, server=True)
        connection = _Connection(number, sock, stream, time.monotonic())
        self._connections[number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._flush(connection)
        self._drop_strangers(_MOST_STRANGERS)

    def _drop_strangers(self, most: int) -> None:
        """Drop those that take too long to prove themselves, and the oldest of too many."""
        now = time.monotonic()
        strangers = [c for c in self._connections.values() if not c.stream.proven]
        strangers.sort(key=lambda c: c.since)
        crowd = strangers[: max(0, len(strangers) - most)]
        for connection in strangers:
            if connection in crowd or now - connection.since > _PROOF_PATIENCE:
                self._drop(connection)

    def _serve_connection(self, connection: _Connection, mask: int) -> None:
        if connection.number not in self._connections:
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            for message in connection.stream.receive(data):
                if message == REQUEST:
                    self._open_tunnel(connection)
                    return
                self._send(self._board.handle(connection.number, message, time.monotonic()))
        except (ProtocolError, UnauthenticatedError, InvalidValueError) as error:
            self._flush(connection)
            self._drop(connection, f"sent what the hub does not understand, and was dropped ({error})")
            return
        self._flush(connection)

    def _open_tunnel(self, connection: _Connection) -> None:
        """From now on the connection belongs to JAX."""
        if self._service is None or self._board.task_of(connection.number) is not None:
            self._drop(connection)
            return
        connection.stream.send(REQUEST)
        self._flush(connection)
        if self._connections.pop(connection.number, None) is not None:
            self._selector.unregister(connection.socket)
            self._service.add(connection.socket)

    def _flush(self, connection: _Connection) -> None:
        if connection.number not in self._connections:
            return
        outgoing = connection.stream.outgoing
        try:
            while outgoing:
                sent = connection.socket.send(outgoing)
                del outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        if len(outgoing) > _LARGEST_BACKLOG:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
        self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: _Connection, why: str = "") -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        cause = why or self._how_it_ended(connection.number)
        self._send(self._board.lost(connection.number, time.monotonic(), cause))

    def _how_it_ended(self, peer: int) -> str:
        task = self._board.task_of(peer)
        if task is None or self._cause_of_death is None:
            return ""
        code = self._cause_of_death(task)
        return "" if code is None else describe_exit(code)

    def _send(self, out: Sequence[Out]) -> None:
        for peer, message in out:
            if peer is None:
                self._event(message)
            elif peer in self._connections:
                connection = self._connections[peer]
                connection.stream.send(message)
                self._flush(connection)

    def _event(self, message: dict[str, Any]) -> None:
        if message["type"] == "stacks":
            future = self._stack_futures.pop(message["request"], None)
            if future is not None:
                future.set_result(message["stacks"])
        elif self.on_event is not None:
            try:
                self.on_event(message)
            except Exception:  # noqa: BLE001 - the hub must go on for the workers' sake
                _log.exception("on_event failed for %s", message["type"])


# -- JAX's service -------------------------------------------------------------------------------


class _Service:
    """JAX's coordination service at a private socket, and the tunnels to it."""

    def __init__(self, processes: int) -> None:
        self._place = PrivateSocket()
        self._pump = Pump("phalanx-hub-tunnels")
        try:
            self._service = start_coordination_service(self._place.address, processes)
        except RuntimeError as error:
            self._pump.close()
            self._place.remove()
            raise ClusterEnvironmentError(
                f"JAX's coordination service does not start. Received: {error}"
            ) from error

    def add(self, peer: socket.socket) -> None:
        """Connect a peer with the service."""
        upstream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            upstream.connect(self._place.path)
        except OSError:
            upstream.close()
            peer.close()
            return
        self._pump.add(peer, upstream)

    def close(self) -> None:
        """End the tunnels and the service."""
        self._pump.close()
        self._service.shutdown()
        self._place.remove()
