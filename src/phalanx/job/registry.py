"""The jobs that run on this machine: how another process of the same user finds them.

Each running job has a small file in the user's runtime folder that says where its hub is. Only the user
can read it, because it holds the job's token.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from phalanx.errors import InvalidValueError, NotFoundError, PermissionDeniedError
from phalanx.runtime.formatting import shown
from phalanx.runtime.processes import is_alive

_log = logging.getLogger("phalanx")

_numbers = itertools.count(1)  # one process may run several jobs


@dataclass(frozen=True)
class RunningJob:
    """A job: its launcher's process id, its name, and its hub's address and token.

    With parameter servers, `servers` are the addresses of the tasks that answer remote calls. `door` is
    where workers join an elastic job.
    """

    pid: int
    name: str
    address: str
    token: str = field(repr=False)
    servers: dict[str, str] = field(default_factory=dict)
    door: str = ""

    def __str__(self) -> str:
        return f"{self.pid} ({self.name})"


def runtime_folder() -> Path:
    """The folder for such files, which no other user can write to or read; made if there is none."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        folder = Path(base) / "phalanx"
    else:
        folder = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionDeniedError(
            "The folder for the files of running jobs must belong to you, and no one else may read it "
            f"(chmod 700); or set XDG_RUNTIME_DIR to another place. Received: {shown(str(folder))}"
        )
    return folder


@contextlib.contextmanager
def announced(job: RunningJob) -> Iterator[Callable[[RunningJob], object]]:
    """Let others find a job as long as the block runs, if there is a place where they can.

    What is yielded says that the job has changed.
    """
    name = f"{job.pid}-{next(_numbers)}.json"
    _write(job, name)
    try:
        yield lambda changed: _write(changed, name)
    finally:
        with contextlib.suppress(OSError):  # there may be no such place
            (runtime_folder() / name).unlink(missing_ok=True)


def _write(job: RunningJob, name: str) -> None:
    try:
        path = runtime_folder() / name
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump(asdict(job), file)
        fresh.replace(path)
    except OSError as error:
        _log.warning("The job cannot be found by `phalanx explain`: %s", error)


def running_jobs() -> list[RunningJob]:
    """The jobs of this user on this machine; files of launchers that died are removed."""
    jobs = []
    for path in sorted(runtime_folder().glob("*.json")):
        try:
            job = RunningJob(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):  # just removed, or not ours
            continue
        if is_alive(job.pid):
            jobs.append(job)
        else:
            path.unlink(missing_ok=True)
    return jobs


def find_job(which: str | None = None) -> RunningJob:
    """The job with this process id, name or address; without any, the only one that runs."""
    jobs = running_jobs()
    matching = [job for job in jobs if which in (None, str(job.pid), job.name, job.address)]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(map(str, jobs)) or "none"
    if matching:
        raise InvalidValueError(
            f"Several jobs match; name one by its number. Running: {listed}. Received: {shown(which)}"
        )
    raise NotFoundError(f"There is no such job. Running: {listed}. Received: {shown(which)}")
