"""`px.experimental.ParameterServerStrategy`: parameter servers without a coordinator.

Every worker runs the whole program, on variables that all of them share. The first one makes the
variables; the others wait for each of them. Nothing else connects the workers.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.cluster import roles
from phalanx.core.options import InputContext
from phalanx.errors import DeadlineExceededError, InvalidValueError
from phalanx.job.hub.descriptions import Task
from phalanx.job.launcher_notice import tell_whether_workers_train
from phalanx.parameter_server.client import ServerConnections
from phalanx.parameter_server.joining import find_run, run_of_all
from phalanx.parameter_server.remote_variable import RemoteVariable
from phalanx.parameter_server.requests import VariableDefinition
from phalanx.parameter_server.watch import ServerWatch
from phalanx.runtime.formatting import shown
from phalanx.strategies.parameter_server import (
    ParameterServerExtended,
    ParameterServerStrategy,
    WorkersDataset,
)

_log = logging.getLogger("phalanx")

_PAUSE = 0.02  # seconds between looks for a variable
_NAMED = 5.0  # seconds after which it is said who is missing, again and again


class OldParameterServerExtended(ParameterServerExtended):
    """What `px.experimental.ParameterServerStrategy` does."""

    def __init__(self, container_strategy: OldParameterServerStrategy, *args: Any) -> None:
        super().__init__(container_strategy, *args)
        resolver = container_strategy.cluster_resolver
        self._type, self._id = resolver.task_type, resolver.task_id
        self._is_chief = self._type != "worker" or roles.is_chief(self._cluster, "worker", self._id)
        self._begins = self._is_chief
        if self._is_chief and self._type is not None:  # until a coordinator uses this strategy
            tell_whether_workers_train(True)

    @property
    def experimental_between_graph(self) -> bool:
        """True, as in TensorFlow: every worker has the whole program."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """Whether this task makes the variables, which the others wait for."""
        return self._is_chief

    @property
    def should_checkpoint(self) -> bool:
        """Whether this task writes checkpoints."""
        return self._is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this task writes summaries."""
        return self._is_chief

    def check_coordinates(self) -> None:
        """Require that a coordinator may run here."""
        if self._type == "worker":
            raise InvalidValueError(
                "This task is a worker, which runs the whole program under "
                "px.experimental.ParameterServerStrategy. A coordinator is a task of its own, mostly "
                f"the chief, and workers run a px.Server then. Received: task {self._type} {self._id}"
            )
        if self._type == "chief":
            tell_whether_workers_train(False)

    def _new_watch(self) -> ServerWatch:
        return ServerWatch(self.session, weakref.ref(self.home), settles=True)

    # -- variables -------------------------------------------------------------------------------

    def _reach(self) -> ServerConnections:
        timeout = self._options.worker_timeout
        if not self._is_chief:
            self.take_part(find_run(self.session, self._leader, timeout))
        elif int(os.environ.get("PHALANX_RESTART", "0")):  # go on with what this task had begun
            run = run_of_all(self.session, timeout)
            if run:
                self.take_part(run)
        return super()._reach()

    @property
    def _leader(self) -> Task:
        """The task that makes the variables."""
        job = "chief" if "chief" in self._cluster.jobs else "worker"
        return Task(job, 0, self._cluster.task_address(job, 0))

    def _create(self, definition: VariableDefinition, value: Any) -> None:
        if self._is_chief:
            super()._create(definition, value)
            return
        begun = named = time.monotonic()
        while not self._is_there(definition):
            now = time.monotonic()
            waited, limit = now - begun, self._options.worker_timeout
            if waited > limit:
                raise DeadlineExceededError(
                    f"{self._leader} has not made the variable {definition.name!r} within "
                    f"{limit:g} seconds. All workers must make the same variables, in the same "
                    f"order. Received: {shown(definition)}"
                )
            if now - named >= _NAMED:
                named = now
                _log.warning(
                    "Waiting for %s at %s to make the variable %r, for %.0f seconds.",
                    self._leader,
                    self._leader.address,
                    definition.name,
                    waited,
                )
            time.sleep(_PAUSE)

    def _is_there(self, definition: VariableDefinition) -> bool:
        with self.home.in_turn() as servers:
            assert isinstance(servers, ServerConnections)
            return servers.find(definition)

    def free_with(self, variable: RemoteVariable, optimizer: int = 0) -> None:
        """Other workers may still use the variable, so it lasts as long as the run does."""
        self._alive[variable.definition.id] = variable

    # -- input -----------------------------------------------------------------------------------

    def _distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return self._here(WorkerDataset(self._strategy, dataset, None, options))

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        return self._here(WorkerDataset(self._strategy, None, dataset_fn, options))

    def _here(self, dataset: WorkerDataset) -> Any:
        """The dataset of this worker; the chief may be a coordinator, and keep it for the workers."""
        return dataset.on_worker() if self._type == "worker" else dataset

    def distribute_here(self, dataset: Any, dataset_fn: Callable[..., Any] | None, options: Any) -> Any:
        """Distribute a dataset among the replicas of this worker."""
        if dataset_fn is None or self._type not in ("worker", "chief"):
            return super().distribute_here(dataset, dataset_fn, options)
        context = InputContext(
            roles.worker_count(self._cluster, self._type),
            roles.id_in_cluster(self._cluster, self._type, self._id or 0),
            self._num_replicas_in_sync,
        )
        return super().distribute_here(None, lambda _: dataset_fn(context), options)


class OldParameterServerStrategy(ParameterServerStrategy):
    """Asynchronous training without a coordinator: every worker runs the whole program.

    Parameter servers hold the variables, which all workers share. Each worker reads its own input and
    runs its own steps, at its own pace: the chief, or worker 0 if there is none, makes the variables,
    and the others wait for them. Make the same variables in the same order on all workers.

    Arguments are those of `px.ParameterServerStrategy`. A `px.coordinator.ClusterCoordinator` can use
    this strategy too; then it is the same as that one.

    Examples:
        A program for ``phalanx run -n 2 --ps 1 train.py``::

            resolver = px.cluster_resolver.TFConfigClusterResolver()
            if resolver.task_type == "ps":
                px.Server(resolver.cluster_spec(), "ps", resolver.task_id).join()
            else:
                strategy = px.experimental.ParameterServerStrategy(resolver)
                with strategy.scope():
                    weights = px.Variable(jnp.zeros(3))
                for batch in strategy.experimental_distribute_dataset(dataset):
                    strategy.run(step, args=(batch,))
    """

    _extended_type = OldParameterServerExtended


class WorkerDataset(WorkersDataset):
    """A dataset that this worker reads, or that a coordinator gives to its workers."""

    def __iter__(self) -> Iterator[Any]:
        """The batches of this worker."""
        return iter(self.on_worker())

    @property
    def element_spec(self) -> Any:
        """What the batches look like."""
        return self.on_worker().element_spec
