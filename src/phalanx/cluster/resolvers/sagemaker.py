"""A cluster that Amazon SageMaker describes in environment variables."""

from __future__ import annotations

import os
from typing import Any

from phalanx.cluster import tasks
from phalanx.cluster.resolvers.base import EnvironmentResolver, master_url
from phalanx.cluster.resolvers.environment import json_variable, number_variable, variable
from phalanx.cluster.spec import ClusterSpec
from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown

_JOB = "worker"
_HINT = "SageMaker sets it in the containers of its training jobs."
_EXAMPLE = '["algo-1", "algo-2"]'


class SageMakerClusterResolver(EnvironmentResolver):
    """Reads the hosts of a SageMaker training job; each of them is a worker.

    SM_HOSTS lists the hosts and SM_CURRENT_HOST is this one. They are read again at each call, and
    must be set. Workers are numbered in the order of their names. If this host is not in the list, the
    cluster is empty.

    >>> import os
    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, SM_HOSTS='["algo-1", "algo-2"]', SM_CURRENT_HOST="algo-2"):
    ...     resolver = SageMakerClusterResolver()
    ...     print(resolver.task_type, resolver.task_id, resolver.master())
    worker 1 algo-2:2223

    Args:
        port: the port of every worker.
        task_type: replaces the job of this process.
        task_id: replaces the index of this process.
        rpc_layer: the protocol between tasks.
        environment: a name for the surroundings.
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._port = tasks.port(port)

    def cluster_spec(self) -> ClusterSpec:
        """Returns all hosts as workers."""
        hosts, _ = _hosts()
        return ClusterSpec({_JOB: [f"{host}:{self._port}" for host in hosts]} if hosts else {})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default this process's; '' if there is only one task."""
        cluster = self.cluster_spec()
        if not cluster or cluster.num_tasks(_JOB) == 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        address = cluster.task_address(task_type, task_id)  # type: ignore[arg-type]
        return master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Returns the number of GPUs per host, from SM_NUM_GPUS; without it, the count of JAX."""
        if "SM_NUM_GPUS" not in os.environ:
            return super().num_accelerators(task_type, task_id, config_proto)
        self.master(task_type, task_id)  # raises if there is no such task
        count = number_variable("SM_NUM_GPUS", _HINT)
        return {"GPU": count} if count else {}

    def _found_type(self) -> str | None:
        return _JOB if _hosts()[0] else None

    def _found_id(self) -> int | None:
        return _hosts()[1]


def _hosts() -> tuple[list[str], int | None]:
    """The names of the hosts in order, and which one this is; none if this host is not among them."""
    current = variable("SM_CURRENT_HOST", _HINT)
    hosts = json_variable("SM_HOSTS", None, _EXAMPLE) if variable("SM_HOSTS", _HINT) else []
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise InvalidValueError(
            f"SM_HOSTS must be a JSON list of names, for example {_EXAMPLE}. Received: {shown(hosts)}"
        )
    hosts = sorted(hosts)
    return (hosts, hosts.index(current)) if current in hosts else ([], None)
