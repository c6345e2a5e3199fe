"""Asks parameter servers what became of closures whose worker was lost, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from phalanx.errors import PhalanxError, UnavailableError
from phalanx.parameter_server.requests import ManagedServers, Token
from phalanx.runtime.interrupts import start

__all__ = ["Settler"]

_log = logging.getLogger(__name__)

_END = 5.0  # seconds that the thread may take to end


class Settler:
    """Settles attempts in doubt, and lets servers forget what is settled.

    Args:
        connect: reaches the servers.
        remembers: whether servers remember attempts; if not, each counts as if it had not happened.
        settled: called in the thread with each attempt, whether it counts, the value of its closure,
            and the error if the servers cannot be asked.
    """

    def __init__(
        self,
        connect: Callable[[], ManagedServers],
        remembers: bool,
        settled: Callable[[Token, bool, bytes, Exception | None], None],
    ) -> None:
        self._connect, self._remembers, self._settled = connect, remembers, settled
        self._servers: ManagedServers | None = None
        self._work: queue.SimpleQueue[Sequence[Token] | int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def inquire(self, attempts: Sequence[Token]) -> None:
        """Settle attempts."""
        if self._remembers:
            self._put(attempts)
            return
        for token in attempts:
            self._settled(token, False, b"", None)

    def forget(self, below: int) -> None:
        """Let servers forget all closures with smaller numbers."""
        if self._remembers:
            self._put(below)

    def end(self) -> None:
        """End the thread, soon."""
        self._work.put(None)

    def close(self) -> None:
        """End the thread, and wait a little for it."""
        self.end()
        if self._thread is not None:
            self._thread.join(_END)

    def _put(self, work: Sequence[Token] | int) -> None:
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phalanx-settler", daemon=True)
            start(self._thread)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if self._servers is None:
                    self._servers = self._connect()
                if isinstance(work, int):
                    self._servers.forget(work)
                    self._servers.collect()
                    continue
                for token, (committed, value) in self._servers.settle(work).items():
                    self._settled(token, committed, value, None)
            except (PhalanxError, OSError) as error:
                self._drop()
                if isinstance(work, int):
                    _log.warning("The parameter servers cannot be reached: %s", error)
                    continue
                failure = UnavailableError(
                    "A worker was lost, and the parameter servers cannot say whether the updates of "
                    f"its closures were made: {error}"
                )
                for token in work:
                    self._settled(token, False, b"", failure)
        self._drop()

    def _drop(self) -> None:
        close = getattr(self._servers, "close", None)
        self._servers = None
        if close is not None:
            close()
