"""Plays a schedule of faults over the real processes of a job, and writes down what happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import InvalidValueError, NotFoundError, PhalanxError
from phalanx.job.elastic.orders import Generation, WorkerLimits
from phalanx.job.hub.descriptions import Task, describe_exit
from phalanx.job.hub.server import Hub
from phalanx.job.hub.tunnel import remove_left_behind
from phalanx.job.launch.elastic_launcher import run_elastic_job
from phalanx.job.launch.exit_policy import EndReason, Patience
from phalanx.job.launch.launcher import Job, JobOutcome, run_job
from phalanx.job.launch.process_group import spawn_here
from phalanx.job.launch.task_environment import job_tasks
from phalanx.net.addresses import split_address
from phalanx.runtime.formatting import shown
from phalanx.runtime.laboratory import FOLDER, FROZEN, SCHEDULE
from phalanx.runtime.processes import is_alive
from phalanx.runtime.shipping import frame, pack_call
from phalanx.testing.faults import programs
from phalanx.testing.faults.job_history import JobHistory
from phalanx.testing.faults.jobs import JobSchedule
from phalanx.train.checkpoints.checkpoint import open_checkpoint

__all__ = ["JobRun", "Program", "run"]

Program = str | Path | Sequence[str] | Callable[[str], Any]
"""A script, a script and its arguments, or a function of a folder."""

PLACE = "{folder}"
"""Stands for the folder of a run in the arguments of a program."""

_LOOK_EVERY = 0.02  # seconds between looks for frozen processes
_GONE = 5.0  # seconds that processes may take to be gone after the job
_MOST_OUTPUT = 2000  # lines
_STOPPING = 4.0  # deadlines after which a worker of an elastic job that says nothing is killed


@dataclass(frozen=True)
class JobRun:
    """A job that was played.

    Args:
        schedule: what should go wrong.
        history: what happened.
        exit_code: of the job.
        seconds: how long it took.
        output: the last lines that processes printed.
    """

    schedule: JobSchedule
    history: JobHistory = field(repr=False)
    exit_code: int
    seconds: float
    output: str = field(repr=False, default="")


def run(
    program: Program,
    schedule: JobSchedule,
    *,
    restarts: int | None = None,
    deadline: float = 3.0,
    timeout: float = 180.0,
    devices: int | None = 1,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> JobRun:
    """Play a schedule: run a program as a job, as ``phalanx run --restarts`` does, with its faults.

    If the schedule says how many workers the job needs at `least`, it is an elastic one, as of
    ``phalanx run --workers MIN:MAX``.

    Args:
        program: a script; a script and its arguments, in which ``{folder}`` stands for a new folder
            for checkpoints; or a function, which is called with that folder. A script without such an
            argument runs in the new folder.
        schedule: what goes wrong, and how many workers there are.
        restarts: how often the job is started again at most, or how many workers of an elastic job
            are replaced; by default as often as faults end it, or them.
        deadline: for how many seconds workers wait for each other (PHALANX_DEADLINE).
        timeout: after how many seconds the job is ended.
        devices: logical CPU devices of each worker; None leaves it to the program.
        env: environment variables for all processes.
        preload: modules that workers have imported when they start, because they are copies of one
            process that has; for many short jobs. See `px.testing.MultiProcess`.

    Examples:
        >>> from phalanx.testing import faults
        >>> def program(folder):
        ...     faults.record(examples=[1, 2, 3])
        >>> schedule = faults.JobSchedule(0, 1, [faults.JobFault("kill", phase="record")])
        >>> played = faults.run(program, schedule, preload=["phalanx"])
        >>> played.exit_code, played.history.attempts, faults.job_violations(played.history)
        (0, 2, [])
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="px-") as place, contextlib.ExitStack() as stack:
        folder = Path(place).resolve()
        work, temporary = folder / "work", folder / "tmp"
        work.mkdir()
        temporary.mkdir()
        (folder / SCHEDULE).write_text(schedule.as_json())
        view = _View()
        argv, cwd, call = _command(program, folder, work)
        environ = {
            **os.environ,
            **(env or {}),
            FOLDER: str(folder),
            "PHALANX_DEADLINE": str(deadline),
            "TMPDIR": str(temporary),
        }
        spawn = programs.forking(preload, call) if preload else spawn_here
        stack.enter_context(_thawing(folder))
        job = Job(
            argv,
            job_tasks(schedule.workers),
            Path(argv[-1]).name,
            environ=environ,
            cwd=cwd,
            devices=devices,
            timeout=timeout,
            restarts=schedule.attempts(deadline) if restarts is None else restarts,
            patience=Patience(peers=3.0, terminate=6.0),
            spawn=spawn,
        )
        if schedule.least is None:
            outcome = run_job(job, view)
        else:
            outcome = run_elastic_job(job, view, _limits(job, schedule, deadline), schedule.workers)
        if outcome.processes.reason is EndReason.INTERRUPT:
            raise KeyboardInterrupt
        history = JobHistory.read(folder)
        view.note("ended", exit_code=outcome.exit_code, **_left(history, folder, temporary))
        history = JobHistory(history.lives, tuple(view.events))
        seconds = time.monotonic() - begun
        return JobRun(schedule, history, outcome.exit_code, seconds, "\n".join(view.output))


def _command(program: Program, folder: Path, work: Path) -> tuple[list[str], str, bytes]:
    """The program as a command line, the folder to start it in, and what copies of a process call."""
    if callable(program):
        called = pack_call(program, (str(work),), {})
        path = folder / "call"
        path.write_bytes(frame(sys.path) + called)
        argv = [sys.executable, "-P", programs.__file__, str(path)]
        return argv, os.getcwd(), pack_call(programs.call, (called, argv), {})
    words = [str(program)] if isinstance(program, str | Path) else [str(word) for word in program]
    if not words:
        raise InvalidValueError("Say which program to run. Received: nothing")
    if not Path(words[0]).is_file():
        raise NotFoundError(f"There is no such file. Received: {shown(words[0])}")
    words[0] = str(Path(words[0]).absolute())
    has_place = any(PLACE in word for word in words[1:])
    words = [words[0], *(word.replace(PLACE, str(work)) for word in words[1:])]
    cwd = os.getcwd() if has_place else str(work)
    return [sys.executable, *words], cwd, pack_call(programs.run_script, (words, cwd), {})


def _limits(job: Job, schedule: JobSchedule, deadline: float) -> WorkerLimits:
    """How many workers an elastic job has, and how long it waits for them."""
    assert schedule.least is not None
    return WorkerLimits(
        schedule.least,
        schedule.workers,
        replacements=job.restarts,
        patience=60.0,
        deadline=deadline,
        stopping=_STOPPING * deadline,
        gathering=0.0,
    )


class _View:
    """Writes down what the launcher sees."""

    overwrite = False

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.output: list[str] = []
        self._attempt = 0

    def note(self, event: str, **about: Any) -> None:
        self.events.append({"event": event, "at": time.monotonic(), **about})

    def begin(self, hub: Hub, attempt: int) -> None:
        self._attempt = attempt
        self.note("attempt", attempt=attempt)

    def failed(self, outcome: JobOutcome, again: bool) -> None:
        words = [] if outcome.failure is None else [outcome.failure.text]
        if outcome.culprit is not None:
            code = outcome.processes.codes[outcome.culprit.id]
            if code:  # else it is one that was started in place of the culprit
                words.append(f"{outcome.culprit} {describe_exit(code)}")
        about = {"exit_code": outcome.exit_code, "codes": outcome.processes.codes}
        self.note("failed", attempt=self._attempt, text="; ".join(words), again=again, **about)

    def restarts(self, task: Task, code: int, count: int) -> None:
        """Nothing: workers that train together start together."""

    def goes_on(self, task: Task, code: int) -> None:
        """An elastic job has lost a worker."""
        self.note("lost", text=f"{task} {describe_exit(code)}", code=code)

    def kills(self, task: Task, why: str) -> None:
        """A worker is ended that the others, who have come to their end, do not hear of."""
        self.note("kills", text=f"{task}: {why}")

    def generation(self, generation: Generation, names: Sequence[str]) -> None:
        """A generation of an elastic job begins."""
        about = {"members": list(names), "step": generation.step, "text": generation.reason}
        self.note("generation", number=generation.number, **about)

    def starts(self, task: Task) -> None:
        """An elastic job starts a worker that is to join."""
        self.note("starts", text=str(task))

    def line(self, index: int, error: bool, line: bytes) -> None:
        self.output.append(f"[{self._attempt}, worker {index}] {line.decode('utf-8', 'replace')}")
        del self.output[:-_MOST_OUTPUT]

    def flush(self) -> None:
        """Nothing is shown."""


# -- frozen processes ------------------------------------------------------------------------------


@contextlib.contextmanager
def _thawing(folder: Path) -> Iterator[None]:
    """Let processes that have frozen go on when it is time."""
    over = threading.Event()

    def thaw() -> None:
        done: set[str] = set()
        while not over.wait(_LOOK_EVERY):
            for path in folder.glob(f"{FROZEN}*"):
                if path.suffix == ".new" or path.name in done:
                    continue
                frozen = json.loads(path.read_text())
                if time.monotonic() >= frozen["until"]:
                    done.add(path.name)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(frozen["pid"], signal.SIGCONT)

    thread = threading.Thread(target=thaw, name="phalanx-thaw", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- what is left ----------------------------------------------------------------------------------


def _left(history: JobHistory, folder: Path, temporary: Path) -> dict[str, Any]:
    """Processes, ports, files and checkpoints that are there when a job has ended."""
    starts = [event for _, event in history.all("process")]
    addresses = {event["address"] for event in starts if event["address"]}
    committed = {str(event["path"]) for _, event in history.all("committed")}
    parents = {Path(path).parent for path in committed}
    half = [x for parent in parents for x in parent.glob(".*") if x.suffix in (".partial", ".removed")]
    orphans = _orphans(folder, {int(event["pid"]) for event in starts})
    remove_left_behind(str(temporary))  # as the next process would, if their owners have ended
    return {
        "orphans": orphans,
        "listening": sorted(address for address in addresses if _listens(address)),
        "left": sorted(map(str, [*half, *temporary.iterdir()])),
        "checkpoints": {
            path: _problem(Path(path)) for path in sorted(committed) if Path(path).is_dir()
        },
    }


def _orphans(folder: Path, pids: set[int]) -> list[int]:
    end = time.monotonic() + _GONE
    while True:
        found = sorted({pid for pid in pids if is_alive(pid)} | _with_environment(folder))
        if not found or time.monotonic() >= end:
            return found
        threading.Event().wait(_LOOK_EVERY)


def _with_environment(folder: Path) -> set[int]:
    """The processes that know this laboratory; Linux only."""
    text, found = f"{FOLDER}={folder}".encode(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found - {os.getpid()}


def _listens(address: str) -> bool:
    """Whether a process listens at an address that no other job has got since."""
    host, port = split_address(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lock:
        try:
            lock.bind((host, port))  # launchers hold the UDP port of the same number
        except OSError:
            return False
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((host, port)) == 0


def _problem(path: Path) -> str:
    """What is wrong with a checkpoint."""
    try:
        saved = open_checkpoint(path)
        for name in saved.entries:
            saved.verify(name)
    except PhalanxError as error:
        return f"{error!s:.300}"
    return ""
