"""Batch statistics of each replica's rows, as TensorFlow has them, in a step for the whole batch.

By default `BatchNormalization` layers see all rows, which is what ``synchronized=True`` asks for. Here
they normalize the rows of each replica by themselves, without communication, and the moving statistics
become the mean of what replicas have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from phalanx.integrations.keras import touch_points
from phalanx.integrations.keras.batches import part_sizes
from phalanx.integrations.keras.model_devices import ModelDevices
from phalanx.runtime.placement import REPLICA_AXIS


def per_replica(model: Any, devices: ModelDevices) -> AbstractContextManager[None]:
    """While it lasts, layers of a model normalize the rows of each replica by themselves."""
    import keras

    layers = [
        layer
        for layer in touch_points.all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and not getattr(layer, "asked_for_synchronized", False)
    ]
    return touch_points.replaced(layers, "call", lambda layer: _call(layer, devices))


def _call(layer: Any, devices: ModelDevices) -> Callable[..., Any]:
    import keras

    whole_batch = type(layer).call
    count = devices.count

    def on_rows(inputs: Any, mask: Any, values: Any) -> tuple[Any, list[Any]]:
        pairs = list(zip(layer.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=pairs) as scope:
            outputs = whole_batch(layer, inputs, training=True, mask=mask)
        return outputs, [scope.get_current_value(v)[None] for v in layer.non_trainable_variables]

    def call(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not training or not layer.trainable or inputs.shape[0] is None:
            return whole_batch(layer, inputs, training=training, mask=mask)
        values = [v.value for v in layer.variables]
        rows = inputs.shape[0]
        if rows % count == 0:
            divided, whole = PartitionSpec(REPLICA_AXIS), PartitionSpec()
            outputs, moving = jax.shard_map(
                on_rows,
                mesh=devices.mesh,
                in_specs=(divided, divided, whole),
                out_specs=(divided, divided),
                check_vma=False,
            )(inputs, mask, values)
        else:
            ends = [0]
            for size in part_sizes(rows, count):
                ends.append(ends[-1] + size)
            parts = [
                on_rows(inputs[a:b], None if mask is None else mask[a:b], values)
                for a, b in itertools.pairwise(ends)
                if b > a
            ]
            outputs = jnp.concatenate([x for x, _ in parts])
            moving = [jnp.concatenate(xs) for xs in zip(*(m for _, m in parts), strict=True)]
        for v, x in zip(layer.non_trainable_variables, moving, strict=True):
            v.assign(x.mean(0))
        return outputs

    return call
