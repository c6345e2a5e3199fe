"""Variables on parameter servers, read and written by Python."""

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
from phalanx.core.variables.recorded_updates import Change, rows_after
from phalanx.core.variables.variable_spec import apply_update
from phalanx.parameter_server.closure import closure, current_closure
from phalanx.parameter_server.requests import Token
from tests.parameter_server.jobs import Job

METHODS = ["add", "sub", "mul", "div", "min", "max", "update"]


@pytest.fixture
def job() -> Job:
    return Job()


def test_outside_of_closures_each_update_is_a_commit(job: Job) -> None:
    v = job.variable([1.0, 2.0])
    assert v.assign_add([1.0, 1.0]) is v
    v.assign_sub(0.5)
    assert v.numpy().tolist() == [1.5, 2.5]
    assert len(job.servers.pushes) == 2
    assert isinstance(v, px.RemoteVariable)


def test_a_step_outside_of_closures_is_one_commit(job: Job) -> None:
    v, w = job.variable(1.0), job.variable(2.0)

    def step() -> None:
        v.assign_add(1.0)
        w.assign(v.read_value() * 10)
        assert float(w) == 20.0  # a step sees its own writes

    job.strategy.run(step)
    assert [len(updates) for updates in job.servers.pushes] == [2]
    assert (float(v), float(w)) == (2.0, 20.0)


def test_a_step_that_fails_changes_nothing(job: Job) -> None:
    v = job.variable(1.0)

    def step() -> None:
        v.assign_add(1.0)
        raise KeyError("no")

    with pytest.raises(KeyError):
        job.strategy.run(step)
    assert float(v) == 1.0
    assert job.servers.pushes == []


def test_a_closure_reads_once_and_sees_its_own_writes(job: Job) -> None:
    v, other = job.variable(1.0), job.variable(5.0)

    def work() -> list[float]:
        seen = [float(v)]
        v.assign_add(1.0)
        seen.append(float(v))
        v.assign_add(1.0)
        seen.append(float(v))
        other.assign(7.0)  # never read, never pulled
        seen.append(float(other))
        return seen

    assert job.run(work) == [1.0, 2.0, 3.0, 7.0]
    assert len(job.servers.pulls) == 1
    assert [u.method for u in job.servers.pushes[0]] == ["assign_add", "assign_add", "assign"]
    assert (float(v), float(other)) == (3.0, 7.0)


def test_nobody_sees_a_closure_before_its_commit(job: Job) -> None:
    v = job.variable(1.0)
    with closure(Token(1), job.servers) as attempt:
        v.assign_add(1.0)
        assert current_closure() is attempt
    assert current_closure() is None
    assert float(v) == 1.0
    job.servers.push(attempt.token, attempt.updates)
    job.servers.push(attempt.token, attempt.updates)  # again: the same token counts once
    assert float(v) == 2.0


def test_what_a_failed_part_of_a_closure_did_is_forgotten(job: Job) -> None:
    v = job.variable(1.0)

    def part() -> None:
        v.assign_add(100.0)
        raise KeyError("no")

    def work() -> float:
        v.assign_add(1.0)
        with pytest.raises(KeyError):
            job.strategy.run(part)
        return float(v)

    assert job.run(work) == 2.0
    assert float(v) == 2.0


def test_an_assignment_makes_earlier_updates_superfluous(job: Job) -> None:
    v = job.variable(np.zeros(3, "f"))

    def work() -> None:
        v.assign_add([1.0, 1.0, 1.0])
        v.assign([5.0, 5.0, 5.0])
        v.assign_add(1.0)

    job.run(work)
    assert [u.method for u in job.servers.pushes[0]] == ["assign", "assign_add"]
    assert v.numpy().tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("method", METHODS)
def test_sparse_updates_are_as_those_of_other_variables(job: Job, method: str) -> None:
    start = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    remote, plain = job.variable(start), px.Variable(start)
    slices = px.IndexedSlices(jnp.array([[2.0, 3.0], [4.0, 0.5]]), jnp.array([2, 0]))
    for v in (remote, plain):
        getattr(v, f"scatter_{method}")(slices)
    np.testing.assert_array_equal(remote.numpy(), plain.numpy())

    def work() -> Any:
        getattr(remote, f"scatter_{method}")(slices)
        return remote.numpy(), remote.sparse_read([2, 2, 1])

    whole, rows = job.run(work)
    getattr(plain, f"scatter_{method}")(slices)
    np.testing.assert_array_equal(whole, plain.numpy())
    np.testing.assert_array_equal(rows, plain.numpy()[[2, 2, 1]])


def test_integers_and_small_floats_keep_their_dtype(job: Job) -> None:
    counter, half = job.variable(3), job.variable(jnp.ones(2, jnp.bfloat16))
    counter.assign_add(4)
    half.assign_add([0.5, 0.5])
    assert (counter.dtype, int(counter)) == (jnp.int32, 7)
    assert half.dtype == jnp.bfloat16
    assert half.numpy().astype("f").tolist() == [1.5, 1.5]
    with pytest.raises(px.PhalanxError, match="lose information"):
        counter.assign_add(0.5)
    with pytest.raises(px.PhalanxError, match="shape"):
        half.assign([1.0, 2.0, 3.0])


def test_rows_travel_alone(job: Job) -> None:
    table = job.variable(np.arange(20, dtype=np.float32).reshape(10, 2))
    rows = table.sparse_read([[3, 1], [3, 9]])
    assert rows.shape == (2, 2, 2)
    np.testing.assert_array_equal(rows, table.numpy()[[[3, 1], [3, 9]]])
    assert [len(read.rows) for read in job.servers.pulls[0]] == [4]
    with pytest.raises(px.errors.InvalidArgumentError, match=r"Received: the indices \[10, -1\]"):
        table.sparse_read([10, 0, -1])
    with pytest.raises(TypeError):
        table.sparse_read([0.5])


def test_rows_of_a_variable_that_a_closure_knows_are_not_asked_for(job: Job) -> None:
    table = job.variable(np.arange(4, dtype=np.float32))

    def work() -> Any:
        return table.numpy(), table.sparse_read([2])

    job.run(work)
    assert len(job.servers.pulls) == 1


def one_or(count: int, of: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    """One, or some: every other number would be one more shape to compile programs for."""
    return st.sampled_from([1, count]).flatmap(lambda n: st.lists(of, min_size=n, max_size=n))


operands = st.one_of(
    st.tuples(st.just("assign_add"), st.floats(-2, 2, width=16)),
    st.tuples(st.just("assign_sub"), st.just("rows")),
    st.tuples(st.just("assign"), st.just("rows")),
    st.tuples(
        st.sampled_from([f"scatter_{m}" for m in METHODS]),
        one_or(4, st.integers(-6, 7)),
    ),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(operands, max_size=4), one_or(6, st.integers(-2, 7)))
def test_rows_after_changes_are_those_of_the_changed_table(
    operations: list[tuple[str, Any]], wanted: list[int]
) -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(1, 9, (6, 2)).astype(np.float32)
    variable: Any = px.Variable(table)
    changes = []
    new = jnp.asarray(table)
    for method, drawn in operations:
        operand: Any = drawn
        if drawn == "rows":
            operand = rng.integers(1, 9, (6, 2)).astype(np.float32)
        elif isinstance(drawn, list):
            places = drawn
            if method in ("scatter_update", "scatter_div"):  # which of two counts is not said
                places = sorted({i % 6 for i in drawn if -6 <= i < 6}) or [0]
            values = rng.integers(1, 9, (len(places), 2)).astype(np.float32)
            operand = px.IndexedSlices(jnp.asarray(values), jnp.asarray(places))
        changes.append(Change(method, operand))
        new = apply_update(method, new, operand)
    indices = np.array(wanted)
    inside = (indices >= 0) & (indices < 6)
    before = np.where(inside[:, None], table[np.clip(indices, 0, 5)], -1.0).astype(np.float32)
    after = rows_after(changes, jnp.asarray(before), jnp.asarray(indices), variable)
    expected = np.where(inside[:, None], np.asarray(new)[np.clip(indices, 0, 5)], -1.0)
    np.testing.assert_allclose(after, expected, rtol=1e-6)


# -- the same variable in every process ------------------------------------------------------------


def test_a_pickled_variable_is_a_reference(job: Job) -> None:
    v, w = job.variable(1.0, name="v"), job.variable(np.ones(2, "f"))
    again = cloudpickle.loads(cloudpickle.dumps((v, job.strategy, lambda: v.read_value() + w)))
    assert again[0] is v
    assert again[1] is job.strategy
    np.testing.assert_array_equal(again[2](), [2.0, 2.0])


def test_a_deep_copy_is_another_variable(job: Job) -> None:
    v = job.variable(1.0, name="v")
    other = copy.deepcopy({"v": v})["v"]
    other.assign_add(1.0)
    assert (float(v), float(other), other.name) == (1.0, 2.0, "v:0")
    assert other.definition.server == v.definition.server
    with pytest.raises(NotImplementedError, match="same variable"):
        copy.copy(v)


def test_a_strategy_can_be_closed() -> None:
    job = Job()
    v = job.variable(1.0)
    job.strategy.close()
    job.strategy.close()
    assert [s.status()["variables"] for s in job.servers.stores] == [0, 0]
    with pytest.raises(RuntimeError, match="has been closed"):
        v.numpy()


def test_closures_cannot_make_variables(job: Job) -> None:
    with pytest.raises(ValueError, match="made by the coordinator's program"):
        job.run(job.variable, 1.0)


def test_staged_code_says_what_it_always_says(job: Job) -> None:
    v = job.variable(1.0)
    with pytest.raises(px.PhalanxError, match="read while JAX staged"):
        jax.jit(lambda: v + 1.0)()
    with pytest.raises(px.PhalanxError, match="written while JAX staged"):
        jax.jit(lambda x: v.assign(x).name and x)(1.0)


def test_printing_and_arithmetic(job: Job) -> None:
    v = job.variable([1.0, 2.0], name="v")
    assert repr(v).startswith("<px.Variable 'v:0' shape=(2,) dtype=float32, numpy=array([1., 2.]")
    np.testing.assert_array_equal(jnp.asarray(v) * 2 + v, [3.0, 6.0])
    assert v.device == "/job:ps/replica:0/task:0/device:CPU:0"
    assert v.values == (v,)


def test_state_comes_back(job: Job) -> None:
    v = job.variable([1.0, 2.0])
    saved = px.train.snapshot({"v": v})
    v.assign([9.0, 9.0])
    v.load_state(saved["v"])
    assert v.numpy().tolist() == [1.0, 2.0]


# -- several replicas in one worker ----------------------------------------------------------------


def test_replicas_of_a_worker_write_together() -> None:
    job = Job(compute_devices=["CPU:0", "CPU:1"])
    v = job.variable(0.0, aggregation=px.VariableAggregation.SUM)
    first = job.variable(0.0, aggregation=px.VariableAggregation.ONLY_FIRST_REPLICA)
    assert job.strategy.num_replicas_in_sync == 2

    def step() -> Any:
        replica = px.get_replica_context().replica_id_in_sync_group
        v.assign_add(replica + 1.0)
        first.assign(replica + 5.0)
        return v.read_value() + replica

    for call in (lambda: job.strategy.run(step), px.function(lambda: job.strategy.run(step))):
        before = float(v)
        result = job.run(call)
        assert float(v) == before + 3.0
        assert float(first) == 5.0
        assert [float(x) for x in result.values] == [before + 3.0, before + 4.0]
