"""`px.coordinator`: closures that workers run, in any order, on variables of parameter servers.

- `phalanx.coordinator.state`: which closure runs where, as a pure machine.
- `phalanx.coordinator.actions`: what the machine wants to be done.
- `phalanx.coordinator.peer`: what goes out to one worker.
- `phalanx.coordinator.cluster_coordinator`: the coordinator, as users see it.
- `phalanx.coordinator.dispatcher`: the thread that has the machine and all connections to workers.
- `phalanx.coordinator.worker_link`: the connection to one worker, made again when it is lost.
- `phalanx.coordinator.worker_service`: the worker's side: runs closures.
- `phalanx.coordinator.messages`, `phalanx.coordinator.values`: what they tell each other.
- `phalanx.coordinator.remote_value`, `phalanx.coordinator.per_worker`: values that are elsewhere.
- `phalanx.coordinator.checkpoints`: the queue and the variables, for a restart.
- `phalanx.coordinator.server`: this process as a task that serves the others.
- `phalanx.coordinator.rpc`, `phalanx.coordinator.rpc_service`: functions that are called by name.
- `phalanx.coordinator.reports`: what happens in the coordinator.
- `phalanx.coordinator.overview`: what all tasks do, for ``phalanx explain``.
- `phalanx.coordinator.evaluator`: evaluates checkpoints beside a training.
"""

from phalanx.coordinator.cluster_coordinator import ClusterCoordinator
from phalanx.coordinator.evaluator import SidecarEvaluator
from phalanx.coordinator.remote_value import (
    PerWorkerValues,
    PerWorkerValues as PerWorkerValue,
    RemoteValue,
    RemoteValueStatus,
)
from phalanx.coordinator.worker_index import experimental_get_current_worker_index

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "RemoteValueStatus",
    "SidecarEvaluator",
    "experimental_get_current_worker_index",
]


def __dir__() -> list[str]:
    return __all__
