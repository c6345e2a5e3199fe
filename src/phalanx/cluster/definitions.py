"""`ClusterDef`, `JobDef` and `ServerDef`: TensorFlow's messages of these names, without protobuf.

They are used as protobuf's messages are, and their serialized form is the same, so each side can read
what the other wrote.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence
from typing import Any, ClassVar, overload

from phalanx.cluster.message import (
    FieldKind,
    ProtobufMessage,
    int_field,
    opaque_field,
    quoted,
    read_fields,
    text_field,
)
from phalanx.cluster.tasks import normal_tasks, task_index, text
from phalanx.errors import InvalidTypeError
from phalanx.runtime import protobuf_wire as wire
from phalanx.runtime.formatting import shown


class TaskMap(UserDict[int, str]):
    """The addresses of a job's tasks by index: a dict that checks what is put in and stays sorted."""

    def __init__(self, tasks: object) -> None:
        self.data = normal_tasks("a JobDef", tasks)

    def __setitem__(self, index: int, address: str) -> None:
        changed = {**self.data, task_index(index): text(address, "A task address")}
        self.data = dict(sorted(changed.items()))


def _tasks_field(number: int) -> FieldKind:
    """Addresses by index."""

    def raw(tasks: TaskMap) -> list[bytes]:
        return [wire.int_field(1, i) + wire.bytes_field(2, at.encode()) for i, at in tasks.items()]

    def decoded(raw: int | bytes) -> Any:
        if isinstance(raw, int):
            return raw
        entry = dict(read_fields(raw))
        return {entry.get(1, 0): entry.get(2, "")}

    return FieldKind(
        number,
        dict,
        lambda tasks, _: TaskMap(tasks),
        raw,
        lambda tasks: [[f"key: {i}", f"value: {quoted(at)}"] for i, at in tasks.items()],
        decoded,
        merged=lambda old, new: {**old, **new},
    )


class JobDef(ProtobufMessage):
    """One job of a cluster: its name, and the address of each task by index.

    Indices that are missing belong to tasks that are not known.

    >>> job = JobDef(name="worker", tasks={1: "host1:2222"})
    >>> job.tasks[0] = "host0:2222"
    >>> job
    JobDef(name='worker', tasks={0: 'host0:2222', 1: 'host1:2222'})
    """

    name: str
    tasks: MutableMapping[int, str]

    _FIELDS: ClassVar[Mapping[str, FieldKind]] = {"name": text_field(1), "tasks": _tasks_field(2)}

    def __init__(self, *, name: str | None = None, tasks: Mapping[int, str] | None = None) -> None:
        self._fill(name=name, tasks=tasks)


class JobList(MutableSequence[JobDef]):
    """The jobs of a cluster: a list that checks and copies what is put in."""

    def __init__(self, jobs: Iterable[object], what: str = "`job` of a ClusterDef") -> None:
        if not isinstance(jobs, list | tuple | JobList):
            raise InvalidTypeError(
                f"{what} must be a list of JobDef objects, for example "
                f"[JobDef(name='worker', tasks={{0: 'host0:2222'}})]. Received: {shown(jobs)}"
            )
        self._jobs = [JobDef.copy_of(job, f"A job in {what}") for job in jobs]

    @overload
    def __getitem__(self, index: int) -> JobDef: ...
    @overload
    def __getitem__(self, index: slice) -> list[JobDef]: ...
    def __getitem__(self, index: int | slice) -> JobDef | list[JobDef]:
        return self._jobs[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            self._jobs[index] = JobList(list(value))._jobs
        else:
            self._jobs[index] = JobDef.copy_of(value, "A job of a ClusterDef")

    def __delitem__(self, index: int | slice) -> None:
        del self._jobs[index]

    def __len__(self) -> int:
        return len(self._jobs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobList | list | tuple) and self._jobs == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._jobs)

    def insert(self, index: int, value: JobDef) -> None:
        """Puts a copy of a job before another."""
        self._jobs.insert(index, JobDef.copy_of(value, "A job of a ClusterDef"))

    def add(self, **fields: Any) -> JobDef:
        """Appends a new job with the given fields, and returns it."""
        job = JobDef.copy_of(fields, "A job of a ClusterDef")
        self._jobs.append(job)
        return job


def _jobs_field(number: int) -> FieldKind:
    """A list of jobs."""
    return FieldKind(
        number,
        list,
        JobList,
        lambda jobs: [job.SerializeToString() for job in jobs],
        lambda jobs: [job.lines() for job in jobs],
        decoded=lambda raw: raw if isinstance(raw, int) else [JobDef.FromString(raw)],
        merged=lambda old, new: [*old, *new],
    )


class ClusterDef(ProtobufMessage):
    """All jobs of a cluster.

    >>> cluster = ClusterDef()
    >>> job = cluster.job.add(name="ps")
    >>> job.tasks[0] = "host2:2222"
    >>> print(cluster)
    job {
      name: "ps"
      tasks {
        key: 0
        value: "host2:2222"
      }
    }
    <BLANKLINE>
    >>> ClusterDef.FromString(cluster.SerializeToString()) == cluster
    True
    """

    job: JobList

    _FIELDS: ClassVar[Mapping[str, FieldKind]] = {"job": _jobs_field(1)}
    _HINT = "; a ClusterSpec gives one with `as_cluster_def()`"

    def __init__(self, *, job: Iterable[JobDef | Mapping[str, Any]] | None = None) -> None:
        self._fill(job=job)


def _cluster_field(number: int) -> FieldKind:
    """A `ClusterDef`."""
    return FieldKind(
        number,
        ClusterDef,
        ClusterDef.copy_of,
        lambda cluster: [cluster.SerializeToString()] if cluster.job else [],
        lambda cluster: [cluster.lines()] if cluster.job else [],
        decoded=lambda raw: raw if isinstance(raw, int) else ClusterDef.FromString(raw),
        merged=lambda old, new: ClusterDef(job=[*old.job, *new.job]),
    )


class ServerDef(ProtobufMessage):
    """One server: the cluster it belongs to, which task it is, and how to reach it.

    `default_session_config` and `cluster_device_filters` are kept for those who read them; nothing
    here does. `port` 0 means the port in the task's address.

    >>> from phalanx.cluster import ClusterSpec
    >>> cluster = ClusterSpec({"worker": ["host0:2222"]}).as_cluster_def()
    >>> server = ServerDef(cluster=cluster, job_name="worker", protocol="grpc")
    >>> server.task_index
    0
    """

    cluster: ClusterDef
    job_name: str
    task_index: int
    default_session_config: Any
    protocol: str
    port: int
    cluster_device_filters: Any
    replica: int

    _FIELDS: ClassVar[Mapping[str, FieldKind]] = {
        "cluster": _cluster_field(1),
        "job_name": text_field(2),
        "task_index": int_field(3),
        "default_session_config": opaque_field(4),
        "protocol": text_field(5),
        "port": int_field(6),
        "cluster_device_filters": opaque_field(7),
        "replica": int_field(8),
    }

    def __init__(
        self,
        *,
        cluster: ClusterDef | Mapping[str, Any] | None = None,
        job_name: str | None = None,
        task_index: int | None = None,
        default_session_config: Any = None,
        protocol: str | None = None,
        port: int | None = None,
        cluster_device_filters: Any = None,
        replica: int | None = None,
    ) -> None:
        self._fill(
            cluster=cluster,
            job_name=job_name,
            task_index=task_index,
            default_session_config=default_session_config,
            protocol=protocol,
            port=port,
            cluster_device_filters=cluster_device_filters,
            replica=replica,
        )
