"""What the children of `parameter_server.py` share: the cases, and how tasks are started.

Only NumPy is needed here, because the children live in different environments. A child is a
coordinator, and starts its own workers and servers. A command ``{"case": name, "steps": n}`` schedules
n closures and waits for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

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
            _tasks.append(
                subprocess.Popen(
                    [sys.executable, script, "task", json.dumps(cluster), job, str(index)],
                    stdin=subprocess.PIPE,  # which ends with this process, however it does
                    stdout=subprocess.DEVNULL,
                )
            )
    return cluster


_tasks: list[subprocess.Popen[bytes]] = []


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
        begin = time.perf_counter()
        run(command["case"], command["steps"])
        parent.say(seconds=time.perf_counter() - begin)
