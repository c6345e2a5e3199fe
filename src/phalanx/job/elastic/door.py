"""The door of an elastic job: a server in the launcher, at which workers wait for their generation.

It outlives every generation. Each generation of several workers has a hub of its own, with a service of
JAX for as many processes; the door says where it is.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from phalanx.errors import InvalidValueError
from phalanx.job.elastic.letters import Letters
from phalanx.job.elastic.membership import ElasticMembership
from phalanx.job.elastic.orders import (
    Again,
    Begin,
    End,
    Fail,
    Generation,
    Order,
    Release,
    Spawn,
    Stop,
)
from phalanx.job.hub import fields
from phalanx.job.hub.descriptions import Failure, Task
from phalanx.job.hub.server import Hub
from phalanx.job.hub.silent_members import Abandoned
from phalanx.net.addresses import join_address, listen
from phalanx.net.client import RequestClient, connect
from phalanx.net.connection import Connection
from phalanx.net.event_loop import EventLoop
from phalanx.net.framing import Message
from phalanx.net.listener import Listener
from phalanx.runtime.observed_time import ObservedTime

__all__ = ["DOOR", "Door", "DoorDisplay", "Host", "ask_door", "connect_to_door"]

DOOR = {"service": "door"}
"""What connections of workers that wait are for."""

_TICK = 0.25  # seconds
_ASK_EVERY = 1.0  # seconds
_FROZEN = 2.0  # seconds without a tick, in which the launcher itself did not run
_LONGEST_NUMBER = 1 << 62


class Host(Protocol):
    """What the door needs of the launcher. Called in the door's thread; must not wait."""

    def spawn(self, count: int) -> None:
        """Start so many workers more."""

    def end(self, worker: int, why: str) -> None:
        """Kill the process of a worker, and say why."""

    def finished(self, worker: int) -> None:
        """A worker is told that the training has ended; what is left to do, none does in its place."""

    def failed(self, text: str) -> None:
        """The job cannot go on."""

    def address_of(self, worker: int) -> str:
        """Where a worker is."""

    def cause_of_death(self, worker: int) -> int | None:
        """The exit code of a worker that may have ended."""

    def computes(self, pid: int) -> bool:
        """Whether a process is known to have computed a moment ago."""

    def is_idle(self, pid: int) -> bool:
        """Whether a process has not computed since the last look; called in the thread of a hub."""


class DoorDisplay(Protocol):
    """Shows people what happens at the door."""

    def generation(self, generation: Generation, names: Sequence[str], hub: Hub | None) -> None:
        """A generation begins."""


class Door:
    """The server; a context manager.

    Args:
        membership: who is in.
        token: what every process of the job knows, and no other.
        launcher: starts and ends processes.
        host: the address to listen at.
        display: is told of each generation.
    """

    def __init__(
        self,
        membership: ElasticMembership,
        token: str,
        launcher: Host,
        host: str = "127.0.0.1",
        display: DoorDisplay | None = None,
    ) -> None:
        self._state, self._token, self._host = membership, token, host
        self._launcher, self._display = launcher, display
        self._loop = EventLoop("phalanx-door")
        self._connections: dict[int, Connection] = {}
        self._letters: dict[int, Letters] = {}
        self._pids: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._tasks: dict[Task, int] = {}
        self._hub: Hub | None = None
        self._closing: list[threading.Thread] = []
        self._now = ObservedTime(_FROZEN)
        self._asked = 0.0  # when workers were asked whether they are there
        self._answered: set[int] = set()  # those that have said so since the last tick
        sock = listen(host, 0)
        self.address = join_address(host, sock.getsockname()[1])
        """Where workers come to."""
        self._listener = Listener(
            self._loop, [sock], token.encode(), self._admit, lambda purpose: purpose == DOOR
        )
        self._loop.repeat(_TICK, self._tick)

    def __enter__(self) -> Door:
        self._loop.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call(self._listener.close)
        self._loop.close()
        for connection in list(self._connections.values()):
            connection.socket.close()
        self._retire(self._hub)
        for thread in self._closing:
            thread.join(10.0)

    @property
    def membership(self) -> ElasticMembership:
        """Who is in."""
        return self._state

    @property
    def failure(self) -> Failure | None:
        """What the workers of this generation know to be wrong, or None."""
        hub = self._hub
        return None if hub is None else hub.failure

    # -- what the launcher tells -----------------------------------------------------------------

    def started(self, worker: int, name: str) -> None:
        """The process of a worker has been started."""
        self._loop.call(lambda: self._started(worker, name))

    def exited(self, worker: int, code: int, how: str, replace: bool, left: bool = False) -> None:
        """The process of a worker has ended; see `ElasticMembership.gone`."""

        def tell() -> None:
            for task, number in self._tasks.items():
                if number == worker and self._hub is not None:
                    self._hub.exited(task, code)
            self._do(self._state.gone(worker, how, self._now(), replace, left))

        self._loop.call(tell)

    def fail(self, text: str) -> None:
        """The program has failed: let all who wait know."""
        self._loop.call(lambda: self._do(self._state.fail(text)))

    def all_leave(self) -> None:
        """All machines will be taken away."""
        self._loop.call(lambda: self._do(self._state.all_leave(self._now())))

    def resize(self, size: int) -> None:
        """As many workers are wanted."""
        self._loop.call(lambda: self._do(self._state.resize(size, self._now())))

    def _started(self, worker: int, name: str) -> None:
        self._names[worker] = name
        self._do(self._state.started(worker, name, self._now()))

    # -- what workers tell -----------------------------------------------------------------------

    def _admit(self, sock: Any, purpose: dict[str, Any]) -> None:
        peer: list[int] = []
        connection = Connection(
            self._loop,
            sock,
            lambda message: self._handle(connection, peer, message),
            lambda error: self._lost(connection, peer),
        )

    def _lost(self, connection: Connection, peer: list[int]) -> None:
        # A process whose network was gone comes back, and so does one that starts anew in its place;
        # one that has died is told of by exited.
        if peer and self._connections.get(peer[0]) is connection:
            del self._connections[peer[0]]

    def _handle(self, connection: Connection, peer: list[int], received: Message) -> None:
        message, now = received.fields, self._now()
        kind = message.get("type")
        if kind == "resize":
            self._answer_resize(connection, received, now)
            return
        if kind == "list":
            connection.send(self._listed(), number=received.number)
            return
        worker = fields.whole(message, "worker")
        if worker not in self._names:
            raise InvalidValueError(f"There is no such worker. Received: {worker}")
        if kind == "back":
            self._come_back(connection, peer, worker, message)
            return
        if kind == "there":
            self._answered.add(worker)
            return
        if not self._letters[worker].is_next(message):
            return
        if kind == "arrived":
            self._do(self._state.arrived(worker, now, message.get("recoverable") is True))
        elif kind == "made":
            self._do(self._state.made(worker, fields.whole(message, "step"), now))
        elif kind == "stopped":
            step = fields.whole(message, "step")
            self._do(self._state.stopped(worker, step, message.get("holds") is True, now))
        elif kind == "finished":
            self._do(self._state.finished(worker, fields.whole(message, "step"), now))
        elif kind == "leaves":
            self._do(self._state.leaves(worker, now))
        else:
            raise InvalidValueError(f"There is no such message. Received: {kind!r:.80}")

    def _come_back(
        self, connection: Connection, peer: list[int], worker: int, message: Mapping[str, Any]
    ) -> None:
        """A process has connected: for the first time, or because its connection had closed."""
        peer[:] = [worker]
        self._connections[worker], self._pids[worker] = connection, fields.whole(message, "pid")
        if message.get("anew") is True:
            self._letters[worker] = Letters()
            return
        self._state.reconnected(worker)
        letters = self._letters[worker]
        connection.send({"type": "back", "heard": letters.heard})
        for letter in letters.after(fields.whole(message, "heard")):
            connection.send(letter)

    def _answer_resize(self, connection: Connection, received: Message, now: float) -> None:
        try:
            size = fields.whole(received.fields, "workers")
            orders = self._state.resize(size, now)
        except InvalidValueError as error:
            connection.send({"error": str(error)}, number=received.number)
            return
        self._do(orders)
        connection.send(self._listed(), number=received.number)

    def _listed(self) -> dict[str, Any]:
        limits = self._state.limits
        return {
            "workers": [list(pair) for pair in self._state.describe()],
            "wanted": self._state.target,
            "minimum": limits.minimum,
            "maximum": limits.maximum,
        }

    # -- orders ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._now()
        self._do(self._state.tick(now, self._heard(self._state.awaited, now)))

    def _heard(self, workers: Sequence[int], now: float) -> set[int]:
        """Those of some workers whose processes run.

        Their threads say so while the training thread is busy, unless native code holds Python's lock;
        then the process computes, as it does while it imports its modules anew.
        """
        if now - self._asked >= _ASK_EVERY:
            self._asked = now
            for connection in [self._connections[w] for w in workers if w in self._connections]:
                connection.send({"type": "there"})
        heard, self._answered = self._answered, set()
        computing = (worker for worker in workers if self._launcher.computes(self._pids[worker]))
        return heard.union(computing)

    def _do(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case Begin(generation):
                    self._begin(generation)
                case Stop(members, save):
                    for worker in members:
                        self._send(worker, {"type": "stop", "save": save})
                case Again(worker):
                    self._send(worker, {"type": "again"})
                case Release(worker, why):
                    if why == "finished":
                        self._launcher.finished(worker)
                    self._send(worker, {"type": "release", "why": why})
                case Spawn(count):
                    self._launcher.spawn(count)
                case End(worker, why):
                    self._launcher.end(worker, why)
                case Fail(text):
                    for worker in list(self._letters):
                        self._send(worker, {"type": "failure", "text": text})
                    self._launcher.failed(text)

    def _send(self, worker: int, message: Mapping[str, Any]) -> None:
        letters, connection = self._letters.get(worker), self._connections.get(worker)
        if letters is not None:
            letter = letters.written(message)  # which is sent later, if the worker comes back
            if connection is not None:
                connection.send(letter)

    def _begin(self, generation: Generation) -> None:
        addresses = [self._launcher.address_of(worker) for worker in generation.members]
        names = [self._names[worker] for worker in generation.members]
        tasks = [Task("worker", i, *x) for i, x in enumerate(zip(addresses, names, strict=True))]
        self._tasks = dict(zip(tasks, generation.members, strict=True))
        old, self._hub = self._hub, None
        if len(tasks) > 1:
            self._hub = Hub(
                tasks,
                self._token,
                self._host,
                cause_of_death=self._cause_of_death,
                abandoned=self._ender(generation, dict(self._tasks)),
            ).start()
        if self._display is not None:
            self._display.generation(generation, names, self._hub)
        about = {
            "type": "begin",
            "generation": generation.number,
            "hub": None if self._hub is None else self._hub.address,
            "addresses": addresses,
            "names": names,
            "step": generation.step,
            "source": generation.source,
            "holders": list(generation.holders),
            "reason": generation.reason,
            "maximum": self._state.limits.maximum,
        }
        for rank, worker in enumerate(generation.members):
            self._send(worker, {**about, "rank": rank})
        self._retire(old)

    def _cause_of_death(self, task: Task) -> int | None:
        worker = self._tasks.get(task)
        return None if worker is None else self._launcher.cause_of_death(worker)

    def _ender(
        self, generation: Generation, workers: Mapping[Task, int]
    ) -> Callable[[Abandoned], bool]:
        """Ends the silent members of a generation that is at its end; called in its hub's thread."""

        def end(member: Abandoned) -> None:
            # After a failure the others go on without it, and it may come back to them.
            if generation is self._state.generation and self.failure is None:
                how = "was ended, because nothing was heard of it at the end"
                self._state.ends(workers[member.task], how)
                self._launcher.end(workers[member.task], member.why)

        def end_if_idle(member: Abandoned) -> bool:
            is_idle = self._launcher.is_idle(member.pid)
            if is_idle:
                self._loop.call_soon(lambda: end(member))
            return is_idle

        return end_if_idle

    def _retire(self, hub: Hub | None) -> None:
        """Close the hub of a generation that is over, in a thread: it waits for those who leave it."""
        if hub is not None:
            thread = threading.Thread(target=_close, args=(hub,), name="phalanx-retire", daemon=True)
            thread.start()
            self._closing = [*(t for t in self._closing if t.is_alive()), thread]


def _close(hub: Hub) -> None:
    with contextlib.suppress(Exception):  # it is no longer needed
        hub.close()


def connect_to_door(address: str, token: str, timeout: float, refusals: float = math.inf) -> Any:
    """Connect to a door, trying again until `timeout` has passed; see `phalanx.net.client.connect`."""
    hint = "It runs in the launcher: phalanx run --workers MIN:MAX. "
    return connect(address, token.encode(), DOOR, timeout, peer="door", hint=hint, refusals=refusals)


def ask_door(
    address: str, token: str, timeout: float, workers: int | None = None
) -> tuple[list[str], str]:
    """Ask a door who is there, and tell it before how many workers are wanted, if a number is given.

    Returns:
        What each worker does, and how many are wanted, in words.
    """
    client = RequestClient(connect_to_door(address, token, timeout), "phalanx-ask").start()
    try:
        question = {"type": "list"} if workers is None else {"type": "resize", "workers": workers}
        answer = dict(client.request(question, timeout=timeout).fields)
    finally:
        client.close()
    if "error" in answer:
        raise InvalidValueError(str(answer["error"]))
    wanted = f"{answer['wanted']} wanted, of {answer['minimum']} to {answer['maximum']}"
    return [f"{name} {doing}" for name, doing in answer["workers"]], wanted
