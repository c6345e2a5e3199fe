"""A cluster as plain data: jobs, the tasks of each job, and the address of each task.

`ClusterSpec` is what the library works with. `ClusterDef`, `JobDef` and `ServerDef` carry the
fields of TensorFlow's messages of the same names, for code that builds or reads those.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.errors import InvalidTypeError, InvalidValueError

__all__ = ["ClusterDef", "ClusterSpec", "JobDef", "ServerDef"]


@dataclass(frozen=True, kw_only=True)
class JobDef:
    """One job of a cluster: its name, and the address of each task by index.

    Indices that are missing belong to tasks that are not known. `tasks` is stored as a dict,
    sorted by index.

    >>> JobDef(name="worker", tasks={1: "host1:2222", 0: "host0:2222"}).tasks
    {0: 'host0:2222', 1: 'host1:2222'}
    """

    name: str = ""
    tasks: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = _text(self.name, "The name of a job")
        # Frozen for its users; this is still its construction.
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "tasks", _normal_tasks(name, self.tasks))


@dataclass(frozen=True, kw_only=True)
class ClusterDef:
    """All jobs of a cluster, as a sequence of `JobDef`.

    No two jobs have the same name.

    >>> cluster = ClusterDef(job=[JobDef(name="ps", tasks={0: "host2:2222"})])
    >>> [job.name for job in cluster.job]
    ['ps']
    """

    job: Sequence[JobDef] = ()

    def __post_init__(self) -> None:
        jobs: object = self.job
        if not isinstance(jobs, list | tuple) or not all(isinstance(job, JobDef) for job in jobs):
            raise InvalidTypeError(
                "`job` must be a list of JobDef objects, for example "
                f"[JobDef(name='worker', tasks={{0: 'host0:2222'}})]. Received: {jobs!r}"
            )
        object.__setattr__(self, "job", tuple(jobs))
        names = [job.name for job in self.job]
        if len(set(names)) < len(names):
            raise InvalidValueError(
                f"A job is defined twice. List all tasks of a job in one JobDef. Received: jobs {names}"
            )


@dataclass(frozen=True, kw_only=True)
class ServerDef:
    """One server: the cluster it belongs to, which task it is, and how to reach it.

    `default_session_config` and `cluster_device_filters` are kept as they are given; nothing
    here reads them. `port` 0 means the port in the task's address.

    >>> cluster = ClusterSpec({"worker": ["host0:2222"]}).as_cluster_def()
    >>> ServerDef(cluster=cluster, job_name="worker", protocol="grpc").task_index
    0
    """

    cluster: ClusterDef = field(default_factory=ClusterDef)
    job_name: str = ""
    replica: int = 0
    task_index: int = 0
    default_session_config: Any = None
    protocol: str = ""
    port: int = 0
    cluster_device_filters: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.cluster, ClusterDef):
            raise InvalidTypeError(
                "`cluster` must be a ClusterDef; a ClusterSpec gives one with `as_cluster_def()`. "
                f"Received: {self.cluster!r}"
            )


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
            cluster = {job.name: job.tasks for job in cluster.job}
        if not isinstance(cluster, Mapping):
            raise InvalidTypeError(
                "`cluster` must be a dict from job names to addresses, for example "
                "{'worker': ['host0:2222', 'host1:2222']}, or a ClusterDef or ClusterSpec. "
                f"Received: {cluster!r}"
            )
        self._tasks: dict[str, dict[int, str]] = {
            _text(name, "The name of a job"): _normal_tasks(name, tasks)
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
        if task_index not in tasks:
            raise InvalidValueError(
                f"Job {job_name!r} has no such task. Use an index of {list(tasks)}. "
                f"Received: task_index={task_index!r}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job by index, with None for each index that is not known.

        >>> ClusterSpec({"worker": {1: "host1:2222", 3: "host3:2222"}}).job_tasks("worker")
        [None, 'host1:2222', None, 'host3:2222']
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._tasks:
            raise InvalidValueError(
                f"The cluster has no such job. Use one of {self.jobs}. Received: job_name={job_name!r}"
            )
        return self._tasks[job_name]


def task_index(value: object, what: str = "A task index") -> int:
    """Returns a task index as an int; digits in a string count, because JSON keys are strings.

    `what` begins the message of the error for anything that is not a whole number from 0.

    >>> task_index("3")
    3
    """
    problem = f"{what} must be a whole number from 0, such as 0 or '0'. Received: {value!r}"
    try:
        index = int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidTypeError(problem) from error
    except ValueError as error:
        raise InvalidValueError(problem) from error
    if index < 0:
        raise InvalidValueError(problem)
    return index


def _list_or_dict(tasks: dict[int, str]) -> list[str] | dict[int, str]:
    has_no_gaps = list(tasks) == list(range(len(tasks)))
    return list(tasks.values()) if tasks and has_no_gaps else dict(tasks)


def _normal_tasks(job_name: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise InvalidTypeError(
            f"The tasks of job {job_name!r} must be a list of addresses, for example "
            "['host0:2222'], or a dict from index to address, for example {0: 'host0:2222'}. "
            f"Received: {tasks!r}"
        )
    indices = [task_index(key, f"A task index of job {job_name!r}") for key in tasks]
    if len(set(indices)) < len(indices):
        raise InvalidValueError(
            f"A task of job {job_name!r} is given twice. Write each index once. Received: {tasks!r}"
        )
    addresses = [_text(address, f"A task address of job {job_name!r}") for address in tasks.values()]
    return dict(sorted(zip(indices, addresses, strict=True)))


def _text(value: object, what: str) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise InvalidTypeError(f"{what} must be a string. Received: {value!r}")
    return value
