"""This process among the workers of its cluster: one connection, and one ledger of programs."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Hashable
from typing import Any

import jax

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.errors import ContextError
from phalanx.job import bootstrap
from phalanx.job.hub.client import Member
from phalanx.job.hub.worker_status import Waiting
from phalanx.job.shared_programs import SharedProgram, use_ledger
from phalanx.runtime import activity
from phalanx.runtime.awaiting import Waiter
from phalanx.runtime.devices import name_task

_TIME_TO_COME_BACK = 1.0  # seconds from a failure to the end of the programs that fail with it

_lock = threading.Lock()
_connected: list[tuple[Any, bootstrap.JobConnection]] = []
_ledgers: list[WorkerLedger] = []


def connect_once(resolver: ClusterResolver, deadline: float | None) -> bootstrap.JobConnection:
    """The connection of this process; strategies of one cluster share it."""
    who = (resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id)
    with _lock:
        if _connected:
            known, connection = _connected[0]
            if known != who:
                raise ContextError(
                    "This process is already a worker of another cluster, and cannot be one of two. "
                    f"Received: {who[1]} {who[2]} of {who[0]}, "
                    f"after {known[1]} {known[2]} of {known[0]}"
                )
            return connection
        connection = bootstrap.connect(resolver, deadline=deadline)
        ledger = WorkerLedger(connection.member)
        atexit.register(ledger.settle_at_exit)
        _ledgers[:] = [ledger]
        use_ledger(ledger)
        activity.watched_by(connection.member.status, connection.member.check)
        name_task(resolver.task_type or "worker", resolver.task_id or 0)
        _connected.append((who, connection))
        return connection


def leave_job() -> None:
    """Leave the other workers, so that this process can become a worker of another cluster.

    What belongs to JAX's devices is useless then; see `jax_distributed.forget_devices`.
    """
    with _lock:
        for _, connection in _connected:
            connection.disconnect()
            connection.member.status.pending = None
        _connected.clear()
        ledger = _ledgers.pop() if _ledgers else None
        if ledger is not None:
            atexit.unregister(ledger.settle_at_exit)
            ledger.close()
        use_ledger(None)
        activity.watched_by_none()


def connected() -> bootstrap.JobConnection | None:
    """The connection of this process to the other workers, if it has one."""
    return _connected[0][1] if _connected else None


class WorkerLedger:
    """Counts the programs that run on all workers, and compares each new one with the others."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._sequence = 0
        self._known: dict[Hashable, tuple[dict[str, Any], Waiting]] = {}
        self._waiting = member.waiting("")
        self._awaits_results = jax.default_backend() == "cpu"
        self._waiter = Waiter()
        self._under_way: tuple[Waiting, Any] | None = None
        self._failed_since: float | None = None

    def meet(self, shared: SharedProgram) -> Waiting:
        """Make sure that all workers come to the same program; the program runs inside.

        The throttle runs one program at a time, so that each has one `Waiting` for all its runs.
        """
        member = self._member
        self.settle()
        member.check()
        self._sequence += 1
        known = self._known.get(shared.key)
        if known is None:
            details = shared.details()
            member.agree(self._sequence, shared.digest(details), details)
            known = self._known[shared.key] = (details, member.waiting(details["site"]))
        details, self._waiting = known
        self._waiting.seconds = shared.seconds
        member.status.begin(self._sequence, details)
        return self._waiting

    def begun(self, token: Any, may_return: bool) -> None:
        """The program was dispatched; `token` is ready when it has finished.

        Between CPUs it is awaited: here, or before the next one if the caller may go on. Else JAX would
        raise what fails, where the program reads a result, and the error could not name the worker
        behind it.
        """
        self._member.status.pending = token
        if self._awaits_results:
            self._under_way = (self._waiting, token)
            if not may_return:
                self.settle()

    def settle(self) -> None:
        """Wait for the program that is under way between CPUs; raises why it has failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            waiting, token = under_way
            with waiting:
                self._waiter.wait(token, self._look)

    def close(self) -> None:
        """No program is waited for any more."""
        self._waiter.close()

    def settle_at_exit(self) -> None:
        """Let the last program end before this process leaves the others, unless the job has failed."""
        if self._member.failure is None:
            with contextlib.suppress(Exception):  # the end of the process tells of failures
                self.settle()

    def _look(self) -> None:
        """Leave a program that does not come back although the job has failed."""
        if self._member.failure is None:
            return
        if self._failed_since is None:
            self._failed_since = time.monotonic()
        elif time.monotonic() - self._failed_since >= _TIME_TO_COME_BACK:
            self._member.check()
