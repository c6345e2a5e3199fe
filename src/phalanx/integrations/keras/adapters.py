"""Input of every kind that Keras or Phalanx knows, as one that gives batches on devices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from phalanx.core.values import PerReplica
from phalanx.data.dataset import Dataset
from phalanx.data.distribute.distributed_dataset import DistributedDataset
from phalanx.data.plan.dataset_options import AutoShardPolicy, Options
from phalanx.errors import InvalidValueError
from phalanx.integrations.keras import touch_points
from phalanx.integrations.keras.batches import Cut, PlacedBatch, dealt_order
from phalanx.integrations.keras.distribution import ModelDistribution
from phalanx.runtime.formatting import shown


class PlacedInput(touch_points.adapter_type()):  # type: ignore[misc]
    """A data adapter, as Keras calls it, whose batches are on devices."""

    def __init__(self) -> None:
        self._peeked: list[Any] = []
        self._iterator: Iterator[Any] | None = None

    def batches(self) -> Iterator[Any]:
        """The batches of one epoch."""
        raise NotImplementedError

    def get_jax_iterator(self) -> Iterator[Any]:
        """The batches of one epoch."""
        if self._iterator is not None:
            begun, self._iterator = self._iterator, None
            return itertools.chain(self._peeked, begun)
        return self.batches()

    def peek(self) -> Any:
        """The first batch, which is given again when the first epoch begins."""
        if self._iterator is None:
            self._iterator = self.batches()
            self._peeked = [next(self._iterator)]
        return self._peeked[0]


class HostInput(PlacedInput):
    """Whole batches on the host, the same on all workers; each puts its replicas' rows on devices."""

    def __init__(self, distribution: ModelDistribution, inner: Any) -> None:
        super().__init__()
        self._devices, self._inner = distribution.devices, inner

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has, if that is known."""
        return self._inner.num_batches

    @property
    def batch_size(self) -> int | None:
        """How many rows a batch has, if that is known."""
        return self._inner.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        """Whether the last batch has fewer rows."""
        return self._inner.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        """How many rows the last batch has."""
        return self._inner.partial_batch_size

    def on_epoch_begin(self) -> None:
        """An epoch begins."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """An epoch has ended."""
        self._inner.on_epoch_end()

    def batches(self) -> Iterator[Any]:
        """The batches of one epoch."""
        for batch in self._inner.get_jax_iterator():
            leaves, structure = jax.tree.flatten(batch)
            yield jax.tree.unflatten(structure, [self._devices.put(x, i) for i, x in enumerate(leaves)])


class DatasetInput(PlacedInput):
    """Batches of a `px.data.Dataset`, or elements of a `px.DistributedDataset`.

    Args:
        distribution: of the model.
        dataset: where batches come from.
        ordered: whether rows must keep their order, as in predictions.
        class_weight: the weight of each class, if there are any.
    """

    batch_size = has_partial_batch = partial_batch_size = None

    def __init__(
        self,
        distribution: ModelDistribution,
        dataset: Dataset | DistributedDataset,
        ordered: bool = False,
        class_weight: Any = None,
    ) -> None:
        super().__init__()
        self._devices = distribution.devices
        self._order: tuple[int, ...] | None = None
        if isinstance(dataset, Dataset):
            dataset = self._distributed(distribution, dataset, ordered, class_weight)
        elif class_weight is not None:
            raise InvalidValueError(
                "class_weight needs the labels of whole batches, but those of a distributed dataset "
                "are divided already. Let the dataset give sample weights, or pass a px.data.Dataset. "
                f"Received: class_weight={shown(class_weight)}"
            )
        self._dataset = dataset
        self._length = dataset.steps if dataset.steps >= 0 else None

    def _distributed(
        self, distribution: ModelDistribution, dataset: Dataset, ordered: bool, class_weight: Any
    ) -> DistributedDataset:
        workers = self._devices.workers
        if class_weight is not None:
            dataset = dataset.map(lambda *batch: touch_points.with_class_weights(batch, class_weight))
        if ordered and workers > 1:
            options = Options()
            options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
            dataset = dataset.with_options(options)
            self._order = dealt_order(self._devices.count, workers)
        made: DistributedDataset = distribution.strategy.experimental_distribute_dataset(dataset)
        return made

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has, if that is known."""
        return self._length

    def batches(self) -> Iterator[Any]:
        """The batches of one epoch."""
        steps = 0
        for element in self._dataset:
            leaves, structure = jax.tree.flatten(element, is_leaf=_is_value)
            yield jax.tree.unflatten(structure, [self._placed(x, i) for i, x in enumerate(leaves)])
            steps += 1
        self._length = steps

    def _placed(self, x: Any, number: int) -> PlacedBatch:
        placed = self._devices.put(x, number)
        if self._order is None or not placed.shape:
            return placed
        count = len(self._order)
        even = (placed.array.shape[0] // count,) * count
        return PlacedBatch(placed.array, Cut(placed.cut.sizes if placed.cut else even, self._order))


class PlainInput(PlacedInput):
    """Batches of a `px.data.Dataset` for a model without a strategy: as they are."""

    batch_size = has_partial_batch = partial_batch_size = None

    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self._dataset = dataset

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has, if that is known."""
        size = self._dataset.cardinality()
        return size if size >= 0 else None

    def batches(self) -> Iterator[Any]:
        """The batches of one epoch."""
        return iter(self._dataset)


def plain_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model without a strategy, with datasets as Keras knows them."""
    x, weights = call["x"], call.get("class_weight")
    if isinstance(x, Dataset):
        _refuse(call.get("y"), "y", "the targets")
        _refuse(call.get("sample_weight"), "sample_weight", "the weights")
        if weights is not None:
            x = x.map(lambda *batch: touch_points.with_class_weights(batch, weights))
            call = call | {"class_weight": None}
        call = call | {"x": PlainInput(x)}
    if isinstance(call.get("validation_data"), Dataset):
        call = call | {"validation_data": PlainInput(call["validation_data"])}
    return call


def _is_value(x: Any) -> bool:
    return isinstance(x, PerReplica)


def input_for(
    distribution: ModelDistribution,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: Any = False,
    class_weight: Any = None,
    ordered: bool = False,
) -> Any:
    """What Keras's `fit`, `evaluate` and `predict` are to take batches from."""
    if isinstance(x, touch_points.adapter_type()):
        return x
    if isinstance(x, Dataset | DistributedDataset):
        _refuse(y, "y", "the targets")
        _refuse(sample_weight, "sample_weight", "the weights")
        return DatasetInput(distribution, x, ordered, class_weight)
    inner = touch_points.data_adapter(x, y, sample_weight, batch_size, steps, shuffle, class_weight)
    return HostInput(distribution, inner)


def _refuse(value: Any, name: str, what: str) -> None:
    if value is not None:
        raise InvalidValueError(
            f"A dataset gives {what} with its batches, so {name} must not be passed. "
            f"Received: {name}={shown(value)}"
        )


def shuffle_alike(distribution: ModelDistribution) -> None:
    """Let all workers shuffle as the first one does: Keras takes NumPy's and Python's generators."""
    devices = distribution.devices
    if not devices.spans_workers:
        return
    kind, keys, *others = np.random.get_state()
    version, numbers, gauss = random.getstate()
    here = [[kind, np.asarray(keys).tolist(), *others], [version, list(numbers), gauss]]
    (kind, keys, *others), (version, numbers, gauss) = devices.exchange("how to shuffle", here)[0]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *others))
    random.setstate((version, tuple(numbers), gauss))
