"""Accumulation, loss scaling and compute policies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from tests import hostile

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


BAD_SCALES = hostile.VALUES | {"too large": 1e39, "too small": 1e-46}


@pytest.mark.parametrize("name", ["initial", "factor", "growth_interval"])
@pytest.mark.parametrize("bad", BAD_SCALES)
def test_bad_scales(name: str, bad: str) -> None:
    if (name, bad) in [("growth_interval", "0"), ("initial", "half")]:
        return  # which are good
    with pytest.raises(px.PhalanxError, match="Received"):
        px.train.LossScale(**{name: BAD_SCALES[bad]})


@pytest.mark.parametrize("bad", hostile.VALUES)
def test_bad_policies(bad: str) -> None:
    with pytest.raises(px.PhalanxError, match="floating"):
        px.train.Policy(hostile.VALUES[bad])


def test_bad_optimizers() -> None:
    for bad in (
        {"transform": hostile.Hostile()},
        {"aggregate": hostile.Hostile()},
        {"aggregate": []},
        {"loss_scale": 8.0},
    ):
        with pytest.raises(px.PhalanxError, match="Received"):
            px.train.Optimizer(**{"transform": optax.sgd(0.1), **bad})
    with pytest.raises(px.PhalanxError, match="no state yet"):
        _ = px.train.LossScale().variables


scales = st.one_of(st.floats(width=32), st.sampled_from([2.0**127, 2.0**126, 1.0, 0.0, 1e-38]))


@settings(max_examples=40)
@given(
    initial=st.sampled_from([2.0**-20, 0.5, 1.0, 8.0, 2.0**126, 2.0**127]),
    interval=st.integers(0, 3),
    factor=st.sampled_from([1.5, 2.0, 1e30]),
    start=scales,
    steps=st.lists(st.booleans(), max_size=12),
)
def test_scales_stay_finite_and_positive_and_come_back(
    initial: float, interval: int, factor: float, start: float, steps: list[bool]
) -> None:
    rule = px.train.LossScale(initial, interval, factor)
    scale, count = jnp.float32(start), jnp.int32(0)
    for finite in steps:
        before = float(scale)
        scale, count = rule.next_state(scale, count, jnp.bool_(finite))
        now = float(scale)
        assert 0 < now <= 2.0**127
        assert scale.dtype == jnp.float32
        if not 2.0**-126 <= before <= 2.0**127:
            continue  # it was no scale at all
        if interval == 0:
            assert now == before
        elif finite:
            assert before <= now
        else:
            assert now == min(before, max(np.float32(before) / np.float32(factor), min(initial, 1.0)))
    run = next((i for i, good in enumerate(reversed(steps)) if good != steps[-1]), len(steps))
    if steps and not steps[-1]:
        assert int(count) == -run


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_scale_at_its_limit_goes_on_training(compiled: bool) -> None:
    with two().scope() as s:
        w = px.Variable(0.0)
        scale = px.train.LossScale(initial=2.0**127, growth_interval=1)
        optimizer = px.train.Optimizer(optax.sgd(2.0**-4), loss_scale=scale)

    def train(slope: Any) -> Any:
        return s.run(lambda: optimizer.minimize(lambda: w * slope, [w]))

    run = px.function(train) if compiled else train
    run(jnp.float32(2.0**-8))
    assert (float(scale.value), float(w)) == (2.0**127, -(2.0**-11))
    run(jnp.float32(8.0))  # too much for this scale
    assert (float(scale.value), float(w)) == (2.0**126, -(2.0**-11))
    run(jnp.float32(2.0**-8))
    assert (float(scale.value), float(w)) == (2.0**127, -(2.0**-10))
    scale.variables[0].load_state(jnp.inf)  # from a checkpoint
    run(jnp.float32(1.0))
    assert np.isfinite(float(scale.value))


def test_large_scales_do_not_make_half_gradients_zero() -> None:
    w = px.Variable(jnp.float16(0.0))
    scale = px.train.LossScale(initial=2.0**17)
    optimizer = px.train.Optimizer(optax.sgd(1.0), loss_scale=scale)
    optimizer.apply_gradients([(jnp.float16(2.0**10), w)])
    assert float(w) == -(2.0**-7)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_long_run_of_skipped_updates_is_said_once(compiled: bool, caplog: Any) -> None:
    w = px.Variable(1.0)
    optimizer = px.train.Optimizer(optax.sgd(0.1), loss_scale=px.train.LossScale(growth_interval=3))
    run = lambda x: optimizer.minimize(lambda: w * x, [w])  # noqa: E731
    run = px.function(run) if compiled else run
    with caplog.at_level("WARNING", "phalanx"):
        for i in range(350):
            run(jnp.float32(1.0 if i < 20 else jnp.nan))
            assert bool(caplog.records) == (i >= 199)  # it looks at every hundredth update
    (record,) = caplog.records
    assert "180 updates were skipped" in record.getMessage()
    assert "jax_debug_nans" in record.getMessage()


def test_policies_cast_floating_arrays_only() -> None:
    policy = px.train.Policy(jnp.bfloat16)
    w = px.Variable(jnp.ones(2))
    tree = policy.cast_to_compute({"w": w, "n": jnp.arange(2), "x": np.ones(2)})
    assert [str(tree[k].dtype) for k in ("w", "n", "x")] == ["bfloat16", "int32", "bfloat16"]
    assert policy.cast_to_output(tree)["w"].dtype == jnp.float32
    assert policy.cast_to_param(tree)["x"].dtype == jnp.float32
