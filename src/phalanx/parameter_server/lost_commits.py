"""Settles commits of tasks that died in the middle of them, where no coordinator does.

A task stages its part of a commit on each server, and then tells all of them to commit. If it dies in
between, some servers may have made its updates and others not. Servers say which attempts they have
staged for long. Any task may then settle them, also several at the same time: an inquiry fences the
attempt off on all servers, and what they know of it then allows one verdict only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from phalanx.parameter_server.recovery import say_settled
from phalanx.parameter_server.requests import Token
from phalanx.parameter_server.session import Session
from phalanx.parameter_server.settler import Settler

__all__ = ["LostCommits"]

_log = logging.getLogger("phalanx")


class LostCommits:
    """Settles attempts in a thread of its own, over connections of its own.

    No task is asked whether it lives: servers refuse what the attempt does
    afterwards, and a task that lives makes another attempt (`ServersHome`).

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        remembers = session.options.delivery == "exactly_once"
        self._settler = Settler(session.connect, remembers, self._settled)
        self._lock = threading.Lock()
        self._under_way: set[Token] = set()

    def doubt(self, tokens: Sequence[Token]) -> None:
        """Settle attempts, soon."""
        with self._lock:
            new = [token for token in tokens if token not in self._under_way]
            self._under_way.update(new)
        if new:
            self._settler.inquire(new)

    def end(self) -> None:
        """Settle no more, soon."""
        self._settler.end()

    def close(self) -> None:
        """Settle no more."""
        self._settler.close()

    def _settled(self, token: Token, committed: bool, value: bytes, error: Exception | None) -> None:
        with self._lock:
            self._under_way.discard(token)
        if error is not None:
            _log.warning("A commit of a worker that may have died is not settled yet. %s", error)
            return
        say_settled(committed)
