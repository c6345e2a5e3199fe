"""The pods of a Kubernetes cluster."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.cluster.resolvers.base import FoundTasksResolver
from phalanx.cluster.resolvers.clients import optional_module
from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.tasks import port, text
from phalanx.errors import ClusterEnvironmentError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


class KubernetesExecutableLocation(enum.Enum):
    """Where this program runs, which decides how it finds the Kubernetes API."""

    WITHIN_CLUSTER = 0
    """In a pod: the service account of the pod is used."""
    OFF_CLUSTER = 1
    """Elsewhere: the file that `kubectl` uses is used."""


class KubernetesClusterResolver(FoundTasksResolver):
    """Describes the pods that match label selectors.

    The resolver looks the pods up at each call, and all of them must be running. The tasks of a job
    are the pods of its first selector, then of the next, each in the order of their names. Numbers in
    names count as numbers, so that the task index is the index of an indexed Job or a StatefulSet.

    It cannot find the pod of this process: set `task_type` and `task_id`.

    >>> from types import SimpleNamespace as Object
    >>> def pod(name, address):
    ...     status = Object(phase="Running", host_ip=address)
    ...     return Object(metadata=Object(name=name), status=status)
    >>> class Client:
    ...     def list_pod_for_all_namespaces(self, label_selector):
    ...         return Object(items=[pod("train-1", "10.0.0.5"), pod("train-0", "10.0.0.4")])
    >>> resolver = KubernetesClusterResolver({"worker": ["job-name=train"]}, override_client=Client())
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['10.0.0.4:8470', '10.0.0.5:8470']})
    >>> resolver.task_type, resolver.task_id = "worker", 1
    >>> resolver.master()
    'grpc://10.0.0.5:8470'

    Args:
        job_to_label_mapping: the label selectors of each job; by default
            ``{"worker": ["job-name=tensorflow"]}``.
        tf_server_port: the port of every task.
        rpc_layer: the protocol between tasks.
        override_client: a ``kubernetes.client.CoreV1Api`` to use; by default one is made, which needs
            the extra ``phalanx[kubernetes]``.
        executable_location: where to find the API; not used with `override_client`.
        namespace: the namespace of the pods; by default all are searched, which needs more rights.
        use_pod_ip: takes the address of the pod instead of that of its node. Pods that share a node, or
            do not use its network, need this.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
        *,
        namespace: str | None = None,
        use_pod_ip: bool = False,
    ) -> None:
        self._selectors = _checked_selectors(
            {} if job_to_label_mapping is None else job_to_label_mapping
        )
        self._port = port(tf_server_port, "`tf_server_port`")
        self._rpc_layer = rpc_layer
        self._namespace = namespace
        self._use_pod_ip = use_pod_ip
        self._client = override_client or _client(executable_location)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the pods as they are now; a RuntimeError if one of them is not running."""
        return ClusterSpec(
            {
                job: [self._address(pod) for selector in selectors for pod in self._pods(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def _pods(self, selector: str) -> list[Any]:
        if self._namespace is None:
            answer = self._client.list_pod_for_all_namespaces(label_selector=selector)
        else:
            answer = self._client.list_namespaced_pod(self._namespace, label_selector=selector)
        return sorted(getattr(answer, "items", None) or [], key=lambda pod: _natural_order(_name(pod)))

    def _address(self, pod: Any) -> str:
        # A pod that has just been made lacks some of these.
        status = getattr(pod, "status", None)
        phase = getattr(status, "phase", None)
        address = getattr(status, "pod_ip" if self._use_pod_ip else "host_ip", None)
        if phase != "Running" or not address:
            raise ClusterEnvironmentError(
                "All pods of the cluster must be running. Wait for this one, or delete it. "
                f"Received: pod {shown(_name(pod))}, phase {shown(phase)}, address {shown(address)}"
            )
        return f"{text(address, 'The address of a pod')}:{self._port}"


def _name(pod: Any) -> str:
    return getattr(getattr(pod, "metadata", None), "name", None) or ""


def _checked_selectors(mapping: object) -> dict[str, list[str]]:
    if not isinstance(mapping, Mapping) or not all(
        isinstance(job, str) and isinstance(selectors, list | tuple)
        for job, selectors in mapping.items()
    ):
        raise InvalidTypeError(
            "`job_to_label_mapping` must be a dict from job names to lists of label selectors, for "
            f"example {{'worker': ['job-name=train']}}. Received: {shown(mapping)}"
        )
    selectors = {job: list(selectors) for job, selectors in mapping.items()}
    return selectors or {"worker": ["job-name=tensorflow"]}


def _client(location: object) -> Any:
    user, extra, instead = "KubernetesClusterResolver", "kubernetes", "override_client"
    config = optional_module("kubernetes.config", user, extra, instead)
    client = optional_module("kubernetes.client", user, extra, instead)
    load = {
        KubernetesExecutableLocation.WITHIN_CLUSTER: config.load_incluster_config,
        KubernetesExecutableLocation.OFF_CLUSTER: config.load_kube_config,
    }
    if not isinstance(location, KubernetesExecutableLocation):
        raise InvalidValueError(
            f"`executable_location` must be a KubernetesExecutableLocation. Received: {shown(location)}"
        )
    try:
        load[location]()
    except config.ConfigException as error:
        raise ClusterEnvironmentError(
            "The Kubernetes API is not known here. A pod needs a service account; elsewhere, use "
            "executable_location=KubernetesExecutableLocation.OFF_CLUSTER and a file that `kubectl` "
            f"can use. Received: {location}, {error}"
        ) from error
    return client.CoreV1Api()


def _natural_order(name: str) -> list[tuple[int, str, str]]:
    """A key that sorts numbers in names as numbers, so that train-2 comes before train-10."""
    pieces = re.split(r"([0-9]+)", name)  # texts and the numbers between them
    numbers = (piece.lstrip("0") for piece in pieces)  # more digits are larger
    return [
        (len(n) if i % 2 else -1, n, p) for i, (n, p) in enumerate(zip(numbers, pieces, strict=True))
    ]
