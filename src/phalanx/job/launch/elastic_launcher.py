"""A whole job whose workers come and go: a door, a process for each worker, and replacements."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from phalanx.errors import InvalidValueError
from phalanx.job.elastic.door import Door
from phalanx.job.elastic.membership import ElasticMembership
from phalanx.job.elastic.orders import Generation, WorkerLimits
from phalanx.job.elastic.visitor import ADDRESS, NUMBER
from phalanx.job.hub.descriptions import Failure, Task, describe_exit
from phalanx.job.hub.server import Hub
from phalanx.job.launch.exit_policy import ElasticExitPolicy, EndReason, has_left, is_lost
from phalanx.job.launch.launcher import (
    DEATH_SECONDS,
    Job,
    JobDisplay,
    JobOutcome,
    hub_host,
    idleness_of,
    judge,
    placed_tasks,
    planned_commands,
)
from phalanx.job.launch.process_group import Command, Interrupts, ProcessGroup, run_process_group
from phalanx.job.launch.worker_process import Running
from phalanx.job.registry import RunningJob, announced
from phalanx.net.wakeup import Wakeup

__all__ = ["ElasticDisplay", "run_elastic_job"]


_NOTICES = (EndReason.INTERRUPT, EndReason.TIMEOUT)  # reasons for which all get SIGTERM
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
        failure = workers.blamed or _blamed(door.failure)
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
        self.unfinished: list[str] = []  # workers that were lost after the training, and how
        self._door: Door
        self._update: Callable[[RunningJob], object] = lambda _: None
        self._places: list[int] = []  # of workers, by their numbers
        self._running: dict[int, Running] = {}  # by the numbers of workers
        self._lock = threading.Lock()
        self._wanted = 0
        self._all_leave = False
        self._to_end: list[tuple[int, str]] = []
        self._finished: set[int] = set()  # workers that are told that the training has ended
        self._generations: list[tuple[Generation, list[str], Hub | None]] = []
        self.wakeup = Wakeup()
        self.is_idle = idleness_of(job).is_idle
        self._computing = idleness_of(job)

    @property
    def blamed(self) -> Failure | None:
        """Why the job has failed, if that is known here."""
        text = self.failure
        if self.unfinished and not text:
            text = "The training has ended, but not all that follows it has been done: "
            text += "; ".join(self.unfinished) + "."
        return Failure("elastic", text) if text else None

    def open(self, door: Door, update: Callable[[RunningJob], object]) -> None:
        self._door, self._update = door, update

    def close(self) -> None:
        self.wakeup.close()

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
            number, task = self._number_at(place), self._tasks[place]
            left = has_left(code) and self.ending.by_itself[place]
            self._door.exited(number, code, describe_exit(code), code != 0, left)
            is_last = all(code is not None for code in self.ending.codes) and not self.is_busy
            if code != 0 and self.ending.reason is None and not is_last:
                self._view.goes_on(task, code)
            if code != 0 and number in self._finished and self.ending.reason is None:
                self.ending.misses(code)
                self.unfinished.append(f"{task} {describe_exit(code)}")

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
        self.wakeup.clear()
        with self._lock:
            to_end, self._to_end = self._to_end, []
            generations, self._generations = self._generations, []
        if self.failure:
            self.ending.fail(time.monotonic())
        if self.ending.reason in _NOTICES and not self._all_leave:
            self._all_leave = True
            self._door.all_leave()  # which would wait for others to be started
        for number, why in to_end:
            place = self._places[number]
            if self._number_at(place) == number and group.kill(place):
                self._view.kills(self._tasks[place], why)
        for generation, names, hub in generations:
            self._show(generation, names, hub)
        while self.is_busy and (free := group.free_index(len(self._tasks))) is not None:
            with self._lock:
                self._wanted -= 1
            self._view.starts(self._tasks[free])
            group.start(free, self.command(free))

    def _show(self, generation: Generation, names: Sequence[str], hub: Hub | None) -> None:
        door = self._door.address
        address = door if hub is None else hub.address
        self._update(RunningJob(os.getpid(), self._job.name, address, self._token, door=door))
        if hub is not None:
            self._view.begin(hub, generation.number)
        self._view.generation(generation, names)

    # -- in the thread of the door ---------------------------------------------------------------

    def computes(self, pid: int) -> bool:
        """Whether a process is known to have computed a moment ago."""
        return self._computing.computes(pid) is True

    def spawn(self, count: int) -> None:
        """Start so many workers more."""
        with self._lock:
            self._wanted += count
        self.wakeup.ring()

    def end(self, worker: int, why: str) -> None:
        """Kill the process of a worker, and say why."""
        with self._lock:
            self._to_end.append((worker, why))
        self.wakeup.ring()

    def finished(self, worker: int) -> None:
        """A worker is told that the training has ended; what is left to do, none does in its place."""
        self._finished.add(worker)

    def failed(self, text: str) -> None:
        """The job cannot go on."""
        if self.ending.reason is None:
            self.failure = text
        self.wakeup.ring()

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
        self.wakeup.ring()
