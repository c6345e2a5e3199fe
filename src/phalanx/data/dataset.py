"""`Dataset`: the friendly face of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import InvalidTypeError, InvalidValueError
from phalanx.data import checks, sources
from phalanx.data.batching import Batch
from phalanx.data.elements import DatasetSpec, LeafBase
from phalanx.data.iterator import Epochs, Iterator
from phalanx.data.node import Node
from phalanx.data.reorder import SHARD_HINT, Repeat, Shard, Skip, Take
from phalanx.data.shuffling import Shuffle


class Dataset(LeafBase):
    """A sequence of elements, as a plan that is run by whoever iterates."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._epochs = Epochs()

    @property
    def element_spec(self) -> Any:
        """What is known of the elements: a pytree of `TensorSpec`."""
        return self._node.element_spec

    def _leaf_spec(self) -> Any:
        return DatasetSpec(self.element_spec)

    def cardinality(self) -> int:
        """The number of elements, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        return self._node.cardinality

    def __len__(self) -> int:
        size = self.cardinality()
        if size < 0:
            raise InvalidTypeError(
                f"The dataset's length is {'infinite' if size == -1 else 'unknown'}. Received: len(dataset)"
            )
        return size

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator:
        return self.iterator()

    def iterator(self, state: Mapping[str, int] | None = None) -> Iterator:
        """An iterator, from the beginning or from a `state` of an earlier one."""
        iterator = Iterator(self._node, self._epochs)
        if state is not None:
            iterator.restore(state)
        return iterator

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """The slices of arrays along their first dimension."""
        return Dataset(sources.slices(tensors))

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """One element."""
        return Dataset(sources.single(tensors))

    @staticmethod
    def range(*args: int, output_type: Any = None, name: str | None = None) -> Dataset:
        """The numbers of a range."""
        import numpy as np

        return Dataset(sources.Range((), range(*args), output_type or np.int64))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stack consecutive elements."""
        return Dataset(
            Batch((self._node,), checks.integer(batch_size, "batch_size", 1), drop_remainder)
        )

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool | None = None
    ) -> Dataset:
        """Random order."""
        again = reshuffle_each_iteration is None or reshuffle_each_iteration
        size = checks.integer(buffer_size, "buffer_size", 1)
        return Dataset(Shuffle((self._node,), size, checks.seed(seed), again))

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat."""
        return Dataset(Repeat((self._node,), None if count in (None, -1) else count))

    def take(self, count: int) -> Dataset:
        """The first elements."""
        return Dataset(Take((self._node,), count))

    def skip(self, count: int) -> Dataset:
        """All but the first elements."""
        return Dataset(Skip((self._node,), count))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Every `num_shards`-th element."""
        return Dataset(Shard((self._node,), num_shards, index))
