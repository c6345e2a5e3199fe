"""Optimizers over stages do what they do on one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from tests.parallel.pipelines import models
from tests.parallel.pipelines.test_pipelining import assert_close, piped

import phalanx as px
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.parallel.pipelines.named_schedules import SCHEDULES
from phalanx.parallel.pipelines.pipelining import pipeline

CLIPPED = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2))


def test_twenty_steps_are_those_of_the_whole_model() -> None:
    model = models.language(3)
    pipe = piped(model, 3, "1f1b", 4)
    optimizer = pipe.optimizer(CLIPPED)
    params = pipe.place(model.params)
    state = optimizer.init(params)
    whole, whole_state = model.params, CLIPPED.init(model.params)

    @jax.jit
    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(model.whole)(params, *batch)
        updates, state = CLIPPED.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for i in range(20):
        batch = model.batch(8 + i % 2)
        value, gradients = pipe.value_and_grad(params, *batch)
        params, state = optimizer.update(gradients, state, params)
        whole, whole_state, expected = step(whole, whole_state, *batch)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert_close(params, whole, 1e-4)
    for i, nest in enumerate(params):
        assert {d.id for x in jax.tree.leaves(nest) for d in x.devices()} == {i}
    moments = jax.tree.leaves(state[1][0].mu)
    assert sorted({d.id for x in moments for d in x.devices()}) == [0, 1, 2]


@pytest.mark.soak
@pytest.mark.parametrize("name", SCHEDULES)
def test_twenty_steps_of_every_schedule(name: str) -> None:
    chunks = 1 if name in ("gpipe", "1f1b") else 2
    model = models.language(4 if chunks > 1 else 2)
    pipe = piped(model, 2, name, 4, chunks=chunks)
    optimizer = pipe.optimizer(CLIPPED)
    params, whole = pipe.place(model.params), model.params
    state, whole_state = optimizer.init(params), CLIPPED.init(model.params)
    for i in range(20):
        batch = model.batch(8 - i % 2)
        _, gradients = pipe.value_and_grad(params, *batch)
        params, state = optimizer.update(gradients, state, params)
        updates, whole_state = CLIPPED.update(jax.grad(model.whole)(whole, *batch), whole_state, whole)
        whole = optax.apply_updates(whole, updates)
    assert_close(params, whole, 1e-3)


def test_variables_of_strategies_are_trained_by_optimizers_of_px_train() -> None:
    model = models.equal(2)
    pipe = piped(model, 2, "1f1b", 2)
    strategies = [px.OneDeviceStrategy(f"CPU:{i}") for i in range(2)]
    variables, optimizers = [], []
    for strategy, nest in zip(strategies, model.params, strict=True):
        with strategy.scope():
            variables.append({name: px.Variable(x, name=name) for name, x in nest.items()})
            optimizers.append(px.train.Optimizer(optax.sgd(0.1)))
    params = model.params
    for _ in range(2):
        _, gradients = pipe.value_and_grad(variables, *model.batch(4))
        for strategy, optimizer, nest, own in zip(
            strategies, optimizers, variables, gradients, strict=True
        ):
            strategy.run(optimizer.apply_gradients, args=([(own[n], nest[n]) for n in nest],))
        expected = jax.grad(model.whole)(params, *model.batch(4))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, expected)
    found = [{name: v.value() for name, v in nest.items()} for nest in variables]
    assert_close(found, params)


def test_a_pipeline_is_no_part_of_a_program() -> None:
    model = models.equal(2)
    pipe = piped(model, 2, "1f1b", 2)
    with pytest.raises(ContextError, match=r"outside of jax\.jit"):
        jax.jit(lambda x: pipe(model.params, x, x))(model.batch(4)[0])


@pytest.mark.parametrize(
    "transform",
    [
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2),
        optax.apply_if_finite(optax.adafactor(1e-2), 3),
        optax.chain(optax.trace(0.9), optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 4))),
        optax.lamb(1e-2),
    ],
    ids=["MultiSteps", "apply_if_finite", "schedule", "lamb"],
)
def test_any_transformation_is_exact(transform: Any) -> None:
    transform = (
        optax.with_extra_args_support(transform) if not hasattr(transform, "init") else transform
    )
    model = models.equal(2)
    pipe = piped(model, 2, "1f1b", 2)
    optimizer = pipe.optimizer(transform)
    params = pipe.place(model.params)
    state, expected_state = optimizer.init(params), transform.init(model.params)
    expected = model.params
    update = jax.jit(transform.update)
    for i in range(3):
        gradients = jax.tree.map(lambda x: x * (0.1 + i), expected)
        params, state = optimizer.update(pipe.place(gradients), state, params)
        updates, expected_state = update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert_close(params, expected)
    assert_close(state, expected_state)


def test_updates_that_donate_take_the_memory_of_what_they_replace() -> None:
    model = models.equal(2)
    pipe = piped(model, 2, "1f1b", 2)
    host = jax.tree.map(np.asarray, model.params)
    params, kept = pipe.place(host), pipe.place(host)
    gradients = pipe.place(host)
    donating, plain = (pipe.optimizer(CLIPPED, donate=donate) for donate in (True, False))
    state, other = donating.init(params), plain.init(kept)
    new, after = donating.update(gradients, state, params)
    assert_close(new, plain.update(gradients, other, kept)[0])
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert all(x.is_deleted() for x in jax.tree.leaves(state[1][0].mu))
    assert not any(x.is_deleted() for x in jax.tree.leaves((gradients, kept, new, after)))


def test_only_numbers_go_from_stage_to_stage() -> None:
    model = models.equal(2)
    pipe = piped(model, 2, "1f1b", 2)
    optimizer = pipe.optimizer(CLIPPED)
    params = pipe.place(model.params)
    placed = optimizer.placed((params, optimizer.init(params), params))
    shapes = {
        n: v.aval.shape
        for r in placed.rounds
        for n, v in zip(r.writes, r.program.jaxpr.outvars, strict=True)
    }
    moved = [shapes.get(n, ()) for n, _, _ in placed.moves()]
    assert moved
    assert set(moved) == {()}


def test_states_are_divided_among_the_devices_of_a_stage() -> None:
    model = models.equal(2)
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "data", "model"))
    pipe = pipeline(
        model.parts, "1f1b", 2, loss=model.loss, mesh=mesh, layouts=[{"w": P(None, "model")}] * 2
    )
    params = pipe.place(model.params)
    expected = None
    for shard in (None, "states"):
        optimizer = pipe.optimizer(px.train.Optimizer(optax.adam(1e-2)), shard)
        state = optimizer.init(params)
        for _ in range(2):
            _, gradients = pipe.value_and_grad(params, *model.batch(4))
            new, state = optimizer.update(gradients, state, params)
        part = state[0].mu[1]["w"]
        assert part.sharding.shard_shape(part.shape) == ((8, 4) if shard is None else (4, 4))
        assert new[1]["w"].sharding.shard_shape((8, 8)) == (8, 4)
        expected = new if expected is None else expected
        assert_close(new, expected)


def test_what_is_no_optimizer_is_refused() -> None:
    pipe = piped(models.equal(2), 2, "1f1b", 2)
    with pytest.raises(InvalidTypeError, match=r"optax\.GradientTransformation"):
        pipe.optimizer(3)
    with pytest.raises(InvalidValueError, match="shard must be 'states' or None"):
        pipe.optimizer(optax.sgd(1.0), "everything")
    scaled = px.train.Optimizer(optax.sgd(1.0), loss_scale=px.train.LossScale())
    with pytest.raises(InvalidValueError, match="Losses are not scaled here"):
        pipe.optimizer(scaled)
