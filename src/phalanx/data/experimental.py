"""`px.data.experimental`: the names that TensorFlow keeps under `tf.data.experimental`."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.data.dataset import Dataset
from phalanx.data.files.datasets import CsvDataset
from phalanx.data.ops.selecting import SHARD_HINT, AssertCardinality
from phalanx.data.plan import argument_checks as checks
from phalanx.data.plan.argument_checks import AUTOTUNE
from phalanx.data.plan.dataset_options import AutoShardPolicy, DistributeOptions
from phalanx.data.plan.nodes import INFINITE as INFINITE_CARDINALITY, UNKNOWN as UNKNOWN_CARDINALITY
from phalanx.errors import InvalidValueError

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "CsvDataset",
    "DistributeOptions",
    "assert_cardinality",
    "cardinality",
]


def cardinality(dataset: Dataset) -> int:
    """The number of elements of a dataset, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`.

    Examples:
        >>> import phalanx as px
        >>> px.data.experimental.cardinality(px.data.Dataset.range(5).batch(2))
        3
    """
    found: Dataset = checks.dataset(dataset, "cardinality")
    return found.cardinality()


def assert_cardinality(expected_cardinality: int) -> Callable[[Dataset], Dataset]:
    """For `Dataset.apply`: says how many elements there are, and fails where it turns out to be wrong.

    Examples:
        >>> import phalanx as px
        >>> odd = px.data.Dataset.range(10).filter(lambda x: x % 2 == 1)
        >>> len(odd.apply(px.data.experimental.assert_cardinality(5)))
        5
    """
    expected = checks.integer(expected_cardinality, "expected_cardinality", INFINITE_CARDINALITY)

    def transformation(dataset: Dataset) -> Dataset:
        node = checks.dataset(dataset, "assert_cardinality")._node
        if node.cardinality >= 0 and node.cardinality != expected:
            raise InvalidValueError(
                f"The dataset has {node.cardinality} elements. Received: {expected}"
            )
        return Dataset(AssertCardinality((node,), expected))

    return transformation
