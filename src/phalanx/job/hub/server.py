"""The hub: connections around the state of a job.

One thread serves all connections, so that a slow or broken peer cannot hold up the others, and the
state of the job needs no lock. Other threads hand it what they want done.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.errors import ClusterEnvironmentError, InvalidValueError
from phalanx.job.hub.connect import COORDINATION, HUB
from phalanx.job.hub.coordination_service import start_coordination_service
from phalanx.job.hub.descriptions import Failure, Task, describe_exit
from phalanx.job.hub.job_state import JobState
from phalanx.job.hub.silent_members import Abandoned
from phalanx.job.hub.stack_requests import Out
from phalanx.job.hub.tunnel import PrivateSocket
from phalanx.job.hub.worker_table import WorkerTable
from phalanx.net.addresses import join_address, listen
from phalanx.net.connection import Connection
from phalanx.net.event_loop import EventLoop
from phalanx.net.framing import Message, ProtocolError
from phalanx.net.listener import Listener
from phalanx.net.relay import Relay

_TICK = 0.25  # seconds


class Hub:
    """The server that a job's workers tell what they do, and that tells them what went wrong.

    Args:
        expected: the tasks of the job, in the order of their ranks.
        token: what every process of the job knows, and no other.
        host: the address to listen at.
        port: the port to listen at; 0 takes a free one.
        advertised: the name under which the others reach `host`, if it is another one.
        coordination: whether to run JAX's coordination service too, which the workers then use. It
            should run where it outlives every worker.
        cause_of_death: asked in the hub's thread how the process of a task ended, when its connection
            closes unexpectedly; returns an exit code or None. Must not wait for long.
        abandoned: told in the hub's thread which members need not be waited for any longer and why:
            nothing is heard of them, and the others have come to their end. Returns whether that is
            settled; else it is told again as long as it is so.

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
        cause_of_death: Callable[[Task], int | None] | None = None,
        abandoned: Callable[[Abandoned], bool] = lambda member: True,
    ) -> None:
        self._expected = tuple(expected)
        self._token, self._host, self._port = token, host, port
        self._advertised = advertised or host
        self._coordination = coordination
        self._cause_of_death, self._abandoned = cause_of_death, abandoned
        self._settled: set[Task] = set()  # of the abandoned
        self._state = JobState(self._expected)
        self._listener: Listener | None = None
        self._bound_port = port
        self._service: _Service | None = None
        self._loop = EventLoop("phalanx-hub", self._tell_waiting)
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._stop = False

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> Hub:
        """Listen, start JAX's coordination service, and serve in a thread."""
        sock = listen(self._host, self._port)
        self._bound_port = sock.getsockname()[1]
        if self._coordination:
            try:
                self._service = _Service(self._loop, len(self._expected))
            except BaseException:
                sock.close()
                raise
        self._state = JobState(self._expected, has_service=self._coordination)
        served = [HUB, COORDINATION] if self._coordination else [HUB]
        self._listener = Listener(
            self._loop, [sock], self._token.encode(), self._admit, served.__contains__
        )
        self._loop.repeat(_TICK, self._tick)
        self._loop.start()
        return self

    def close(self, timeout: float = 5.0) -> None:
        """Stop serving. Gives members that are still there `timeout` seconds to leave.

        JAX aborts a process whose coordination service vanishes, so stop the workers first.
        """
        if self._stop:
            return
        if self._loop.is_alive:
            with self._changed:
                self._changed.wait_for(lambda: not self._state.present(), timeout)
        self._stop = True
        self._loop.call(self._close_sockets)
        self._loop.close()
        self._tell_waiting()
        if self._service is not None:
            self._service.close()
            self._service = None

    def _close_sockets(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections.values()):
            connection.close()

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
        return join_address(self._advertised, self._bound_port)

    @property
    def failure(self) -> Failure | None:
        """Why the job cannot go on, or None."""
        return self._state.failure

    @property
    def workers_train(self) -> bool:
        """Whether the chief has said that the workers end by themselves."""
        return self._state.workers_train

    @property
    def is_used(self) -> bool:
        """Whether there are connections."""
        return bool(self._connections) or (self._listener is not None and self._listener.strangers > 0)

    def table(self) -> WorkerTable:
        """Who does what at this moment."""
        return self._loop.call(lambda: WorkerTable(self._state.rows(time.monotonic())))

    def wait_over(self, timeout: float | None = None) -> bool:
        """Wait until all tasks have come and gone, and are disconnected; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._stop or (self._state.is_over and not self._connections), timeout
            )

    def exited(self, task: Task, code: int) -> None:
        """The process of a task has ended; `code` is its exit code as `subprocess` gives it."""
        self._loop.call(lambda: self._send(self._state.exited(task, code, time.monotonic())))

    def notice(self, name: str, value: Any = None) -> None:
        """Tell all members something; see `Member.when_told`."""
        self._loop.call(lambda: self._send(self._state.notice(name, value)))

    # -- the thread --------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        self._send(self._state.tick(now))
        for member in self._state.abandoned(now):
            if member.task not in self._settled and self._abandoned(member):
                self._settled.add(member.task)

    def _tell_waiting(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _admit(self, sock: socket.socket, purpose: dict[str, Any]) -> None:
        if purpose == COORDINATION and self._service is not None:
            self._service.add(sock)
            return
        peer = next(self._numbers)

        def receive(message: Message) -> None:
            # An answer gets the number of its request.
            fields = {**message.fields, "request": message.number or None}
            self._send(self._state.handle(peer, fields, time.monotonic()))

        self._connections[peer] = Connection(self._loop, sock, receive, lambda e: self._lost(peer, e))

    def _lost(self, peer: int, error: Exception | None) -> None:
        del self._connections[peer]
        if self._stop:
            return
        if isinstance(error, ProtocolError | InvalidValueError):
            cause = f"sent what the hub does not understand, and was dropped ({error})"
        else:
            cause = self._how_it_ended(peer)
        self._send(self._state.lost(peer, time.monotonic(), cause))

    def _how_it_ended(self, peer: int) -> str:
        task = self._state.task_of(peer)
        if task is None or self._cause_of_death is None:
            return ""
        code = self._cause_of_death(task)
        return "" if code is None else describe_exit(code)

    def _send(self, out: Sequence[Out]) -> None:
        for peer, message in out:
            if peer in self._connections:
                fields = {name: value for name, value in message.items() if name != "request"}
                self._connections[peer].send(fields, number=message.get("request") or 0)


# -- JAX's service -------------------------------------------------------------------------------


class _Service:
    """JAX's coordination service at a private socket, and the way of connections to it."""

    def __init__(self, loop: EventLoop, processes: int) -> None:
        self._place = PrivateSocket()
        self._loop, self._relay = loop, Relay(loop)
        try:
            self._service = start_coordination_service(self._place.address, processes)
        except RuntimeError as error:
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
        self._relay.add(peer, upstream)

    def close(self) -> None:
        """End the connections and the service. The loop must have ended."""
        self._relay.close()
        self._service.shutdown()
        self._place.remove()
