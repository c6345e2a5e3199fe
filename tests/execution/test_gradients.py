"""Gradients with respect to variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px


def two() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def test_structures_and_auxiliary_results() -> None:
    w, b = px.Variable([1.0, 2.0]), px.Variable(0.5)

    def loss(x: Any) -> Any:
        y = jnp.dot(w, x) + b
        return y**2, {"y": y}

    (value, aux), grads = px.value_and_grad(loss, {"w": w, "b": [b]}, has_aux=True)(
        jnp.array([3.0, 4.0])
    )
    assert float(value) == 11.5**2
    assert float(aux["y"]) == 11.5
    np.testing.assert_allclose(grads["w"], [69.0, 92.0])
    assert float(grads["b"][0]) == 23.0
    only, aux = px.grad(loss, w, has_aux=True)(jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(only, [69.0, 92.0])


def test_unused_variables_have_zero_gradients() -> None:
    w, unused = px.Variable(2.0), px.Variable([1.0, 1.0])
    grads = px.grad(lambda: w * w, [w, unused])()
    assert float(grads[0]) == 4.0
    assert grads[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_local_and_flow_through_collectives(compiled: bool) -> None:
    s = two()
    with s.scope():
        w = px.Variable(2.0)
    x = s.experimental_distribute_values_from_function(
        lambda c: jnp.float32(10**c.replica_id_in_sync_group)
    )

    def step(x: Any) -> Any:
        context = px.get_replica_context()
        assert context is not None
        local = px.grad(lambda: w * x, w)()
        through = px.grad(lambda: context.all_reduce("sum", w * x) * x, w)()
        return local, through

    def run(x: Any) -> Any:
        return s.run(step, args=(x,))

    local, through = px.function(run)(x) if compiled else run(x)
    assert [float(v) for v in local.values] == [1.0, 10.0]
    assert [float(v) for v in through.values] == [11.0, 110.0]


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoints_custom_rules_and_writes_inside(compiled: bool) -> None:
    s = two()
    with s.scope():
        w = px.Variable(3.0)
        calls = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)

    @jax.custom_vjp
    def clip(x: Any) -> Any:
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))

    def step() -> Any:
        def loss() -> Any:
            calls.assign_add(jnp.float32(1.0))
            return jax.checkpoint(lambda v: clip(v * v) * 100.0)(w.value())

        return px.value_and_grad(loss, w)()

    value, gradient = px.function(lambda: s.run(step))() if compiled else s.run(step)
    assert [float(v) for v in value.values] == [900.0, 900.0]
    assert [float(v) for v in gradient.values] == [6.0, 6.0]
    assert float(calls) == 2.0


def test_written_variables_are_read_as_written() -> None:
    w = px.Variable(2.0)

    def loss() -> Any:
        first = w * 1.0
        w.assign(5.0)
        return first * w

    assert float(px.grad(loss, w)()) == 5.0
    assert float(w) == 5.0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_writing_what_is_differentiated(replicas: int, sparse: bool, compiled: bool) -> None:
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        w = px.Variable([2.0, 1.0], aggregation=px.VariableAggregation.SUM)

    def loss() -> Any:
        before = (w * w).sum()
        if sparse:
            w.scatter_add(px.IndexedSlices(w[:1] * 1.0, jnp.array([0])))
        else:
            w.assign_add(w * 1.0)
        return before + w.sum()  # every replica sees what all have written

    def step() -> Any:
        return strategy.run(px.value_and_grad(loss, w))

    value, gradient = (px.function(step) if compiled else step)()
    after = [2.0 * (1 + replicas), 1.0 * (1 if sparse else 1 + replicas)]
    assert w.numpy().tolist() == after
    for replica in range(replicas):
        here = strategy.experimental_local_results
        assert float(here(value)[replica]) == 5.0 + sum(after)
        assert here(gradient)[replica].tolist() == [4.0, 2.0]


@pytest.mark.parametrize("bad", [3, [], [jnp.ones(1)], "w"])
def test_what_is_no_variable(bad: Any) -> None:
    with pytest.raises(TypeError, match="Received"):
        px.value_and_grad(lambda: 1.0, bad)


def test_other_mistakes() -> None:
    w = px.Variable(1.0)
    with pytest.raises(TypeError, match="twice"):
        px.grad(lambda: w, [w, w])
    with pytest.raises(TypeError, match="callable"):
        px.grad(3, w)  # type: ignore[arg-type]
