"""A whole job whose workers come and go: a door, a process for each worker, and replacements."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from phalanx.errors import InvalidValueError
from phalanx.job.elastic.door import Door
from phalanx.job.elastic.membership import ElasticMembership, Generation, WorkerLimits
from phalanx.job.elastic.visitor import ADDRESS, NUMBER
from phalanx.job.hub.descriptions import Failure, Task, describe_exit
from phalanx.job.hub.server import Hub
from phalanx.job.launch.exit_policy import LEFT_CODE, ElasticExitPolicy, is_lost
from phalanx.job.launch.launcher import (
    DEATH_SECONDS,
    Job,
    JobDisplay,
    JobOutcome,
    hub_host,
    judge,
    placed_tasks,
    planned_commands,
)
from phalanx.job.launch.process_group import Command, Interrupts, ProcessGroup, run_process_group
from phalanx.job.launch.worker_process import Running
from phalanx.job.registry import RunningJob, announced

__all__ = ["ElasticDisplay", "run_elastic_job"]


_LOST = ("died", "left", "deadline", "hub")  # kinds of failures after which the others go on


class ElasticDisplay(JobDisplay, Protocol):
    """Shows an elastic job to people."""

    def generation(self, generation: Generation, names: Sequence[str]) -> None:
        """A generation of workers begins."""

    def starts(self, task: Task) -> None:
        """A process is started while the job runs."""


def run_elastic_job(job: Job, view: ElasticDisplay, limits: WorkerLimits, size: int) -> JobOutcome:
    """Run a job until it has come to its end, or cannot go on.

    Args:
        job: what to run; its tasks are as many workers as there may be.
        view: shows it.
        limits: how many workers there may be, and how long to wait for them.
        size: how many are started at first.
    """
    if job.ray is not None:
        raise InvalidValueError(
            "Workers of a job on Ray cannot come and go: Ray has placed them together. Leave --engine "
            f"out, or give one number of workers. Received: {limits.minimum}:{limits.maximum}"
        )
    host = "127.0.0.1" if job.hosts is None else hub_host(job.hosts)
    token = secrets.token_hex(16)
    with (
        Interrupts() as interrupts,
        placed_tasks(job) as tasks,
        contextlib.closing(_Workers(job, tasks, token, view)) as workers,
        Door(ElasticMembership(limits, size), token, workers, host, workers) as door,
        announced(RunningJob(os.getpid(), job.name, door.address, token, door=door.address)) as update,
    ):
        workers.open(door, update)
        outcome = run_process_group(
            [workers.command(index) for index in range(size)],
            view,
            ending=workers.ending,
            timeout=job.timeout,
            interrupts=interrupts,
            started=workers.started,
            exited=workers.exited,
            noticed=door.all_leave,
            controller=workers,
            spawn=job.spawn,
        )
        failure = Failure("elastic", workers.failure) if workers.failure else _blamed(door.failure)
    result = judge(tasks, outcome, failure)
    if result.exit_code != 0:
        view.failed(result, False)
    return result


def _blamed(failure: Failure | None) -> Failure | None:
    """A failure of the program, which ends the job; that a worker was lost does not."""
    return None if failure is None or failure.kind in _LOST else failure


class _Workers:
    """The processes: which worker is where. Between the thread of the group and that of the door."""

    def __init__(self, job: Job, tasks: Sequence[Task], token: str, view: ElasticDisplay) -> None:
        self._job, self._tasks, self._token, self._view = job, tasks, token, view
        self.ending = ElasticExitPolicy(len(tasks), job.patience)
        self.failure = ""
        self._door: Door
        self._update: Callable[[RunningJob], object] = lambda _: None
        self._places: list[int] = []  # of workers, by their numbers
        self._running: dict[int, Running] = {}  # by the numbers of workers
        self._lock = threading.Lock()
        self._wanted = 0
        self._to_end: list[int] = []
        self._generations: list[tuple[Generation, list[str], Hub | None]] = []
        self.wakeup, self._waker = socket.socketpair()
        for end in (self.wakeup, self._waker):
            end.setblocking(False)

    def open(self, door: Door, update: Callable[[RunningJob], object]) -> None:
        self._door, self._update = door, update

    def close(self) -> None:
        self.wakeup.close()
        self._waker.close()

    def command(self, place: int) -> Command:
        """What to start at a place, as a new worker."""
        with self._lock:
            number = len(self._places)
            self._places.append(place)
        self.ending.starts(place)
        self._door.started(number, str(self._tasks[place]))
        environ = {**self._job.environ, ADDRESS: self._door.address, NUMBER: str(number)}
        job = replace(self._job, environ=environ)
        restarts = self._places.count(place) - 1
        return planned_commands(job, self._tasks, "", self._token, restarts)[place]

    # -- in the thread of the group --------------------------------------------------------------

    def started(self, place: int, process: Running) -> None:
        self._running[self._number_at(place)] = process

    def exited(self, place: int, code: int) -> None:
        if code != 0 and not is_lost(code):
            self._door.fail(f"{self._tasks[place]} {describe_exit(code)}.")
        elif self.ending.reason is None or is_lost(code):
            if code != 0 and self.ending.reason is None:
                self._view.goes_on(self._tasks[place], code)
            replaces = code not in (0, LEFT_CODE)
            self._door.exited(self._number_at(place), code, describe_exit(code), replaces)

    def _number_at(self, place: int) -> int:
        """The newest worker at a place."""
        return len(self._places) - 1 - self._places[::-1].index(place)

    @property
    def is_busy(self) -> bool:
        """Whether a process is to be started."""
        with self._lock:
            return self._wanted > 0 and self.ending.reason is None

    def attend(self, group: ProcessGroup) -> None:
        """Do what the door has asked for."""
        with contextlib.suppress(BlockingIOError):
            self.wakeup.recv(1 << 10)
        with self._lock:
            to_end, self._to_end = self._to_end, []
            generations, self._generations = self._generations, []
        if self.failure:
            self.ending.fail(time.monotonic())
        for number in to_end:
            group.kill(self._places[number])
        for generation, names, hub in generations:
            self._show(generation, names, hub)
        while self.is_busy and (place := group.free_index(len(self._tasks))) is not None:
            with self._lock:
                self._wanted -= 1
            self._view.starts(self._tasks[place])
            group.start(place, self.command(place))

    def _show(self, generation: Generation, names: Sequence[str], hub: Hub | None) -> None:
        if hub is not None:
            address = hub.address
            job = RunningJob(os.getpid(), self._job.name, address, self._token, door=self._door.address)
            self._update(job)
            self._view.begin(hub, generation.number)
        self._view.generation(generation, names)

    # -- in the thread of the door ---------------------------------------------------------------

    def spawn(self, count: int) -> None:
        """Start so many workers more."""
        with self._lock:
            self._wanted += count
        self._wake()

    def end(self, worker: int) -> None:
        """Kill the process of a worker."""
        with self._lock:
            self._to_end.append(worker)
        self._wake()

    def failed(self, text: str) -> None:
        """The job cannot go on."""
        if self.ending.reason is None:
            self.failure = text
        self._wake()

    def address_of(self, worker: int) -> str:
        """Where a worker is."""
        return self._tasks[self._places[worker]].address

    def cause_of_death(self, worker: int) -> int | None:
        """The exit code of a worker that may have ended."""
        process = self._running.get(worker)
        return None if process is None or self._job.hosts is not None else process.wait(DEATH_SECONDS)

    def generation(self, generation: Generation, names: Sequence[str], hub: Hub | None) -> None:
        """A generation begins; the other thread shows it."""
        with self._lock:
            self._generations.append((generation, list(names), hub))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!")
