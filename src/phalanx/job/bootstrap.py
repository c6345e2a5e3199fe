"""Brings the processes of a cluster together: the hub, JAX's distributed runtime, and the end.

>>> from phalanx.job import bootstrap
>>> connection = bootstrap.connect(resolver)  # doctest: +SKIP
>>> connection.rank, connection.size  # doctest: +SKIP
(0, 2)
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from types import TracebackType

import jax

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.errors import (
    ClusterEnvironmentError,
    DeadlineExceededError,
    FailedPreconditionError,
    PhalanxError,
    UnauthenticatedError,
)
from phalanx.job import device_connections, jax_distributed, jax_runtime
from phalanx.job.arrivals import Arrivals
from phalanx.job.elastic.visitor import ADDRESS
from phalanx.job.hub.client import Member, Roster
from phalanx.job.hub.descriptions import Failure
from phalanx.job.hub.hub_process import HubProcess
from phalanx.job.hub.tunnel import Tunnel
from phalanx.job.observer import Observer
from phalanx.job.preflight import Membership, bind_host, find_membership, port_problem
from phalanx.job.tokens import find_token
from phalanx.job.watchdog import Watchdog
from phalanx.net.addresses import split_address
from phalanx.net.framing import ProtocolError
from phalanx.runtime import laboratory
from phalanx.runtime.deadlines import terminate_patience, worker_deadline

_log = logging.getLogger("phalanx")

_GOODBYE = 10.0  # seconds that a worker waits at its end for the others to come to theirs
_EXIT_GUARD = 10.0  # seconds that the end of a process may take after its job has failed
_OLD_HUB = 6.0  # seconds for the hub of an older run to go away


class JobConnection:
    """This process as one of the workers of a job.

    Attributes:
        member: the connection to the hub.
        rank: the number of this worker, from 0.
        size: the number of workers.
        roster: what is known of each worker, by rank.
    """

    def __init__(
        self, member: Member, membership: Membership, roster: Roster, watchdog: Watchdog, tunnel: Tunnel
    ) -> None:
        self.member, self.membership = member, membership
        self.rank, self.size = membership.rank, len(membership.tasks)
        self.roster = list(roster["members"])
        self._watchdog, self._tunnel = watchdog, tunnel
        self._previous_hook = sys.excepthook
        self._hook = self._on_exception  # one object, so that it can be recognised
        self._crashed = False
        self._ended = False
        sys.excepthook = self._hook
        atexit.register(self._at_exit)
        member.status.phase = "step"

    def come_to_end(self) -> None:
        """Say that this worker has nothing left to do, so that none who is frozen keeps up the job."""
        self.member.come_to_end(self._watchdog.deadline)

    def disconnect(self, timeout: float = _GOODBYE) -> None:
        """Leave the job: wait a moment for the others to come to their end, and leave JAX's runtime.

        Never raises and never ends the process, whatever has become of the others.
        """
        if self._ended:
            return
        self._ended = True
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        atexit.unregister(self._at_exit)
        if not self._crashed:
            self.come_to_end()
            if not self.member.meet("goodbye", timeout):
                self._watchdog.name_silent()
        self._watchdog.stop()
        hub_is_gone = self.member.failure is not None and self.member.failure.kind == "hub"
        jax_runtime.leave(abandon=hub_is_gone)
        if not hub_is_gone:  # else JAX must find it open until the end
            self._tunnel.close()
        self.member.leave()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Tell the others, and let the traceback say what is behind an error of the connection."""
        self._crashed = True
        cause = self.member.cause_of(error)
        if cause is not None:
            error.add_note(f"This is because the job has failed: {cause}")
        else:
            self.member.report_exception(error)
        self._previous_hook(kind, error, traceback)

    def _at_exit(self) -> None:
        ignore_notices()
        if not self._ended:
            laboratory.reach(laboratory.END)
            if not self._crashed:
                self.come_to_end()
            laboratory.reach(laboratory.END)  # and now it only waits for the others
        failed = self._crashed or self.member.failure is not None
        self.disconnect()
        if failed:
            _failed.append(self)
            jax_distributed.abandon_backends()


def ignore_notices() -> None:
    """The program has ended, and so does its process: a notice must not make a loss of it.

    Only where a launcher kills what does not end.
    """
    if terminate_patience() is not None and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)


def connect(
    resolver: ClusterResolver,
    *,
    timeout: float = 60.0,
    devices_per_worker: int | None = None,
    deadline: float | None = None,
    warn_after: float | None = None,
    grace: float = 15.0,
) -> JobConnection:
    """Meet the other workers of the cluster and start JAX on the devices of all of them.

    Must come before JAX starts. What is wrong with the cluster is one clear error on every worker that
    is up: a port in use, a wrong address, two processes with the same task, different versions, a
    worker that does not come in time.

    Args:
        resolver: says who is in the cluster, and which task this process is.
        timeout: seconds within which all workers must have joined.
        devices_per_worker: the number of CPU devices of this worker; None leaves it as it is set.
        deadline: seconds after which a wait for other workers fails the job, by default
            PHALANX_DEADLINE.
        warn_after: seconds after which a wait for other workers shows who is late; see `Watchdog`.
        grace: seconds for native code to come back after the job has failed.
    """
    laboratory.provide("cut", device_connections.cut_all)
    laboratory.reach("start")
    end = time.monotonic() + timeout
    if os.environ.get(ADDRESS) and not os.environ.get("PHALANX_HUB"):
        raise FailedPreconditionError(
            "The workers of this job come and go (phalanx run --workers MIN:MAX), so the strategy over "
            "them is made anew each time: put the training into a function, call "
            "px.train.elastic(function, batch_size=...), and take the strategy from its context. Or "
            "give phalanx run one number of workers. Received: a strategy outside of px.train.elastic"
        )
    membership = find_membership(resolver)
    member, roster = join_hub(membership, timeout, problem=jax_runtime.start_problem(membership.task))
    seconds = worker_deadline() if deadline is None else deadline
    watchdog = Watchdog(member, warn_after=warn_after, deadline=seconds, grace=grace)
    try:
        if not roster["service"]:
            raise ClusterEnvironmentError("The hub runs no coordination service, which JAX needs.")
        jax_runtime.prepare(devices_per_worker, seconds + grace)
        left = max(30.0, end - time.monotonic())
        tunnel = Tunnel(member.address, find_token(membership.is_local))
        listener = jax_runtime.run_unless_failed(
            lambda: jax_runtime.start(membership, tunnel.address, left), member, left
        )
        reports = member.exchange("start", [jax.local_device_count(), listener], timeout=left)
        if len({count for count, _ in reports}) > 1:
            _log.warning("The workers have different numbers of devices: %s", [n for n, _ in reports])
        listeners = [listener for _, listener in reports]

        def free_native_waits(failure: Failure) -> None:
            device_connections.cut(listeners)

        member.on_failure(free_native_waits)
        gate = device_connections.Gate(listener)
        member.on_knock(gate.open)
        watchdog.keep(gate, listeners)
    except BaseException as error:
        member.report_exception(error)
        member.leave()
        raise
    return JobConnection(member, membership, roster, watchdog.start(), tunnel)


def join_hub(
    membership: Membership, timeout: float = 60.0, *, problem: Failure | None = None
) -> tuple[Member, Roster]:
    """Find the job's hub, or start it if that is this process's part, and wait for all to join.

    `problem` is what is already known to be wrong with this worker, for the others to know.
    """
    end = time.monotonic() + timeout
    address = os.environ.get("PHALANX_HUB")
    bind = os.environ.get("PHALANX_BIND")
    token = find_token(membership.is_local)
    with contextlib.ExitStack() as stack:
        if address is None:
            problem = problem or _own_port_problem(membership, bind)
            address, process = _find_hub(membership, token, bind, timeout)
            if process is not None:
                stack.callback(process.close)
        member = Member(
            address,
            token,
            membership.task.type,
            membership.task.id,
            cluster=membership.cluster,
            timeout=max(1.0, end - time.monotonic()),
            problem=problem,
        )
        try:
            with Arrivals(membership.tasks) as arrivals:
                roster = member.wait_joined(max(1.0, end - time.monotonic()), arrivals.note)
        except BaseException as error:
            member.report_exception(error)
            member.leave()
            raise
        stack.pop_all()
    return member, roster


# -- the hub --------------------------------------------------------------------------------------


def _own_port_problem(membership: Membership, bind: str | None) -> Failure | None:
    """Whether something else listens where this worker should; the first worker finds out later."""
    text = port_problem(membership.task, bind) if membership.rank > 0 else None
    return None if text is None else Failure("cluster", text, str(membership.task))


def _find_hub(
    membership: Membership, token: str, bind: str | None, timeout: float
) -> tuple[str, HubProcess | None]:
    """The address of the hub next to the first worker, and its process if this worker starts it."""
    first = membership.tasks[0]
    if membership.rank > 0:
        return first.address, None
    if not _wait_for_port(membership, token, bind):
        return first.address, None  # another process is this task: its hub will tell all of us
    host, port = split_address(first.address)
    name = os.path.basename(sys.argv[0]) or "python"
    process = HubProcess(
        membership.tasks,
        token,
        bind_host(first, membership.is_local, bind),
        port,
        advertised=host,
        name=name,
        timeout=timeout,
    )
    atexit.register(process.close)
    return process.address, process


def _wait_for_port(membership: Membership, token: str, bind: str | None) -> bool:
    """Wait for the hub of an older run to go; returns False if a hub of a running job is there."""
    end = time.monotonic() + _OLD_HUB
    while True:
        problem = port_problem(membership.task, bind)
        if problem is None:
            return True
        try:
            with Observer(membership.task.address, token, timeout=2.0) as observer:
                rows = observer.table().rows
        except (ProtocolError, DeadlineExceededError) as error:
            raise ClusterEnvironmentError(problem) from error
        except UnauthenticatedError as error:
            raise ClusterEnvironmentError(f"{problem} It is the hub of another job.") from error
        except PhalanxError:  # it is just going
            rows = []
        if any(row["state"] == "joined" for row in rows):
            return False
        if time.monotonic() > end:
            raise ClusterEnvironmentError(problem)
        time.sleep(0.1)


# -- the end --------------------------------------------------------------------------------------

_failed: list[JobConnection] = []


def _guard_end() -> None:
    """End the process of a failed job even if something at its end hangs, also with Python's lock.

    Functions for the end run in the opposite order of their registration, so this one, which is
    registered early, comes after those of the program.
    """
    if _failed:
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - stays open until the end
        faulthandler.dump_traceback_later(_EXIT_GUARD, exit=True, file=nowhere)


atexit.register(_guard_end)
