"""Folders for what must outlive a process: the logs and snapshots of parameter servers."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from phalanx.job.hub.descriptions import Task
from phalanx.runtime.processes import is_alive

STATE = "PHALANX_STATE"
"""The environment variable that says where these folders are."""


def server_folder(task: Task) -> Path:
    """Where a server keeps what must outlive its process; not made yet.

    It follows from the task and its address, so that a server that is started again finds it.
    PHALANX_STATE says where these folders are, by default in the home directory.
    """
    place = re.sub(r"[^0-9A-Za-z.-]", "_", f"{task.type}-{task.id}-{task.address}")
    return _root() / "servers" / place


@contextlib.contextmanager
def folder_of_job() -> Iterator[Path]:
    """A folder for the servers of one job, which goes with the job; so do those of dead launchers.

    A folder that PHALANX_STATE names is the user's own, and stays.
    """
    if os.environ.get(STATE):
        yield Path(os.environ[STATE])
        return
    jobs = _root() / "jobs"
    for old in jobs.glob("*-*"):
        pid = old.name.partition("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    folder = jobs / f"{os.getpid()}-{secrets.token_hex(4)}"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _root() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get(STATE) or Path(home) / "phalanx")
