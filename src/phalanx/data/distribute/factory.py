"""Making distributed datasets: what the input methods of strategies do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.core.options import InputContext, InputOptions, InputReplicationMode
from phalanx.data.dataset import Dataset
from phalanx.data.distribute.distributed_dataset import DistributedDataset, DistributedIterator
from phalanx.data.distribute.input_topology import InputTopology
from phalanx.data.distribute.sharding import Division, check_batched, divide
from phalanx.data.ops.prefetching import Prefetch
from phalanx.data.ops.selecting import WithOptions
from phalanx.data.plan.loaders import as_loader
from phalanx.data.plan.nodes import PlanNode
from phalanx.data.plan.opening import row_source
from phalanx.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.runtime.formatting import shown

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy

PER_REPLICA = InputReplicationMode.PER_REPLICA


def distribute_dataset(
    strategy: Strategy, dataset: Any, options: InputOptions | None
) -> DistributedDataset:
    """`Strategy.experimental_distribute_dataset`."""
    options = checked(options)
    if options.experimental_replication_mode is PER_REPLICA:
        raise UnsupportedError(
            "A dataset is divided by its batches, so there is one pipeline per worker. For one per "
            "replica use distribute_datasets_from_function under px.MirroredStrategy. "
            "Received: InputReplicationMode.PER_REPLICA"
        )
    node = plan_of(dataset)
    policy, deterministic = settings_of(dataset)

    def plan(topology: InputTopology) -> DistributedDataset:
        mine, division = divide(node, policy, topology.workers, topology.worker, topology.replicas)
        return DistributedDataset(topology, options, division, [mine], node, plan, deterministic)

    return plan(InputTopology.of(strategy))


def distribute_from_function(
    strategy: Strategy, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None
) -> DistributedDataset:
    """`Strategy.distribute_datasets_from_function`."""
    options = checked(options)
    per_replica = options.experimental_replication_mode is PER_REPLICA
    if options.experimental_place_dataset_on_device and not per_replica:
        raise InvalidValueError(
            "experimental_place_dataset_on_device needs InputReplicationMode.PER_REPLICA. "
            f"Received: {shown(options)}"
        )
    if options.experimental_place_dataset_on_device and options.experimental_fetch_to_device:
        raise InvalidValueError(
            "experimental_place_dataset_on_device and experimental_fetch_to_device exclude each other. "
            f"Received: {shown(options)}"
        )
    topology = InputTopology.of(strategy)
    if per_replica and (topology.workers > 1 or not strategy.extended._wraps_values):
        raise UnsupportedError(
            "Calling an input function once per replica needs a strategy with several replicas in one "
            f"process, such as px.MirroredStrategy. Received: {shown(strategy)}"
        )

    def plan(topology: InputTopology) -> DistributedDataset:
        total = topology.workers * topology.replicas
        if per_replica:
            contexts = [InputContext(topology.replicas, i, total) for i in range(topology.replicas)]
        else:
            contexts = [InputContext(topology.workers, topology.worker, total)]
        datasets = [dataset_fn(context) for context in contexts]
        nodes = [plan_of(dataset) for dataset in datasets]
        for node in nodes:
            check_batched(node, pieces=1)
        division = Division(topology.workers, topology.worker, topology.replicas)
        deterministic = settings_of(datasets[0])[1]
        return DistributedDataset(topology, options, division, nodes, None, plan, deterministic)

    return plan(topology)


def numpy_dataset(numpy_input: Any) -> Dataset:
    """`Strategy.experimental_make_numpy_dataset`."""
    return Dataset.from_tensor_slices(numpy_input)


def checked(options: Any) -> InputOptions:
    """The options, or the default ones."""
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise InvalidTypeError(f"options must be px.InputOptions or None. Received: {shown(options)}")
    depth = options.experimental_per_replica_buffer_size
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise InvalidValueError(
            "experimental_per_replica_buffer_size must be a whole number, 0 for no reading ahead. "
            f"Received: {shown(depth)}"
        )
    return options


def plan_of(dataset: Any) -> PlanNode:
    """The plan of a dataset, or of another iterable."""
    if isinstance(dataset, DistributedDataset | DistributedIterator):
        raise InvalidTypeError(
            "A dataset can be distributed once; distribute the dataset that this one was made from. "
            f"Received: {shown(dataset)}"
        )
    if not isinstance(dataset, Dataset):
        return as_loader(dataset)
    node = dataset._node
    below = node
    while isinstance(below, Prefetch | WithOptions):
        below = below.input
    # The distributed iterator reads ahead itself; rows that are only moved need no other buffer.
    return node if row_source(below) is None else below


def settings_of(dataset: Any) -> tuple[str, bool]:
    """The name of a dataset's auto-shard policy, and whether its order must be kept.

    What is no `px.data.Dataset` is divided by its data.
    """
    if not isinstance(dataset, Dataset):
        return "DATA", True
    options = dataset.options()
    return options.experimental_distribute.auto_shard_policy.name, options.deterministic
