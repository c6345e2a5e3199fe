"""Where the workers of a TPU are: the forms in which Google Cloud says it.

Each source gives the addresses of all workers, and which of them this machine is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.cluster.resolvers.environment import json_variable
from phalanx.cluster.tasks import port, task_index
from phalanx.errors import ClusterEnvironmentError, InvalidValueError
from phalanx.runtime.formatting import shown

_PORT = 8470
_WORKER_LISTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_SLICES = "MEGASCALE_NUM_SLICES"


def parse_endpoints(text: str) -> list[str]:
    """Reads addresses that are separated by commas. The protocol goes, the usual port is added.

    >>> parse_endpoints("grpc://10.1.2.3:8470,10.1.2.4")
    ['10.1.2.3:8470', '10.1.2.4:8470']
    """
    addresses = [part.strip().removeprefix("grpc://") for part in text.split(",")]
    if not all(addresses):
        raise InvalidValueError(
            "The addresses of a TPU must be separated by single commas, for example "
            f"'grpc://10.1.2.3:8470,10.1.2.4:8470'. Received: {shown(text)}"
        )
    return [address if ":" in address else f"{address}:{_PORT}" for address in addresses]


def endpoints_of_node(name: str, node: Mapping[str, Any]) -> list[str]:
    """Reads the answer of the Cloud TPU service about a TPU, which must be ready.

    >>> endpoints_of_node("t", {"state": "READY", "networkEndpoints": [{"ipAddress": "10.1.2.3"}]})
    ['10.1.2.3:8470']
    """
    if not isinstance(node, Mapping):
        raise _no_address(name, node)
    if node.get("state") != "READY":
        raise ClusterEnvironmentError(
            f"TPU {shown(name)} is not ready. Wait until its state is READY. "
            f"Received: {shown(node.get('state'))}"
        )
    endpoints = node.get("networkEndpoints") or [node]  # the oldest answers have one endpoint only
    known = isinstance(endpoints, list) and all(isinstance(e, Mapping) for e in endpoints)
    if not known or not all(isinstance(e.get("ipAddress"), str) for e in endpoints):
        raise _no_address(name, node)
    return [f"{e['ipAddress']}:{port(e.get('port') or _PORT, 'A port of a TPU')}" for e in endpoints]


def _no_address(name: str, node: object) -> ClusterEnvironmentError:
    return ClusterEnvironmentError(
        f"The Cloud TPU service gives no address for TPU {shown(name)}. Received: {shown(node)}"
    )


def workers_in_environment() -> tuple[list[str], int] | None:
    """The workers and this worker's index, if the environment variables of a TPU machine are set."""
    hosts = next((os.environ[name] for name in _WORKER_LISTS if os.environ.get(name)), None)
    if hosts is None:
        return None
    _check_slices(os.environ.get(_SLICES))
    worker = task_index(os.environ.get("TPU_WORKER_ID", "0"), "The environment variable TPU_WORKER_ID")
    return parse_endpoints(hosts), worker


def workers_in_metadata(metadata: Callable[[str], str]) -> tuple[list[str], int]:
    """The workers and this worker's index, from the metadata server of a TPU machine.

    Workers are listed by name, or as triples that end in the address.

    >>> answers = {"worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2", "agent-worker-number": "1"}
    >>> workers_in_metadata(lambda path: answers.get(path.rpartition("/")[2], ""))
    (['10.0.0.1:8470', '10.0.0.2:8470'], 1)
    """

    def ask(key: str) -> str:
        return metadata(f"instance/attributes/{key}").strip()

    hosts = ",".join(part.rpartition(":")[2] for part in ask("worker-network-endpoints").split(","))
    worker = task_index(ask("agent-worker-number"), "The metadata entry agent-worker-number")
    try:
        settings = ask("tpu-env")
    except ClusterEnvironmentError:  # not every machine has this entry
        settings = ""
    lines = (line.partition(":") for line in settings.splitlines())
    _check_slices({key.strip(): value.strip(" '\"") for key, _, value in lines}.get(_SLICES))
    return parse_endpoints(hosts), worker


def tpu_config() -> dict[str, Any]:
    """The value of TPU_CONFIG: a JSON object with the keys tpu_node_name, project and zone."""
    example = '{"tpu_node_name": "my-tpu", "project": "my-project", "zone": "us-central2-b"}'
    config = json_variable("TPU_CONFIG", {}, example)
    if not isinstance(config, dict):
        raise InvalidValueError(
            f"TPU_CONFIG must be a JSON object: {example}. Received: {shown(config)}"
        )
    return config


def has_tpu() -> bool:
    """Whether this machine has TPU chips."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def _check_slices(slices: str | None) -> None:
    if slices and slices != "1":
        raise ClusterEnvironmentError(
            "The TPU has several slices, and each knows the addresses of its own workers only. Give "
            "the addresses of all workers: TPUClusterResolver('grpc://host0,host1'). "
            f"Received: {_SLICES}={shown(slices)}"
        )
