"""Making distributed datasets: what the input methods of strategies do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.core.options import InputContext, InputOptions, InputReplicationMode
from phalanx.core.showing import shown
from phalanx.data.dataset import Dataset
from phalanx.data.distributed import DistributedDataset, DistributedIterator
from phalanx.data.loaders import as_loader
from phalanx.data.node import Node
from phalanx.data.place import Place
from phalanx.data.prefetch import Prefetch
from phalanx.data.reorder import WithOptions
from phalanx.data.sharding import Division, check_batched, divide

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

    def plan(place: Place) -> DistributedDataset:
        mine, division = divide(node, policy, place.workers, place.worker, place.replicas)
        return DistributedDataset(place, options, division, [mine], node, plan, deterministic)

    return plan(Place.of(strategy))


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
    place = Place.of(strategy)
    if per_replica and (place.workers > 1 or not strategy.extended._wraps_values):
        raise UnsupportedError(
            "Calling an input function once per replica needs a strategy with several replicas in one "
            f"process, such as px.MirroredStrategy. Received: {shown(strategy)}"
        )

    def plan(place: Place) -> DistributedDataset:
        total = place.workers * place.replicas
        if per_replica:
            contexts = [InputContext(place.replicas, i, total) for i in range(place.replicas)]
        else:
            contexts = [InputContext(place.workers, place.worker, total)]
        datasets = [dataset_fn(context) for context in contexts]
        nodes = [plan_of(dataset) for dataset in datasets]
        for node in nodes:
            check_batched(node, pieces=1)
        division = Division(place.workers, place.worker, place.replicas)
        deterministic = settings_of(datasets[0])[1]
        return DistributedDataset(place, options, division, nodes, None, plan, deterministic)

    return plan(place)


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


def plan_of(dataset: Any) -> Node:
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
    return below if runs_on_rows(below) else node


def runs_on_rows(node: Node) -> bool:
    """Whether a plan only moves the rows of a source that can fetch any of them."""
    while node.rows() is None and node.moves:
        (node,) = node.inputs
    return node.rows() is not None


def settings_of(dataset: Any) -> tuple[str, bool]:
    """The name of a dataset's auto-shard policy, and whether its order must be kept.

    What is no `px.data.Dataset` is divided by its data.
    """
    if not isinstance(dataset, Dataset):
        return "DATA", True
    options = dataset.options()
    return options.experimental_distribute.auto_shard_policy.name, options.deterministic
