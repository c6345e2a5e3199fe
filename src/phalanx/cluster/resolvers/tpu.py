"""The workers of a Cloud TPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.cluster.resolvers import tpu_endpoints
from phalanx.cluster.resolvers.base import ClusterResolver, local_accelerators, master_url
from phalanx.cluster.resolvers.clients import google_metadata, google_service
from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.tasks import text
from phalanx.errors import InvalidValueError, NotFoundError, UnsupportedError
from phalanx.runtime.formatting import shown

_LOCAL = "local"
_EXAMPLE = "TPUClusterResolver('local') for a TPU of this machine, or a name or 'grpc://10.1.2.3:8470'"


@dataclass(frozen=True)
class TPUSystemMetadata:
    """What JAX knows about the TPU: cores, hosts, and where each core is in the mesh.

    `devices` are JAX's devices. `topology` has the coordinates of each of them, or is None.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: tuple[tuple[int, ...], ...] | None
    devices: tuple[Any, ...]


class TPUClusterResolver(ClusterResolver):
    """Describes the workers of a Cloud TPU, and which of them this process is.

    JAX runs on the machines of the TPU themselves and finds its chips alone, so one machine needs no
    resolver. The workers are found, in this order, by

    - `tpu`: ``"local"`` for the TPU of this machine, a cluster without addresses; ``"grpc://a,b"`` for
      workers at these addresses; or a name, which the Cloud TPU service is asked about at each call;
    - KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, with addresses;
    - TPU_WORKER_HOSTNAMES, or TPU_PROCESS_ADDRESSES, and TPU_WORKER_ID, which GKE sets;
    - TPU_NAME, which is used like `tpu`;
    - TPU_CONFIG, a JSON object with the keys tpu_node_name, project and zone;
    - the metadata server of a TPU machine.

    (Not run on TPU hardware by the project's own tests.)

    >>> resolver = TPUClusterResolver("grpc://10.1.2.3:8470,10.1.2.4:8470")
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['10.1.2.3:8470', '10.1.2.4:8470']})
    >>> resolver.master()
    'grpc://10.1.2.3:8470'
    >>> TPUClusterResolver("local").cluster_spec()
    ClusterSpec({})

    Args:
        tpu: which TPU, as above; a list must have one element.
        zone: the zone of a TPU that is given by name; by default that of this machine.
        project: the project of a TPU that is given by name; by default that of this machine.
        job_name: the job of the workers.
        coordinator_name: a further job with one task, at `coordinator_address`.
        coordinator_address: the address of that task.
        credentials: the credentials to ask with; by default those of the surroundings.
        service: what ``googleapiclient.discovery.build("tpu", "v2")`` returns; by default it is made
            when it is needed, which takes the extra ``phalanx[gcp]``.
        discovery_url: where the service describes itself; TPU_API_DISCOVERY_URL wins over it.
        metadata: what answers instead of the metadata server: a function from a path, such as
            ``"instance/zone"``, to text.
    """

    @classmethod
    def connect(
        cls, tpu: Any = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Makes a resolver and starts JAX on the TPU; a NotFoundError if JAX finds no TPU."""
        resolver = cls(tpu, zone, project)
        if not resolver.num_accelerators()["TPU"]:
            raise NotFoundError(
                "JAX finds no TPU in this process. Run on the machine of the TPU, with `jax[tpu]` "
                f"installed. Received: tpu={shown(tpu)}"
            )
        return resolver

    def __init__(
        self,
        tpu: Any = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
        *,
        metadata: Callable[[str], str] | None = None,
    ) -> None:
        if bool(coordinator_name) != bool(coordinator_address):
            raise InvalidValueError(
                "`coordinator_name` and `coordinator_address` belong together: give both or none. "
                f"Received: {shown(coordinator_name)} and {shown(coordinator_address)}"
            )
        self._coordinator: dict[str, list[str]] = {}
        if coordinator_name and coordinator_address:
            self._coordinator[coordinator_name] = [coordinator_address]
        self._task_type = job_name
        self._task_id = 0
        self._rpc_layer = "grpc"
        self._zone = zone
        self._project = project
        self._credentials = credentials
        self._service = service
        self._discovery_url = os.environ.get("TPU_API_DISCOVERY_URL") or discovery_url
        self._metadata = metadata or google_metadata
        self._workers: list[str] | None = None  # known addresses
        self._name = ""
        self._find(_only_one(tpu), has_metadata=metadata is not None)

    def _find(self, tpu: str | None, has_metadata: bool) -> None:
        """Decides where the addresses come from, and which worker this process is."""
        endpoints = os.environ.get("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")
        if not tpu and endpoints:
            self._workers = tpu_endpoints.parse_endpoints(endpoints)
            return
        if not tpu and (found := tpu_endpoints.workers_in_environment()):
            self._workers, self._task_id = found
            return
        tpu = tpu or os.environ.get("TPU_NAME")
        if not tpu and (config := tpu_endpoints.tpu_config()):
            tpu = _only_one(config.get("tpu_node_name"))
            self._project = self._project or config.get("project")
            self._zone = self._zone or config.get("zone")
        if tpu == _LOCAL:
            self._workers = []
        elif tpu and tpu.startswith("grpc://"):
            self._workers = tpu_endpoints.parse_endpoints(tpu)
        elif tpu:
            self._name = tpu
        elif has_metadata or tpu_endpoints.has_tpu():
            self._workers, self._task_id = tpu_endpoints.workers_in_metadata(self._metadata)
        else:
            raise InvalidValueError(
                f"Nothing says which TPU to use. Write {_EXAMPLE}. Received: tpu={shown(tpu)}"
            )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers, and the coordinator if there is one; nothing for ``"local"``."""
        workers = self._ask_service() if self._workers is None else self._workers
        if not workers:
            return ClusterSpec({})
        return ClusterSpec({str(self.task_type): workers, **self._coordinator})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default this process's; '' for ``"local"``."""
        cluster = self.cluster_spec()
        if not cluster:
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = str(self.task_type), self.task_id or 0
        return master_url(cluster.task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def get_master(self) -> str:
        """Returns `master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Returns the job of the workers."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """Returns the name of the first worker, which coordinates the others."""
        return f"/job:{self.get_job_name()}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns what JAX knows about the TPU. Starts JAX."""
        import jax

        devices = tuple(device for device in jax.devices() if device.platform == "tpu")
        hosts = {device.process_index for device in devices}
        places = [getattr(device, "coords", ()) for device in devices]
        return TPUSystemMetadata(
            num_cores=len(devices),
            num_hosts=len(hosts),
            num_of_cores_per_host=len(devices) // max(len(hosts), 1),
            topology=tuple(tuple(place) for place in places) if all(places) and places else None,
            devices=devices,
        )

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Returns the number of TPU cores that JAX sees in this process; every worker has as many."""
        return {"TPU": local_accelerators().get("TPU", 0)}

    @property
    def tpu_hardware_feature(self) -> str | None:
        """The kind of TPU, such as 'TPU v4'; None if JAX finds none. Starts JAX."""
        devices = self.get_tpu_system_metadata().devices
        return str(devices[0].device_kind) if devices else None

    def _ask_service(self) -> list[str]:
        zone = self._zone or self._metadata("instance/zone").rpartition("/")[2]
        project = self._project or self._metadata("project/project-id")
        if self._service is None:
            self._service = google_service(
                "tpu",
                "v2",
                self._credentials,
                user="TPUClusterResolver",
                discovery_url=self._discovery_url,
            )
        nodes = self._service.projects().locations().nodes()
        full_name = f"projects/{project}/locations/{zone}/nodes/{self._name}"
        try:
            node = nodes.get(name=full_name).execute()
        except Exception as error:
            raise InvalidValueError(
                f"The Cloud TPU service does not know {shown(full_name)}. Check the name, the zone, "
                f"the project and your rights. Received: {error}"
            ) from error
        return tpu_endpoints.endpoints_of_node(self._name, node)


def _only_one(tpu: Any) -> str | None:
    if isinstance(tpu, list | tuple):
        if len(tpu) > 1:
            raise UnsupportedError(
                "One resolver describes one TPU. Join several with UnionClusterResolver. "
                f"Received: tpu={shown(tpu)}"
            )
        if not tpu:
            raise InvalidValueError(
                f"The list names no TPU. Write {_EXAMPLE}. Received: tpu={shown(tpu)}"
            )
        (tpu,) = tpu
    if isinstance(tpu, bytes):
        tpu = text(tpu, "`tpu`")
    if tpu is not None and not isinstance(tpu, str):
        raise InvalidValueError(f"`tpu` must be a string. Write {_EXAMPLE}. Received: tpu={shown(tpu)}")
    return tpu
