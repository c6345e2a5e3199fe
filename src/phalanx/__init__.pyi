# Where the public names live. `__init__.py` reads this file, and so do type checkers.
from phalanx import (
    cluster_resolver as cluster_resolver,
    comm as comm,
    config as config,
    coordinator as coordinator,
    data as data,
    errors as errors,
    estimator as estimator,
    experimental as experimental,
    io as io,
    keras as keras,
    losses as losses,
    metrics as metrics,
    nn as nn,
    optimizers as optimizers,
    parallel as parallel,
    partitioners as partitioners,
    random as random,
    rpc as rpc,
    summary as summary,
    testing as testing,
    train as train,
)
from phalanx.collectives.cross_device_ops import (
    AllReduceCrossDeviceOps as AllReduceCrossDeviceOps,
    CrossDeviceOps as CrossDeviceOps,
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    NcclAllReduce as NcclAllReduce,
    ReductionToOneDevice as ReductionToOneDevice,
)
from phalanx.coordinator.server import Server as Server
from phalanx.core.context import (
    experimental_set_strategy as experimental_set_strategy,
    get_replica_context as get_replica_context,
    get_strategy as get_strategy,
    has_strategy as has_strategy,
    in_cross_replica_context as in_cross_replica_context,
)
from phalanx.core.extended import StrategyExtended as StrategyExtended
from phalanx.core.indexed_slices import IndexedSlices as IndexedSlices
from phalanx.core.name_scopes import name_scope as name_scope
from phalanx.core.options import (
    InputContext as InputContext,
    InputOptions as InputOptions,
    InputReplicationMode as InputReplicationMode,
    RunOptions as RunOptions,
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
)
from phalanx.core.reduction import ReduceOp as ReduceOp
from phalanx.core.replica_context import ReplicaContext as ReplicaContext
from phalanx.core.strategy import Strategy as Strategy
from phalanx.core.tensor_spec import TensorSpec as TensorSpec
from phalanx.core.values import (
    DistributedValues as DistributedValues,
    Mirrored as Mirrored,
    PerReplica as PerReplica,
)
from phalanx.core.variables.distributed_variables import (
    AggregatingVariable as AggregatingVariable,
    MirroredVariable as MirroredVariable,
    SyncOnReadVariable as SyncOnReadVariable,
)
from phalanx.core.variables.variable import Variable as Variable
from phalanx.data.distribute.distributed_dataset import (
    DistributedDataset as DistributedDataset,
    DistributedIterator as DistributedIterator,
)
from phalanx.data.distribute.per_replica_spec import PerReplicaSpec as PerReplicaSpec
from phalanx.errors import PhalanxError as PhalanxError
from phalanx.execution.function import Function as Function, function as function
from phalanx.execution.gradients import (
    grad as grad,
    value_and_grad as value_and_grad,
    values_and_grads as values_and_grads,
)
from phalanx.execution.loops import Range as range
from phalanx.notebooks import launch as launch
from phalanx.parallel.context import (
    get_auto_parallel_context as get_auto_parallel_context,
    reset_auto_parallel_context as reset_auto_parallel_context,
    set_auto_parallel_context as set_auto_parallel_context,
)
from phalanx.parallel.strategy import AutoParallelStrategy as AutoParallelStrategy
from phalanx.parameter_server.remote_variable import RemoteVariable as RemoteVariable
from phalanx.parameter_server.sharded_variable import ShardedVariable as ShardedVariable
from phalanx.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from phalanx.strategies.default import DefaultStrategy as DefaultStrategy
from phalanx.strategies.mirrored import MirroredStrategy as MirroredStrategy
from phalanx.strategies.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from phalanx.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from phalanx.strategies.parameter_server import ParameterServerStrategy as ParameterServerStrategy
from phalanx.strategies.tpu import TPUStrategy as TPUStrategy
from phalanx.train.module import Module as Module
from phalanx.train.overview import show as show
from phalanx.train.profiling import profile as profile

__version__: str
