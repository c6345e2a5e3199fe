"""A cluster as plain data: jobs, the tasks of each job, and the address of each task.

`ClusterSpec` is what the library works with. `ClusterDef`, `JobDef` and `ServerDef`, for code that
builds or reads TensorFlow's messages, are in `phalanx.cluster.definitions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.cluster.definitions import ClusterDef, JobDef
from phalanx.cluster.tasks import normal_tasks, text
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

_LONGEST_LIST = 1_000_000


class ClusterSpec:
    """The jobs of a cluster and the network address of each of their tasks.

    `cluster` is a dict from job name to either a list (or tuple) of addresses or, where only
    some tasks are known, a dict from task index to address; or a `ClusterDef`; or another
    `ClusterSpec`. Indices may be strings, as JSON has them. A spec does not change.

    Two specs are equal if they have the same tasks. A spec also equals the dict
    ``{job: {index: address}}``, but no other form of dict.

    >>> cluster = ClusterSpec({"worker": ["host0:2222", "host1:2222"], "ps": {2: "host4:2222"}})
    >>> cluster
    ClusterSpec({'ps': {2: 'host4:2222'}, 'worker': ['host0:2222', 'host1:2222']})
    >>> cluster.task_address("worker", 1)
    'host1:2222'
    """

    def __init__(
        self, cluster: ClusterSpec | ClusterDef | Mapping[str, Sequence[str] | Mapping[int, str]]
    ) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster._tasks
        elif isinstance(cluster, ClusterDef):
            cluster = _unique_jobs(cluster)
        if not isinstance(cluster, Mapping):
            raise InvalidTypeError(
                "`cluster` must be a dict from job names to addresses, for example "
                "{'worker': ['host0:2222', 'host1:2222']}, or a ClusterDef or ClusterSpec. "
                f"Received: {shown(cluster)}"
            )
        self._tasks: dict[str, dict[int, str]] = {
            text(name, "The name of a job"): normal_tasks(f"job {shown(name)}", tasks)
            for name, tasks in cluster.items()
        }

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        return self._tasks == (other._tasks if isinstance(other, ClusterSpec) else other)

    # Equal to some dicts, which have no hash.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order they were given in.

        >>> ClusterSpec({"worker": ["host0:2222"], "ps": ["host1:2222"]}).jobs
        ['worker', 'ps']
        """
        return list(self._tasks)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """The spec as a dict that `ClusterSpec` accepts.

        A job whose tasks are numbered from 0 without gaps is a list of addresses. Other jobs,
        also those without tasks, are dicts from index to address.

        >>> ClusterSpec({"worker": {"0": "host0:2222"}, "ps": {3: "host3:2222"}}).as_dict()
        {'worker': ['host0:2222'], 'ps': {3: 'host3:2222'}}
        """
        return {name: _list_or_dict(tasks) for name, tasks in self._tasks.items()}

    def as_cluster_def(self) -> ClusterDef:
        """The spec as a `ClusterDef`, with jobs sorted by name.

        >>> [job.name for job in ClusterSpec({"worker": [], "ps": []}).as_cluster_def().job]
        ['ps', 'worker']
        """
        return ClusterDef(
            job=[JobDef(name=name, tasks=self._tasks[name]) for name in sorted(self._tasks)]
        )

    def num_tasks(self, job_name: str) -> int:
        """The number of known tasks of a job.

        >>> ClusterSpec({"worker": {1: "host1:2222", 3: "host3:2222"}}).num_tasks("worker")
        2
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of the known tasks of a job, ascending.

        >>> ClusterSpec({"worker": {3: "host3:2222", 1: "host1:2222"}}).task_indices("worker")
        [1, 3]
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of one task; a ValueError if the cluster does not have it.

        >>> ClusterSpec({"worker": ["host0:2222", "host1:2222"]}).task_address("worker", 1)
        'host1:2222'
        """
        tasks = self._job(job_name)
        if not _has(tasks, task_index):
            raise InvalidValueError(
                f"Job {shown(job_name)} has no such task. Use an index of {list(tasks)}. "
                f"Received: task_index={shown(task_index)}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job by index, with None for each index that is not known.

        >>> ClusterSpec({"worker": {1: "host1:2222", 3: "host3:2222"}}).job_tasks("worker")
        [None, 'host1:2222', None, 'host3:2222']
        """
        tasks = self._job(job_name)
        last = max(tasks, default=-1)
        if last >= _LONGEST_LIST:
            raise InvalidValueError(
                f"A list with a place for each index would have more than {_LONGEST_LIST:,} places. "
                f"Use `task_indices` and `task_address`. "
                f"Received: job {shown(job_name)} with task {last}"
            )
        return [tasks.get(index) for index in range(last + 1)]

    def _job(self, job_name: str) -> dict[int, str]:
        if not _has(self._tasks, job_name):
            raise InvalidValueError(
                f"The cluster has no such job. Use one of {self.jobs}. "
                f"Received: job_name={shown(job_name)}"
            )
        return self._tasks[job_name]


def _has(mapping: Mapping[Any, object], key: object) -> bool:
    try:
        return key in mapping
    except TypeError:  # a key without a hash, such as a list
        return False


def _list_or_dict(tasks: dict[int, str]) -> list[str] | dict[int, str]:
    has_no_gaps = list(tasks) == list(range(len(tasks)))
    return list(tasks.values()) if tasks and has_no_gaps else dict(tasks)


def _unique_jobs(definition: ClusterDef) -> dict[str, Mapping[int, str]]:
    jobs = {job.name: job.tasks for job in definition.job}
    if len(jobs) < len(definition.job):
        names = [job.name for job in definition.job]
        raise InvalidValueError(
            f"A job is defined twice. List all tasks of a job in one JobDef. Received: jobs {names}"
        )
    return dict(jobs)
