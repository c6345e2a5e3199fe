"""What variables promise, for every synchronization and aggregation."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx import VariableAggregation as A, VariableSynchronization as S
from tests.contract.conftest import World

METHODS = ["assign", "assign_add", "assign_sub"]


def rid() -> jax.Array:
    context = px.get_replica_context()
    assert context is not None
    return jnp.asarray(context.replica_id_in_sync_group).astype(jnp.float32)


def apply(method: str, old: float, x: float) -> float:
    return {"assign": x, "assign_add": old + x, "assign_sub": old - x}[method]


@pytest.mark.parametrize("aggregation", [A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA])
@pytest.mark.parametrize("method", METHODS)
def test_replica_writes_are_aggregated(world: World, method: str, aggregation: A) -> None:
    v = world.variable(10.0, aggregation=aggregation)
    written = [i + 1.0 for i in range(world.n)]
    world.run(lambda: getattr(v, method)(rid() + 1.0))
    one = {A.SUM: sum(written), A.MEAN: float(np.mean(written)), A.ONLY_FIRST_REPLICA: 1.0}
    expected = apply(method, 10.0, one[aggregation])
    assert world.copies(v) == [pytest.approx(expected)] * world.count(v)


@pytest.mark.parametrize("method", METHODS)
def test_without_aggregation_replicas_must_agree(many: World, method: str) -> None:
    v = many.variable(10.0)
    many.run(lambda: getattr(v, method)(jnp.float32(3.0)))
    expected = [apply(method, 10.0, 3.0)] * many.count(v)
    assert many.copies(v) == expected
    with pytest.raises(px.errors.DivergenceError, match=r"(replica|worker) 1"):
        many.run(lambda: getattr(v, method)(rid()))
    assert many.copies(v) == expected


@pytest.mark.parametrize("aggregation", list(A))
@pytest.mark.parametrize("method", METHODS)
def test_copies_of_on_read_variables_belong_to_replicas(
    copied: World, method: str, aggregation: A
) -> None:
    v = copied.variable(10.0, synchronization=S.ON_READ, aggregation=aggregation)
    copied.run(lambda: getattr(v, method)(rid() + 1.0))
    assert copied.copies(v) == [apply(method, 10.0, i + 1.0) for i in range(copied.n)]
    local = copied.local(copied.run(lambda: v + 0.0))
    assert [float(x) for x in local] == [apply(method, 10.0, i + 1.0) for i in range(copied.n)]


def test_reading_on_read_variables_aggregates(copied: World) -> None:
    written = [i + 1.0 for i in range(copied.n)]
    expected = {A.SUM: sum(written), A.MEAN: np.mean(written), A.ONLY_FIRST_REPLICA: 1.0}
    for aggregation, value in expected.items():
        v = copied.variable(0.0, synchronization=S.ON_READ, aggregation=aggregation)
        copied.run(lambda v=v: v.assign(rid() + 1.0))
        assert float(v) == pytest.approx(value)
        assert float(v.numpy()) == pytest.approx(value)
        assert float(v.state()) == pytest.approx(value)
    undecided = copied.variable(0.0, synchronization=S.ON_READ)
    with pytest.raises(ValueError, match="NONE"):
        undecided.read_value()


def test_assigning_on_read_variables_from_outside(copied: World) -> None:
    v = copied.variable(1.0, synchronization=S.ON_READ, aggregation=A.SUM)
    assert float(v) == copied.n  # every copy starts with the initial value
    v.assign(6.0)
    assert float(v) == pytest.approx(6.0)
    assert copied.copies(v) == [pytest.approx(6.0 / copied.n)] * copied.n
    with pytest.raises(ValueError, match="sum of its copies"):
        v.assign_add(1.0)
    m = copied.variable(1.0, synchronization=S.ON_READ, aggregation=A.MEAN)
    m.assign_add(4.0)
    assert copied.copies(m) == [5.0] * copied.n
    n = copied.variable(1.0, synchronization=S.ON_READ)
    n.assign(4.0)
    n.assign_add(1.0)
    assert copied.copies(n) == [5.0] * copied.n
    n.load_state(2.0)
    assert copied.copies(n) == [2.0] * copied.n
    for read in (n.read_value, lambda: n + 1.0, lambda: 1.0 - n, lambda: n[...], lambda: abs(n)):
        with pytest.raises(ValueError, match="no single value"):
            read()


@pytest.mark.parametrize("method", METHODS)
def test_cross_replica_writes_reach_all_copies(world: World, method: str) -> None:
    v = world.variable(10.0)
    with world.strategy.scope():
        getattr(v, method)(4.0)
    assert world.copies(v) == [apply(method, 10.0, 4.0)] * world.count(v)


def test_a_constant_cannot_be_summed_but_averaged(world: World) -> None:
    v = world.variable(10.0, aggregation=A.SUM)
    if world.n > 1:
        with pytest.raises(ValueError, match="once per replica"):
            world.run(lambda: v.assign_add(1.0))
        assert world.copies(v) == [10.0] * world.count(v)
    world.run(lambda: v.assign(0))
    assert float(v) == 0.0
    m = world.variable(10.0, aggregation=A.MEAN)
    world.run(lambda: m.assign_add(1.0))
    assert float(m) == 11.0


def test_the_initial_value_is_made_once(world: World) -> None:
    calls = []

    def initial() -> Any:
        calls.append(1)
        return np.random.default_rng().normal(size=3).astype(np.float32)

    v = world.variable(initial)
    assert len(calls) == 1
    assert all(c == world.copies(v)[0] for c in world.copies(v))


def test_variables_made_on_replicas_are_one_variable(eager: World) -> None:
    made: list[px.Variable] = []

    def step() -> Any:
        v = px.Variable(lambda: rid_or_zero() + 5.0, name="inner", aggregation=A.ONLY_FIRST_REPLICA)
        made.append(v)
        return v.assign_add(1.0) + 0.0

    def rid_or_zero() -> float:
        return 0.0

    results = eager.local(eager.run(step))
    assert [float(x) for x in results] == [6.0] * eager.n
    assert all(v is made[0] for v in made)
    assert made[0].name == "inner:0"


def test_sparse_updates(world: World) -> None:
    v = world.variable([0.0, 0.0, 0.0, 0.0], aggregation=A.SUM)

    def step() -> None:
        i = jnp.asarray(px.get_replica_context().replica_id_in_sync_group)  # type: ignore[union-attr]
        v.scatter_add(px.IndexedSlices(values=(i + 1.0)[None], indices=i[None]))

    world.run(step)
    expected = [i + 1.0 if i < world.n else 0.0 for i in range(4)]
    assert world.copies(v) == [expected] * world.count(v)
    if world.n > 1:
        with pytest.raises(NotImplementedError, match="scatter_update"):
            world.run(lambda: v.scatter_update(px.IndexedSlices(jnp.ones(1), jnp.zeros(1, jnp.int32))))


def test_variables_behave_as_arrays(world: World) -> None:
    v = world.variable([[1.0, 2.0], [3.0, 4.0]])
    reference = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)

    def look() -> list[Any]:
        return [
            v + 1, 1 - v, v * v, v / 2, v**2, -v, v @ v, v[0], v > 2, jnp.dot(v, v),
            jnp.sum(v), jax.jit(lambda x: x * 2)(v), jnp.asarray(v), v.T, abs(v),
        ]  # fmt: skip

    expected = [
        reference + 1, 1 - reference, reference * reference, reference / 2, reference**2,
        -reference, reference @ reference, reference[0], reference > 2, reference @ reference,
        reference.sum(), reference * 2, reference, reference.T, abs(reference),
    ]  # fmt: skip
    for got, want in zip(look(), expected, strict=True):
        np.testing.assert_allclose(got, want)
    for replica in world.local(world.run(look)):
        for got, want in zip(replica, expected, strict=True):
            np.testing.assert_allclose(got, want)
    np.testing.assert_array_equal(np.asarray(v), reference)
    grad = world.local(world.run(lambda: jax.grad(lambda x: jnp.sum(x * v))(jnp.ones((2, 2)))))
    for g in grad:
        np.testing.assert_array_equal(g, reference)


def test_values_that_do_not_fit_change_nothing(world: World) -> None:
    v = world.variable([1.0, 2.0])
    for bad in ([1.0], "text", None, [1j, 2j], object()):
        with pytest.raises((ValueError, TypeError)):
            v.assign(bad)
        with pytest.raises((ValueError, TypeError)):
            world.run(lambda bad=bad: v.assign(bad))
    i = world.variable(3)
    with pytest.raises(ValueError, match="lose information"):
        i.assign(jnp.float32(1.5))
    assert world.copies(v) == [[1.0, 2.0]] * world.count(v)
    assert int(i) == 3


def test_reads_are_snapshots(world: World) -> None:
    v = world.variable([1.0])
    kept = v.read_value()
    v.assign([2.0])
    assert kept.tolist() == [1.0]


def test_update_calls_the_function_for_each_copy(world: World) -> None:
    v = world.variable(5.0)
    calls = []

    def bump(copy: px.Variable, x: Any) -> Any:
        calls.append(copy)
        return copy.assign_add(x) + 0.0

    result = world.strategy.extended.update(v, bump, args=(2.0,))
    assert len(calls) == len(v.values)
    assert world.copies(v) == [7.0] * world.count(v)
    assert float(result) == 7.0
    pieces = world.strategy.extended.update(v, bump, args=(1.0,), group=False)
    assert [float(x) for x in pieces] == [8.0] * len(v.values)


def test_a_failed_update_is_undone(world: World) -> None:
    v, slot = world.variable(5.0), world.variable(0.0)
    calls = []

    def fail_on_the_last_copy(copy: px.Variable) -> None:
        copy.assign_add(1.0)
        slot.assign_add(1.0)
        calls.append(copy)
        if len(calls) == len(v.values):
            raise KeyError("boom")

    with pytest.raises(KeyError):
        world.strategy.extended.update(v, fail_on_the_last_copy)
    assert world.copies(v) == [5.0] * world.count(v)
    assert world.copies(slot) == [0.0] * world.count(slot)


def test_update_from_a_replica_happens_once(world: World) -> None:
    v = world.variable(5.0)
    calls = []

    def step() -> None:
        world.strategy.extended.update(v, lambda c: calls.append(c.assign_add(1.0)))

    world.run(step)
    assert world.copies(v) == [6.0] * world.count(v)
    assert len(calls) == (1 if world.executor.name == "compiled" else len(v.values))


def test_state_moves_between_any_strategies(world: World) -> None:
    source = world.variable([1.0, 2.0])
    for other in (px.get_strategy(), px.MirroredStrategy()):
        with other.scope():
            target = px.Variable([0.0, 0.0])
        target.load_state(source.state())
        assert all(c.numpy().tolist() == [1.0, 2.0] for c in target.values)


def test_sums_are_restored_on_any_number_of_replicas(world: World) -> None:
    v = world.variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM)
    v.load_state(np.float32(12.0))
    assert float(v.state()) == pytest.approx(12.0)


def test_deepcopy_is_independent(world: World) -> None:
    v = world.variable([1.0])
    w = copy.deepcopy(v)
    v.assign([2.0])
    assert world.copies(w) == [[1.0]] * world.count(w)
    assert w.aggregation is v.aggregation
    assert w.distribute_strategy is v.distribute_strategy


def test_ownership(world: World) -> None:
    v = world.variable(1.0)
    extended = world.strategy.extended
    assert extended.variable_created_in_scope(v)
    assert all(extended.value_container(c) is v for c in v.values)
    stranger = px.MirroredStrategy(["CPU:0"])
    assert not stranger.extended.variable_created_in_scope(v)
    with pytest.raises(AssertionError):
        stranger.extended.update(v, lambda c: c.assign(2.0))
    if type(v).__name__ != "ResourceVariable":
        with stranger.scope(), pytest.raises(RuntimeError):
            v.assign(2.0)
    assert float(v) == 1.0


def test_a_run_returns_the_variable_itself(world: World) -> None:
    v = world.variable(1.0)
    assert world.run(lambda: v) is v
