"""One cluster out of several."""

from __future__ import annotations

from typing import Any

from phalanx.cluster.resolvers.base import ClusterResolver, master_url
from phalanx.cluster.spec import ClusterSpec
from phalanx.errors import DuplicateTaskError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


class UnionClusterResolver(ClusterResolver):
    """Joins the clusters of several resolvers. For everything else it asks the first one.

    Jobs of the same name are joined. If all of them list their tasks without gaps, the lists follow one
    another. If one has gaps, indices stay what they are, and an index that appears twice is a KeyError.

    `task_type`, `task_id` and `rpc_layer`, given by name or set later, win over the first resolver's.

    >>> from phalanx.cluster import ClusterSpec
    >>> from phalanx.cluster.resolvers import SimpleClusterResolver
    >>> workers = SimpleClusterResolver(
    ...     ClusterSpec({"worker": ["host0:2222", "host1:2222"]}), task_type="worker", task_id=1
    ... )
    >>> servers = SimpleClusterResolver(ClusterSpec({"ps": ["host2:2222"]}))
    >>> resolver = UnionClusterResolver(workers, servers)
    >>> resolver.cluster_spec()
    ClusterSpec({'ps': ['host2:2222'], 'worker': ['host0:2222', 'host1:2222']})
    >>> resolver.task_type, resolver.task_id
    ('worker', 1)
    """

    def __init__(
        self,
        *args: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise InvalidValueError(
                "A UnionClusterResolver takes the names `task_type`, `task_id` and `rpc_layer`. "
                f"Received: {shown(kwargs)}"
            )
        if not args:
            raise InvalidValueError("At least one resolver is needed. Received: no arguments")
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise InvalidTypeError(
                    "The arguments must be resolvers, for example TFConfigClusterResolver(). "
                    f"Received: {shown(resolver)}"
                )
        self._resolvers = args
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of all resolvers."""
        return joined([resolver.cluster_spec() for resolver in self._resolvers])

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of the given task, or the first resolver's if none is given in full.

        The protocol in front of a given task is `rpc_layer`, here or of this resolver.
        """
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return master_url(address, rpc_layer or self._rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> Any:
        """Returns what the first resolver answers."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    def _found_type(self) -> str | None:
        return self._resolvers[0].task_type

    def _found_id(self) -> int | None:
        return self._resolvers[0].task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol between tasks, from the first resolver unless it was set."""
        return self._rpc_layer or self._resolvers[0].rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """The environment of the first resolver."""
        return self._resolvers[0].environment


UnionResolver = UnionClusterResolver


def joined(clusters: list[ClusterSpec]) -> ClusterSpec:
    """The tasks of all clusters as one.

    >>> joined([ClusterSpec({"worker": ["a:1"]}), ClusterSpec({"worker": ["b:1"], "ps": ["c:1"]})])
    ClusterSpec({'ps': ['c:1'], 'worker': ['a:1', 'b:1']})
    """
    names = dict.fromkeys(name for cluster in clusters for name in cluster.jobs)
    return ClusterSpec({name: _joined_job(name, clusters) for name in names})


def _joined_job(name: str, clusters: list[ClusterSpec]) -> list[str] | dict[int, str]:
    parts = [
        {index: cluster.task_address(name, index) for index in cluster.task_indices(name)}
        for cluster in clusters
        if name in cluster.jobs
    ]
    if all(list(part) == list(range(len(part))) for part in parts):
        return [address for part in parts for address in part.values()]
    tasks: dict[int, str] = {}
    for part in parts:
        if both := sorted(tasks.keys() & part.keys()):
            raise DuplicateTaskError(
                f"Two of the clusters have the same task of job {shown(name)}, and one of them has "
                f"gaps, so that tasks cannot be renumbered. Use indices that differ. "
                f"Received: {both} twice"
            )
        tasks.update(part)
    return tasks
