"""All parameter servers of a job, as a task reaches them over the network."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from phalanx.errors import InvalidValueError, ServerStateLostError, UnavailableError
from phalanx.parameter_server import wire
from phalanx.parameter_server.buffers import BufferPool
from phalanx.parameter_server.commits import Commits
from phalanx.parameter_server.durability import Durability
from phalanx.parameter_server.landing import LARGE, Room
from phalanx.parameter_server.placing import by_server, home_of, variables_of
from phalanx.parameter_server.recovery import say_settled, verdict
from phalanx.parameter_server.requests import (
    Commit,
    OptimizerDefinition,
    Read,
    Settled,
    Token,
    Update,
    VariableDefinition,
)
from phalanx.parameter_server.server_link import ServerLink
from phalanx.parameter_server.store import Outcome
from phalanx.parameter_server.updates import checked, dtype_named, has_dtype
from phalanx.parameter_server.wire import Kind, Where
from phalanx.runtime.formatting import shown
from phalanx.runtime.host_memory import expect_input

__all__ = ["ServerConnections"]

_log = logging.getLogger("phalanx")

Array = np.ndarray[Any, Any]

_DELIVERIES = ("exactly_once", "at_least_once")


class ServerConnections:
    """All parameter servers of a job, over the network. For one thread at a time.

    Args:
        addresses: of the ps tasks, in their order.
        key: the job's secret.
        run: names what the coordinator has begun; the same for all tasks of a run.
        earlier: the runs from whose checkpoints it goes on.
        begin: whether this is the coordinator, which begins the run. Servers are then empty.
        resume: whether servers that have kept this run go on with it.
        delivery: "exactly_once", or "at_least_once": servers do not remember what they have applied,
            so that nothing has to be staged.
        arbiter: whether several attempts of a closure may run at the same time.
        durability: what servers keep, for the one who begins.
        timeout: seconds after which a server that is gone, or does not answer, is given up.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: bytes,
        run: str,
        *,
        earlier: Sequence[str] = (),
        begin: bool = False,
        resume: bool = False,
        delivery: str = "exactly_once",
        arbiter: bool = False,
        durability: Durability = Durability(),  # noqa: B008 - cannot be changed
        timeout: float = 60.0,
    ) -> None:
        if delivery not in _DELIVERIES:
            raise InvalidValueError(
                f"delivery must be one of {', '.join(map(repr, _DELIVERIES))}. "
                f"Received: {shown(delivery)}"
            )
        self.runs = frozenset({run, *earlier})
        """The run, and those from whose checkpoints it goes on."""
        self._arbiter = arbiter
        self._pool = BufferPool()
        expect_input()
        self._has_read = False  # since answers were collected
        self._known: dict[int, tuple[int, Array]] = {}  # variable -> its version and value
        hello = {"run": run, "begin": begin, "resume": resume, "durability": vars(durability)}
        self._links = [
            ServerLink(address, key, {**hello, "index": i}, self._pool, timeout)
            for i, address in enumerate(addresses)
        ]
        self._commits = Commits(self._links, delivery == "exactly_once", arbiter)
        try:
            for link in self._links:
                link.connect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connections."""
        for link in self._links:
            link.close()

    def __enter__(self) -> ServerConnections:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    # -- reading -----------------------------------------------------------------------------------

    def create(self, definition: VariableDefinition, value: Array) -> None:
        """Let its server hold a variable; if it does already, nothing happens."""
        array = np.ascontiguousarray(value, has_dtype(definition)).reshape(np.shape(value))
        self._call(definition.server, wire.create(definition, array))

    def find(self, definition: VariableDefinition) -> bool:
        """Whether its server holds a variable."""
        answer = self._call(definition.server, wire.find(definition))
        return wire.read_outcome(answer) is not Outcome.REFUSED

    def free(self, server: int, variables: Sequence[int], optimizers: Sequence[int] = ()) -> None:
        """Let a server hold variables no more, and forget optimizers. It does so soon."""
        self._links[server].ask(wire.free(variables, optimizers), lambda _: None)

    def drop_known(self, variable: int) -> None:
        """A variable was freed: its value is not needed any more."""
        self._known.pop(variable, None)

    def define_optimizer(self, definition: OptimizerDefinition) -> None:
        """Tell all servers of an optimizer."""
        self._call_all(wire.optimizer(definition))

    def pull(self, reads: Sequence[Read]) -> list[Array]:
        """Read variables, with one round trip to all servers concerned at the same time."""
        self._has_read = True
        while True:
            shown = self._commits.shown()
            found = self._pull(reads, [push.token for push in shown])
            if found is None:
                continue
            if not shown or self._commits.have_counted(shown):
                return found

    def _pull(self, reads: Sequence[Read], after: Sequence[Token]) -> list[Array] | None:
        """Read variables; None if they must be read again, because a commit was half done."""
        parts: dict[int, list[int]] = {}
        known: list[tuple[int, Any]] = []
        rooms: list[Room | None] = []
        for i, (variable, rows) in enumerate(reads):
            parts.setdefault(variable.server, []).append(i)
            before = _UNKNOWN if rows is not None else self._known.get(variable.id, _UNKNOWN)
            known.append(before)
            rooms.append(self._room(variable) if before[0] else None)
        answers: dict[int, Any] = {}
        for server, part in parts.items():
            link = self._links[server]
            asked = []
            for i in part:
                if (room := rooms[i]) is not None and not link.has(room):
                    room = rooms[i] = None
                asked.append((reads[i], known[i][0], -1 if room is None else room.place))
            link.ask(wire.pull(asked, after), partial(answers.__setitem__, server))
        self._commits.flush()
        is_whole = True
        for server in parts:
            while server not in answers:
                self._links[server].answer()
            is_whole &= wire.read_outcome(answers[server]) is not Outcome.DOUBTFUL
        if not is_whole:
            self._settle_doubts(answers.values())
            return None
        found: list[Any] = [None] * len(reads)
        for server, part in parts.items():
            values = wire.read_pulled(answers[server])
            for i, (version, where, buffer) in zip(part, values, strict=True):
                if where is Where.KNOWN:
                    found[i] = known[i][1]
                elif where is Where.LANDED and (room := rooms[i]) is not None:
                    found[i] = self._array(reads[i], version, room.memory)
                else:
                    found[i] = self._array(reads[i], version, buffer)
        return found

    def _room(self, variable: VariableDefinition) -> Room | None:
        """Where the value of a variable that was read before can be written, if it is large."""
        size = self._known[variable.id][1].nbytes
        return self._links[variable.server].room(size) if size >= LARGE else None

    def preview(self, updates: Sequence[Update]) -> list[Array]:
        """What variables would hold after updates, which are not made."""
        self._commits.finish_staging()
        parts = by_server(map(checked, updates))
        requests = {s: wire.push(Kind.PREVIEW, Token(0), part) for s, part in parts.items()}
        found = {s: iter(wire.read_pulled(answer)) for s, answer in self._answers(requests).items()}
        return [
            wire.array_of(next(found[v.server])[2], np.dtype(v.dtype), v.shape)
            for v in variables_of(updates)
        ]

    def _array(self, read: Read, version: int, buffer: Any) -> Array:
        variable, rows = read
        shape = variable.shape if rows is None else (len(rows), *variable.shape[1:])
        array = wire.array_of(buffer, dtype_named(variable.dtype), shape)
        if rows is None:
            array.setflags(write=False)  # it may be given again
            if version:  # else it is what only this task sees
                self._known[variable.id] = (version, array)
        return array

    # -- writing -----------------------------------------------------------------------------------

    def push(self, token: Token, updates: Sequence[Update], value: bytes = b"") -> Commit:
        """Make all updates, or none, once for all attempts of the token's closure."""
        results: list[Commit] = []
        self.push_later(token, updates, value, results.append)
        while not results:
            for link in self._links:
                while link.pending and not results:
                    link.answer()
        if results[0].error is not None:
            raise results[0].error
        return results[0]

    def push_later(
        self,
        token: Token,
        updates: Sequence[Update],
        value: bytes,
        then: Callable[[Commit], None],
        hold: bool = False,
    ) -> None:
        """As `push`, but return at once; `collect` calls `then`. Later pulls see the updates.

        Args:
            token: the closure, and the attempt.
            updates: in the order in which they are made; none for a closure that only reads.
            value: what the closure returns.
            then: called when it is known whether the updates, and what the closure has read, count.
            hold: whether a pull follows soon, with which the updates can be sent.
        """
        self._commits.push(token, updates, value, then, hold)

    def collect(self, wait: bool = False) -> None:
        """Call `then` of the pushes that are done; if `wait`, of all of them."""
        if not wait:
            for link in self._links:
                while link.pending and link.poll():
                    pass
            if not self._has_read:  # else what is held goes with the next read
                self._commits.flush()
            self._has_read = False
            return
        while any(link.pending for link in self._links):
            for link in self._links:
                while link.pending:
                    link.answer()

    @property
    def is_ahead(self) -> bool:
        """Whether something was read of which it is not known yet whether it counts."""
        return self._commits.is_ahead

    @property
    def pending(self) -> int:
        """How many requests have no answer yet."""
        return sum(len(link.pending) for link in self._links)

    # -- for the coordinator -------------------------------------------------------------------------

    def settle(self, tokens: Sequence[Token]) -> dict[Token, Settled]:
        """Find out, and decide, what became of attempts whose worker is lost."""
        if not tokens:
            return {}
        found = [wire.read_inquired(a) for a in self._call_all([wire.inquire(tokens)])]
        settled: dict[Token, Settled] = {}
        for i, token in enumerate(tokens):
            home = home_of(token, len(self._links), {}, self._arbiter)
            settled[token] = verdict([known[i] for known in found], home)
        self._call_all([wire.decide([(token, settled[token].committed) for token in tokens])])
        return settled

    def _settle_doubts(self, answers: Iterable[Any]) -> None:
        """Settle the attempts that servers name in place of values: their tasks may be dead."""
        doubts = [a for a in answers if wire.read_outcome(a) is Outcome.DOUBTFUL]
        tokens = {token for answer in doubts for token in wire.read_doubted(answer)}
        for committed, _ in self.settle(sorted(tokens)).values():
            say_settled(committed)

    def forget(self, below: int) -> None:
        """Closures with smaller numbers are done: no task asks for them, or tries them, again."""
        for link in self._links:
            link.ask([wire.number(Kind.FORGET, below)], lambda _: None)
        self._commits.look()

    def status(self) -> list[dict[str, Any]]:
        """What each server holds and has done."""
        return [wire.fields_in(answer) for answer in self._call_all(wire.with_fields(Kind.STATUS, {}))]

    def save(self, folder: str) -> None:
        """Let each server write what it holds into a folder, which all of them can write to."""
        self._call_all(_once({"folder": str(folder)}))

    def load(self, folder: str) -> None:
        """Let each server hold what it had when it wrote into a folder."""
        self._known.clear()
        self._call_all(_once({"folder": str(folder), "load": True}))

    def end(self, without: Collection[int] = ()) -> None:
        """End the run: servers forget everything. Those that are gone have nothing to forget."""
        for i in range(len(self._links)):
            if i in without:
                continue
            try:
                self._call(i, wire.with_fields(Kind.END, {}))
            except ServerStateLostError:  # the run is over there
                continue
            except UnavailableError as error:
                _log.warning("A run ends without one of its parameter servers. %s", error)

    # -- inside ----------------------------------------------------------------------------------

    def _call(self, server: int, buffers: list[Any]) -> Any:
        return self._answers({server: buffers})[server]

    def _call_all(self, buffers: list[Any]) -> list[Any]:
        answers = self._answers(dict.fromkeys(range(len(self._links)), buffers))
        return [answers[i] for i in range(len(self._links))]

    def _answers(self, requests: dict[int, list[Any]]) -> dict[int, Any]:
        """Ask servers at the same time; an error of any of them is raised."""
        answers: dict[int, Any] = {}
        for server, buffers in requests.items():
            self._links[server].ask(buffers, partial(answers.__setitem__, server))
        for server in requests:
            while server not in answers:
                self._links[server].answer()
        for answer in answers.values():
            wire.read_outcome(answer)
        return answers


_UNKNOWN: tuple[int, Any] = (0, None)


def _once(fields: dict[str, Any]) -> list[Any]:
    """A request to save or load, of which servers ignore late copies."""
    return wire.with_fields(Kind.SAVE, {**fields, "once": secrets.token_hex(8)})
