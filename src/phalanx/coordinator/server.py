"""`px.Server`: this process as a task of a cluster that serves the others."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from phalanx.cluster.definitions import ClusterDef, ServerDef
from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.tasks import task_index as checked_index
from phalanx.coordinator import rpc_service
from phalanx.coordinator.messages import PURPOSE as CLOSURES
from phalanx.coordinator.rpc_service import RpcService
from phalanx.coordinator.worker_service import WorkerService
from phalanx.errors import (
    ClusterEnvironmentError,
    FailedPreconditionError,
    InternalError,
    InvalidTypeError,
    InvalidValueError,
    NotFoundError,
    UnknownError,
)
from phalanx.job.hub.descriptions import Task
from phalanx.job.preflight import bind_host, is_loopback
from phalanx.job.state_folders import server_folder
from phalanx.job.tokens import find_token
from phalanx.net.addresses import join_address, split_address
from phalanx.net.endpoint import Endpoint
from phalanx.parameter_server import service as parameter_service
from phalanx.runtime import interrupts
from phalanx.runtime.devices import compute_in_calling_threads
from phalanx.runtime.formatting import shown

__all__ = ["Server", "Service"]

_log = logging.getLogger("phalanx")

_PROTOCOLS = ("grpc", "grpc+verbs")
_LOOK_EVERY = 60.0  # seconds
_ALONE = 4.5  # seconds without any other task, after which the one that should be there is named


class _NoSuchTaskError(InternalError, InvalidValueError):
    """The cluster has no such task. TensorFlow's server says that it is an internal error."""


class _CannotListenError(UnknownError, ClusterEnvironmentError):
    """The port is in use, or the address is not this machine's."""


class Service(Protocol):
    """What a server does for those who connect to it."""

    def admit(self, sock: Any, purpose: dict[str, Any]) -> None:
        """Take a connection."""

    def status(self) -> Mapping[str, Any]:
        """What the service holds and has done."""

    @property
    def connections(self) -> int:
        """How many connections it has, about."""

    def close(self) -> None:
        """End it, with its connections."""


class Server:
    """This process as one task of a cluster, in which it serves the others.

    A parameter server holds variables, a worker runs the functions that a coordinator schedules. All
    servers answer remote calls of ``status`` and ``stop`` (see `px.rpc.Client`). The server listens at
    the address that the cluster gives to its task. Peers must know the job's token.

    Args:
        server_or_cluster_def: the cluster as a `ClusterSpec`, a `ClusterDef` or a dict; or a
            `ServerDef`, which also says which task this is.
        job_name: the task's job; the default is that of the `ServerDef`, or the only one there is.
        task_index: the task's index in the job, with defaults as for `job_name`.
        protocol: the name of the protocol, 'grpc'; servers speak Phalanx's own.
        config: kept in `server_def`.
        start: whether to start the server now.

    Examples:
        >>> import phalanx as px
        >>> server = px.Server({"ps": ["localhost:0"]})
        >>> server.server_def.job_name, server.server_def.task_index
        ('ps', 0)
        >>> server.stop()
        >>> server.join()
    """

    def __init__(
        self,
        server_or_cluster_def: ServerDef | ClusterDef | ClusterSpec | Mapping[str, Sequence[str]],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        self._def = _server_def(server_or_cluster_def, job_name, task_index, protocol, config)
        self._cluster = ClusterSpec(self._def.cluster)
        self._task, is_local = _own_task(self._def, self._cluster)
        self._key = find_token(is_local).encode()
        self._endpoint = _endpoint(self._task, is_local, self._key)
        self._task = replace(self._task, address=self._endpoint.address)
        self._begun = time.monotonic()
        self._stopped = interrupts.Bell()
        self._is_running = self._is_over = self._has_served = False
        self._services: dict[str, Service] = {}
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """A server on this machine, the only task of a cluster of its own, at a free port.

        Args:
            config: kept in `server_def`.
            start: whether to start the server now.

        Examples:
            >>> import phalanx as px
            >>> server = px.Server.create_local_server()
            >>> server.server_def.job_name, server.target.split(":")[0]
            ('localhost', 'grpc')
            >>> server.stop()
        """
        cluster = ClusterSpec({"localhost": ["localhost:0"]})
        return Server(cluster, protocol="grpc", config=config, start=start)

    @property
    def server_def(self) -> ServerDef:
        """The cluster, and which task of it this server is."""
        return self._def

    @property
    def target(self) -> str:
        """Where the server can be reached, with the name of the protocol in front."""
        return f"{self._def.protocol}://{self._task.address}"

    def start(self) -> None:
        """Accept connections, and serve in threads of this process.

        Nothing happens if the server runs already.
        """
        if self._is_over:
            raise FailedPreconditionError(
                f"A server cannot be started again once it was stopped. Received: {self!r}"
            )
        if self._is_running:
            return
        self._is_running = True
        makers = _services(self._task.type)
        calls = RpcService({"status": self._status, "stop": self._stop_soon}, threads=2)
        self._services = {rpc_service.PURPOSE: calls}
        for purpose, make in makers.items():
            self._services[purpose] = make(self._endpoint, self._cluster, self._task, self._key)
        for purpose, service in self._services.items():
            self._endpoint.serve(purpose, partial(self._admit, service))
        self._endpoint.start()

    def _admit(self, service: Service, sock: Any, purpose: dict[str, Any]) -> None:
        self._has_served |= not isinstance(service, RpcService)  # people may ask for its status
        service.admit(sock, purpose)

    def join(self) -> None:
        """Wait until the server is stopped, by `stop` in another thread or from another process.

        Ctrl-C interrupts the wait.
        """
        if not (self._is_running or self._is_over):
            raise FailedPreconditionError(
                f"The server has not been started, so nothing would ever stop it. Received: {self!r}"
            )
        if _services(self._task.type):
            compute_in_calling_threads()  # this process does nothing else
            self._endpoint.loop.spin()
            if "PHALANX_HUB" not in os.environ:  # else the launcher says which tasks are missing
                self._wait_for_others()
        while not self._is_over:
            self._stopped.wait(_LOOK_EVERY)
        self._stopped.ring()  # for the next who waits

    @property
    def _is_used(self) -> bool:
        """Whether tasks are connected; people who ask for the status are none."""
        return any(s.connections for s in self._services.values() if not isinstance(s, RpcService))

    def _wait_for_others(self) -> None:
        """Wait until the server is stopped, and say so while no task uses it; no wait is silent."""
        chief = ""
        for index in self._cluster.task_indices("chief") if "chief" in self._cluster.jobs else ():
            chief = f", also not chief {index} at {self._cluster.task_address('chief', index)}"
        since, silence, pause = self._begun, _ALONE, _ALONE
        while not (self._is_over or self._stopped.wait(_ALONE / 4)):
            if self._is_used:
                since, silence, pause = time.monotonic(), _ALONE, _ALONE
            seconds = time.monotonic() - since
            if seconds < silence:
                continue
            pause = min(2 * pause, _LOOK_EVERY)
            silence = seconds + pause
            _log.warning(
                "%s at %s has been waiting for %.0f seconds, and no task %s%s.%s",
                self._task,
                self._task.address,
                seconds,
                "uses it any more" if self._has_served else "has come yet",
                chief,
                " It serves until it is stopped." if self._has_served else "",
            )

    def stop(self) -> None:
        """Stop listening, end all connections, and let `join` return."""
        if self._is_over:
            return
        self._is_over = True
        try:
            self._endpoint.stop_listening()  # or a service would get a connection after its end
            for service in self._services.values():
                service.close()
            self._endpoint.close()
        finally:
            self._stopped.ring()

    def __repr__(self) -> str:
        state = "stopped" if self._is_over else "running" if self._is_running else "not started"
        return f"<px.Server of {self._task} at {self._task.address}, {state}>"

    def __del__(self) -> None:
        if not getattr(self, "_is_running", True):
            self._endpoint.close()  # else the process serves as long as it lives

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _status(self) -> dict[str, Any]:
        return {
            "task": str(self._task),
            "pid": os.getpid(),
            "seconds": time.monotonic() - self._begun,
            **{purpose: dict(service.status()) for purpose, service in self._services.items()},
        }

    def _stop_soon(self) -> None:
        """Stop, after this call has been answered."""
        interrupts.start(threading.Thread(target=self.stop, name="phalanx-server-stop", daemon=True))


Maker = Callable[[Endpoint, ClusterSpec, Task, bytes], Service]


def _services(job: str) -> dict[str, Maker]:
    """What makes the services of a task of a job, by their purposes."""
    if job == "ps":
        return {parameter_service.PURPOSE: _parameter_service}
    if job == "worker":
        return {CLOSURES: _worker_service}
    return {}


def _parameter_service(endpoint: Endpoint, cluster: ClusterSpec, task: Task, key: bytes) -> Service:
    return parameter_service.ParameterService(endpoint.loop, server_folder(task))


def _worker_service(endpoint: Endpoint, cluster: ClusterSpec, task: Task, key: bytes) -> Service:
    return WorkerService()


def _endpoint(task: Task, is_local: bool, key: bytes) -> Endpoint:
    try:
        host = bind_host(task, is_local, os.environ.get("PHALANX_BIND"))
        return Endpoint(task.address, key, host=host)
    except ClusterEnvironmentError as error:
        raise _CannotListenError(f"{task} cannot serve. {error}") from error


def _server_def(
    given: Any, job_name: str | None, task_index: int | None, protocol: str | None, config: Any
) -> ServerDef:
    if isinstance(given, ServerDef):
        result = ServerDef()
        result.CopyFrom(given)
    else:
        try:
            cluster = ClusterSpec(given)
        except InvalidTypeError as error:
            raise InvalidTypeError(
                "`server_or_cluster_def` must describe a cluster or a server, as a ServerDef, a "
                f"ClusterDef, a ClusterSpec or a dict. Received: {shown(given)}"
            ) from error
        job_name = _only("job_name", cluster.jobs) if job_name is None else job_name
        if task_index is None:
            task_index = _only("task_index", cluster.task_indices(job_name))
        result = ServerDef(cluster=cluster.as_cluster_def(), protocol="grpc")
    if job_name is not None:
        result.job_name = job_name
    if task_index is not None:
        result.task_index = checked_index(task_index, "`task_index`")
    if protocol is not None:
        result.protocol = protocol
    if config is not None:
        result.default_session_config = config
    result.protocol = result.protocol or "grpc"
    if result.protocol not in _PROTOCOLS:
        raise NotFoundError(
            "There is no server for this protocol. Leave `protocol` out, or write 'grpc'. "
            f"Received: {shown(result.protocol)}"
        )
    return result


def _only(what: str, choices: Sequence[Any]) -> Any:
    if len(choices) != 1:
        raise InvalidValueError(f"Say which `{what}` this server has. Received: one of {list(choices)}")
    return choices[0]


def _own_task(server: ServerDef, cluster: ClusterSpec) -> tuple[Task, bool]:
    """The task of a server, with its address, and whether all of the cluster is on one machine."""
    job, index = server.job_name, server.task_index
    if job not in cluster.jobs or index not in cluster.task_indices(job):
        raise _NoSuchTaskError(
            f"The server must be a task of its cluster, {cluster}. Received: {job} {index}"
        )
    host, port = split_address(cluster.task_address(job, index))
    tasks = [
        cluster.task_address(job, index) for job in cluster.jobs for index in cluster.task_indices(job)
    ]
    is_local = all(is_loopback(split_address(address)[0]) for address in tasks)
    return Task(job, index, join_address(host, server.port or port)), is_local
