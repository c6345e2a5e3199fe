"""Losses that can be summed over replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px


def two() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def test_average_losses_sum_to_the_mean_of_the_global_batch() -> None:
    s = two()
    losses = s.experimental_distribute_values_from_function(
        lambda c: jnp.array([1.0, 2.0]) + 2 * c.replica_id_in_sync_group
    )
    for options in ({}, {"global_batch_size": 4}, {"global_batch_size": jnp.int32(4)}):
        parts = s.run(lambda x, o=options: px.nn.compute_average_loss(x, **o), args=(losses,))
        assert float(s.reduce("sum", parts, axis=None)) == 2.5
    weighted = s.run(lambda x: px.nn.compute_average_loss(x, sample_weight=[0.0, 2.0]), args=(losses,))
    assert float(s.reduce("sum", weighted, axis=None)) == 3.0
    assert float(px.nn.compute_average_loss(jnp.array([1.0, 3.0]))) == 2.0


def test_regularization_counts_once() -> None:
    parts = two().run(lambda: px.nn.scale_regularization_loss(jnp.array([4.0, 2.0])))
    assert [float(x) for x in parts.values] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"per_example_loss": 1.0}, ValueError),
        ({"per_example_loss": [1.0], "global_batch_size": 1.5}, TypeError),
        ({"per_example_loss": [1.0], "global_batch_size": "4"}, TypeError),
        ({"per_example_loss": [1.0], "global_batch_size": -1}, ValueError),
        ({"per_example_loss": [1.0], "global_batch_size": 0}, ValueError),
        ({"per_example_loss": [1.0], "global_batch_size": 10**400}, ValueError),
        ({"per_example_loss": [1.0], "global_batch_size": jnp.int32(0)}, ValueError),
        ({"per_example_loss": [1.0], "global_batch_size": jnp.int32(-4)}, ValueError),
        ({"per_example_loss": [1.0], "global_batch_size": np.int64(0)}, ValueError),
        ({"per_example_loss": [1.0], "global_batch_size": float("nan")}, TypeError),
        ({"per_example_loss": [1.0], "global_batch_size": jnp.float32(2.0)}, TypeError),
        ({"per_example_loss": [1.0], "global_batch_size": jnp.array([4])}, TypeError),
        ({"per_example_loss": [1.0], "global_batch_size": True}, TypeError),
        ({"per_example_loss": ["a"]}, TypeError),
        ({"per_example_loss": [True]}, TypeError),
        ({"per_example_loss": [1.0, 2.0], "sample_weight": [1.0, 2.0, 3.0]}, ValueError),
        ({"per_example_loss": [1.0, 2.0], "sample_weight": "a"}, TypeError),
    ],
)
def test_bad_losses(kwargs: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="Received"):
        px.nn.compute_average_loss(**kwargs)


def test_a_size_that_is_not_known_yet() -> None:
    average = jax.jit(lambda x, n: px.nn.compute_average_loss(x, global_batch_size=n))
    assert float(average(jnp.ones(2), 4)) == 0.5
    gradient = jax.grad(lambda x: px.nn.compute_average_loss(x, global_batch_size=jnp.int32(4)))
    assert gradient(jnp.ones(2)).tolist() == [0.25, 0.25]


def test_a_replica_without_examples_adds_nothing() -> None:
    assert float(px.nn.compute_average_loss(jnp.zeros(0))) == 0.0
    assert float(px.nn.compute_average_loss(jnp.array([2, 4]))) == 3.0


def test_not_in_a_scope() -> None:
    with two().scope():
        for call in (px.nn.compute_average_loss, px.nn.scale_regularization_loss):
            with pytest.raises(RuntimeError, match=r"Strategy\.run"):
                call(jnp.ones(2))
