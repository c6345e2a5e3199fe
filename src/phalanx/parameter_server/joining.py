"""How a task finds a run that another one has begun."""

from __future__ import annotations

import logging
import time

from phalanx.errors import DeadlineExceededError, UnauthenticatedError
from phalanx.job.hub.descriptions import Task
from phalanx.net.endpoint import dial
from phalanx.net.framing import ProtocolError
from phalanx.net.stream import Stream
from phalanx.parameter_server import wire
from phalanx.parameter_server.service import PURPOSE
from phalanx.parameter_server.session import Session
from phalanx.parameter_server.wire import LIMITS, Kind

__all__ = ["find_run", "run_of_all"]

_log = logging.getLogger("phalanx")

_TRY = 2.0  # seconds for one question
_PAUSE = 0.05  # seconds between questions
_NAMED = 4.5  # seconds after which it is said who is missing, again and again


def find_run(session: Session, leader: Task, timeout: float) -> str:
    """The run that all servers serve, once another task has begun it.

    Args:
        session: has the servers and the key.
        leader: the task that begins the run.
        timeout: seconds after which to give up.
    """
    begun = named = time.monotonic()
    while True:
        runs, missing = _ask(session)
        if not missing and len(runs) == 1 and "" not in runs:
            return runs.pop()
        now = time.monotonic()
        whom = missing or f"{leader} at {leader.address}, which begins the run"
        if now - begun > timeout:
            raise DeadlineExceededError(
                f"No run has begun within {timeout:g} seconds. Missing is {whom}. Start it, or wait "
                f"longer for it by worker_timeout. Received: {session.servers}"
            )
        if now - named >= _NAMED:
            named = now
            _log.warning("Waiting for %s, for %.0f seconds.", whom, now - begun)
        time.sleep(_PAUSE)


def run_of_all(session: Session, timeout: float) -> str:
    """The run that all servers serve at this moment; "" if they do not serve the same one.

    Args:
        session: has the servers and the key.
        timeout: seconds to wait for servers that do not answer.
    """
    begun = named = time.monotonic()
    while True:
        runs, missing = _ask(session)
        now = time.monotonic()
        if not missing or now - begun > timeout:  # who is missing is named where it is needed
            return runs.pop() if len(runs) == 1 and not missing else ""
        if now - named >= _NAMED:
            named = now
            _log.warning("Waiting for %s, for %.0f seconds.", missing, now - begun)
        time.sleep(_PAUSE)


def _ask(session: Session) -> tuple[set[str], str]:
    """The runs that servers serve, and a server that does not answer."""
    runs = set()
    for task in session.servers:
        try:
            runs.add(_run_of(task, session.key))
        except (UnauthenticatedError, ProtocolError):
            raise
        except OSError as error:
            return runs, f"{task} at {task.address} ({error})"
    return runs, ""


def _run_of(task: Task, key: bytes) -> str:
    stream = Stream(dial(task.address, key, {"for": PURPOSE}, _TRY, peer=str(task)), LIMITS)
    try:
        stream.send(wire.with_fields(Kind.STATUS, {}), 1, _TRY)
        answer = stream.receive(_TRY).buffers
        wire.read_outcome(answer)
        return str(wire.fields_in(answer).get("run", ""))
    finally:
        stream.close()
