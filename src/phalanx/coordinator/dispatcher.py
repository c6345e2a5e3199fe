"""The thin shell around the machine: one thread that has all connections to workers.

Only that thread touches the machine, so there is no lock. Users' threads put closures into a deque and
wait for bells; the thread takes them up when workers have room, many at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from phalanx.coordinator.actions import (
    Action,
    ClosureOutcome,
    ClosureSettled,
    Inquire,
    ReturnAttempts,
    RunAttempts,
)
from phalanx.coordinator.functions import Functions
from phalanx.coordinator.messages import LIMITS, Status, reports_in
from phalanx.coordinator.peer import Entry, Peer, Resource
from phalanx.coordinator.questions import Question, Questions
from phalanx.coordinator.remote_value import RemoteValue, RemoteValueStatus
from phalanx.coordinator.reports import report_of
from phalanx.coordinator.state import Machine
from phalanx.coordinator.values import NOTHING, given_up, load_error, lost_value
from phalanx.coordinator.worker_link import WorkerLink
from phalanx.coordinator.worker_service import Greeting
from phalanx.errors import CancelledError, ClosureInputError, DeadlineExceededError
from phalanx.job.hub.descriptions import Task
from phalanx.net.connection import Connection
from phalanx.net.event_loop import EventLoop
from phalanx.net.framing import Message
from phalanx.parameter_server.options import ParameterServerOptions
from phalanx.parameter_server.requests import ManagedServers, Token
from phalanx.parameter_server.settler import Settler
from phalanx.runtime.interrupts import Bell

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)

_AT_ONCE = 0.02  # seconds of work that a worker has waiting
_TICK = 0.05  # seconds between looks at slow closures
_SLOW = 3.0  # times the usual duration
_SHORTEST = 0.1  # seconds that are never slow
_SILENCE = 30.0  # seconds after which a worker that does not answer is given up
_LONGEST = 60.0  # seconds for a value, for those who do not wait in a way of their own
_REMEMBERED = 1024  # closures that servers may remember in vain


class Dispatcher:
    """Has workers run closures.

    Args:
        workers: the worker tasks.
        key: the job's secret.
        connect: reaches the parameter servers; called here, and on every worker.
        options: as the user gave them.
        first: the number of the first closure.
    """

    def __init__(
        self,
        workers: Sequence[Task],
        key: bytes,
        connect: Callable[[], ManagedServers],
        options: ParameterServerOptions,
        first: int = 1,
    ) -> None:
        self._options = options
        self.machine = Machine(
            len(workers),
            window=options.window,
            max_staleness=options.max_staleness,
            backups=options.backup_workers,
            first=first,
        )
        self.inbox: deque[Entry | Callable[[], None]] = deque()
        """Closures that the thread has not taken up yet, and what else must keep its place."""
        self.is_hungry = False
        """Whether the thread waits for closures, and must be woken."""
        self._entries: dict[int, Entry] = {}
        self._resources: dict[int, Resource] = {}
        self._numbers = itertools.count(1)
        self._peers: list[Peer | None] = [None] * len(workers)
        self._paces = [0.0] * len(workers)
        self._begun: dict[int, float] = {}  # when closures were sent, for backup workers
        self._told = first
        self.is_closed = False
        """Whether nothing is done any more."""
        self.last_error: str = ""
        self.wait: Callable[[RemoteValue, Bell], None] = _wait
        """How users' threads wait for a value."""
        self.loop = EventLoop("phalanx-coordinator", self._after_round)
        self.questions = Questions(self.loop)
        self.functions = Functions(
            lambda number: self.loop.call_soon(partial(self._tell_released, "function", number))
        )
        self._settler = Settler(connect, options.delivery == "exactly_once", self._settled)
        patience = (options.server_timeout + 30.0, min(_SILENCE, options.worker_timeout))
        self.links = [
            WorkerLink(
                task,
                key,
                Greeting(i, connect),
                partial(self._hand_over, i),
                partial(self._cut, i),
                self._give_up,
                patience,
            )
            for i, task in enumerate(workers)
        ]

    def start(self) -> None:
        """Begin to dial workers."""
        self.loop.start()
        if self._options.backup_workers:
            self.loop.call_soon(lambda: self.loop.repeat(_TICK, self._speculate))
        for link in self.links:
            link.start()

    def close(self) -> None:
        """End the connections and the threads. Closures that are not settled are given up."""
        self.is_closed = True
        for link in self.links:
            link.close()
        self._settler.close()
        with contextlib.suppress(TimeoutError):
            self.loop.call(self._end)
        self.loop.close()

    # -- for any thread --------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """Queue a closure."""
        self.inbox.append(entry)
        if self.is_hungry:
            self.is_hungry = False
            self.loop.call_soon(_nothing)
        if self.is_closed:  # meanwhile, so its thread will not look there
            self._give_up_inbox()

    @property
    def queued(self) -> int:
        """How many closures wait, about."""
        return len(self.inbox) + self.machine.queued

    def add_resource(self, resource: Resource) -> int:
        """Let every worker have something; returns its number."""
        number = next(self._numbers)
        self._put_call(lambda: self._build(number, resource))
        return number

    def restore_resource(self, number: int, resource: Resource) -> None:
        """Let every worker have something that closures of a checkpoint know by its number."""
        self._numbers = itertools.count(max(next(self._numbers), number + 1))
        self._put_call(lambda: self._build(number, resource))

    def drop_resource(self, number: int) -> None:
        """No closure needs a resource any more."""

        def drop() -> None:
            self.machine.drop_resource(number)
            self._resources.pop(number, None)
            self._tell_released("resource", number)

        self._put_call(drop)

    def drop_variable(self, number: int) -> None:
        """Servers do not hold a variable any more; workers may have its last value."""
        self.loop.call_soon(partial(self._tell_released, "variable", number))

    def _put_call(self, call: Callable[[], None]) -> None:
        """Let the thread do something after it has taken up the closures before."""
        self.inbox.append(call)
        self.loop.call_soon(_nothing)

    # -- the thread: rounds ------------------------------------------------------------------------

    def _after_round(self) -> None:
        """Start what can start, and answer what can be answered."""
        if self.is_closed:
            return
        self._take_up()
        has_failed = self.machine.error is not None and self.machine.is_quiet
        if has_failed:
            self._take_up(everything=True)
            self._act(self.machine.cancel())  # else those who wait for values would wait in vain
        self._act(self.machine.dispatch())
        if has_failed or self.machine.is_hungry:
            self.is_hungry = True
            if self.inbox:  # it came before it could know
                self.loop.call_soon(_nothing)
        if self.questions:
            self.questions.answer()
        if self.machine.low - self._told >= _REMEMBERED:
            self._told = self.machine.low
            self._settler.forget(self._told)

    def _take_up(self, everything: bool = False) -> None:
        """Take closures out of the inbox: as many as workers need soon, or all of them."""
        machine, inbox = self.machine, self.inbox
        enough = 2 * self._options.window * len(self._peers)
        while inbox and (everything or machine.queued < enough):
            entry = inbox.popleft()
            if not isinstance(entry, Entry):
                entry()
            elif entry.inputs:
                self._take_up_with_inputs(entry)
            else:
                number = entry.value.closure = machine.schedule()
                self._entries[number] = entry

    def _take_up_with_inputs(self, entry: Entry) -> None:
        error = next((v.error for v in entry.inputs if v.error is not None), None)
        if error is not None and self.machine.error is None:  # else it is cancelled anyway
            number, actions = self.machine.reject(_input_error(error))
            self._entries[number] = entry
            entry.value.closure = number
            self._act(actions)
            return
        needs = [v.closure for v in entry.inputs if v.status is RemoteValueStatus.NOT_READY]
        number = entry.value.closure = self.machine.schedule(needs)
        self._entries[number] = entry

    def _build(self, number: int, resource: Resource) -> None:
        self._resources[number] = resource
        self._act(self.machine.add_resource(number))

    def _tell_released(self, what: str, number: int) -> None:
        for peer in self._peers:
            if peer is not None:
                peer.release(what, number)

    def _speculate(self) -> None:
        now = time.monotonic()
        usual = sorted(p for p in self._paces if p)
        limit = max(_SHORTEST, _SLOW * (usual[len(usual) // 2] if usual else 0.0))
        self._act(self.machine.speculate(lambda c: now - self._begun.get(c, now) > limit))

    # -- the thread: what the machine wants ----------------------------------------------------------

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, ClosureSettled):
                self._settle(action)
                continue
            peer = self._peers[action.worker]
            if isinstance(action, Inquire):
                self._settler.inquire(action.attempts)
            elif peer is None:  # its loss will be noticed
                continue
            elif isinstance(action, RunAttempts):
                peer.run(action, self._entries)
                if self._options.backup_workers:
                    now = time.monotonic()
                    self._begun.update((token.closure, now) for token in action.attempts)
            elif isinstance(action, ReturnAttempts):
                peer.recall(action.era)
            else:
                for number in action.resources:
                    if number in self._resources:
                        self._resources[number].values[action.worker].unsettle()
                        peer.build(number, self._resources[number])

    def _settle(self, action: ClosureSettled, value: bytes = b"") -> None:
        number, outcome, error = action
        entry = self._entries.pop(number)
        if self._begun:
            self._begun.pop(number, None)
        if outcome is ClosureOutcome.CANCELLED:
            error = CancelledError(
                f"{entry.function.name} was not run, because a function that was scheduled before it "
                "has failed."
            )
        elif outcome is ClosureOutcome.FAILED:
            self.last_error = f"{entry.function.name}: {type(error).__name__}: {error}"
        entry.value.settle(value, error)

    # -- the thread: workers -------------------------------------------------------------------------

    def _hand_over(self, worker: int, sock: socket.socket) -> None:
        """A worker is ready; called in the thread of its link."""

        def begin() -> None:
            if self.is_closed:
                sock.close()
                return
            connection = Connection(
                self.loop,
                sock,
                partial(self._receive, worker),
                lambda error: self._lose(worker, connection, error),
                limits=LIMITS,
                waits=True,
            )
            self._peers[worker] = Peer(connection)
            self._paces[worker] = 0.0
            self._act(self.machine.worker_up(worker))
            self.machine.set_window(worker, 1)  # until it is known how long closures take

        if self.is_closed:  # so that the loop may be over
            sock.close()
        else:
            self.loop.call_soon(begin)

    def _cut(self, worker: int) -> None:
        """A worker does not answer any more; called in the thread of its link."""

        def close() -> None:
            peer = self._peers[worker]
            if peer is not None:
                peer.connection.close(TimeoutError("it does not answer"))

        self.loop.call_soon(close)

    def _give_up(self, error: Exception) -> None:
        """No worker can work any more; called in the thread of a link."""

        def act() -> None:
            if not self._is_idle():
                self._act(self.machine.doomed(error))

        self.loop.call_soon(act)

    def _lose(self, worker: int, connection: Connection, error: Exception | None) -> None:
        peer = self._peers[worker]
        if peer is None or peer.connection is not connection:
            return
        self._peers[worker] = None
        actions = self.machine.worker_lost(worker)
        count = sum(len(a.attempts) for a in actions if isinstance(a, Inquire))
        if self.is_closed:
            return
        link = self.links[worker]
        reason = str(error or "it closed the connection")
        _log.warning("%s is lost (%s); %d closures of it are in doubt.", link, reason, count)
        link.lose(reason)
        self._act(actions)

    def _end(self) -> None:
        """End everything; no thread waits in vain."""
        for peer in self._peers:
            if peer is not None:
                peer.connection.close()
        self._give_up_inbox()
        for number, entry in self._entries.items():
            entry.value.settle(b"", given_up(entry.function.name, self.machine.is_busy(number)))
        for resource in self._resources.values():
            for value in resource.values:
                if value.status is RemoteValueStatus.NOT_READY:
                    value.settle(b"", given_up(resource.function.name, False))
        self._entries.clear()
        self._resources.clear()
        self.questions.close()
        self.functions.close()

    def _give_up_inbox(self) -> None:
        with contextlib.suppress(IndexError):  # nothing is left
            while True:
                entry = self.inbox.popleft()
                if isinstance(entry, Entry):
                    entry.value.settle(b"", given_up(entry.function.name, False))

    def _receive(self, worker: int, message: Message) -> None:
        """Reports of a worker."""
        machine, entries = self.machine, self._entries
        pace, reports = reports_in(message.buffers)
        for closure, attempt, status, value in reports:
            if status == Status.DONE:
                if machine.done(worker, closure, attempt):
                    entries.pop(closure).value.settle(value)
            else:
                self._receive_other(worker, closure, attempt, status, value)
        if pace >= 0.0:
            before = self._paces[worker]
            now = self._paces[worker] = (pace + before) / 2 if before else pace
            machine.set_window(worker, int(_AT_ONCE / max(now, 1e-6)))

    def _receive_other(self, worker: int, number: int, attempt: int, status: int, value: bytes) -> None:
        machine = self.machine
        if status == Status.FAILED:
            self._act(machine.failed(worker, number, attempt, load_error(value)))
        elif status == Status.RETURNED:
            self._act(machine.returned(worker, number, attempt))
        elif status == Status.REFUSED:
            self._act(machine.refused(worker, number, attempt))
        elif number in self._resources:
            remote = self._resources[number].values[worker]
            remote.settle(b"", load_error(value) if status == Status.NOT_BUILT else None)

    def _settled(self, token: Token, committed: bool, value: bytes, error: Exception | None) -> None:
        """What servers know of an attempt in doubt; called in the thread of the settler."""

        def act() -> None:
            if error is not None:
                self._act(self.machine.abandoned(*token, error))
                return
            for action in self.machine.resolved(*token, committed):
                if isinstance(action, ClosureSettled) and action.outcome is ClosureOutcome.DONE:
                    lost = None if value else lost_value(action.closure)
                    kept = b"" if value == NOTHING else value
                    self._entries.pop(action.closure).value.settle(kept, lost)
                else:
                    self._act([action])

        self.loop.call_soon(act)

    # -- questions: in the thread --------------------------------------------------------------------

    def ask_to_join(self) -> Question:
        """Ask for the end of all closures, or for the first error, once nothing runs."""

        def answer() -> tuple[BaseException | None] | None:
            if self.machine.error is not None:
                return self._take_error()
            return (None,) if self._is_idle() else None

        return self.questions.ask(answer)

    def ask_whether_done(self) -> Question:
        """Ask whether all closures have ended; for the error, if there is one, once nothing runs."""

        def answer() -> tuple[Any] | None:
            if self.machine.error is not None:
                return self._take_error()
            return (self._is_idle(),)

        return self.questions.ask(answer)

    def ask_for_error(self) -> Question:
        """Ask for the error, once nothing runs; None if another thread has taken it."""
        return self.questions.ask(lambda: (None,) if self.machine.error is None else self._take_error())

    def ask_for_room(self, limit: int) -> Question:
        """Ask for the moment in which fewer closures wait."""
        return self.questions.ask(
            lambda: (None,) if self.queued < limit or self.machine.error is not None else None
        )

    def ask_for_quiet(self) -> Question:
        """Let workers return what they have not begun, and ask for the moment when nothing runs."""
        self.loop.call_soon(lambda: self._act(self.machine.pause()))
        return self.questions.ask(lambda: (None,) if self.machine.is_quiet else None)

    def resume(self) -> None:
        """Start closures again."""
        self.loop.call_soon(self.machine.resume)

    def pending(self) -> tuple[list[Entry], dict[int, Resource], int]:
        """All closures that are not settled, the resources, and the number of the next closure.

        To be called in the thread.
        """
        self._take_up(everything=True)
        entries = [self._entries[number] for number in self.machine.unsettled]
        return entries, dict(self._resources), self.machine.next_closure

    def _is_idle(self) -> bool:
        return not self.inbox and self.machine.is_idle

    def _take_error(self) -> tuple[BaseException] | None:
        if not self.machine.is_quiet:
            return None
        self._take_up(everything=True)
        error, actions = self.machine.take_error()
        self._act(actions)
        return (error,)

    def report(self) -> dict[str, Any]:
        """What happens; to be called in the thread."""
        return report_of(self.machine, self.links, self._paces, self.queued, self.last_error)


def _wait(value: RemoteValue, bell: Bell) -> None:
    if not bell.wait(_LONGEST):
        raise DeadlineExceededError(f"A value was not there within {_LONGEST:g} seconds.")


def _nothing() -> None:
    """Wake the thread."""


def _input_error(error: BaseException) -> ClosureInputError:
    found = ClosureInputError(
        "A scheduled function needs the value of another one, which has none: "
        f"{type(error).__name__}: {error}"
    )
    found.__cause__ = error
    return found
