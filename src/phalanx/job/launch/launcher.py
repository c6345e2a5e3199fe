"""A whole job: a hub, a process for each task, and restarts after failures."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from phalanx.job.hub.descriptions import PREEMPTION, Failure, Task
from phalanx.job.hub.server import Hub
from phalanx.job.hub.silent_members import Abandoned
from phalanx.job.launch.exit_policy import DEFAULT_PATIENCE, EndReason, ExitPolicy, Patience
from phalanx.job.launch.idleness import Idleness
from phalanx.job.launch.output import failure_report
from phalanx.job.launch.ports import PortReservation
from phalanx.job.launch.process_group import (
    Command,
    GroupOutcome,
    Interrupts,
    ProcessGroup,
    Sink,
    Spawn,
    run_process_group,
    spawn_here,
)
from phalanx.job.launch.ray_engine import RayCluster, RayOptions
from phalanx.job.launch.remote import agent_command, agent_order, own_address, parse_hosts
from phalanx.job.launch.task_environment import (
    essential_tasks,
    task_environment,
    tf_config,
    with_addresses,
)
from phalanx.job.launch.worker_process import Running, shell_code
from phalanx.job.preflight import is_loopback
from phalanx.job.registry import RunningJob, announced
from phalanx.job.state_folders import STATE, folder_of_job
from phalanx.net.wakeup import Wakeup
from phalanx.runtime.deadlines import worker_deadline

DEATH_SECONDS = 0.3
"""How long the hub waits to learn how a process ended whose connection has closed."""


@dataclass(frozen=True)
class Hosts:
    """Hosts that are reached over ssh."""

    names: str  # with commas between them
    ssh: str = "ssh -o BatchMode=yes"  # the command that logs in
    hub_address: str | None = None  # of this machine, as the hosts reach it; else it is found out


@dataclass(frozen=True)
class Job:
    """What to run, and how."""

    argv: Sequence[str]  # the program and its arguments, the same for all tasks
    tasks: Sequence[Task]  # without addresses
    name: str  # what the job is called
    # The environment that all processes have in common, and the folder they start in.
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    cwd: str = field(default_factory=os.getcwd)
    devices: int | None = None  # logical CPU devices of each process; None leaves it to them
    retain_memory: bool = False  # whether the C library of the processes keeps freed memory
    timeout: float | None = None  # seconds that the job may take, restarts included
    # How often all processes are started again after a failure; with parameter servers, each alone.
    restarts: int = 0
    patience: Patience = DEFAULT_PATIENCE  # how long processes may take to end
    hosts: Hosts | None = None  # where the processes run; None for this machine
    ray: RayOptions | None = None  # how they are placed on a Ray cluster; None does without Ray
    python: str = "python3"  # the interpreter on other hosts
    spawn: Spawn = field(default=spawn_here, repr=False)  # starts processes of this machine


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended: its exit code, who failed first, and what is known of the reason.

    `failure` is what the hub knows. `report` is the part of the failed process's output that explains
    it.
    """

    exit_code: int
    processes: GroupOutcome
    culprit: Task | None = None
    failure: Failure | None = None
    report: list[str] = field(default_factory=list)


class JobDisplay(Sink, Protocol):
    """Shows a job to people."""

    def restarts(self, task: Task, code: int, count: int) -> None:
        """A process has ended, and is started again for the `count`-th time."""

    def goes_on(self, task: Task, code: int) -> None:
        """A process has ended, and the job goes on without it."""

    def kills(self, task: Task, why: str) -> None:
        """A process is ended, because the others have waited for it in vain."""

    def begin(self, hub: Hub, attempt: int) -> None:
        """The processes are about to be started, for the first time or again."""

    def failed(self, outcome: JobOutcome, again: bool) -> None:
        """The job has failed; whether it is tried again."""


def members(tasks: Sequence[Task]) -> list[Task]:
    """The tasks that train together, in the order of their ranks: the chief, and the workers."""
    return [task for task in tasks if task.type in ("chief", "worker")]


def is_restarted_in_parts(tasks: Sequence[Task]) -> bool:
    """Whether processes that fail are started again on their own.

    A coordinator goes on without a worker or a server for a while. Workers that train together do not.
    """
    return any(task.type == "ps" for task in tasks)


def ending_of(job: Job, workers_train: Callable[[], bool] = lambda: False) -> ExitPolicy:
    """When a job is over, and which of its processes are started again.

    Args:
        job: what runs.
        workers_train: asked whether workers end by themselves, although there is a chief.
    """
    types = [task.type for task in job.tasks]
    in_parts = is_restarted_in_parts(job.tasks)
    patience = job.patience
    if "evaluator" in types:
        patience = replace(patience, finish=max(patience.finish, worker_deadline()))
    has_coordinator = in_parts and "chief" in types
    return ExitPolicy(
        essential_tasks(job.tasks),
        patience,
        restarts=[job.restarts if in_parts else 0] * len(types),
        expendable=[has_coordinator and kind == "worker" for kind in types],
        all_train=workers_train,
    )


def run_job(job: Job, view: JobDisplay) -> JobOutcome:
    """Run a job until it has succeeded, or has failed and is not to be restarted."""
    give_up = None if job.timeout is None else time.monotonic() + job.timeout
    with Interrupts() as interrupts:
        restarts = 0 if is_restarted_in_parts(job.tasks) else job.restarts
        for attempt in range(restarts + 1):
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            outcome = _attempt(job, view, attempt, left, interrupts)
            again = outcome.processes.reason is EndReason.FAILURE and attempt < restarts
            if outcome.exit_code != 0:
                view.failed(outcome, again)
            if not again:
                break
    return outcome


def _attempt(
    job: Job, view: JobDisplay, attempt: int, timeout: float | None, interrupts: Interrupts
) -> JobOutcome:
    running: dict[Task, Running] = {}
    hub: Hub
    ending = ending_of(job, lambda: hub.workers_train)

    def cause_of_death(task: Task) -> int | None:
        return running[task].wait(DEATH_SECONDS) if task in running else None

    with contextlib.ExitStack() as stack:
        spawn = job.spawn
        if job.ray is not None:
            cluster = stack.enter_context(RayCluster(job.tasks, job.ray))
            tasks, host, spawn = cluster.tasks, cluster.host, cluster.spawn
        else:
            tasks = stack.enter_context(placed_tasks(job))
            host = "127.0.0.1" if job.hosts is None else hub_host(job.hosts)
        if is_restarted_in_parts(tasks) and is_loopback(host):
            state = str(stack.enter_context(folder_of_job()))
            job = replace(job, environ={**job.environ, STATE: state})
        token = secrets.token_hex(16)
        local = job.hosts is None
        killer = stack.enter_context(contextlib.closing(_Killer(view, tasks, job)))
        hub = stack.enter_context(
            Hub(
                members(tasks),
                token,
                host,
                cause_of_death=cause_of_death if local else None,
                abandoned=killer.end,
            )
        )
        stack.enter_context(
            announced(RunningJob(os.getpid(), job.name, hub.address, token, _servers(tasks)))
        )
        view.begin(hub, attempt)

        def exited(index: int, code: int) -> None:
            if code != 0 and ending.reason is None:
                view.goes_on(tasks[index], code)
            elif ending.by_itself[index] and tasks[index] in members(tasks):
                hub.exited(tasks[index], code)

        def again(index: int, code: int, count: int) -> Command:
            view.restarts(tasks[index], code, count)
            return planned_commands(job, tasks, hub.address, token, count)[index]

        outcome = run_process_group(
            planned_commands(job, tasks, hub.address, token, attempt),
            view,
            ending=ending,
            timeout=timeout,
            interrupts=interrupts,
            started=lambda index, process: running.update({tasks[index]: process}),
            exited=exited,
            again=again,
            noticed=lambda: hub.notice(PREEMPTION),
            spawn=spawn,
            controller=killer,
        )
        return judge(tasks, outcome, hub.failure)


def idleness_of(job: Job) -> Idleness:
    """Says whether processes of a job compute, as far as that can be seen from here."""
    return Idleness() if job.hosts is None and job.ray is None else Idleness(lambda pid: None)


class _Killer:
    """Ends single processes in the thread of the group; any thread may ask for it."""

    is_busy = False

    def __init__(self, view: JobDisplay, tasks: Sequence[Task], job: Job) -> None:
        self.wakeup = Wakeup()
        self._view, self._tasks = view, list(tasks)
        self._idleness = idleness_of(job)
        self._asked: deque[Abandoned] = deque()

    def end(self, member: Abandoned) -> bool:
        """End the process of a member, and say why, unless it computes; returns whether it ends."""
        is_idle = self._idleness.is_idle(member.pid)
        if is_idle:
            self._asked.append(member)
            self.wakeup.ring()
        return is_idle

    def attend(self, group: ProcessGroup) -> None:
        """Do what was asked for."""
        self.wakeup.clear()
        while self._asked:
            member = self._asked.popleft()
            if group.kill(self._tasks.index(member.task)):
                self._view.kills(member.task, member.why)

    def close(self) -> None:
        """End nothing more."""
        self.wakeup.close()


def _servers(tasks: Sequence[Task]) -> dict[str, str]:
    """The tasks that answer remote calls, by name: all of a job with parameter servers."""
    if not is_restarted_in_parts(tasks):
        return {}
    return {str(task): task.address for task in tasks if task.type != "evaluator"}


def judge(tasks: Sequence[Task], processes: GroupOutcome, failure: Failure | None) -> JobOutcome:
    """Name the process to blame: the one that the hub blames, or else the first that failed.

    A process that waits for a failed one may well end before it.
    """
    if processes.reason is not EndReason.FAILURE or processes.first_failure is None:
        return JobOutcome(processes.exit_code, processes, failure=failure)
    names = [str(task) for task in tasks]
    culprit = processes.first_failure
    exit_code = processes.exit_code
    if failure is not None and failure.task in names:
        blamed = names.index(failure.task)
        code = processes.codes[blamed]
        if code:
            culprit = blamed
            exit_code = shell_code(code) if processes.by_itself[blamed] else exit_code
    report = failure_report(processes.tails[culprit])
    return JobOutcome(exit_code, processes, tasks[culprit], failure, report)


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
            terminate_grace=job.patience.terminate,
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


def hub_host(hosts: Hosts) -> str:
    """The address of this machine for some hosts."""
    if hosts.hub_address is not None:
        return hosts.hub_address
    _, addresses = parse_hosts(hosts.names, 1)
    return own_address(addresses[0].rpartition(":")[0])
