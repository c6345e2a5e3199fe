"""Variables that are divided among parameter servers."""

from __future__ import annotations

import copy
from typing import Any

import cloudpickle
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import phalanx as px
from phalanx.core.shard_slices import split_rows
from phalanx.parameter_server.sharded_variable import shard_sizes
from tests.parameter_server.jobs import Job

FIXED = px.partitioners.FixedShardsPartitioner


def sharded(rows: int = 7, shards: int = 3, width: int = 2, servers: int = 2) -> tuple[Job, Any]:
    job = Job(servers, FIXED(shards))
    value = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    return job, job.variable(value, name="table")


def test_shards_have_names_places_and_rows() -> None:
    job, v = sharded()
    assert isinstance(v, px.ShardedVariable)
    assert isinstance(v, px.Variable)
    assert [s.name for s in v] == ["table/part_0:0", "table/part_1:0", "table/part_2:0"]
    assert [s.shape for s in v.variables] == [(3, 2), (2, 2), (2, 2)]
    assert [s.definition.server for s in v.values] == [0, 1, 0]
    assert (v.shape, v.dtype, v.name, len(v), v.num_shards) == ((7, 2), jnp.float32, "table:0", 3, 3)
    assert v.distribute_strategy is job.strategy
    np.testing.assert_array_equal(v.numpy(), np.arange(14).reshape(7, 2))
    assert len(job.servers.pulls[-1]) == 3  # in one round trip
    assert repr(v).startswith("ShardedVariable:{\n  0: <px.Variable 'table/part_0:0'")


@given(st.integers(1, 50), st.integers(1, 9))
def test_sizes_are_even_and_add_up(rows: int, shards: int) -> None:
    sizes = shard_sizes(rows, min(rows, shards))
    assert sum(sizes) == rows
    assert sorted(sizes, reverse=True) == sizes
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_slices_are_those_of_arrays(data: st.DataObject) -> None:
    _, v = SHARED
    whole = np.arange(14).reshape(7, 2)
    bound = st.one_of(st.none(), st.integers(-9, 9))
    step = st.one_of(st.none(), st.sampled_from([-3, -2, -1, 1, 2, 3]))
    first = data.draw(st.one_of(st.integers(-7, 6), st.builds(slice, bound, bound, step)))
    rest = data.draw(st.sampled_from([(), (1,), (slice(None),), (slice(0, 1),), (..., None)]))
    index = (first, *rest)
    np.testing.assert_array_equal(v[index], whole[index])


SHARED = sharded()


def test_a_slice_asks_for_its_rows_only() -> None:
    job, v = sharded()
    np.testing.assert_array_equal(v[2:4], [[4.0, 5.0], [6.0, 7.0]])
    np.testing.assert_array_equal(v[-1], [12.0, 13.0])
    assert [[r.rows.tolist() for r in pull] for pull in job.servers.pulls] == [[[2], [0]], [[1]]]


def test_what_cannot_be_an_index() -> None:
    _, v = sharded()
    with pytest.raises(IndexError, match="has 7 rows"):
        v[7]
    with pytest.raises(IndexError, match="has 7 rows"):
        v[-8]
    with pytest.raises(TypeError, match="sparse_read"):
        v[jnp.array(1)]
    with pytest.raises(TypeError, match="integers and slices"):
        v["a"]


def test_rows_come_in_the_order_that_was_asked_for() -> None:
    _, v = sharded()
    np.testing.assert_array_equal(v.sparse_read([6, 0, 4, 0]), v.numpy()[[6, 0, 4, 0]])
    found = px.nn.embedding_lookup(v, [[5, 1]], max_norm=1.0)
    assert found.shape == (1, 2, 2)
    np.testing.assert_allclose(jnp.linalg.norm(found, axis=-1), [[1.0, 1.0]], rtol=1e-6)
    with pytest.raises(px.errors.InvalidArgumentError):
        px.nn.embedding_lookup(v, [7])
    assert v.sparse_read(np.zeros((0,), int)).shape == (0, 2)


def test_updates_reach_their_shards() -> None:
    job, v = sharded()
    plain = px.Variable(v.numpy())
    slices = px.IndexedSlices(jnp.ones((4, 2)), jnp.array([6, 0, 3, -7]))
    for each in (v, plain):
        each.assign_add(np.ones((7, 2), "f"))
        each.assign_sub(0.5)
        each.assign_add([1.0, 2.0])
        each.scatter_add(slices)
        each.scatter_update(px.IndexedSlices(jnp.full((1, 2), 50.0), jnp.array([2])))
    np.testing.assert_array_equal(v.numpy(), plain.numpy())
    assert v.assign(np.zeros((7, 2), "f")) is v
    assert not v.numpy().any()
    # One commit for all shards, and a shard gets its own rows only.
    assert [len(u.values) for u in job.servers.pushes[3]] == [2, 1, 1]
    with pytest.raises(ValueError, match="shape"):
        v.assign(np.zeros((6, 2), "f"))


def test_indices_in_memory_that_is_used_again() -> None:
    _, v = sharded()
    before, ids = v.numpy(), np.array([6, 0, 3])
    np.testing.assert_array_equal(v.sparse_read(ids), before[[6, 0, 3]])
    ids[:] = [1, 5, 1]
    np.testing.assert_array_equal(v.sparse_read(ids), before[[1, 5, 1]])
    v.scatter_add(px.IndexedSlices(np.ones((3, 2), "f"), ids))
    np.testing.assert_array_equal(v.numpy() - before, np.array([0, 2, 0, 0, 0, 1, 0])[:, None] + [0, 0])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_indices_of_any_dtype(dtype: str) -> None:
    large = 2**64 - 1 if dtype == "uint64" else 100  # rows that do not exist are left out
    indices = np.array([6, 0, large, 3], dtype)
    parts = split_rows(indices, (3, 5, 7))
    assert [part.rows.tolist() for part in parts] == [[0], [0], [1]]
    assert [part.mine.tolist() for part in parts if part.mine is not None] == [[1], [3], [0]]


def test_indices_that_are_written_to_are_divided_again() -> None:
    indices = np.array([0, 4, 6])
    view = indices.view()
    view.setflags(write=False)  # still what the user's array is
    for array in (indices, view):
        indices[:] = 0, 4, 6
        assert [part.rows.tolist() for part in split_rows(array, (3, 7))] == [[0], [1, 3]]
        indices[:] = 2, 3, 1
        assert [part.rows.tolist() for part in split_rows(array, (3, 7))] == [[2, 1], [0]]


def test_constants_of_a_program_are_those_of_its_trace() -> None:
    job = Job(2, px.partitioners.FixedShardsPartitioner(2))
    table = job.variable(jnp.zeros((6, 1)))
    ids = np.array([1, 4])

    @px.function
    def step() -> None:
        table.scatter_add(px.IndexedSlices(jnp.ones((2, 1)), ids))

    job.run(step)
    ids[:] = 0, 5
    job.run(step)
    assert np.asarray(table.whole()).ravel().tolist() == [0, 2, 0, 0, 2, 0]


def test_own_writes_are_seen_in_a_closure() -> None:
    job, v = sharded()

    def work() -> Any:
        v.scatter_add(px.IndexedSlices(jnp.ones((2, 2)), jnp.array([6, 0])))
        rows = v.sparse_read([0, 1, 6])
        v.assign_add(np.ones((7, 2), "f"))
        return rows, v.sparse_read([0, 1, 6]), v.numpy()

    before = np.arange(14, dtype=np.float32).reshape(7, 2)
    rows, later, whole = job.run(work)
    added = before[[0, 1, 6]] + [[1], [0], [1]]
    np.testing.assert_array_equal(rows, added)
    np.testing.assert_array_equal(later, added + 1)
    np.testing.assert_array_equal(whole, v.numpy())


# -- making them -----------------------------------------------------------------------------------


def test_a_large_table_is_made_in_parts() -> None:
    job = Job(3, FIXED(3))
    asked = []

    def initial(partition_shape: Any, partition_offset: Any) -> Any:
        asked.append((partition_shape, partition_offset))
        first = partition_offset[0]
        return np.arange(first, first + partition_shape[0], dtype=np.float32)[:, None] * np.ones(4, "f")

    v = job.variable(initial, shape=(1000, 4), dtype="float32")
    assert asked == [((334, 4), (0, 0)), ((333, 4), (334, 0)), ((333, 4), (667, 0))]
    assert job.servers.created == [(334, 4), (333, 4), (333, 4)]
    np.testing.assert_array_equal(v.sparse_read([0, 999])[:, 0], [0.0, 999.0])


def test_an_initial_value_in_parts_must_fit() -> None:
    job = Job(2, FIXED(2))
    with pytest.raises(ValueError, match="shape"):
        job.variable(lambda partition_shape, partition_offset: np.zeros(3), shape=(4, 2))
    whole = job.variable(lambda partition_shape, **_: np.zeros(partition_shape), shape=(3, 2))
    assert [s.shape for s in whole] == [(2, 2), (1, 2)]


def initial_rows(partition_shape: Any, partition_offset: Any) -> Any:
    del partition_offset
    return np.ones(partition_shape, "f")


def test_without_a_partitioner_it_is_one_part() -> None:
    job = Job(2)
    v = job.variable(initial_rows, shape=(5, 2))
    assert isinstance(v, px.RemoteVariable)
    assert v.numpy().sum() == 10.0


def test_other_shards_take_a_state_over() -> None:
    _, v = sharded(7, 3)
    state = v.state()
    for shards in (1, 2, 7):
        _, other = sharded(7, shards)
        other.assign(np.zeros((7, 2), "f"))
        other.load_state(np.asarray(state))
        np.testing.assert_array_equal(other.numpy(), state)
    plain = px.Variable(np.zeros((7, 2), "f"))
    plain.load_state(state)
    np.testing.assert_array_equal(plain.numpy(), state)
    with pytest.raises(ValueError, match="Received: a state of shape"):
        v.load_state(np.zeros((3, 2)))


def test_a_pickled_one_is_a_reference() -> None:
    _, v = sharded()
    assert cloudpickle.loads(cloudpickle.dumps(v)) is v
    with pytest.raises(NotImplementedError):
        copy.copy(v)
    other = copy.deepcopy(v)
    other.assign_add(1.0)
    np.testing.assert_array_equal(other.numpy(), v.numpy() + 1.0)
    assert [s.definition.server for s in other] == [s.definition.server for s in v]


# -- gradients -------------------------------------------------------------------------------------


def check_gradients(v: Any) -> None:
    whole = v.numpy()

    def by_rows() -> Any:
        return (px.nn.embedding_lookup(v, [6, 0, 6]) ** 2).sum()

    expected = jax.grad(lambda x: (x[jnp.array([6, 0, 6])] ** 2).sum())(whole)
    sparse = px.grad(by_rows, v)()
    assert isinstance(sparse, px.IndexedSlices)
    dense = jnp.zeros_like(whole).at[sparse.indices].add(sparse.values)
    np.testing.assert_array_equal(dense, expected)
    both = px.grad(lambda: by_rows() + (jnp.asarray(v) * 2.0).sum(), v)()
    np.testing.assert_array_equal(both, expected + 2.0)


def test_the_gradient_of_rows_is_sparse() -> None:
    job, v = sharded()
    check_gradients(v)
    check_gradients(job.variable(np.ones((21, 2), "f")).variables[0])


def test_the_gradient_of_a_shard_has_its_rows() -> None:
    _, v = sharded(5, 2)

    def squares() -> Any:
        return jnp.sum(px.nn.embedding_lookup(v, [4, 0]) ** 2)

    loss, gradients = px.value_and_grad(squares, v.variables)()
    assert float(loss) == 8**2 + 9**2 + 0 + 1
    for shard, gradient in zip(v.variables, gradients, strict=True):
        shard.scatter_sub(gradient)
    expected = np.arange(10).reshape(5, 2).astype("f")
    expected[[4, 0]] *= -1
    np.testing.assert_array_equal(v.numpy(), expected)


def test_variables_that_are_not_read_have_a_gradient_of_zero() -> None:
    job, v = sharded()
    w = job.variable(3.0)
    used, unused = px.grad(lambda: w * w, [w, v])()
    assert float(used) == 6.0
    assert unused.shape == (7, 2)
    assert not unused.any()
    with pytest.raises(TypeError, match="real or complex"):
        px.grad(lambda: jnp.float32(0), job.variable(3))()


def test_written_variables_are_no_longer_differentiated() -> None:
    job, _ = sharded()
    w = job.variable(3.0)

    def loss() -> Any:
        first = w * w
        w.assign(5.0)
        return first + w * 100.0

    plain = px.Variable(3.0)

    def same() -> Any:
        first = plain * plain
        plain.assign(5.0)
        return first + plain * 100.0

    assert float(px.grad(loss, w)()) == float(px.grad(same, plain)()) == 6.0
    assert float(w) == 5.0
