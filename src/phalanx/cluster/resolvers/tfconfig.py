"""A cluster that is described by the environment variable TF_CONFIG.

Its value is a JSON object such as::

    {"cluster": {"worker": ["host0:2222", "host1:2222"]},
     "task": {"type": "worker", "index": 0},
     "rpc_layer": "grpc"}

Each key is optional, and checked when it is needed.
"""

from __future__ import annotations

from typing import Any

from phalanx.cluster.resolvers.base import ClusterResolver, EnvironmentResolver, master_url
from phalanx.cluster.resolvers.environment import json_variable
from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.tasks import task_index
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

_VARIABLE = "TF_CONFIG"
# What an error shows as the right way to write each key.
_EXAMPLES = {
    "cluster": '"cluster": {"worker": ["host0:2222", "host1:2222"]}',
    "task": '"task": {"type": "worker", "index": 0}',
    "task.type": '"task": {"type": "worker", "index": 0}',
    "task.index": '"task": {"type": "worker", "index": 0}',
    "rpc_layer": '"rpc_layer": "grpc"',
    "session_master": '"session_master": "host0:2222"',
}
_FULL_EXAMPLE = f"{{{_EXAMPLES['cluster']}, {_EXAMPLES['task']}}}"


class _WrongKeyError(InvalidValueError, InvalidTypeError):
    """TF_CONFIG is JSON, but one of its keys cannot be used.

    Both a ValueError and a TypeError: tf.distribute raises either, by key and kind of mistake.
    """


class TFConfigClusterResolver(EnvironmentResolver):
    """Reads the cluster and this process's task from the environment variable TF_CONFIG.

    The variable is read again at each call. Arguments, and later assignments to `task_type`,
    `task_id` and `rpc_layer`, win over it; None gives way to it again. Without the variable the
    cluster is empty and the task is None. A value that cannot be used is a ValueError that names
    the key and shows how to write it; broken JSON is also a `json.JSONDecodeError`.

    >>> import json, os
    >>> from unittest import mock
    >>> config = {
    ...     "cluster": {"worker": ["host0:2222", "host1:2222"]},
    ...     "task": {"type": "worker", "index": 1},
    ... }
    >>> with mock.patch.dict(os.environ, TF_CONFIG=json.dumps(config)):
    ...     resolver = TFConfigClusterResolver()
    ...     print(resolver.task_type, resolver.task_id, resolver.master())
    worker 1 host1:2222
    """

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster under the key 'cluster', or an empty one."""
        return _cluster(_read_config())

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default this process's, with the protocol in front.

        The key 'session_master' is returned as it is, if there is one. A cluster of at most one
        task needs no address: ''.
        """
        config = _read_config()
        session_master = _optional_text(config, "session_master")
        if session_master is not None:
            return session_master
        cluster = _cluster(config)
        if _has_at_most_one_task(cluster):
            return ""
        given_type = self._task_type if task_type is None else task_type
        given_id = self._task_id if task_id is None else task_id
        task_type = _listed_type(config, cluster) if given_type is None else given_type
        if given_id is None:
            # Only an index of the type that stands next to it can be wrong for that type.
            among = cluster.task_indices(task_type) if given_type is None else None
            given_id = _listed_id(config, task_type, among)
        address = cluster.task_address(task_type, given_id)
        return master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    def _found_type(self) -> str | None:
        return _task_type(_read_config())

    def _found_id(self) -> int | None:
        return _task_id(_read_config())

    def _found_rpc_layer(self) -> str | None:
        return _optional_text(_read_config(), "rpc_layer")


def resolver_or_tf_config(cluster_resolver: ClusterResolver | None) -> ClusterResolver:
    """The resolver that a strategy was given, or that of TF_CONFIG."""
    if cluster_resolver is None:
        return TFConfigClusterResolver()
    if not isinstance(cluster_resolver, ClusterResolver):
        raise InvalidValueError(
            "cluster_resolver must be a px.cluster_resolver.ClusterResolver or None. "
            f"Received: {shown(cluster_resolver)}"
        )
    return cluster_resolver


def _read_config() -> dict[str, Any]:
    config = json_variable(_VARIABLE, default={}, example=_FULL_EXAMPLE)
    if not isinstance(config, dict):
        raise _WrongKeyError(
            f"{_VARIABLE} must be a JSON object. Write for example {_FULL_EXAMPLE}. "
            f"Received: {shown(config)}"
        )
    for key in ("cluster", "task"):
        _check_spelling(config, key)
    return config


_MEANT = {
    "cluster": ("clusters", "cluster_spec", "clusterspec", "cluster_def"),
    "task": ("tasks", "task_spec"),
    "task.type": ("task_type", "job", "job_name", "role", "name"),
    "task.index": ("task_index", "task_id", "id", "idx", "rank"),
}
"""Keys that people write for others, which then are missing, and that would go unnoticed."""


def _check_spelling(values: dict[str, Any], key: str) -> None:
    name = key.rpartition(".")[2]
    if name in values:
        return
    wrong = [k for k in values if k.lower() == name or k.lower() in _MEANT[key]]
    if wrong:
        raise _wrong_key(key, f"is missing, and {shown(wrong[0])} is not known", values)


def _cluster(config: dict[str, Any]) -> ClusterSpec:
    try:
        return ClusterSpec(config.get("cluster", {}))
    except (InvalidTypeError, InvalidValueError) as error:
        raise _WrongKeyError(
            f"The key 'cluster' of {_VARIABLE} cannot be used. "
            f"Write for example {_EXAMPLES['cluster']}. {error}"
        ) from error


def _task_type(config: dict[str, Any]) -> str | None:
    task_type = _task(config).get("type")
    if task_type is not None and not isinstance(task_type, str):
        raise _wrong_key("task.type", "must be a string", task_type)
    return task_type


def _task_id(config: dict[str, Any]) -> int | None:
    task = _task(config)
    if "index" not in task:
        return None
    try:
        return task_index(task["index"])
    except (InvalidTypeError, InvalidValueError) as error:
        raise _wrong_key("task.index", "must be a whole number from 0", task["index"]) from error


def _listed_type(config: dict[str, Any], cluster: ClusterSpec) -> str:
    task_type = _task_type(config)
    if task_type not in cluster.jobs:
        raise _wrong_key("task.type", f"must be a job of the cluster: {cluster.jobs}", task_type)
    return task_type


def _listed_id(config: dict[str, Any], task_type: str, among: list[int] | None) -> int:
    task_id = _task_id(config)
    if task_id is None or (among is not None and task_id not in among):
        known = "" if among is None else f": {among}"
        raise _wrong_key("task.index", f"must be a task of job {shown(task_type)}{known}", task_id)
    return task_id


def _task(config: dict[str, Any]) -> dict[str, Any]:
    task = config.get("task", {})
    if not isinstance(task, dict):
        raise _wrong_key("task", "must be a JSON object", task)
    for key in ("task.type", "task.index"):
        _check_spelling(task, key)
    return task


def _optional_text(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong_key(key, "must be a string", value)
    return value


def _has_at_most_one_task(cluster: ClusterSpec) -> bool:
    # Gaps count: in {"worker": {"1": "host1:2222"}} there is a worker 0 that is not listed.
    jobs = cluster.jobs
    return not jobs or (len(jobs) == 1 and max(cluster.task_indices(jobs[0]), default=0) == 0)


def _wrong_key(key: str, problem: str, value: object) -> _WrongKeyError:
    return _WrongKeyError(
        f"The key {shown(key)} of {_VARIABLE} {problem}. Write for example {_EXAMPLES[key]}. "
        f"Received: {shown(value)}"
    )
