"""A parameter server: serves a store to the tasks of a job, in the thread of an endpoint.

A server serves one run at a time. The coordinator begins a run, which empties the store; others take
part in it. A server that was restarted knows a run again if it was kept (see `durability`); if not,
tasks that ask for it are told so.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import (
    FailedPreconditionError,
    InvalidValueError,
    PhalanxError,
    ServerStateLostError,
    UnavailableError,
)
from phalanx.net.connection import Connection
from phalanx.net.event_loop import EventLoop
from phalanx.net.framing import Decoder, Message, ProtocolError
from phalanx.parameter_server import wire
from phalanx.parameter_server.buffers import BufferPool
from phalanx.parameter_server.commands import perform
from phalanx.parameter_server.durability import Durability, Keeper, fresh_store
from phalanx.parameter_server.lane import LANED, restored
from phalanx.parameter_server.own_tokens import line_of
from phalanx.parameter_server.requests import Token, VariableDefinition
from phalanx.parameter_server.shared_memory import open_shared
from phalanx.parameter_server.snapshots import load_snapshot, records_of, write_snapshot
from phalanx.parameter_server.store import Outcome, Store
from phalanx.parameter_server.wire import LIMITS, Kind
from phalanx.runtime.formatting import shown
from phalanx.runtime.host_memory import expect_input

__all__ = ["PURPOSE", "ParameterService"]

_log = logging.getLogger("phalanx")

PURPOSE = "ps"
"""What connections to a parameter server are for."""

_MOST_SAVED = 64
_CARE = 1.0  # seconds between looks at what is to be kept
_DOUBT = 2.0  # seconds after which it is said that a commit of no closure has been staged only
_FOLDER = "run-"
_RUN = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(eq=False)
class _Run:
    """What the tasks of one run share."""

    name: str
    index: int
    store: Store
    keeper: Keeper | None
    saved: list[str] = field(default_factory=list)  # the latest requests to save or load
    staged: dict[Token, float] = field(default_factory=dict)  # of no closure, and since when

    def look_for_doubtful(self, gone: int | None = None) -> None:
        """Note which attempts of no closure have been staged; a commit follows at once, or never.

        Args:
            gone: the line of tokens of a task whose connection has ended.
        """
        now = time.monotonic()
        own = [token for token in self.store.staged if token.closure < 0]
        self.staged = {token: self.staged.get(token, now) for token in own}
        if gone is not None:
            self.staged |= {token: 0.0 for token in own if line_of(token) == gone}
        latest = now - _DOUBT
        self.store.doubtful = {token for token, since in self.staged.items() if since <= latest}


@dataclass(eq=False)
class _Session:
    """A connection of a task."""

    connection: Connection
    run: _Run | None = None
    lane: memoryview | None = None
    landing: memoryview | None = None
    challenge: str = ""  # what it must repeat to begin a run
    line: int | None = None  # of the tokens of its updates of no closure


class ParameterService:
    """Serves a store over the connections that an endpoint admits.

    Args:
        loop: of the endpoint.
        folder: where runs are kept that shall outlive the process.
    """

    def __init__(self, loop: EventLoop, folder: Path | None = None) -> None:
        self._loop, self._folder = loop, folder
        expect_input()
        self._run: _Run | None = None
        self._sessions: set[_Session] = set()
        self._pool = BufferPool()
        self._late: list[tuple[Connection, list[Any], int]] = []  # answers that wait for the disk
        self._counts = {"bytes_in": 0, "bytes_out": 0}
        loop.call_soon(lambda: loop.repeat(_CARE, self._take_care))

    def admit(self, sock: socket.socket, purpose: dict[str, Any]) -> None:
        """Serve a connection."""
        session: _Session

        def receive(message: Message) -> None:
            self._receive(session, message)

        connection = Connection(
            self._loop,
            sock,
            receive,
            lambda _: self._left(session),
            limits=LIMITS,
            decoder=Decoder(LIMITS, self._pool.take),
            waits=True,
        )
        session = _Session(connection)
        self._sessions.add(session)

    def close(self) -> None:
        """End all connections. What is kept stays."""

        def end() -> None:
            for session in list(self._sessions):
                session.connection.close()
            self._end_run()

        self._loop.call(end)

    def status(self) -> dict[str, Any]:
        """What the server holds and has done."""
        return self._loop.call(self._status)

    @property
    def connections(self) -> int:
        """How many connections of tasks there are."""
        return len(self._sessions)

    # -- inside the loop's thread ------------------------------------------------------------------

    def _left(self, session: _Session) -> None:
        """A connection has ended: what its task has staged may never be committed."""
        self._sessions.discard(session)
        if session.line is not None and session.run is not None and session.run is self._run:
            self._run.look_for_doubtful(session.line)

    def _receive(self, session: _Session, message: Message) -> None:
        buffers, number = message.buffers, message.number
        if not buffers:
            raise ProtocolError("A peer sent a message without a request.")
        if wire.kind_of(buffers) == Kind.SEVERAL:
            done = [self._do(session, request) for request in wire.read_several(buffers)]
            answer = wire.several([part for part, _ in done])
            must_sync = any(sync for _, sync in done)
        else:
            answer, must_sync = self._do(session, buffers)
        if must_sync:
            if not self._late:
                self._loop.call_soon(self._sync)
            self._late.append((session.connection, answer, number))
        else:
            self._answer(session.connection, answer, number)

    def _do(self, session: _Session, buffers: Sequence[Any]) -> tuple[list[Any], bool]:
        """Do what a request asks for; returns the answer, and whether it must wait for the disk."""
        kind = wire.kind_of(buffers)
        if kind == LANED:
            buffers = restored(buffers, session.lane)
            kind = wire.kind_of(buffers)
            if kind not in _READ_IN_PLACE:
                buffers = [self._copied(b) for b in buffers]
        run = session.run
        self._counts["bytes_in"] += sum(map(len, buffers))
        if kind in _ADMINISTRATION:
            try:
                answer: list[Any] = getattr(self, _ADMINISTRATION[kind])(session, buffers)
            except ProtocolError:
                raise
            except PhalanxError as error:
                answer = wire.failed(error)
            return answer, False
        if run is None or run is not self._run:
            raise ProtocolError("A peer takes part in no run of this server.")
        answer, has_changed, landed = perform(run.store, buffers, session.landing)
        self._counts["bytes_out"] += landed
        if kind == Kind.STAGE and (token := wire.token_of(buffers)).closure < 0:
            session.line = line_of(token)
        keeper = run.keeper
        if keeper is not None and has_changed:
            try:
                keeper.note(buffers)
            except PhalanxError:
                self._end_run()  # the store is ahead of its log: begin again from the log
                raise
            return answer, keeper.durability.sync
        return answer, False

    def _copied(self, buffer: Any) -> Any:
        """What outlives the request must not stay where the peer writes the next one."""
        copy = self._pool.take(len(buffer))
        copy[:] = buffer
        return copy

    def _answer(self, connection: Connection, buffers: list[Any], number: int) -> None:
        if self._late:  # in the order of the requests, and no task sees what is not on the disk yet
            self._late.append((connection, buffers, number))
            return
        self._counts["bytes_out"] += sum(map(len, buffers))
        connection.send({}, buffers, number)

    def _sync(self) -> None:
        """Let the disk have what was done in this round, and answer."""
        if self._run is not None and self._run.keeper is not None:
            try:
                self._run.keeper.sync()
            except OSError:
                self._end_run()  # no task is told of what may be lost: begin again from the log
                raise
        late, self._late = self._late, []
        for connection, buffers, number in late:
            self._answer(connection, buffers, number)

    def _hello(self, session: _Session, buffers: Any) -> list[Any]:
        fields = wire.fields_in(buffers)
        name, index = fields.get("run"), fields.get("index")
        if not (isinstance(name, str) and _RUN.fullmatch(name) and isinstance(index, int)):
            raise ProtocolError("A peer said hello wrongly.")
        if self._run is None or self._run.name != name:
            if fields.get("begin") and not self._lives(session, fields):
                return wire.told({"challenge": session.challenge})
            self._change_run(name, index, fields)
        assert self._run is not None
        if self._run.index != index:
            raise FailedPreconditionError(
                f"Two ps tasks of the cluster, {self._run.index} and {index}, have the same address. "
                f"Received: {shown(fields)}"
            )
        session.run = self._run
        return wire.told({"process": os.getpid(), "variables": len(self._run.store.variables)})

    @staticmethod
    def _lives(session: _Session, fields: dict[str, Any]) -> bool:
        """Whether the peer repeats what it was told, and so is not dead with its messages under way."""
        if session.challenge and fields.get("challenge") == session.challenge:
            return True
        session.challenge = secrets.token_hex(8)
        return False

    def _change_run(self, name: str, index: int, fields: dict[str, Any]) -> None:
        resumed = None
        if not fields.get("begin") or fields.get("resume"):
            folder = self._folder_of(name)
            resumed = None if folder is None else Keeper.resume(folder, self._loop.call_soon)
        if resumed is not None:
            self._end_run()
            keeper, store = resumed
            self._run = _Run(name, index, store, keeper)
        elif fields.get("begin"):
            try:
                durability = Durability(**fields.get("durability", {}))
            except TypeError:
                raise ProtocolError("A peer said hello wrongly.") from None
            self._begin_run(name, index, durability)
        else:
            raise ServerStateLostError(
                f"The parameter server, ps task {index}, does not hold the variables of this run: its "
                "process was restarted and kept nothing, or it serves another run now. To let servers "
                'survive, use durability="log". '
                f"Received: the run {name}"
            )

    def _begin_run(self, name: str, index: int, durability: Durability) -> None:
        keeper = None
        if durability.mode != "none":
            folder = self._folder_of(name)
            if folder is None:
                raise InvalidValueError(
                    "This server has no folder to keep anything in. "
                    f"Received: durability={durability.mode!r}"
                )
            for old in folder.parent.glob(f"{_FOLDER}*"):
                shutil.rmtree(old, ignore_errors=True)  # one server, one run at a time
            try:
                keeper = Keeper.begin(folder, durability, self._loop.call_soon)
            except OSError as error:
                raise UnavailableError(
                    f"The parameter server, ps task {index}, cannot write into its folder: "
                    f"{error.strerror}. Set PHALANX_SERVER_FOLDER to another one. Received: {folder}"
                ) from error
        self._end_run()
        self._run = _Run(name, index, fresh_store(), keeper)

    def _folder_of(self, run: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{_FOLDER}{run}"

    def _end_run(self, *, forget: bool = False) -> None:
        """End what tasks of an earlier run still want."""
        run, self._run = self._run, None
        self._late.clear()
        for session in [s for s in self._sessions if s.run is not None and s.run is run]:
            session.connection.close(UnavailableError("Another run has begun."))
        if run is not None and run.keeper is not None:
            run.keeper.close(forget=forget)

    def _end(self, session: _Session, buffers: Any) -> list[Any]:
        run = session.run
        if run is not None and run is self._run:
            session.run = None
            self._end_run(forget=True)
        return wire.done(Outcome.DONE)

    def _open_lane(self, session: _Session, buffers: Any) -> list[Any]:
        fields = wire.fields_in(buffers)
        if fields.get("landing"):
            session.landing = open_shared(fields, writable=True)
        else:
            session.lane = open_shared(fields)
        return wire.done(Outcome.DONE)

    def _tell(self, session: _Session, buffers: Any) -> list[Any]:
        return wire.told(self._status())

    def _status(self) -> dict[str, Any]:
        run = self._run
        held = {} if run is None else run.store.status()
        log = 0 if run is None or run.keeper is None else run.keeper.log_size
        name = "" if run is None else run.name
        return {
            "run": name,
            **held,
            **self._counts,
            "doubtful": [] if run is None else [t for t in run.store.doubtful if t in run.store.staged],
            "connections": len(self._sessions),
            "log_bytes": log,
        }

    def _save(self, session: _Session, buffers: Any) -> list[Any]:
        """Write what is held into a folder, or read it from there. The server waits for it."""
        run = session.run
        if run is None or run is not self._run:
            raise ProtocolError("A peer takes part in no run of this server.")
        fields = wire.fields_in(buffers)
        once = str(fields.get("once"))
        if once in run.saved:
            return wire.done(Outcome.REPEATED)
        path = Path(str(fields["folder"])) / f"ps-{run.index:05d}.snapshot"
        try:
            if fields.get("load"):
                store = fresh_store()
                load_snapshot(path, store)
                _take_freed(run.store, store)
                _check_same(run.store, store, run.index)
                run.store = store
                if run.keeper is not None:
                    run.keeper.snapshot(store).join(600.0)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_snapshot(path, records_of(run.store))
        except OSError as error:
            raise UnavailableError(
                f"The parameter server, ps task {run.index}, cannot use this file: {error.strerror}. "
                f"Received: {path}"
            ) from error
        run.saved = [*run.saved[-_MOST_SAVED:], once]
        return wire.done(Outcome.DONE)

    def _take_care(self) -> None:
        run = self._run
        if run is None:
            return
        run.look_for_doubtful()
        if run.keeper is not None:
            try:
                run.keeper.take_care(run.store)
            except OSError as error:
                _log.warning(
                    "The parameter server, ps task %d, cannot begin another log: %s. It goes on with "
                    "the one that it has, which grows.",
                    run.index,
                    error,
                )


def _take_freed(made: Store, kept: Store) -> None:
    """What either the program or that of the checkpoint has freed is needed by neither."""
    kept.variables.update({i: made.variables[i] for i in kept.freed if i in made.variables})
    kept.freed = {i: None for i in kept.freed if i not in made.variables}
    kept.free([*made.freed])


def _check_same(made: Store, kept: Store, index: int) -> None:
    """The variables that the program has made must be those of the checkpoint."""
    ours, theirs = ({i: h.definition for i, h in s.variables.items()} for s in (made, kept))
    wrong = [d.name for i, d in ours.items() if i not in theirs or _form(d) != _form(theirs[i])]
    wrong += [d.name for i, d in theirs.items() if i not in ours]
    if wrong:
        raise FailedPreconditionError(
            "The checkpoint of a coordinator has other variables than its program. Make the same "
            f"variables before it is restored, in the same order. ps task {index} compared them. "
            f"Received: {shown(sorted(wrong))}"
        )


def _form(definition: VariableDefinition) -> tuple[str, tuple[int, ...]]:
    return definition.dtype, tuple(definition.shape)


_ADMINISTRATION: dict[int, str] = {
    Kind.HELLO: "_hello",
    Kind.STATUS: "_tell",
    Kind.SAVE: "_save",
    Kind.END: "_end",
    Kind.LANE: "_open_lane",
}
_READ_IN_PLACE = {Kind.PUSH, Kind.APPLY}  # which keep nothing of their buffers
