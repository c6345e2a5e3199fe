"""The same training under every strategy: equal to one device, uneven batches included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from tests.contract.conftest import World

X = np.random.default_rng(0).normal(size=(23, 5)).astype(np.float32)
Y = X @ np.arange(1.0, 6.0, dtype=np.float32)
BATCH = 8


def reference(steps: int) -> tuple[np.ndarray[Any, Any], list[float]]:
    """Plain JAX, one device."""
    w, losses = jnp.zeros(5), []
    for step in range(steps):
        rows = slice(step * BATCH % 24, step * BATCH % 24 + BATCH)
        x, y = X[rows], Y[rows]
        loss, g = jax.value_and_grad(lambda w, x=x, y=y: jnp.sum((x @ w - y) ** 2) / BATCH)(w)
        w, losses = w - 0.05 * g, [*losses, float(loss)]
    return np.asarray(w), losses


def test_training_equals_one_device(world: World) -> None:
    steps = 6
    w = world.variable(jnp.zeros(5))

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, g = jax.value_and_grad(lambda w: jnp.sum((x @ w - y) ** 2) / BATCH)(w.value())
        context = px.get_replica_context()
        assert context is not None
        w.assign_sub(0.05 * context.all_reduce("sum", g))
        return loss

    losses = []
    for i in range(steps):
        rows = slice(i * BATCH % 24, i * BATCH % 24 + BATCH)
        xs, ys = np.array_split(X[rows], world.n), np.array_split(Y[rows], world.n)
        batch = world.values(lambda r, xs=xs: xs[r]), world.values(lambda r, ys=ys: ys[r])
        losses.append(float(world.strategy.reduce("sum", world.run(step, *batch), axis=None)))
    expected_w, expected_losses = reference(steps)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for copy in world.copies(w):
        np.testing.assert_allclose(copy, expected_w, rtol=1e-5)


def test_a_local_mean_moves_every_replicas_share(world: World) -> None:
    """Summed gradients of local means move n times as far: the user's scaling is respected."""
    w = world.variable(0.0, aggregation=px.VariableAggregation.SUM)
    world.run(lambda: w.assign_sub(jnp.float32(0.5) * jnp.ones(())))
    assert float(w) == pytest.approx(-0.5 * world.n)
