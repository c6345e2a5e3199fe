"""What the processes of a job are: their tasks, and the environment that tells each who it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.errors import InvalidValueError
from phalanx.job.hub.descriptions import Task
from phalanx.runtime.cpu_pool import cpu_device_environment
from phalanx.runtime.deadlines import TERMINATE_GRACE

RETAIN_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_ARENA_MAX": "1",
}
"""Makes the GNU C library keep freed memory, which large steps on CPU devices need."""


def job_tasks(workers: int, ps: int = 0, chief: bool = False, evaluator: bool = False) -> list[Task]:
    """The tasks of a job: the chief if there is one, the workers, the parameter servers, the evaluator.

    >>> [str(task) for task in job_tasks(workers=2, ps=1, chief=True)]
    ['chief 0', 'worker 0', 'worker 1', 'ps 0']
    """
    if workers < 0 or ps < 0 or not (workers or chief):
        raise InvalidValueError(
            "A job needs at least one worker, and no negative number of parameter servers. "
            f"Received: workers={workers}, ps={ps}, chief={chief}"
        )
    return [
        *([Task("chief", 0)] if chief else []),
        *(Task("worker", i) for i in range(workers)),
        *(Task("ps", i) for i in range(ps)),
        *([Task("evaluator", 0)] if evaluator else []),
    ]


def essential_tasks(tasks: Sequence[Task]) -> list[bool]:
    """For each task, whether the job waits for it.

    Parameter servers serve until they are ended. Where there is a chief as well, it is the one who
    trains, and the workers serve too. An evaluator has a while to come to its end after the others.

    >>> essential_tasks(job_tasks(workers=1, ps=1)), essential_tasks(job_tasks(1, 1, chief=True))
    ([True, False], [True, False, False])
    """
    types = {task.type for task in tasks}
    serving = {"ps", "worker", "evaluator"} if {"ps", "chief"} <= types else {"ps", "evaluator"}
    return [task.type not in serving for task in tasks]


def with_addresses(tasks: Sequence[Task], addresses: Sequence[str]) -> list[Task]:
    """The tasks, each with its address."""
    return [replace(task, address=at) for task, at in zip(tasks, addresses, strict=True)]


def tf_config(tasks: Sequence[Task], task: Task) -> str:
    """The value of TF_CONFIG for one task of a cluster.

    >>> tf_config([Task("worker", 0, "host0:2222")], Task("worker", 0))
    '{"cluster": {"worker": ["host0:2222"]}, "task": {"type": "worker", "index": 0}}'
    """
    cluster: dict[str, list[str]] = {}
    for member in tasks:
        if member.type == "evaluator":  # works on its own, so the others need not know it
            continue
        cluster.setdefault(member.type, []).append(member.address)
    return json.dumps({"cluster": cluster, "task": {"type": task.type, "index": task.id}})


def task_environment(
    environ: Mapping[str, str],
    *,
    config: str,
    hub: str | None = None,
    token: str | None = None,
    devices: int | None = None,
    retain_memory: bool = False,
    restart: int = 0,
    terminate_grace: float | None = None,
) -> dict[str, str]:
    """The environment of one task's process.

    `devices` of None leaves their number to the process; `restart` counts the restarts of the job, and
    `terminate_grace` seconds after SIGTERM its launcher kills it.
    """
    result = dict(environ)
    if devices is not None:
        result = cpu_device_environment(devices, result)
    if retain_memory:
        result |= RETAIN_MEMORY
    result |= {"TF_CONFIG": config, "PHALANX_RESTART": str(restart), "PYTHONUNBUFFERED": "1"}
    seconds = None if terminate_grace is None else f"{terminate_grace:g}"
    for name, value in (("PHALANX_HUB", hub), ("PHALANX_TOKEN", token), (TERMINATE_GRACE, seconds)):
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result
