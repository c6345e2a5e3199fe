"""What every cluster resolver answers."""

from __future__ import annotations

import abc
from collections import Counter
from typing import Any

from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.tasks import task_index


def master_url(address: str, rpc_layer: str | None) -> str:
    """Puts the protocol in front of an address.

    Without a protocol the address stays as it is.

    >>> master_url("host0:2222", "grpc")
    'grpc://host0:2222'
    >>> master_url("host0:2222", None)
    'host0:2222'
    """
    return f"{rpc_layer}://{address}" if rpc_layer else address


def local_accelerators() -> dict[str, int]:
    """Counts the accelerators that JAX sees in this process, by kind. Starts JAX."""
    # Late, because describing a cluster must work where JAX may not start yet.
    import jax

    platforms = (device.platform for device in jax.local_devices())
    return dict(Counter(platform.upper() for platform in platforms if platform != "cpu"))


class ClusterResolver(abc.ABC):
    """Tells a strategy who is in the cluster and which task this process is.

    A subclass defines `cluster_spec` and `master`. Both are asked anew whenever the answer is
    needed, so a resolver may follow a cluster that changes. `task_type`, `task_id` and `rpc_layer`
    can be set; they are None until then, unless the subclass knows better.

    >>> from phalanx.cluster import ClusterSpec
    >>> class OneHost(ClusterResolver):
    ...     def cluster_spec(self):
    ...         return ClusterSpec({"worker": ["localhost:2222"]})
    ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
    ...         return ""
    >>> resolver = OneHost()
    >>> resolver.task_type, resolver.task_id = "worker", 0
    >>> resolver.cluster_spec().task_address(resolver.task_type, resolver.task_id)
    'localhost:2222'
    """

    # Defaults on the class, so that a subclass need not call super().__init__.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = ""

    def __repr__(self) -> str:
        task = "" if self._task_type is None else f" of {self._task_type} {self._task_id}"
        return f"<{type(self).__name__}{task}>"

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster as it is now."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, with its protocol; '' means this process itself."""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Returns how many accelerators a task has, by kind, such as ``{"GPU": 8}``.

        These are the accelerators that JAX sees in this process; a task elsewhere is taken to
        have the same. A machine with CPUs only has none: ``{}``. A task that is not in the
        cluster is a ValueError. The call starts JAX's backend, so in a cluster of several
        processes it comes after `jax.distributed.initialize`. `config_proto` is not used.

        >>> from phalanx.cluster import ClusterSpec
        >>> from phalanx.cluster.resolvers import SimpleClusterResolver
        >>> SimpleClusterResolver(ClusterSpec({}), num_accelerators={"GPU": 8}).num_accelerators()
        {'GPU': 8}
        """
        self.master(task_type, task_id)  # raises if there is no such task
        return local_accelerators()

    @property
    def task_type(self) -> str | None:
        """The job that this process belongs to, such as 'worker'; None if it is not known."""
        return self._found_type() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if it is not known."""
        return self._found_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol between tasks, such as 'grpc'; None if it is not known."""
        return self._found_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """A name for the surroundings the program runs in; '' if there is nothing to say."""
        return self._environment

    # What the surroundings say where nothing was set.

    def _found_type(self) -> str | None:
        return None

    def _found_id(self) -> int | None:
        return None

    def _found_rpc_layer(self) -> str | None:
        return None


class EnvironmentResolver(ClusterResolver):
    """Base of resolvers that read environment variables; what is given, or set later, wins."""

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = task_type
        self.task_id = task_id  # through the setter, which checks it
        self._rpc_layer = rpc_layer
        self._environment = environment

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, from the environment unless it was set."""
        return super().task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = None if task_id is None else task_index(task_id, "`task_id`")


class FoundTasksResolver(ClusterResolver):
    """Base of resolvers that look up the addresses of all tasks, and know no other master."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default this process's; '' if that is not known."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)
