"""The actors of a Ray job, which find each other through Ray."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from phalanx.cluster.resolvers.base import FoundTasksResolver
from phalanx.cluster.resolvers.clients import optional_module
from phalanx.cluster.resolvers.tfconfig import TFConfigClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.tasks import port as checked_port, task_index, text
from phalanx.errors import (
    ClusterEnvironmentError,
    DeadlineExceededError,
    InvalidTypeError,
    InvalidValueError,
)
from phalanx.runtime.formatting import shown

NAMESPACE = "phalanx"
_ROLES = ("chief", "worker", "ps", "evaluator")
_POLL = 0.1  # seconds between looks at who is there


class TaskDirectory:
    """Where the tasks of one cluster say who they are, and see who is there.

    Args:
        sizes: how many tasks each job has.

    >>> directory = TaskDirectory({"worker": 2, "ps": 1})
    >>> directory.enter(None, None, "a:1"), directory.enter("ps", None, "b:1")
    (('worker', 0), ('ps', 0))
    >>> directory.tasks()
    {'worker': {0: 'a:1'}, 'ps': {0: 'b:1'}}
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self._tasks: dict[str, dict[int, str]] = {job: {} for job in self._sizes}

    def enter(self, task_type: str | None, task_id: int | None, address: str) -> tuple[str, int]:
        """Take a task, or the next that is free; a task that is taken again has a new address."""
        free = [
            (job, index)
            for job, size in self._sizes.items()
            for index in range(size)
            if task_type in (None, job)
            and task_id in (None, index)
            and (task_id is not None or index not in self._tasks[job])
        ]
        if not free:
            raise InvalidValueError(
                f"The cluster has no such task that is free; it has {self._sizes}. "
                f"Received: task_type={shown(task_type)}, task_id={shown(task_id)}"
            )
        job, index = free[0]
        self._tasks[job][index] = address
        return job, index

    def tasks(self) -> dict[str, dict[int, str]]:
        """The addresses of the tasks that are taken."""
        return {job: dict(tasks) for job, tasks in self._tasks.items()}


class RayClusterResolver(FoundTasksResolver):
    """Describes the tasks of a cluster that runs on Ray.

    In a job that ``phalanx run --engine ray`` has started, it needs no arguments: the launcher has
    placed the tasks. In actors of your own, each makes a resolver with the same `cluster`. It becomes
    one of the tasks, and its address is the address of its Ray node and a free port. `cluster_spec`
    waits for the others.

    >>> directory = TaskDirectory({"worker": 2})
    >>> one, two = (
    ...     RayClusterResolver({"worker": 2}, directory=directory, host="10.0.0.4", port=port)
    ...     for port in (2222, 2223)
    ... )
    >>> two.task_type, two.task_id, two.cluster_spec()
    ('worker', 1, ClusterSpec({'worker': ['10.0.0.4:2222', '10.0.0.4:2223']}))

    Args:
        cluster: how many tasks each job has, such as ``{"chief": 1, "worker": 4, "ps": 2}``.
        task_type: the job of this task; by default the first that has a task left.
        task_id: its index; by default the next that is free. Give both to actors that Ray restarts, so
            that they become the same task again.
        name: of the cluster, if a Ray job has several.
        port: of this task; by default a free one.
        host: the address of this machine; by default that of the Ray node.
        timeout: seconds within which all tasks must be there.
        rpc_layer: the protocol between tasks.
        directory: where the tasks meet; by default an actor of Ray, which needs the extra
            ``phalanx[ray]``.
    """

    def __init__(
        self,
        cluster: Mapping[str, int] | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
        *,
        name: str = "",
        port: int | None = None,
        host: str | None = None,
        timeout: float = 60.0,
        rpc_layer: str | None = "grpc",
        directory: TaskDirectory | None = None,
    ) -> None:
        self._rpc_layer = rpc_layer
        self._timeout = timeout
        self._given: TFConfigClusterResolver | None = None
        if cluster is None:
            self._given = _launched()
            self._task_type = self._given.task_type if task_type is None else task_type
            self._task_id = self._given.task_id if task_id is None else task_id
            return
        self._sizes = _checked_sizes(cluster)
        kind = None if task_type is None else text(task_type, "`task_type`")
        index = None if task_id is None else task_index(task_id, "`task_id`")
        self._directory = directory or _RayDirectory(self._sizes, name)
        number = _free_port() if port is None else checked_port(port)
        self.address = f"{host or _node_address()}:{number}"
        """Where this task is to listen."""
        self._task_type, self._task_id = self._directory.enter(kind, index, self.address)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster, once all its tasks are there."""
        if self._given is not None:
            return self._given.cluster_spec()
        end = time.monotonic() + self._timeout
        while True:
            tasks = self._directory.tasks()
            missing = [
                f"{job} {i}" for job, n in self._sizes.items() for i in range(n) if i not in tasks[job]
            ]
            if not missing:
                return ClusterSpec(tasks)
            if time.monotonic() >= end:
                raise DeadlineExceededError(
                    f"Not all tasks have come within {self._timeout:g} seconds; missing: "
                    f"{', '.join(missing)}. Received: {tasks}"
                )
            time.sleep(_POLL)

    def close(self) -> None:
        """End the actor in which the tasks have met; a cluster of the same name can then be new."""
        if self._given is None and isinstance(self._directory, _RayDirectory):
            self._directory.close()


def _launched() -> TFConfigClusterResolver:
    if not os.environ.get("TF_CONFIG"):
        raise ClusterEnvironmentError(
            "RayClusterResolver needs to know the cluster: start the program with `phalanx run "
            "--engine ray`, or say how many tasks it has, such as {'worker': 4}. Received: no TF_CONFIG"
        )
    return TFConfigClusterResolver()


def _checked_sizes(cluster: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(cluster, Mapping):
        raise InvalidTypeError(
            "`cluster` must say how many tasks each job has, for example {'worker': 4, 'ps': 2}. "
            f"Received: {shown(cluster)}"
        )
    sizes = {text(job, "A job"): task_index(size, "A number of tasks") for job, size in cluster.items()}
    if strange := [job for job in sizes if job not in _ROLES]:
        raise InvalidValueError(f"Jobs must be among {list(_ROLES)}. Received: {strange}")
    return {job: sizes[job] for job in _ROLES if sizes.get(job)}


def ray_module() -> Any:
    """The package Ray."""
    return optional_module("ray", "Ray as the engine", extra="ray", instead="directory")


def _node_address() -> str:
    return str(ray_module().util.get_node_ip_address())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class _RayDirectory(TaskDirectory):
    """A directory that lives in an actor, one for each Ray job and name."""

    def __init__(self, sizes: Mapping[str, int], name: str) -> None:
        self._ray = ray = ray_module()
        if not ray.is_initialized():
            raise ClusterEnvironmentError(
                "This process is not connected to Ray. Make the resolver in an actor or a task of Ray, "
                "or call ray.init() first. Received: no connection"
            )
        job = ray.get_runtime_context().get_job_id()
        self._actor = (
            ray.remote(TaskDirectory)
            .options(
                name=f"{job}-{name}",
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",  # else it ends with the actor that came first
                num_cpus=0,
            )
            .remote(dict(sizes))
        )

    def enter(self, task_type: str | None, task_id: int | None, address: str) -> tuple[str, int]:
        """Take a task."""
        job, index = self._ray.get(self._actor.enter.remote(task_type, task_id, address), timeout=60)
        return job, index

    def tasks(self) -> dict[str, dict[int, str]]:
        """The tasks that are taken."""
        tasks: dict[str, dict[int, str]] = self._ray.get(self._actor.tasks.remote(), timeout=60)
        return tasks

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self._actor)
