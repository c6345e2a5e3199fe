"""Phalanx: the `tf.distribute` system on JAX.

Write a training step once; run it on one device, on many, or with central storage by changing one line.

A map of the package:

* ``core``         what things mean: contexts, values, variables, reductions, strategies
* ``data``         datasets, and how they reach the replicas
* ``execution``    how `Strategy.run` runs
* ``collectives``  how data moves between devices
* ``strategies``   one file per strategy
* ``cluster``      which tasks a cluster has
* ``comm``         collectives between workers, and between replicas
* ``cli``          the ``phalanx`` command

Arrows point one way: core <- data <- execution <- collectives <- strategies. This module only
re-exports.
"""

from typing import NoReturn

from phalanx import (
    cluster_resolver,
    comm,
    config,
    data,
    errors,
    experimental,
    io,
    nn,
    partitioners,
    random,
    testing,
    train,
)
from phalanx.collectives.cross_device_ops import (
    AllReduceCrossDeviceOps,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from phalanx.core.context import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from phalanx.core.distributed_variables import (
    AggregatingVariable,
    MirroredVariable,
    SyncOnReadVariable,
)
from phalanx.core.errors import PhalanxError
from phalanx.core.extended import StrategyExtended
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.options import InputContext, InputOptions, InputReplicationMode, RunOptions
from phalanx.core.reduction import ReduceOp
from phalanx.core.replica_context import ReplicaContext
from phalanx.core.spelling import no_such_name
from phalanx.core.strategy import Strategy
from phalanx.core.synchronization import VariableAggregation, VariableSynchronization
from phalanx.core.tensor_spec import TensorSpec
from phalanx.core.values import DistributedValues, Mirrored, PerReplica
from phalanx.core.variables import Variable
from phalanx.data.distributed import DistributedDataset, DistributedIterator
from phalanx.data.specs import PerReplicaSpec
from phalanx.execution.function import Function, function
from phalanx.execution.gradients import grad, value_and_grad
from phalanx.execution.loops import Range as range  # noqa: N813 - as TensorFlow writes tf.range
from phalanx.strategies.central_storage import CentralStorageStrategy
from phalanx.strategies.default import DefaultStrategy
from phalanx.strategies.mirrored import MirroredStrategy
from phalanx.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx.strategies.one_device import OneDeviceStrategy
from phalanx.strategies.tpu import TPUStrategy

__version__ = "0.1.0"

__all__ = [
    "AggregatingVariable",
    "AllReduceCrossDeviceOps",
    "CentralStorageStrategy",
    "CrossDeviceOps",
    "DefaultStrategy",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Function",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MirroredVariable",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PerReplica",
    "PerReplicaSpec",
    "PhalanxError",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "SyncOnReadVariable",
    "TPUStrategy",
    "TensorSpec",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "comm",
    "config",
    "data",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "grad",
    "has_strategy",
    "in_cross_replica_context",
    "io",
    "nn",
    "partitioners",
    "random",
    "range",
    "testing",
    "train",
    "value_and_grad",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> NoReturn:
    no_such_name("px", name, __all__)
