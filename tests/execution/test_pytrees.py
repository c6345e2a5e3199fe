"""Distributed values as pytrees, for functions and libraries that know nothing of them."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import phalanx as px


@pytest.fixture
def strategy() -> px.Strategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def made(strategy: px.Strategy, make: Any = lambda i: jnp.arange(2.0) + i) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda c: make(c.replica_id_in_sync_group)
    )


VALUES = {
    "vector": lambda i: jnp.arange(2.0) + i,
    "scalar": jnp.float32,
    "matrix": lambda i: jnp.ones((3, 2)) * i,
    "uneven": lambda i: jnp.ones(i + 1),
    "empty": lambda i: jnp.ones((0, 2)),
    "text": lambda i: "ab"[i],
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_any_leaf_can_take_the_place_of_an_array(strategy: px.Strategy, make: Any) -> None:
    value = made(strategy, make)
    leaves, structure = jax.tree.flatten(value)
    for other in (None, "text", 7, object(), [1, 2], np.float32(1), {"a": 1}):
        new = jax.tree.map(lambda _, other=other: other, value)
        assert isinstance(new, px.PerReplica)
        assert all(x is other for x in new.values)
        assert repr(new)
        flat = jax.tree.flatten(new, is_leaf=lambda x, other=other: x is other)
        assert flat[0] == [other] * len(leaves)
        assert flat[1] == structure
    assert jax.tree.structure(jax.tree.map(lambda x: x, value)) == structure


@pytest.mark.parametrize("name", ["vector", "scalar", "matrix"])
def test_numpy_arrays_are_cut_for_the_replicas(strategy: px.Strategy, name: str) -> None:
    value = made(strategy, VALUES[name])
    for host in (jax.device_get(value), jax.tree.map(np.asarray, value)):
        for mine, wanted in zip(host.values, value.values, strict=True):
            assert isinstance(mine, np.ndarray | np.generic)
            np.testing.assert_array_equal(mine, wanted)
        doubled = px.function(lambda x: strategy.run(lambda x: x * 2, args=(x,)))
        for run in (doubled, lambda x: strategy.run(lambda x: x * 2, args=(x,))):
            for mine, wanted in zip(run(host).values, value.values, strict=True):
                np.testing.assert_array_equal(mine, wanted * 2)
        total = strategy.reduce("sum", host, axis=None)
        np.testing.assert_array_equal(total, sum(value.values))
    shapes = jax.eval_shape(lambda x: x, value)
    assert [(x.shape, x.dtype) for x in shapes.values] == [(x.shape, x.dtype) for x in value.values]


def test_equinox_divides_and_compiles(strategy: px.Strategy) -> None:
    nest = {"x": made(strategy), "name": "a", "f": jnp.tanh}
    arrays, rest = eqx.partition(nest, eqx.is_array)
    assert rest["x"].values == (None, None)
    again = eqx.combine(arrays, rest)
    np.testing.assert_array_equal(again["x"].values[1], [1.0, 2.0])

    @eqx.filter_jit
    def add(nest: Any) -> Any:
        return {**nest, "x": strategy.run(lambda x: x + 1, args=(nest["x"],))}

    result = add(nest)
    np.testing.assert_array_equal(result["x"].values[1], [2.0, 3.0])
    assert result["name"] == "a"


def test_orbax_saves_and_restores(strategy: px.Strategy, tmp_path: Any) -> None:
    nest = {"x": made(strategy), "y": jnp.ones(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nest)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), nest
        )
        again = checkpointer.restore(tmp_path / "state", shapes)
    for mine, wanted in zip(again["x"].values, nest["x"].values, strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_comparing_outside_of_replicas_is_refused(strategy: px.Strategy) -> None:
    value = made(strategy)
    for compare in (lambda: value == 0, lambda: value != 0):
        with pytest.raises(TypeError, match=r"strategy\.reduce"):
            compare()
    assert (value == value) is True
    assert (value == None) is False  # noqa: E711 - as some code asks
    assert (value != None) is True  # noqa: E711 - as above
    assert value in [None, value]
    assert made(strategy) not in [value, "text"]
    assert len({value, value}) == 1
    found = strategy.run(lambda: (value == 1, value != 1))
    np.testing.assert_array_equal(found[0].values[0], [False, True])
    np.testing.assert_array_equal(found[1].values[1], [False, True])


# -- modules of flax ----------------------------------------------------------------------------------


def linear() -> Any:
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_modules_of_flax_go_in_and_come_out(compiled: bool, replicas: int) -> None:
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    batches = [jnp.ones((2, 3)) * (i + 1) for i in range(replicas)]
    x = made(strategy, lambda i: batches[i])

    def train(model: Any, optimizer: Any, x: jax.Array) -> Any:
        gradients = nnx.grad(loss)(model, x)
        gradients = px.get_replica_context().all_reduce("mean", gradients)
        optimizer.update(model, gradients)
        return model, optimizer

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        return strategy.run(train, args=(model, optimizer, x))

    model = linear()
    state = model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    run = px.function(step) if compiled else step
    for _ in range(3):
        state = run(*state, x)
    alone = linear()
    optimizer = nnx.Optimizer(alone, optax.adam(0.1), wrt=nnx.Param)
    for _ in range(3):
        parts = [nnx.grad(loss)(alone, batch) for batch in batches]
        optimizer.update(alone, jax.tree.map(lambda *xs: sum(xs) / replicas, *parts))
    for mine in strategy.experimental_local_results(state[0].kernel.get_raw_value()):
        np.testing.assert_allclose(mine, alone.kernel[...], rtol=1e-5)


def test_captured_modules_that_change_are_explained(strategy: px.Strategy) -> None:
    model = linear()
    x = made(strategy, lambda i: jnp.ones((2, 3)))
    read = px.function(lambda x: strategy.run(model, args=(x,)))
    np.testing.assert_allclose(read(x).values[1], model(jnp.ones((2, 3))), rtol=1e-6)
    gradient = px.function(lambda x: strategy.run(lambda x: nnx.grad(loss)(model, x), args=(x,)))
    with pytest.raises(px.errors.ContextError, match="as an argument"):
        gradient(x)
