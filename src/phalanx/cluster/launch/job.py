"""A whole job: a hub, a process for each task, and restarts after failures."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from phalanx.cluster.hub.facts import Failure, Task
from phalanx.cluster.hub.server import Hub
from phalanx.cluster.launch.gang import Command, Interrupts, Outcome, Sink, run_gang
from phalanx.cluster.launch.jobs import RunningJob, announced
from phalanx.cluster.launch.output import failure_report
from phalanx.cluster.launch.plan import (
    essential_tasks,
    task_environment,
    tf_config,
    with_addresses,
)
from phalanx.cluster.launch.policy import DEFAULT_PATIENCE, Patience, Reason
from phalanx.cluster.launch.ports import PortReservation
from phalanx.cluster.launch.process import Process, shell_code
from phalanx.cluster.launch.remote import agent_command, agent_order, own_address, parse_hosts

__all__ = ["Hosts", "Job", "JobOutcome", "View", "members", "planned_commands", "run_job"]

_DEATH_SECONDS = 0.3
"""How long the hub waits to learn how a process ended whose connection has closed."""


@dataclass(frozen=True)
class Hosts:
    """Hosts that are reached over ssh.

    Args:
        names: the hosts, with commas between them.
        ssh: the command that logs in.
        hub_address: the address of this machine that the hosts reach; found out if it is not given.
    """

    names: str
    ssh: str = "ssh -o BatchMode=yes"
    hub_address: str | None = None


@dataclass(frozen=True)
class Job:
    """What to run, and how.

    Args:
        argv: the program and its arguments, the same for all tasks.
        tasks: the tasks, without addresses.
        name: what the job is called.
        environ: the environment that all processes have in common.
        cwd: the folder they start in.
        devices: the number of logical CPU devices of each process; None leaves it to them.
        retain_memory: whether the C library of the processes keeps freed memory.
        timeout: how many seconds the job may take, restarts included.
        restarts: how often all processes are started again after a failure.
        patience: how long processes may take to end.
        hosts: where the processes run; None for this machine.
        python: the interpreter on other hosts.
    """

    argv: Sequence[str]
    tasks: Sequence[Task]
    name: str
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    cwd: str = field(default_factory=os.getcwd)
    devices: int | None = None
    retain_memory: bool = False
    timeout: float | None = None
    restarts: int = 0
    patience: Patience = DEFAULT_PATIENCE
    hosts: Hosts | None = None
    python: str = "python3"


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended: its exit code, who failed first, and what is known of the reason.

    `failure` is what the hub knows. `report` is the part of the failed process's output that explains
    it.
    """

    exit_code: int
    gang: Outcome
    culprit: Task | None = None
    failure: Failure | None = None
    report: list[str] = field(default_factory=list)


class View(Sink, Protocol):
    """Shows a job to people."""

    def begin(self, hub: Hub, attempt: int) -> None:
        """The processes are about to be started, for the first time or again."""

    def failed(self, outcome: JobOutcome, again: bool) -> None:
        """The job has failed; whether it is tried again."""


def members(tasks: Sequence[Task]) -> list[Task]:
    """The tasks that train together, in the order of their ranks: the chief, and the workers."""
    return [task for task in tasks if task.type in ("chief", "worker")]


def run_job(job: Job, view: View) -> JobOutcome:
    """Run a job until it has succeeded, or has failed and is not to be restarted."""
    give_up = None if job.timeout is None else time.monotonic() + job.timeout
    with Interrupts() as interrupts:
        for attempt in range(job.restarts + 1):
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            outcome = _attempt(job, view, attempt, left, interrupts)
            again = outcome.gang.reason is Reason.FAILURE and attempt < job.restarts
            if outcome.exit_code != 0:
                view.failed(outcome, again)
            if not again:
                break
    return outcome


def _attempt(
    job: Job, view: View, attempt: int, timeout: float | None, interrupts: Interrupts
) -> JobOutcome:
    processes: dict[Task, Process] = {}

    def cause_of_death(task: Task) -> int | None:
        return processes[task].wait(_DEATH_SECONDS) if task in processes else None

    with contextlib.ExitStack() as stack:
        tasks = stack.enter_context(placed_tasks(job))
        token = secrets.token_hex(16)
        host = "127.0.0.1" if job.hosts is None else _hub_host(job.hosts)
        hub = stack.enter_context(
            Hub(members(tasks), token, host, cause_of_death=_local(job, cause_of_death))
        )
        stack.enter_context(
            announced(RunningJob(os.getpid(), job.name, hub.address, token, list(job.argv)))
        )
        view.begin(hub, attempt)

        def exited(index: int, code: int) -> None:
            if tasks[index] in members(tasks):
                hub.exited(tasks[index], code)

        gang = run_gang(
            planned_commands(job, tasks, hub.address, token, attempt),
            view,
            essential=essential_tasks(tasks),
            patience=job.patience,
            timeout=timeout,
            interrupts=interrupts,
            started=lambda running: processes.update(zip(tasks, running, strict=True)),
            exited=exited,
        )
        return _judge(tasks, gang, hub.failure)


def _local(
    job: Job, cause_of_death: Callable[[Task], int | None]
) -> Callable[[Task], int | None] | None:
    return cause_of_death if job.hosts is None else None


def _judge(tasks: Sequence[Task], gang: Outcome, failure: Failure | None) -> JobOutcome:
    """Name the process to blame: the one that the hub blames, or else the first that failed.

    A process that waits for a failed one may well end before it.
    """
    if gang.reason is not Reason.FAILURE or gang.first_failure is None:
        return JobOutcome(gang.exit_code, gang, failure=failure)
    names = [str(task) for task in tasks]
    culprit = gang.first_failure
    exit_code = gang.exit_code
    if failure is not None and failure.task in names:
        blamed = names.index(failure.task)
        code = gang.codes[blamed]
        if code:
            culprit = blamed
            exit_code = shell_code(code) if gang.by_itself[blamed] else exit_code
    report = failure_report(gang.tails[culprit])
    return JobOutcome(exit_code, gang, tasks[culprit], failure, report)


# -- where the tasks are -------------------------------------------------------------------------


@contextlib.contextmanager
def placed_tasks(job: Job) -> Iterator[list[Task]]:
    """The tasks with their addresses, which stay theirs during the block."""
    if job.hosts is not None:
        _, addresses = parse_hosts(job.hosts.names, len(job.tasks))
        yield with_addresses(job.tasks, addresses)
        return
    with PortReservation(len(job.tasks)) as reservation:
        yield with_addresses(job.tasks, [f"127.0.0.1:{port}" for port in reservation.ports])


def planned_commands(
    job: Job, tasks: Sequence[Task], hub: str, token: str, attempt: int = 0
) -> list[Command]:
    """The processes of a job whose tasks have addresses."""
    logins = None if job.hosts is None else parse_hosts(job.hosts.names, len(tasks))[0]
    commands = []
    for i, task in enumerate(tasks):
        environ = task_environment(
            job.environ,
            config=tf_config(tasks, task),
            hub=hub,
            token=token,
            devices=job.devices,
            retain_memory=job.retain_memory,
            restart=attempt,
        )
        command = Command(str(task), job.argv, environ, job.cwd)
        if logins is not None and job.hosts is not None:
            command = replace(
                command,
                argv=agent_command(job.hosts.ssh, logins[i], job.python),
                environ=dict(os.environ),
                remote=agent_order(job.argv, environ, job.cwd),
            )
        commands.append(command)
    return commands


def _hub_host(hosts: Hosts) -> str:
    if hosts.hub_address is not None:
        return hosts.hub_address
    _, addresses = parse_hosts(hosts.names, 1)
    return own_address(addresses[0].rpartition(":")[0])
