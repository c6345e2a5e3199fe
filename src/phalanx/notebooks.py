"""`px.launch`: run a function on several workers, from a notebook or a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.runtime.numbers import check_integer, check_number
from phalanx.testing.multi_process import MultiProcess

__all__ = ["launch"]


def launch(
    fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    devices_per_worker: int = 1,
    timeout: float = 600.0,
) -> list[Any]:
    """Run a function in several processes, as a job, and return what each of them returned.

    The function may be defined in a notebook: it travels with cloudpickle. In it,
    `px.MultiWorkerMirroredStrategy()` meets the other workers. If a worker fails, its error is raised
    here, and the others are ended. What workers print is shown at the end, with their numbers.

    Args:
        fn: the function; every worker calls it.
        *args: its arguments.
        workers: how many processes.
        devices_per_worker: logical CPU devices of each.
        timeout: seconds after which the job ends with an error.

    Examples:
        >>> import phalanx as px
        >>> def count(x):
        ...     return x * px.MultiWorkerMirroredStrategy().num_replicas_in_sync
        >>> px.launch(count, 10, workers=2)
        [20, 20]
    """
    count = check_integer(workers, "workers", 1, 1024)
    devices = check_integer(devices_per_worker, "devices_per_worker", 1, 1024)
    limit = check_number(timeout, "timeout", 0.001, 1e9)
    cluster = MultiProcess(workers=count, devices=devices)
    try:
        with cluster:
            return list(cluster.run(fn, *args, timeout=limit))
    finally:
        for worker in range(count):
            for line in cluster.stdout(worker).splitlines():
                print(f"[worker {worker}] {line}", flush=True)
