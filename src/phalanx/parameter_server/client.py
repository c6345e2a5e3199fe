"""All parameter servers of a job, as a task reaches them over the network."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.errors import InvalidValueError, PhalanxError, ServerStateLostError, UnavailableError
from phalanx.parameter_server import wire
from phalanx.parameter_server.buffers import BufferPool
from phalanx.parameter_server.durability import Durability
from phalanx.parameter_server.placing import by_server, home_of, variables_of
from phalanx.parameter_server.recovery import verdict
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
from phalanx.parameter_server.updates import checked, has_dtype
from phalanx.parameter_server.wire import Kind
from phalanx.runtime.formatting import shown
from phalanx.runtime.host_memory import expect_input

__all__ = ["ServerConnections"]

_log = logging.getLogger("phalanx")

Array = np.ndarray[Any, Any]

_MOST_PENDING = 64  # requests to a server that wait for their answers before some are looked for
_DELIVERIES = ("exactly_once", "at_least_once")


@dataclass(eq=False)
class _Push:
    """A commit on its way."""

    token: Token
    then: Callable[[Commit], None]
    staging: set[int] = field(default_factory=set)  # servers that have not answered in this phase
    staged: list[int] = field(default_factory=list)
    committing: int = 0
    is_refused: bool = False
    error: Exception | None = None


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
        self._remembers, self._arbiter = delivery == "exactly_once", arbiter
        self._pool = BufferPool()
        expect_input()
        self._known: dict[int, tuple[int, Array]] = {}  # variable -> its version and value
        self._staging: dict[_Push, None] = {}  # pushes that have not been staged everywhere
        hello = {"run": run, "begin": begin, "resume": resume, "durability": vars(durability)}
        self._links = [
            ServerLink(address, key, {**hello, "index": i}, self._pool, timeout)
            for i, address in enumerate(addresses)
        ]
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
        self._finish_staging()
        parts: dict[int, list[int]] = {}
        for i, read in enumerate(reads):
            parts.setdefault(read.variable.server, []).append(i)
        known = [
            self._known.get(variable.id, _UNKNOWN) if rows is None else _UNKNOWN
            for variable, rows in reads
        ]
        answers: dict[int, Any] = {}
        for server, part in parts.items():
            request = wire.pull([(reads[i], known[i][0]) for i in part])
            self._links[server].ask(request, lambda answer, s=server: answers.__setitem__(s, answer))  # type: ignore[misc]
        self._flush()
        found: list[Any] = [None] * len(reads)
        for server, part in parts.items():
            while server not in answers:
                self._links[server].answer()
            wire.read_outcome(answers[server])
            for i, (version, buffer) in zip(part, wire.read_pulled(answers[server]), strict=True):
                found[i] = known[i][1] if buffer is None else self._array(reads[i], version, buffer)
        return found

    def preview(self, updates: Sequence[Update]) -> list[Array]:
        """What variables would hold after updates, which are not made."""
        self._finish_staging()
        parts = by_server(map(checked, updates))
        requests = {s: wire.push(Kind.PREVIEW, Token(0), part) for s, part in parts.items()}
        found = {s: iter(wire.read_pulled(answer)) for s, answer in self._answers(requests).items()}
        return [
            wire.array_of(next(found[v.server])[1], np.dtype(v.dtype), v.shape)
            for v in variables_of(updates)
        ]

    def _array(self, read: Read, version: int, buffer: Any) -> Array:
        variable, rows = read
        shape = variable.shape if rows is None else (len(rows), *variable.shape[1:])
        array = wire.array_of(buffer, np.dtype(variable.dtype), shape)
        if rows is None:
            array.setflags(write=False)  # it may be given again
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
        self, token: Token, updates: Sequence[Update], value: bytes, then: Callable[[Commit], None]
    ) -> None:
        """As `push`, but return at once; `collect` calls `then`. Later pulls see the updates."""
        parts = by_server(map(checked, updates))
        push = _Push(token, then)
        if not self._remembers:
            self._finish(push, {s: wire.push(Kind.APPLY, token, part) for s, part in parts.items()})
            return
        home = home_of(token, len(self._links), parts, self._arbiter and bool(parts))
        final = {} if home is None else {home: wire.push(Kind.PUSH, token, parts.get(home, []), value)}
        push.staged = [server for server in parts if server != home]
        for server in push.staged:
            push.staging.add(server)
            final[server] = [wire.about(Kind.COMMIT, token)]
        if not push.staging:
            self._finish(push, final)
            return
        self._staging[push] = None
        for server in push.staged:
            request = wire.push(Kind.STAGE, token, parts[server], value)
            self._links[server].ask(request, self._on_staged(push, server, home, final))
        self._look()

    def collect(self, wait: bool = False) -> None:
        """Call `then` of the pushes that are done; if `wait`, of all of them."""
        if not wait:
            for link in self._links:
                while link.pending and link.poll():
                    pass
            self._flush()
            return
        while any(link.pending for link in self._links):
            for link in self._links:
                while link.pending:
                    link.answer()

    @property
    def pending(self) -> int:
        """How many requests have no answer yet."""
        return sum(len(link.pending) for link in self._links)

    def _on_staged(
        self, push: _Push, server: int, home: int | None, final: dict[int, list[Any]]
    ) -> Callable[[Any], None]:
        def then(answer: Any) -> None:
            _note(push, answer)
            push.staging.discard(server)
            if push.staging:
                return
            self._staging.pop(push, None)
            if push.is_refused:
                self._drop(push)
            elif home is None:
                self._finish(push, final, hold=True)
            else:
                self._decide(push, home, final)

        return then

    def _decide(self, push: _Push, home: int, final: dict[int, list[Any]]) -> None:
        """Let the arbiter take or refuse the attempt; the other servers follow."""
        self._staging[push] = None

        def then(answer: Any) -> None:
            _note(push, answer)
            self._staging.pop(push, None)
            if push.is_refused:
                self._drop(push)
            else:
                self._finish(push, final, hold=True)

        push.staging.add(home)
        self._links[home].ask(final.pop(home), then)

    def _finish(self, push: _Push, requests: dict[int, list[Any]], *, hold: bool = False) -> None:
        """Send what commits, now or with what comes next, which is not far."""
        push.committing = len(requests)

        def then(answer: Any) -> None:
            _note(push, answer)
            push.committing -= 1
            if not push.committing:
                push.then(Commit(not push.is_refused, push.error))

        for server, request in requests.items():
            self._links[server].ask(request, then, hold=hold)
        if not requests:
            push.then(Commit(not push.is_refused, push.error))
        self._look()

    def _drop(self, push: _Push) -> None:
        """An attempt is refused: nothing of it stays."""
        for server in push.staged:
            self._links[server].ask([wire.about(Kind.DROP, push.token)], lambda _: None)
        push.then(Commit(False, push.error))

    def _finish_staging(self) -> None:
        """Let all commits be on their way, so that what follows sees them."""
        while self._staging:
            push = next(iter(self._staging))
            self._links[next(iter(push.staging))].answer()

    def _look(self) -> None:
        """Take answers, before too many of them wait."""
        for link in self._links:
            if len(link.pending) > _MOST_PENDING:
                while link.pending and link.poll():
                    pass
                while len(link.pending) > 4 * _MOST_PENDING:
                    link.answer()
                self._flush()

    def _flush(self) -> None:
        for link in self._links:
            link.flush()

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

    def forget(self, below: int) -> None:
        """Closures with smaller numbers are done: no task asks for them, or tries them, again."""
        for link in self._links:
            link.ask([wire.number(Kind.FORGET, below)], lambda _: None)
        self._look()

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
            self._links[server].ask(buffers, lambda answer, s=server: answers.__setitem__(s, answer))  # type: ignore[misc]
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


def _note(push: _Push, answer: Any) -> None:
    try:
        push.is_refused |= wire.read_outcome(answer) is Outcome.REFUSED
    except PhalanxError as error:
        push.error, push.is_refused = error, True
