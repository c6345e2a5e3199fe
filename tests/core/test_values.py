"""Distributed values: two faces, pytrees, printing, and where they can be used."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px


@pytest.fixture
def strategy() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def value(strategy: px.Strategy) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.array([1.0, 2.0]) + 10 * c.replica_id_in_sync_group
    )


def test_a_per_replica_value_is_one_sharded_array_to_jax(value: Any) -> None:
    (leaf,) = jax.tree.leaves(value)
    assert leaf.shape == (4,)
    assert leaf.sharding.spec == jax.sharding.PartitionSpec("replica")
    assert [s.device.id for s in leaf.addressable_shards] == [0, 1]
    np.testing.assert_array_equal(leaf, [1.0, 2.0, 11.0, 12.0])


def test_per_replica_values_pass_through_jit_and_tree_map(value: Any) -> None:
    for result in (jax.jit(lambda v: v)(value), jax.tree.map(lambda x: x * 2, value)):
        assert isinstance(result, px.PerReplica)
    doubled = jax.jit(lambda v: jax.tree.map(lambda x: x * 2, v))(value)
    assert [x.tolist() for x in doubled.values] == [[2.0, 4.0], [22.0, 24.0]]
    assert [next(iter(x.devices())).id for x in doubled.values] == [0, 1]


def test_the_sharded_face_is_a_view(strategy: px.Strategy) -> None:
    mirrored = strategy.extended.broadcast_to(
        jnp.arange(1024.0), strategy.run(lambda: jnp.zeros(()) + 0)
    )
    assert isinstance(mirrored, px.Mirrored)
    pieces = [s.data.unsafe_buffer_pointer() for s in mirrored.array.addressable_shards]
    assert pieces == [x.unsafe_buffer_pointer() for x in mirrored.values]


def test_unequal_shapes_stay_apart(strategy: px.Strategy) -> None:
    value = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.ones(c.replica_id_in_sync_group)
    )
    assert [x.shape for x in jax.tree.leaves(value)] == [(0,), (1,)]
    back = jax.tree.map(lambda x: x + 1, value)
    assert [x.shape for x in back.values] == [(0,), (1,)]


def test_a_mirrored_value_is_one_replicated_array_to_jax(strategy: px.Strategy) -> None:
    with strategy.scope():
        v = px.Variable([1.0, 2.0])
        mirrored = v.assign([3.0, 4.0])
    (leaf,) = jax.tree.leaves(mirrored)
    assert leaf.is_fully_replicated
    assert len(leaf.devices()) == 2
    doubled = jax.jit(lambda m: jax.tree.map(lambda x: x * 2, m))(mirrored)
    assert isinstance(doubled, px.Mirrored)
    assert [x.tolist() for x in doubled.values] == [[6.0, 8.0]] * 2
    assert (mirrored + 1.0).tolist() == [4.0, 5.0]
    assert mirrored.shape == (2,)
    assert mirrored.numpy().tolist() == [3.0, 4.0]


def test_a_captured_value_is_the_replicas_own(strategy: px.Strategy, value: Any) -> None:
    def step() -> list[Any]:
        return [value + 1, jnp.add(value, 1), jax.jit(lambda x: x + 1)(value), value[0] * 0 + value]

    for i, results in enumerate(strategy.experimental_local_results(strategy.run(step))):
        own = np.array([1.0, 2.0]) + 10 * i
        for got, want in zip(results, [own + 1, own + 1, own + 1, own], strict=True):
            np.testing.assert_array_equal(got, want)
            assert next(iter(got.devices())).id == i


def test_outside_it_is_only_a_container(strategy: px.Strategy, value: Any) -> None:
    for scope in (px.get_strategy().scope(), strategy.scope()):
        with scope:
            with pytest.raises(ValueError, match=r"strategy\.run"):
                jnp.add(value, 1.0)
            with pytest.raises(ValueError, match=r"strategy\.run"):
                np.asarray(value)
            with pytest.raises(TypeError):
                value + 1.0
            with pytest.raises(TypeError):
                1.0 + value


def test_printing(strategy: px.Strategy, value: Any) -> None:
    assert str(value) == (
        "PerReplica:{\n"
        "  0: Array([1. 2.], shape=(2,), dtype=float32),\n"
        "  1: Array([11. 12.], shape=(2,), dtype=float32)\n"
        "}"
    )
    assert repr(value) == (
        "PerReplica:{\n"
        "  0: <Array: shape=(2,), dtype=float32, numpy=array([1., 2.], dtype=float32)>,\n"
        "  1: <Array: shape=(2,), dtype=float32, numpy=array([11., 12.], dtype=float32)>\n"
        "}"
    )
    assert str(strategy.run(lambda: object)).startswith("<class")


def test_values_made_by_functions_keep_other_objects(strategy: px.Strategy) -> None:
    value = strategy.experimental_distribute_values_from_function(
        lambda c: {"id": c.replica_id_in_sync_group, "n": c.num_replicas_in_sync}
    )
    assert value["id"].values == (0, 1)
    assert value["n"].values == (2, 2)
    one = px.MirroredStrategy(["CPU:0"]).experimental_distribute_values_from_function(lambda c: 5)
    assert isinstance(one, px.PerReplica)
    plain = px.OneDeviceStrategy("CPU:0").experimental_distribute_values_from_function(lambda c: 5)
    assert plain == 5


def test_donating_a_result_does_not_break_what_was_handed_out(strategy: px.Strategy) -> None:
    with strategy.scope():
        v = px.Variable(jnp.ones(4))
    first = v.read_value()
    jax.jit(lambda x: x + 1, donate_argnums=0)(jnp.array(first))
    assert first.tolist() == [1.0] * 4
    assert float(v[0]) == 1.0
