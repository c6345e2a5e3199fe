"""Looks after parameter servers while no task waits for one: those that are gone are named."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from phalanx.errors import PhalanxError, ServerStateLostError
from phalanx.job.hub.descriptions import Task
from phalanx.net.stream import Stream
from phalanx.parameter_server import wire
from phalanx.parameter_server.home import ServersHome
from phalanx.parameter_server.lost_commits import LostCommits
from phalanx.parameter_server.requests import Token
from phalanx.parameter_server.server_link import Refusal, greeted
from phalanx.parameter_server.session import Session
from phalanx.parameter_server.wire import Kind
from phalanx.runtime.interrupts import Bell, start

__all__ = ["ServerWatch"]

_log = logging.getLogger("phalanx")

_BEAT = 1.0  # seconds between questions whether a server lives, and for each answer
_PAUSE = 0.2  # seconds between tries to reach a server that is gone
_LATE = 3.0  # seconds of silence after which a server is named; that is noticed a little later
_MOST = 60.0  # seconds after which it is named again at the latest


class ServerWatch:
    """Asks each server of a run, each second, whether it lives, and lets it free variables.

    Args:
        session: the run.
        home: where its variables are. The watch ends with it.
        settles: whether to settle commits whose task may have died in the middle of them.
    """

    def __init__(
        self,
        session: Session,
        home: weakref.ref[ServersHome],
        settles: bool = False,
    ) -> None:
        self._lost = LostCommits(session) if settles else None
        self._watched = [_Watched(task, session, home, self._lost) for task in session.servers]

    def start(self) -> ServerWatch:
        """Begin; each server has a thread of its own, so that none hides the silence of another."""
        for watched in self._watched:
            watched.start()
        return self

    def close(self) -> None:
        """Ask no more."""
        for watched in self._watched:
            watched.close()
        if self._lost is not None:
            self._lost.close()

    @property
    def missing(self) -> list[int]:
        """The indices of servers that do not answer."""
        return [i for i, watched in enumerate(self._watched) if not watched.is_up]

    def report(self) -> list[dict[str, Any]]:
        """Which servers are there: for each its ``task``, ``address``, ``state`` and ``reason``."""
        return [watched.report() for watched in self._watched]


class _Watched:
    """One server.

    Args:
        task: the server.
        session: the run.
        home: where its variables are.
        lost: settles attempts whose task may be dead, if that is done here.
    """

    def __init__(
        self,
        task: Task,
        session: Session,
        home: weakref.ref[ServersHome],
        lost: LostCommits | None,
    ) -> None:
        self._task, self._home, self._lost = task, home, lost
        hello = {"run": session.run, "index": task.id}
        self._greet = partial(greeted, task.address, session.key, hello, _BEAT)
        self._heard = time.monotonic()
        self._reason = ""
        self._has_lost = False
        self._over = Bell()
        self._thread = threading.Thread(
            target=self._run, name=f"phalanx-watch-{task.type}-{task.id}", daemon=True
        )

    def start(self) -> None:
        start(self._thread)

    def close(self) -> None:
        self._over.ring()

    @property
    def is_up(self) -> bool:
        return not self._reason

    def report(self) -> dict[str, Any]:
        state = "up" if self.is_up else "lost" if self._has_lost else "missing"
        silent = 0.0 if self.is_up else time.monotonic() - self._heard
        found = {"task": str(self._task), "address": self._task.address, "state": state}
        return {**found, "silent": silent, "reason": self._reason}

    def _run(self) -> None:
        stream: Stream | None = None
        late = _LATE  # seconds of silence after which to name it next
        self._heard = time.monotonic()
        try:
            while not self._over.wait(_BEAT if self._has_lost or stream is not None else _PAUSE):
                if self._home() is None:  # no code needs the server any more
                    break
                try:
                    if stream is None:
                        stream = self._greet()
                    status = wire.fields_in(_ask(stream, wire.with_fields(Kind.STATUS, {})))
                    if self._lost is not None and status.get("doubtful"):
                        self._lost.doubt([Token(*found) for found in status["doubtful"]])
                    self._free(stream)
                except (Refusal, PhalanxError, OSError) as error:
                    if stream is not None:
                        stream.close()
                    stream = None
                    late = self._miss(getattr(error, "error", error), late)
                else:
                    if late > _LATE:
                        _log.warning("%s at %s answers again.", self._task, self._task.address)
                    self._heard, self._reason, late = time.monotonic(), "", _LATE
                    self._has_lost = False
        finally:
            if stream is not None:
                stream.close()
            if self._lost is not None:
                self._lost.end()

    def _free(self, stream: Stream) -> None:
        """Let the server free what no code refers to."""
        home = self._home()
        freed = None if home is None else home.take_freed(self._task.id)
        if home is not None and freed is not None:
            try:
                _ask(stream, wire.free(*freed))
            except BaseException:
                home.free(self._task.id, freed)
                raise
            home.was_freed(freed)

    def _miss(self, error: Exception, late: float) -> float:
        """Note that there is no answer, and name the server if that is so for long."""
        self._reason = str(error)
        silent = time.monotonic() - self._heard
        self._has_lost = isinstance(error, ServerStateLostError)
        if silent <= late and not (self._has_lost and late == _LATE):
            return late
        if self._has_lost:  # it is there, and waiting will not help
            _log.warning("%s", error)
            return silent + _MOST
        _log.warning(
            "The parameter server, %s at %s, has not answered for %.0f seconds. Functions that use its "
            "variables wait for it. %s",
            self._task,
            self._task.address,
            silent,
            error,
        )
        return silent + min(_MOST, max(_LATE, silent))


def _ask(stream: Stream, request: list[Any]) -> Sequence[Any]:
    stream.send(request, 1, _BEAT)
    answer = stream.receive(_BEAT).buffers
    wire.read_outcome(answer)
    return answer
