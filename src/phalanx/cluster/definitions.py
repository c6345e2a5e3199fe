"""`ClusterDef`, `JobDef` and `ServerDef`: TensorFlow's messages of these names, without protobuf.

They are used as protobuf's messages are, and their serialized form is the same, so each side can read
what the other wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, ClassVar, TypeVar, overload

from phalanx.cluster.message import (
    FieldKind,
    Int,
    Opaque,
    ProtobufMessage,
    Text,
    block,
    quoted,
    read_fields,
)
from phalanx.cluster.tasks import normal_tasks, task_index, text
from phalanx.errors import InvalidTypeError
from phalanx.runtime import protobuf_wire as wire
from phalanx.runtime.formatting import shown

__all__ = ["ClusterDef", "JobDef", "JobList", "ServerDef", "TaskMap"]

M = TypeVar("M", bound=ProtobufMessage)


class TaskMap(MutableMapping[int, str]):
    """The addresses of a job's tasks by index: a dict that checks what is put in and stays sorted."""

    def __init__(self, tasks: object) -> None:
        self._tasks = normal_tasks("a JobDef", tasks)

    def __getitem__(self, index: int) -> str:
        return self._tasks[index]

    def __setitem__(self, index: int, address: str) -> None:
        changed = {**self._tasks, task_index(index): text(address, "A task address")}
        self._tasks = dict(sorted(changed.items()))

    def __delitem__(self, index: int) -> None:
        del self._tasks[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return repr(self._tasks)


class _Tasks(FieldKind):
    """Addresses by index."""

    def default(self) -> dict[int, str]:
        return {}

    def check(self, value: Any, what: str) -> TaskMap:
        return TaskMap(value)

    def merged(self, old: TaskMap, new: TaskMap) -> dict[int, str]:
        return {**old, **new}

    def encoded(self, value: TaskMap) -> bytes:
        entries = (
            wire.int_field(1, index) + wire.bytes_field(2, address.encode())
            for index, address in value.items()
        )
        return b"".join(wire.bytes_field(self.number, entry) for entry in entries)

    def decoded(self, raw: int | bytes) -> Any:
        if isinstance(raw, int):
            return raw
        entry = dict(read_fields(raw))
        return {entry.get(1, 0): entry.get(2, "")}

    def lines(self, name: str, value: TaskMap) -> list[str]:
        blocks = (block(name, [f"key: {i}", f"value: {quoted(task)}"]) for i, task in value.items())
        return [line for lines in blocks for line in lines]


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

    _FIELDS: ClassVar[Mapping[str, FieldKind]] = {"name": Text(1), "tasks": _Tasks(2)}

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
        self._jobs = [_own(JobDef, job, f"A job in {what}") for job in jobs]

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
            self._jobs[index] = _own(JobDef, value, "A job of a ClusterDef")

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
        self._jobs.insert(index, _own(JobDef, value, "A job of a ClusterDef"))

    def add(self, **fields: Any) -> JobDef:
        """Appends a new job with the given fields, and returns it."""
        job = _own(JobDef, fields, "A job of a ClusterDef")
        self._jobs.append(job)
        return job


class _Jobs(FieldKind):
    """A list of jobs."""

    def default(self) -> list[JobDef]:
        return []

    def check(self, value: Any, what: str) -> JobList:
        return JobList(value, what)

    def merged(self, old: JobList, new: JobList) -> list[JobDef]:
        return [*old, *new]

    def encoded(self, value: JobList) -> bytes:
        return b"".join(wire.bytes_field(self.number, job.SerializeToString()) for job in value)

    def decoded(self, raw: int | bytes) -> Any:
        return raw if isinstance(raw, int) else [JobDef.FromString(raw)]

    def lines(self, name: str, value: JobList) -> list[str]:
        return [line for job in value for line in block(name, job._lines())]


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

    _FIELDS: ClassVar[Mapping[str, FieldKind]] = {"job": _Jobs(1)}

    def __init__(self, *, job: Iterable[JobDef | Mapping[str, Any]] | None = None) -> None:
        self._fill(job=job)


class _Cluster(FieldKind):
    """A `ClusterDef`."""

    def default(self) -> ClusterDef:
        return ClusterDef()

    def check(self, value: Any, what: str) -> ClusterDef:
        return _own(ClusterDef, value, what)

    def merged(self, old: ClusterDef, new: ClusterDef) -> ClusterDef:
        return ClusterDef(job=[*old.job, *new.job])

    def encoded(self, value: ClusterDef) -> bytes:
        return wire.bytes_field(self.number, value.SerializeToString()) if value.job else b""

    def decoded(self, raw: int | bytes) -> Any:
        return raw if isinstance(raw, int) else ClusterDef.FromString(raw)

    def lines(self, name: str, value: ClusterDef) -> list[str]:
        return block(name, value._lines()) if value.job else []


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
        "cluster": _Cluster(1),
        "job_name": Text(2),
        "task_index": Int(3),
        "default_session_config": Opaque(4),
        "protocol": Text(5),
        "port": Int(6),
        "cluster_device_filters": Opaque(7),
        "replica": Int(8),
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


def _own(kind: type[M], value: object, what: str) -> M:
    """A copy of a message, or a message with the fields that a dict has."""
    own = kind()
    if isinstance(value, kind):
        own.CopyFrom(value)
    elif isinstance(value, Mapping):
        for name, field in value.items():
            setattr(own, name, field)
    else:
        hint = "; a ClusterSpec gives one with `as_cluster_def()`" if kind is ClusterDef else ""
        raise InvalidTypeError(f"{what} must be a {kind.__name__}{hint}. Received: {shown(value)}")
    return own
