"""An instance group of Google Compute Engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.cluster import tasks
from phalanx.cluster.resolvers.base import FoundTasksResolver
from phalanx.cluster.resolvers.clients import google_service
from phalanx.cluster.spec import ClusterSpec
from phalanx.errors import ClusterEnvironmentError, UnsupportedError
from phalanx.runtime.formatting import shown


class GCEClusterResolver(FoundTasksResolver):
    """Describes the running instances of an instance group; all of them have one job.

    The resolver looks the instances up at each call. Tasks are numbered in the order of their
    addresses as text. Say with `task_id` which of them this process is.

    Args:
        project: the project of the instance group.
        zone: the zone of the instance group.
        instance_group: the name of the instance group.
        port: the port of every task.
        task_type: the job of the instances. It cannot be changed later.
        task_id: the index of this process.
        rpc_layer: the protocol between tasks.
        credentials: the credentials to ask with; by default those of the surroundings.
        service: what ``googleapiclient.discovery.build("compute", "v1")`` returns; by default it is
            made, which needs the extra ``phalanx[gcp]``.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._project = project
        self._zone = zone
        self._instance_group = instance_group
        self._port = tasks.port(port)
        self._task_type: str = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._service = service or google_service(
            "compute", "v1", credentials, user="GCEClusterResolver"
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the instances that are running now."""
        addresses = sorted(f"{self._address(name)}:{self._port}" for name in self._running())
        return ClusterSpec({self._task_type: addresses})

    @property
    def task_type(self) -> str | None:
        """The job of the instances, which was given to the constructor."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise UnsupportedError(
            "The task type of a GCEClusterResolver is that of its instance group. Give it to the "
            f"constructor: GCEClusterResolver(..., task_type={shown(task_type)}). "
            f"Received: {shown(task_type)}"
        )

    def _running(self) -> Iterator[str]:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            project=self._project,
            zone=self._zone,
            instanceGroup=self._instance_group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        while request is not None:
            response = request.execute()
            for item in response.get("items") or []:
                yield str(_entry(item, "instance")).rpartition("/")[2]
            request = groups.listInstances_next(previous_request=request, previous_response=response)

    def _address(self, instance: str) -> str:
        details = (
            self._service.instances()
            .get(project=self._project, zone=self._zone, instance=instance)
            .execute()
        )
        return str(_entry(details, "networkInterfaces", 0, "networkIP"))


def _entry(answer: Any, *path: str | int) -> Any:
    """What an answer of the service has at the end of a path, which a new instance may lack."""
    found = answer
    for key in path:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            found = None
    if found is None:
        where = ".".join(map(str, path))
        raise ClusterEnvironmentError(
            f"Compute Engine gives no {where} for an instance. Wait until all instances of the group "
            f"are up. Received: {shown(answer)}"
        )
    return found
