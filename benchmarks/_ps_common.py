"""What the children of `parameter_server.py` share: the cases, and how tasks are started.

Only NumPy is needed here, because the children live in different environments. A child is a
coordinator, and starts its own workers and servers. A command ``{"case": name, "steps": n}`` schedules
n closures and waits for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _child import Parent
from _harness import free_addresses

BATCH, WIDTH = 32, 64
ROWS, DIMENSION, LOOKED_UP = 1_000_000, 64, 256
LARGE = (1024, 1024)
RATE = 0.01

CASES = {
    "trivial": "closures that do nothing",
    "step": "training steps of two 64 x 64 matrices",
    "sparse": "updates of 256 rows of 1,000,000 x 64",
    "dense": "updates of 4 MB",
    "read": "reads of 4 MB that have changed, and the change",
}
"""The name of each case, and what it measures."""

LAUNCHED = {"trivial": 8000, "step": 1000}
"""The closures that are measured in jobs that `phalanx run` starts, and how many in a round."""
MARK = "measured "
"""Where a result begins in the output of such a job."""


def inputs() -> np.ndarray:
    """The batch of every training step."""
    return np.random.default_rng(0).standard_normal((BATCH, WIDTH)).astype(np.float32)


def weights() -> list[np.ndarray]:
    """The matrices that training steps change."""
    rng = np.random.default_rng(1)
    return [(rng.standard_normal((WIDTH, WIDTH)) * 0.1).astype(np.float32) for _ in range(2)]


def indices() -> np.ndarray:
    """The rows that sparse updates change."""
    return np.random.default_rng(2).integers(0, ROWS, LOOKED_UP)


def start_tasks(script: str, workers: int, servers: int) -> dict[str, list[str]]:
    """Start ``script task CLUSTER JOB INDEX`` for all but the coordinator; they end with this one."""
    addresses = free_addresses(workers + servers)
    cluster = {"worker": list(addresses[:workers]), "ps": list(addresses[workers:])}
    for job, tasks in cluster.items():
        for index in range(len(tasks)):
            started = subprocess.Popen(
                [sys.executable, script, "task", json.dumps(cluster), job, str(index)],
                stdin=subprocess.PIPE,  # which ends with this process, however it does
                stdout=subprocess.DEVNULL,
            )
            _tasks.append((job, started))
    return cluster


_tasks: list[tuple[str, subprocess.Popen[bytes]]] = []


def processor_times() -> dict[str, float]:
    """Seconds that the processors have worked for the coordinator, the workers and the servers."""
    found = {"coordinator": _processor_time(os.getpid())}
    for job, task in _tasks:
        found[job] = found.get(job, 0.0) + _processor_time(task.pid)
    return found


def _processor_time(pid: int) -> float:
    """Of all threads of a process; 0 where the system does not tell."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended
            nanoseconds += int(thread.read_text().split()[0])
    return nanoseconds / 1e9


def end_with_coordinator() -> None:
    """End this process, a task, when the one that has started it ends."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def serve(versions: dict[str, str], run: Callable[[str, int], None]) -> None:
    """Answer commands; `run` schedules so many closures of a case and waits for all of them."""
    parent = Parent(versions)
    for command in parent:
        parent.say(**measured(run, command["case"], command["steps"]))


def measured(run: Callable[[str, int], None], case: str, steps: int) -> dict[str, Any]:
    """Run closures; the seconds that they take, and those of processors by kind of task."""
    before = processor_times()
    begin = time.perf_counter()
    run(case, steps)
    seconds = time.perf_counter() - begin
    after = processor_times()
    return {"seconds": seconds, "processors": {job: after[job] - before[job] for job in after}}
