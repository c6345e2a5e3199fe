"""Programs and jobs in copies of one process that has imported what they need, so that they start fast.

Everything else is as for users; `tests/cli/test_run.py` has jobs with new processes.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import phalanx as px
from phalanx.cli.terminal import JobView
from phalanx.job.launch.launcher import Job, run_job
from phalanx.job.launch.task_environment import job_tasks
from phalanx.runtime.shipping import pack_call
from phalanx.testing.faults import programs

ROOT = Path(__file__).parents[1]

# Programs are compiled as users compile them, unlike those of other tests (conftest.py).
AS_USERS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}


def new_processes() -> px.testing.MultiProcess:
    """Runs each function in a process of its own, which has imported Phalanx and done nothing else."""
    return px.testing.MultiProcess(1, reuse=False, env=AS_USERS, preload=["phalanx"])


def as_user() -> None:
    """Undo what workers have and users have not, and let no warning pass."""
    for name in [x for x in os.environ if x.startswith(("PHALANX_", "TF_CONFIG"))]:
        del os.environ[name]
    warnings.simplefilter("error")


def run_program(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script as the program of this process; for `new_processes`."""
    as_user()
    sys.argv = [script, *words]
    sys.path[:0] = [str(Path(script).parent)]
    code: object = 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            code = error.code
    number = code if isinstance(code, int) else int(code is not None)
    return subprocess.CompletedProcess(sys.argv, number, stdout.getvalue(), stderr.getvalue())


def run_script(
    script: Path,
    *words: str,
    folder: Path,
    workers: int = 1,
    ps: int = 0,
    chief: bool | None = None,
    evaluator: bool = False,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    **settings: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a script as a job, and return what ``phalanx run`` would have printed.

    Args:
        script: the program.
        words: its arguments.
        folder: where files of the job may be.
        workers: how many there are.
        ps: how many parameter servers there are.
        chief: whether there is one; by default, with parameter servers.
        evaluator: whether there is one.
        env: environment variables.
        preload: modules that the processes have imported, besides Phalanx.
        settings: of `Job`.
    """
    own = {
        "JAX_PLATFORMS": "cpu",
        "XDG_RUNTIME_DIR": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **(env or {}),
    }
    tasks = job_tasks(workers, ps, ps > 0 if chief is None else chief, evaluator)
    call = pack_call(programs.run_script, ([str(script), *words], str(folder)), {})
    job = Job(
        [str(script)],
        tasks,
        script.name,
        environ={**os.environ, **own},
        cwd=str(folder),
        spawn=programs.forking(["phalanx", *preload], call),
        **{"timeout": 150.0, **settings},
    )
    stdout, stderr = io.StringIO(), io.StringIO()
    view = JobView(tasks, script.name, stdout, stderr, bar=False)
    try:
        with mock.patch.dict(os.environ, own):  # the hub of the job is in this process
            code = run_job(job, view).exit_code
    finally:
        view.close()
    return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())
