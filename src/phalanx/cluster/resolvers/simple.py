"""A cluster that is written down in the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.cluster.resolvers.base import ClusterResolver, master_url
from phalanx.cluster.spec import ClusterSpec
from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown


class SimpleClusterResolver(ClusterResolver):
    """Returns the cluster, and the rest, as they were given.

    `cluster_spec` is a `ClusterSpec`. `master` is the address that `master()` returns when no
    task is asked for. `num_accelerators` replaces the count of JAX's local accelerators.
    `task_type`, `task_id` and `rpc_layer` can be set later; whether the task is in the cluster
    is checked when its address is asked for.

    >>> from phalanx.cluster import ClusterSpec
    >>> cluster = ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
    >>> resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=1, rpc_layer="grpc")
    >>> resolver.task_type, resolver.task_id
    ('worker', 1)
    >>> resolver.master("worker", 0)
    'grpc://host0:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise InvalidTypeError(
                "`cluster_spec` must be a ClusterSpec. Wrap a dict: "
                f"ClusterSpec({{'worker': ['host0:2222']}}). Received: {shown(cluster_spec)}"
            )
        if not isinstance(master, str):
            raise InvalidTypeError(
                f"`master` must be a string; leave it out to have none. Received: {shown(master)}"
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the `ClusterSpec` that the resolver was made with."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of the given task, or `master` if type and id are not both given.

        The resolver's own task plays no part. An empty `rpc_layer` means the resolver's.
        """
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        else:
            address = self._master
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> Any:
        """Returns `num_accelerators` as it was given, for every task; without it, a count.

        The count is that of `ClusterResolver.num_accelerators`.
        """
        if self._num_accelerators is None:
            return super().num_accelerators(task_type, task_id, config_proto)
        return self._num_accelerators
