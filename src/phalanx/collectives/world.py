"""The workers of this job: who they are, how they agree on what to do, and their queues."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from phalanx.collectives.channels import (
    Channel,
    DifferentError,
    InterruptedChannelError,
    LateError,
    LinkLostError,
    Notice,
)
from phalanx.collectives.links import Address, Links
from phalanx.collectives.mailbox import Mailbox
from phalanx.collectives.mismatches import different_operations
from phalanx.collectives.operation_queue import OperationQueue
from phalanx.errors import InvalidValueError, PhalanxError, UnauthenticatedError
from phalanx.job import jax_distributed, shared_programs
from phalanx.job.bootstrap import JobConnection
from phalanx.job.hub.descriptions import Failure
from phalanx.job.hub.worker_status import PeerWait, WorkerStatus
from phalanx.job.preflight import bind_host
from phalanx.job.shared_programs import Ledger, SharedProgram
from phalanx.job.tokens import find_token
from phalanx.net.addresses import split_address
from phalanx.runtime.deadlines import worker_deadline
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import let_handlers_run

_LOOK = 0.1  # seconds between looks at whether the job has failed
_MOST_REFUSALS = 5
_ROUTE = "PHALANX_COMM_ROUTE"


class World:
    """All workers of the job, or this process alone."""

    def __init__(self, connection: JobConnection | None) -> None:
        self._connection = connection
        self.rank = 0 if connection is None else connection.rank
        self.size = 1 if connection is None else connection.size
        self.is_on_host = _is_on_host()
        """Whether data move through the memory of the host, else between devices."""
        self._queues: dict[Any, OperationQueue] = {}
        self.channels: dict[tuple[int, ...], Channel] = {}
        """The connections between the members of groups that have had an operation."""
        self._lock = threading.Lock()
        self._links: Links | None = None
        self.status = WorkerStatus()
        """What this worker does, for the others."""
        self.prepared: dict[Any, Any] = {}
        """What `prepared_calls` keeps for the calls of this process, by their signatures."""
        self._orderly: OrderlyLedger | None = None
        self.mailbox: Mailbox | None = None
        self.hosts = ["" for _ in range(self.size)]
        """The machine of each worker."""
        self._names = [f"rank {i}" for i in range(self.size)]
        if connection is not None:
            self._join(connection)

    def _join(self, connection: JobConnection) -> None:
        membership = connection.membership
        token = find_token(membership.is_local).encode()
        self.hosts = [str(m.get("host")) for m in connection.roster]
        self._names = [f"rank {i} ({m.get('worker')})" for i, m in enumerate(connection.roster)]
        key = hashlib.sha256(b"collectives of " + token).digest()
        self._links = Links(self.rank, bind_host(membership.task, membership.is_local), key)
        self.mailbox = Mailbox(self.rank, self._links, self._dial, self.check)
        jax_distributed.publish(f"phalanx/links/{self.rank}", json.dumps(self._links.address))
        connection.member.on_failure(lambda _: self._cut())
        self.status = connection.member.status
        self.status.operations = self._operations
        ledger = shared_programs.ledger()
        if ledger is not None and not self.is_on_host:
            self._orderly = OrderlyLedger(ledger, self.settle)
            shared_programs.use_ledger(self._orderly)
        atexit.register(self.settle)

    # -- the job ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the job's failure if there is one, and what a signal handler has to raise."""
        let_handlers_run()
        if self._connection is not None:
            self._connection.member.check()

    @property
    def has_failed(self) -> bool:
        """Whether the job has failed."""
        return self._connection is not None and self._connection.member.failure is not None

    def fail(self, kind: str, text: str) -> PhalanxError:
        """Tell all workers that the job cannot go on; returns the error to raise."""
        assert self._connection is not None
        member = self._connection.member
        member.report(Failure(kind, text))
        return (member.failure or Failure(kind, text)).error()

    def wait_of(self, members: tuple[int, ...], notice: Notice) -> PeerWait:
        """How the wait in an operation of some members is shown to the other workers."""
        missing: Callable[[], Sequence[int]]
        channel = self.channels.get(members)
        if channel is None:  # they are not connected yet
            missing, number = (lambda: [r for r in members if r != self.rank]), lambda: 1
        else:
            missing, number = channel.missing, channel.count
        return PeerWait(self.status, notice.same, notice.site, missing, _name(members), number)

    def _operations(self) -> dict[str, int]:
        """How many operations this worker has begun, by their members, and messages by receiver."""
        counts = {_name(members): c.number for members, c in list(self.channels.items())}
        sent = {} if self.mailbox is None else dict(self.mailbox.sent)
        return counts | {f"to {rank}": count for rank, count in sent.items()}

    def explain(self, error: Exception, notice: Notice, seconds: float | None = None) -> Exception:
        """The error to raise for one that an operation has met; the job knows of it then."""
        at = f"{notice.same} at {notice.site}"
        if isinstance(error, DifferentError):
            said = {self._names[r]: (n.same, n.site) for r, n in sorted(error.notices.items())}
            return self.fail("mismatch", different_operations(said))
        if isinstance(error, LateError):
            assert self._connection is not None
            waited = worker_deadline() if seconds is None else seconds
            member = self._connection.member
            return member.late(notice.site, waited, notice.same, error.ranks)
        if isinstance(error, InterruptedChannelError):
            text = f"The operation before {at} was interrupted on this rank or another."
            return self.fail("precondition", text)
        if self._connection is None or isinstance(error, PhalanxError):
            return error
        cause = self._connection.member.cause_of(error)
        if cause is None and isinstance(error, LinkLostError):
            lost = self._names[error.rank]
            return self.fail("died", f"{lost} closed its connection in the middle of {at}.")
        return cause or error

    # -- order -----------------------------------------------------------------------------------

    def queue(self, key: Any) -> OperationQueue:
        """What keeps operations of one kind in order."""
        queue = self._queues.get(key)
        if queue is None:
            with self._lock:
                queue = self._queues.setdefault(key, OperationQueue("-".join(map(str, key))))
        return queue

    def settle(self) -> None:
        """Wait until what was launched is done, or the job has failed."""
        with self._lock:
            queues = list(self._queues.values())
        for queue in queues:
            while not queue.is_current and not queue.wait_idle(_LOOK):
                if self.has_failed:
                    return

    def programs(self) -> Any:
        """The newest program of a strategy, which must be over before other programs begin."""
        return None if self._orderly is None else self._orderly.token

    def close(self) -> None:
        """Finish what was launched and stop all threads."""
        self.settle()
        atexit.unregister(self.settle)
        for queue in self._queues.values():
            queue.close()
        if self._links is not None:
            self._links.close()
        if self._orderly is not None and shared_programs.ledger() is self._orderly:
            shared_programs.use_ledger(self._orderly.inner)

    # -- connections -----------------------------------------------------------------------------

    def channel(self, members: tuple[int, ...], seconds: float, wait: PeerWait) -> Channel:
        """The connections between the members of a group, which are made for its first operation.

        Of each pair, the member with the higher rank calls the other.
        """
        channel = self.channels.get(members)
        if channel is None:
            channel = self.channels[members] = self._connect(members, seconds, wait)
        wait.missing, wait.moved, wait.number = channel.missing, channel.moved, channel.count
        return channel

    def _connect(self, members: tuple[int, ...], seconds: float, wait: PeerWait) -> Channel:
        assert self._links is not None
        name, end = _name(members), time.monotonic() + seconds
        sockets: dict[int, socket.socket] = {}
        wait.missing = lambda: [r for r in members if r != self.rank and r not in sockets]
        for rank in (r for r in members if r < self.rank):
            sockets[rank] = self._dial(rank, name, end)
        waiting = [r for r in members if r > self.rank]
        while waiting:
            found = self._links.wait(name, waiting[0], _LOOK)
            if found is not None:
                sockets[waiting.pop(0)] = found
                continue
            self.check()
            if time.monotonic() > end:
                raise LateError([r for r in waiting if not self._links.has(name, r)])
        return Channel(self.rank, sockets, self.check)

    def _dial(self, rank: int, channel: str, end: float | None = None) -> socket.socket:
        """Connect to another worker; waits for it to come to its collectives."""
        assert self._links is not None
        assert self._connection is not None
        end = time.monotonic() + worker_deadline() if end is None else end
        host = split_address(self._connection.membership.tasks[rank].address)[0]
        refusals = 0
        while True:
            self.check()
            left = max(0.1, end - time.monotonic())
            found = jax_distributed.look_up(f"phalanx/links/{rank}", min(1.0, left))
            if found is not None:
                _, port, local = json.loads(found)
                is_here = self.hosts[rank] == self.hosts[self.rank]
                address = Address(host, port, local if is_here and self._links.address.local else "")
                try:
                    return self._links.dial(address, channel, left)
                except (OSError, UnauthenticatedError):  # strangers may crowd out who belongs there
                    refusals += 1
                    if refusals >= _MOST_REFUSALS:
                        raise
                    time.sleep(_LOOK)
            if time.monotonic() > end:
                raise LateError([rank])

    def _cut(self) -> None:
        if self._links is not None:
            self._links.cut()


class OrderlyLedger:
    """Lets programs of strategies and collectives take turns: both use the same connections."""

    def __init__(self, inner: Ledger, settle: Callable[[], None]) -> None:
        self.inner, self._settle = inner, settle
        self.token: Any = None

    def meet(self, shared: SharedProgram) -> AbstractContextManager[Any]:
        """See `Ledger.meet`."""
        self._settle()
        return self.inner.meet(shared)

    def begun(self, token: Any, may_return: bool) -> None:
        """See `Ledger.begun`."""
        self.token = token
        self.inner.begun(token, may_return)


@functools.lru_cache(maxsize=1000)
def _name(members: tuple[int, ...]) -> str:
    """How all members name the operations that they share."""
    return ",".join(map(str, members))


def device_of(rank: int) -> jax.Device:
    """The device with which a worker takes part in collectives: its first."""
    devices = [d for d in jax.devices() if d.process_index == rank]
    return min(devices, key=lambda d: d.id)


def _is_on_host() -> bool:
    """Whether arrays are on the host in any case; PHALANX_COMM_ROUTE is for testing."""
    route = os.environ.get(_ROUTE, "")
    if route not in ("", "host", "devices"):
        raise InvalidValueError(
            f"The environment variable {_ROUTE} must be host or devices. Received: {shown(route)}"
        )
    return route == "host" or (not route and jax.default_backend() == "cpu")
