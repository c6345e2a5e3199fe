"""What reductions and gathers promise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from tests.contract.conftest import World


def ctx() -> px.ReplicaContext:
    context = px.get_replica_context()
    assert context is not None
    return context


def parts(world: World, sizes: list[int]) -> tuple[Any, np.ndarray[Any, Any]]:
    """A batch cut into pieces of the given sizes, and the whole batch."""
    whole = np.arange(1.0, sum(sizes) + 1, dtype=np.float32)
    bounds = np.cumsum([0, *sizes])
    return world.values(lambda i: whole[bounds[i] : bounds[i + 1]]), whole


def partitions(n: int) -> list[list[int]]:
    """Even, uneven and partly empty ways to cut a batch for `n` replicas."""
    return [[2] * n, [3] + [1] * (n - 1), [4] + [0] * (n - 1), [0] * (n - 1) + [2]]


def test_reduce_over_replicas(world: World) -> None:
    value = world.values(lambda i: [i + 1.0, 10.0 * i])
    rows = np.array([[i + 1.0, 10.0 * i] for i in range(world.n)])
    np.testing.assert_allclose(world.strategy.reduce("SUM", value, axis=None), rows.sum(0))
    np.testing.assert_allclose(world.strategy.reduce("MEAN", value, axis=None), rows.mean(0))


def test_reduce_over_uneven_batches(world: World) -> None:
    for sizes in partitions(world.n):
        value, whole = parts(world, sizes)
        assert float(world.strategy.reduce("sum", value, axis=0)) == whole.sum()
        mean = float(world.strategy.reduce("mean", value, axis=0))
        assert mean == pytest.approx(whole.mean())


def test_mean_of_nothing_is_nan(world: World) -> None:
    value = world.values(lambda i: np.zeros(0, np.float32))
    assert np.isnan(world.strategy.reduce("mean", value, axis=0))


def test_reduce_over_several_dimensions(world: World) -> None:
    value = world.values(lambda i: np.full((2, 3), i + 1.0, np.float32))
    rows = np.array([np.full((2, 3), i + 1.0) for i in range(world.n)])
    total = world.strategy.reduce("sum", value, axis=(0, 1))
    assert float(total) == rows.sum()
    mean = world.strategy.reduce("mean", value, axis=-1)
    np.testing.assert_allclose(mean, rows.sum(axis=(0, 2)) / (3 * world.n), rtol=1e-6)


def test_integers_average_to_floats(world: World) -> None:
    value = world.values(lambda i: [i])
    mean = world.strategy.reduce("mean", value, axis=0)
    assert mean.dtype == jnp.float32
    assert float(mean) == (world.n - 1) / 2


def test_half_precision_stays(world: World) -> None:
    value = world.values(lambda i: jnp.ones(2, jnp.float16))
    assert world.strategy.reduce("mean", value, axis=0).dtype == jnp.float16


def test_reduce_keeps_nests(world: World) -> None:
    nest = {"a": world.values(lambda i: 1.0), "b": [world.values(lambda i: 2.0)]}
    result = world.strategy.reduce("sum", nest, axis=None)
    assert float(result["a"]) == world.n
    assert float(result["b"][0]) == 2.0 * world.n


def test_gather_joins_uneven_parts_in_order(world: World) -> None:
    for sizes in partitions(world.n):
        value, whole = parts(world, sizes)
        np.testing.assert_array_equal(world.strategy.gather(value, axis=0), whole)


def test_gather_along_the_last_dimension(world: World) -> None:
    value = world.values(lambda i: [[i, i]])
    expected = np.repeat(np.arange(world.n), 2)[None]
    np.testing.assert_array_equal(world.strategy.gather(value, axis=-1), expected)


def test_gather_of_booleans(world: World) -> None:
    value = world.values(lambda i: [True, False])
    assert world.strategy.gather(value, axis=0).tolist() == [True, False] * world.n


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_all_reduce_of_a_nest(world: World, op: str) -> None:
    def step() -> Any:
        i = jnp.asarray(ctx().replica_id_in_sync_group)
        nest = {"f": i + 1.0, "i": (i + 1, None), "big": jnp.full((300, 300), i + 1.0), "e": []}
        return ctx().all_reduce(op, nest)

    total = sum(range(1, world.n + 1)) / (world.n if op == "MEAN" else 1)
    for result in world.local(world.run(step)):
        assert float(result["f"]) == pytest.approx(total)
        assert float(result["i"][0]) == pytest.approx(total)
        assert result["i"][1] is None
        np.testing.assert_allclose(result["big"], total, rtol=1e-6)


def test_the_same_array_on_every_replica_is_summed(world: World) -> None:
    shared = jnp.float32(1.0)
    results = world.local(world.run(lambda: ctx().all_reduce("sum", shared)))
    assert [float(x) for x in results] == [float(world.n)] * world.n


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 64, 10**6])
def test_packing_does_not_change_sums(world: World, bytes_per_pack: int) -> None:
    options = px.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    shapes = [(), (3,), (2, 5), (0,), (7, 1, 2)]

    def step() -> Any:
        i = jnp.asarray(ctx().replica_id_in_sync_group) + 1.0
        xs = [jnp.full(s, i * (k + 1)) for k, s in enumerate(shapes)]
        return ctx().all_reduce("sum", xs, options=options)

    total = sum(range(1, world.n + 1))
    for result in world.local(world.run(step)):
        for k, (shape, x) in enumerate(zip(shapes, result, strict=True)):
            assert x.shape == shape
            np.testing.assert_allclose(x, (k + 1.0) * total)


def test_all_reduce_of_sparse_rows(world: World) -> None:
    def step() -> Any:
        i = jnp.asarray(ctx().replica_id_in_sync_group)
        rows = px.IndexedSlices(values=jnp.full((1, 2), i + 1.0), indices=i[None])
        reduced = ctx().all_reduce("sum", rows)
        return reduced.values, reduced.indices

    for values, indices in world.local(world.run(step)):
        assert indices.tolist() == list(range(world.n))
        assert values[:, 0].tolist() == [i + 1.0 for i in range(world.n)]


def test_all_gather_of_uneven_parts(world: World) -> None:
    for sizes in partitions(world.n):
        value, whole = parts(world, sizes)
        results = world.local(world.run(lambda x: ctx().all_gather(x, axis=0), value))
        for result in results:
            np.testing.assert_array_equal(result, whole)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_the_gradient_of_all_reduce_is_its_all_reduce(world: World, op: str) -> None:
    w = world.values(lambda i: float(i + 1))

    def step(w: jax.Array) -> jax.Array:
        return jax.grad(lambda x: w * ctx().all_reduce(op, x))(jnp.float32(2.0))

    total = sum(range(1, world.n + 1)) / (world.n if op == "MEAN" else 1)
    for g in world.local(world.run(step, w)):
        assert float(g) == pytest.approx(total)


def test_second_derivatives_go_through_all_reduce(world: World) -> None:
    def step() -> jax.Array:
        def f(x: jax.Array) -> jax.Array:
            return ctx().all_reduce("sum", x**3)

        return jax.grad(jax.grad(f))(jnp.float32(2.0))

    # d/dx of all_reduce(1) * 3 x^2 is n * 6 x on each replica
    for g in world.local(world.run(step)):
        assert float(g) == pytest.approx(world.n * 12.0)


def test_the_gradient_of_all_gather(world: World) -> None:
    w = world.values(lambda i: np.arange(1.0, world.n + 1, dtype=np.float32) * 10**i)

    def step(w: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(w * ctx().all_gather(x, axis=0)))(jnp.ones(1))

    scale = sum(10**i for i in range(world.n))
    for i, g in enumerate(world.local(world.run(step, w))):
        assert float(g[0]) == pytest.approx((i + 1) * scale)


def test_bad_reductions_are_refused_before_anything_moves(world: World) -> None:
    value = world.values(lambda i: [1.0])
    reduce = world.strategy.reduce
    with pytest.raises(ValueError, match="MAX"):
        reduce("MAX", value, axis=None)
    with pytest.raises(TypeError):
        reduce(3, value, axis=None)
    with pytest.raises(TypeError, match="axis"):
        reduce("sum", value, axis="0")
    with pytest.raises(ValueError, match="axis 1"):
        reduce("sum", value, axis=1)
    with pytest.raises(ValueError, match="rank 0"):
        world.run(lambda: ctx().all_gather(jnp.float32(1.0), axis=0))


def test_different_shapes_cannot_be_reduced_element_by_element(many: World) -> None:
    value = many.values(lambda i: np.ones(i + 1, np.float32))
    with pytest.raises(px.errors.InvalidArgumentError, match="axis=0"):
        many.strategy.reduce("sum", value, axis=None)
    with pytest.raises(px.errors.InvalidArgumentError, match="replica 1"):
        many.run(lambda x: ctx().all_reduce("sum", x), value)
    again = many.local(many.run(lambda: ctx().all_reduce("sum", jnp.float32(1.0))))
    assert [float(x) for x in again] == [float(many.n)] * many.n


def test_reduce_to_and_broadcast_to_destinations(world: World) -> None:
    v = world.variable(0.0)
    extended = world.strategy.extended
    value = world.run(lambda: jnp.asarray(ctx().replica_id_in_sync_group) + 1.0)
    reduced = extended.reduce_to("sum", value, destinations=v)
    total = sum(range(1, world.n + 1))
    assert [float(x) for x in world.strategy.experimental_local_results(reduced)] == (
        [total] * len(v.values)
    )
    assert float(v) == 0.0
    one = extended.reduce_to("mean", value, destinations=f"CPU:{len(jax.local_devices()) - 1}")
    assert next(iter(one.devices())) == jax.local_devices()[-1]
    assert float(one) == pytest.approx(total / world.n)
    everywhere = extended.broadcast_to(jnp.float32(3.0), destinations=v)
    copies = world.strategy.experimental_local_results(everywhere)
    assert [float(x) for x in copies] == [3.0] * len(v.values)
    assert extended.broadcast_to(7, destinations=v) == 7
