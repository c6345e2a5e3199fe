"""Which part a task has in training over several workers: who leads, how many, and in what order.

The jobs are 'chief' (at most one task, which is also a worker), 'worker', 'ps' and 'evaluator' (at most
one task, which works on its own). Without a chief, the first worker takes its part.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cluster.definitions import ClusterDef
from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.tasks import task_index
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

ClusterLike = ClusterSpec | ClusterDef | Mapping[str, object]

_CHIEF, _WORKER, _PS, _EVALUATOR = "chief", "worker", "ps", "evaluator"
_JOBS = (_CHIEF, _WORKER, _EVALUATOR, _PS)


class _NotAClusterError(InvalidTypeError, InvalidValueError):
    """What was given does not describe a cluster."""


def normalize_cluster_spec(cluster_spec: ClusterLike) -> ClusterSpec:
    """Returns a description of a cluster as a `ClusterSpec`.

    >>> normalize_cluster_spec({"worker": ["host0:2222"]})
    ClusterSpec({'worker': ['host0:2222']})
    """
    if isinstance(cluster_spec, ClusterSpec):
        return cluster_spec
    if not isinstance(cluster_spec, Mapping | ClusterDef):
        raise _NotAClusterError(
            "`cluster_spec` must be a ClusterSpec, a ClusterDef or a dict, for example "
            f"{{'worker': ['host0:2222']}}. Received: {shown(cluster_spec)}"
        )
    return ClusterSpec(cluster_spec)  # type: ignore[arg-type]


def task_count(cluster_spec: ClusterLike, task_type: str) -> int:
    """Returns the number of known tasks of a job, 0 if the cluster does not have it."""
    cluster = normalize_cluster_spec(cluster_spec)
    return cluster.num_tasks(task_type) if task_type in cluster.jobs else 0


def validate_cluster_spec(
    cluster_spec: ClusterLike, task_type: str | None, task_id: int | None
) -> ClusterSpec:
    """Checks that a cluster has the usual jobs, and that a task is one of it; returns the cluster.

    An evaluator need not be in the cluster. A `task_type` of None is no task, and right.
    """
    cluster = normalize_cluster_spec(cluster_spec)
    if strange := [job for job in cluster.jobs if job not in _JOBS]:
        raise InvalidValueError(
            f"The jobs of a cluster must be among {list(_JOBS)}. Received: {strange} in {cluster}"
        )
    for job in (_CHIEF, _EVALUATOR):
        if task_count(cluster, job) > 1:
            raise InvalidValueError(
                f"A cluster has at most one task in job {shown(job)}. Received: {cluster}"
            )
    if task_type is None:
        return cluster
    if task_type not in _JOBS or (task_type not in cluster.jobs and task_type != _EVALUATOR):
        raise InvalidValueError(
            f"`task_type` must be a job of the cluster, {cluster.jobs}. Received: {shown(task_type)}"
        )
    if task_type in cluster.jobs:
        indices = cluster.task_indices(task_type)
        if task_index(task_id, "`task_id`") not in indices:
            raise InvalidValueError(
                f"`task_id` must be the index of a task in job {task_type!r}, one of {indices}. "
                f"Received: {shown(task_id)}"
            )
    return cluster


def is_chief(cluster_spec: ClusterLike, task_type: str | None, task_id: int | None) -> bool:
    """Returns whether a task is the chief. An evaluator is its own chief.

    >>> is_chief({"worker": ["host0:2222", "host1:2222"]}, "worker", 0)
    True
    >>> is_chief({"chief": ["host2:2222"], "worker": ["host0:2222"]}, "worker", 0)
    False
    """
    cluster = validate_cluster_spec(cluster_spec, task_type, task_id)
    if task_type in (_CHIEF, _EVALUATOR):
        return True
    return task_type == _WORKER and task_id == 0 and _CHIEF not in cluster.jobs


def should_save_checkpoint(
    cluster_spec: ClusterLike, task_type: str | None, task_id: int | None
) -> bool:
    """Returns whether a task writes the checkpoints. Without a cluster, this process does.

    >>> should_save_checkpoint({"worker": ["host0:2222", "host1:2222"]}, "worker", 1)
    False
    """
    cluster = normalize_cluster_spec(cluster_spec)
    return not cluster or is_chief(cluster, task_type, task_id)


def worker_count(cluster_spec: ClusterLike, task_type: str) -> int:
    """Returns the number of tasks that train together with one of the given type.

    The chief is one of the workers. An evaluator is alone.

    >>> worker_count({"chief": ["host2:2222"], "worker": ["host0:2222", "host1:2222"]}, "worker")
    3
    """
    cluster = normalize_cluster_spec(cluster_spec)
    some_task = cluster.task_indices(task_type)[:1] if task_type in cluster.jobs else []
    validate_cluster_spec(cluster, task_type, some_task[0] if some_task else 0)
    if task_type == _EVALUATOR:
        return 1
    if task_type not in (_CHIEF, _WORKER):
        raise InvalidValueError(
            f"Only the tasks of {_CHIEF!r}, {_WORKER!r} and {_EVALUATOR!r} train or evaluate. "
            f"Received: task_type={shown(task_type)}"
        )
    _check_no_gaps(cluster)
    return task_count(cluster, _CHIEF) + task_count(cluster, _WORKER)


def id_in_cluster(cluster_spec: ClusterLike, task_type: str, task_id: int) -> int:
    """Returns the number of a task among those that train together, from 0.

    The chief is 0 and the workers come after it. An evaluator is 0 in its own cluster.

    >>> id_in_cluster({"chief": ["host2:2222"], "worker": ["host0:2222", "host1:2222"]}, "worker", 1)
    2
    """
    cluster = validate_cluster_spec(cluster_spec, task_type, task_id)
    if task_type in (_CHIEF, _EVALUATOR):
        return 0
    if task_type != _WORKER:
        raise InvalidValueError(
            f"Tasks of type {task_type!r} have no number among the workers. Use 'chief', 'worker' or "
            f"'evaluator'. Received: task_type={shown(task_type)}"
        )
    _check_no_gaps(cluster)
    return task_id + task_count(cluster, _CHIEF)


def collective_leader(cluster_spec: ClusterLike, task_type: str | None, task_id: int | None) -> str:
    """Returns the name of the task that leads collectives, '' if there is no task to lead.

    >>> collective_leader({"worker": ["host0:2222", "host1:2222"]}, "worker", 1)
    '/job:worker/replica:0/task:0'
    """
    cluster = normalize_cluster_spec(cluster_spec)
    if not cluster:
        return ""
    validate_cluster_spec(cluster, task_type, task_id)
    return "" if task_type == _EVALUATOR else _leader(cluster, (_CHIEF, _WORKER))


def coordination_leader(cluster_spec: ClusterLike) -> str:
    """Returns the name of the task that runs the coordination service, '' if there is none.

    >>> coordination_leader({"worker": ["host0:2222"], "ps": ["host1:2222"]})
    '/job:ps/replica:0/task:0'
    """
    return _leader(normalize_cluster_spec(cluster_spec), (_PS, _CHIEF, _WORKER))


def _leader(cluster: ClusterSpec, jobs: tuple[str, ...]) -> str:
    job = next((job for job in jobs if job in cluster.jobs), None)
    return "" if job is None else f"/job:{job}/replica:0/task:0"


def _check_no_gaps(cluster: ClusterSpec) -> None:
    if task_count(cluster, _WORKER) and None in cluster.job_tasks(_WORKER):
        raise InvalidValueError(
            "Workers can only be counted if all of them are known. List the addresses of all workers. "
            f"Received: {cluster}"
        )
