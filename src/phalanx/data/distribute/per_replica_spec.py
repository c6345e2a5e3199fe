"""What is known of the elements of a distributed dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.distribute.device_transfer import narrow
from phalanx.data.plan.elements import with_rows


@dataclass(frozen=True, init=False)
class PerReplicaSpec:
    """What is known of a `PerReplica` value: one spec per replica.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> dataset = px.data.Dataset.range(8).batch(4, drop_remainder=True)
        >>> strategy.experimental_distribute_dataset(dataset).element_spec.value_specs[0].shape
        (2,)
    """

    value_specs: tuple[Any, ...]

    def __init__(self, *value_specs: Any) -> None:
        object.__setattr__(self, "value_specs", value_specs)

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.value_specs))})"


def on_replicas(spec: Any, replicas: int, wraps: bool, fixed: bool) -> Any:
    """The spec of what replicas get.

    Args:
        spec: the spec of one replica's part, as the plan has it.
        replicas: how many replicas there are.
        wraps: whether they get `PerReplica` values.
        fixed: whether sizes along the first dimension are what the plan says; else any size may come.
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            leaf = TensorSpec(leaf.shape, narrow(leaf.dtype))
        if leaf.shape and not fixed:
            leaf = with_rows(leaf, None)
        return PerReplicaSpec(*[leaf] * replicas) if wraps else leaf

    return tree_util.tree_map(of_leaf, spec)
