"""Stopping after the same step on all workers: messages through the hub around `StopAgreement`."""

from __future__ import annotations

import threading
import time
from typing import Any

from phalanx.errors import DeadlineExceededError
from phalanx.job.bootstrap import JobConnection
from phalanx.runtime.deadlines import worker_deadline
from phalanx.train.termination import StopAgreement

__all__ = ["AgreedStop"]


class AgreedStop:
    """Which step is the last one, on this worker and on all others.

    Args:
        connection: to the other workers; None if there are none.
        name: what the workers call it, for each agreement another one.
        remedy: what the program must do on every worker, for the error that names a silent one.
    """

    def __init__(self, connection: JobConnection | None, name: str, remedy: str) -> None:
        self._connection, self._name, self._remedy = connection, name, remedy
        rank, size = (0, 1) if connection is None else (connection.rank, connection.size)
        self.agreement = StopAgreement(rank, size)
        self._changed = threading.Condition(threading.RLock())
        if connection is not None:
            connection.member.when_told(name, self._told)

    @property
    def is_pending(self) -> bool:
        """Whether the workers are about to stop."""
        return self.agreement.is_pending

    @property
    def is_over(self) -> bool:
        """Whether the last step has been made."""
        return self.agreement.is_over

    def begin(self) -> None:
        """A step begins."""
        with self._changed:
            self.agreement.begin()

    def announce(self) -> None:
        """Tell the others that it is time to stop, unless they know. Any thread may call this."""
        with self._changed:
            self._tell(self.agreement.notice())

    def wait_for_answers(self) -> None:
        """Before a step: wait until it is known which one is the last, if this may be one too many."""
        agreement = self.agreement
        if self._connection is None or agreement.may_begin or agreement.is_over:
            return
        seconds = worker_deadline()
        end = time.monotonic() + seconds
        with self._changed:
            while agreement.last is None and time.monotonic() < end:
                self._changed.wait(0.1)
                self._connection.member.check()
        if agreement.last is None:
            roster = self._connection.roster
            silent = [m["worker"] for rank, m in enumerate(roster) if rank not in agreement.promises]
            raise DeadlineExceededError(
                f"{', '.join(silent)} did not say within {seconds:g} seconds (PHALANX_DEADLINE) after "
                f"which step to stop. {self._remedy} "
                f"Received: a notice after {agreement.started} steps"
            )

    def close(self) -> None:
        """Listen no more."""
        if self._connection is not None:
            self._connection.member.when_told(self._name, None)

    def _told(self, rank: int | None, promise: Any) -> None:
        if rank is not None:
            with self._changed:
                self._tell(self.agreement.told(rank, int(promise)))

    def _tell(self, promise: int | None) -> None:
        if promise is not None and self._connection is not None:
            self._connection.member.tell(self._name, promise)
        self._changed.notify_all()
