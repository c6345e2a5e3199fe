"""`MultiWorkerMirroredStrategy`: synchronous training over several processes and machines."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from phalanx.cluster import roles
from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.tfconfig import resolver_or_tf_config
from phalanx.collectives import device_programs
from phalanx.collectives.cross_worker_ops import CrossWorkerOps
from phalanx.core.options import (
    CommunicationImplementation,
    CommunicationOptions,
    as_communication_options,
)
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.strategy import Strategy
from phalanx.core.values import PerReplica
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import VariableSpec
from phalanx.errors import DivergenceError, InvalidValueError
from phalanx.job.bootstrap import JobConnection
from phalanx.job.connection import connect_once
from phalanx.runtime import compat
from phalanx.runtime.devices import default_devices, device_name
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import Span, place
from phalanx.strategies.mirrored import MirroredExtended

_log = logging.getLogger("phalanx")


class OldMultiWorkerMirroredStrategy(Strategy):
    """`MultiWorkerMirroredStrategy` with the arguments that it had before TensorFlow 2.4.

    Args:
        communication: a `px.experimental.CommunicationImplementation` or its name.
        cluster_resolver: who the workers are; by default TF_CONFIG.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        self._start(cluster_resolver, CommunicationOptions(implementation=communication))

    def _start(self, cluster_resolver: ClusterResolver | None, options: CommunicationOptions) -> None:
        self._cluster_resolver = resolver_or_tf_config(cluster_resolver)
        connection = connect_workers(self._cluster_resolver, options)
        if connection is None:
            super().__init__(MirroredExtended(self, default_devices()))
        else:
            super().__init__(MultiWorkerExtended(self, connection, options))
        devices = ", ".join(device_name(d) for d in self.extended._replica_devices if d is not None)
        _log.info(
            "MultiWorkerMirroredStrategy: %d replica(s), here %s", self.num_replicas_in_sync, devices
        )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Who the workers are."""
        return self._cluster_resolver


class MultiWorkerMirroredStrategy(OldMultiWorkerMirroredStrategy):
    """Synchronous training on the devices of several workers, each a process of its own.

    Every worker runs the same program. Each of its devices runs one replica, and variables have a copy
    on every device of every worker; the copies stay equal. Create the strategy at the top of the
    program: it waits until all workers have joined.

    Without a cluster, or with a single worker, it is like `MirroredStrategy`.

    Args:
        cluster_resolver: finds the workers, and which of them this process is; by default
            the environment variable TF_CONFIG, which `phalanx run` also sets.
        communication_options: how tensors are packed, and how long to wait for other workers.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MultiWorkerMirroredStrategy()
        >>> strategy.cluster_resolver.cluster_spec().as_dict()
        {}
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        if not isinstance(communication_options, CommunicationOptions | None):
            raise InvalidValueError(
                "communication_options must be a px.experimental.CommunicationOptions or None. "
                f"Received: {shown(communication_options)}"
            )
        self._start(cluster_resolver, as_communication_options(communication_options))


def connect_workers(resolver: ClusterResolver, options: CommunicationOptions) -> JobConnection | None:
    """Meet the other workers; None if this process works alone."""
    spec = resolver.cluster_spec()
    task_type, task_id = resolver.task_type, resolver.task_id
    if not spec or not spec.jobs:
        return None
    roles.validate_cluster_spec(spec, task_type, task_id)
    if task_type is None or task_id is None:
        raise InvalidValueError(
            "The cluster has several tasks, but the resolver does not say which of them this process "
            f"is: its task_type and task_id must be set. Received: {spec}"
        )
    if task_type == "ps":
        raise InvalidValueError(
            "MultiWorkerMirroredStrategy has no parameter servers; a task of this strategy is a chief, "
            f"a worker or an evaluator. Received: task_type={shown(task_type)}"
        )
    if task_type == "evaluator" or roles.worker_count(spec, task_type) == 1:
        return None
    return connect_once(resolver, options.timeout_seconds)


class MultiWorkerExtended(MirroredExtended):
    """What `MultiWorkerMirroredStrategy` does on one of several workers."""

    def __init__(
        self, container_strategy: Strategy, connection: JobConnection, options: CommunicationOptions
    ) -> None:
        span = tuple(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))
        local = tuple(d for d in span if d.process_index == jax.process_index())
        super().__init__(container_strategy, local, CrossWorkerOps(local, span, options))
        self._everywhere, self._connection = span, connection

    @property
    def _span(self) -> Span:
        return self._everywhere

    @property
    def _first_replica(self) -> int:
        return self._everywhere.index(self._devices[0])

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker builds its own part of the computation: yes."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes variables: all do, with the first worker's values."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: the first worker does."""
        return self._connection.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: the first worker does."""
        return self._connection.rank == 0

    # -- other workers ---------------------------------------------------------------------------

    @property
    def _input_worker(self) -> tuple[int, int]:
        return self._connection.size, self._connection.rank

    def _exchange(self, name: str, value: Any, given_up: threading.Event | None = None) -> list[Any]:
        return self._connection.member.exchange(name, value, given_up=given_up)

    def _from_first(self, value: PerReplica) -> Any:
        if isinstance(value, SpmdPerReplica):
            return value.first()
        assert isinstance(self._communicator, CrossWorkerOps)
        return self._communicator.from_first(value)

    def _require_agreement(self, value: Any, what: str) -> None:
        if compat.is_staging() or any(compat.is_tracer(x) for x in jax.tree.leaves(value)):
            return
        digests = self._exchange("values that must agree", [what, _digest(value)])
        different = [i for i, other in enumerate(digests) if other != digests[0]]
        if different:
            raise DivergenceError(
                f"{what} would write different values on different workers, to copies that must stay "
                "equal. Combine the values first, as with strategy.reduce. Received: values that "
                f"differ between worker 0 and worker {different[0]}; here {value!r}"
            )

    def _create_variable(self, spec: VariableSpec) -> Variable:
        def from_chief() -> jax.Array:
            values = [place(spec.value, d) for d in self._devices]
            value: jax.Array = device_programs.from_first(values, self._devices, self._span).values[0]
            return value

        # A thread of its own, because variables may be made while this one traces a program.
        with ThreadPoolExecutor(1, "phalanx-initial-value") as thread:
            value = thread.submit(from_chief).result()
        return super()._create_variable(dataclasses.replace(spec, value=value))


def _digest(value: Any) -> str:
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(value):
        host = np.asarray(jax.random.key_data(leaf) if compat.is_key_array(leaf) else leaf)
        hashed.update(repr((host.shape, host.dtype.str)).encode() + host.tobytes())
    return hashed.hexdigest()
