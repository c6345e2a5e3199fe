"""Accumulation, loss scaling and compute policies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px


def two() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = X.sum(axis=1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_accumulated_gradients_equal_whole_ones(micro_batches: int, compiled: bool) -> None:
    s = two()
    with s.scope():
        w = px.Variable(jnp.ones(3))
        optimizer = px.train.Optimizer(optax.adam(0.1))
    batch = s.experimental_distribute_values_from_function(
        lambda c: tuple(jnp.asarray(np.split(a, 2)[c.replica_id_in_sync_group]) for a in (X, Y))
    )

    def loss(x: Any, y: Any) -> Any:
        return jnp.sum((x @ w.value() - y) ** 2) / len(X)

    def step(x: Any, y: Any) -> Any:
        value, gradient = px.train.accumulate_gradients(loss, w, (x, y), micro_batches)
        optimizer.apply_gradients([(gradient, w)])
        return value

    def train(x: Any, y: Any) -> Any:
        return s.reduce("sum", s.run(step, args=(x, y)), axis=None)

    value = (px.function(train) if compiled else train)(*batch)
    assert float(value) == pytest.approx(float(np.mean((X @ np.ones(3) - Y) ** 2)), rel=1e-4, abs=1e-6)
    state = optax.adam(0.1).init(jnp.ones(3))
    g = jax.grad(lambda w: jnp.sum((X @ w - Y) ** 2) / len(X))(jnp.ones(3))
    updates, _ = optax.adam(0.1).update(g, state)
    if float(jnp.max(jnp.abs(g))) > 1e-4:
        np.testing.assert_allclose(w.numpy(), 1.0 + np.asarray(updates), rtol=1e-4)


def test_accumulation_needs_pieces_that_fit() -> None:
    w = px.Variable(1.0)
    for batch, count in ((jnp.ones(5), 2), ((jnp.ones(4), jnp.ones(6)), 2), (1.0, 1), (jnp.ones(4), 0)):
        with pytest.raises(ValueError, match="Received"):
            px.train.accumulate_gradients(lambda *_: w * 1.0, w, batch, count)
    with pytest.raises(TypeError, match="integer"):
        px.train.accumulate_gradients(lambda x: w * 1.0, w, jnp.ones(4), 2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_loss_scales_skip_bad_steps_and_adapt(compiled: bool) -> None:
    s = two()
    with s.scope():
        w = px.Variable(1.0)
        scale = px.train.LossScale(initial=8.0, growth_interval=2)
        optimizer = px.train.Optimizer(optax.sgd(0.5), loss_scale=scale)

    def step(x: Any) -> Any:
        return optimizer.minimize(lambda: w * x, [w])

    def train(x: Any) -> Any:
        return s.reduce("sum", s.run(step, args=(x,)), axis=None)

    run = px.function(train) if compiled else train
    history = []
    for x in (1.0, np.inf, 1.0, 1.0, 1.0):
        value = s.experimental_distribute_values_from_function(
            lambda c, x=x: jnp.float32(x if c.replica_id_in_sync_group else 1.0)
        )
        loss = float(run(value))
        history.append((round(loss, 4), float(w), float(scale.value)))
    # Each good step moves w by 0.5 * (1 + 1); a bad one moves nothing and halves the scale.
    assert history == [
        (2.0, 0.0, 8.0),
        (pytest.approx(np.nan, nan_ok=True), 0.0, 4.0),
        (0.0, -1.0, 4.0),
        (-2.0, -2.0, 8.0),
        (-4.0, -3.0, 8.0),
    ]
    assert int(optimizer.iterations) == 5


def test_bad_scales_and_policies() -> None:
    for bad in ({"initial": 0.0}, {"factor": 1.0}, {"growth_interval": -1}):
        with pytest.raises(ValueError, match="Received"):
            px.train.LossScale(**bad)
    with pytest.raises(ValueError, match="floating"):
        px.train.Policy("int32")


def test_policies_cast_floating_arrays_only() -> None:
    policy = px.train.Policy(jnp.bfloat16)
    w = px.Variable(jnp.ones(2))
    tree = policy.cast_to_compute({"w": w, "n": jnp.arange(2), "x": np.ones(2)})
    assert [str(tree[k].dtype) for k in ("w", "n", "x")] == ["bfloat16", "int32", "bfloat16"]
    assert policy.cast_to_output(tree)["w"].dtype == jnp.float32
    assert policy.cast_to_param(tree)["x"].dtype == jnp.float32
