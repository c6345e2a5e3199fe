"""Compiled functions that use variables on parameter servers."""

from __future__ import annotations

import gc
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.parameter_server.closure import closure
from phalanx.parameter_server.requests import Token
from tests.parameter_server.jobs import Job

FIXED = px.partitioners.FixedShardsPartitioner


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_step_asks_once_for_what_it_needs(job: Job) -> None:
    a, b, steps = job.variable(2.0), job.variable(3.0), job.variable(0)
    unused = job.variable(np.ones(100, "f"))

    @px.function
    def step(x: Any) -> Any:
        a.assign_sub(0.5 * x * b)
        steps.assign_add(1)
        del_ = unused.read_value()  # read, and not needed
        del del_
        return a + b

    for i in range(3):
        job.run(step, np.float32(i))
    assert step.trace_count == 1
    reads = [[read.variable.name for read in pull] for pull in job.servers.pulls]
    assert reads == [["Variable", "Variable"]] * 3
    assert {r.variable.id for r in job.servers.pulls[0]} == {a.definition.id, b.definition.id}
    assert [[u.method for u in push] for push in job.servers.pushes] == [
        ["assign_sub", "assign_add"]
    ] * 3
    assert float(a) == 2.0 - 0.5 * 3 * (0 + 1 + 2)
    assert int(steps) == 3


def test_it_sees_its_own_writes_and_records_what_it_does(job: Job) -> None:
    v = job.variable(1.0)

    @px.function
    def step(x: Any) -> Any:
        before = v.read_value()
        v.assign_add(x)
        middle = v.read_value()
        v.assign(middle * 10)
        v.assign_add(1.0)
        return before, middle, v.read_value()

    assert [float(x) for x in job.run(step, 2.0)] == [1.0, 3.0, 31.0]
    assert float(v) == 31.0
    # Two calls in one closure: the second sees what the first did.
    results = job.run(lambda: (step(2.0), step(2.0)))
    assert [[float(x) for x in r] for r in results] == [[31.0, 33.0, 331.0], [331.0, 333.0, 3331.0]]
    assert float(v) == 3331.0


def test_concurrent_updates_all_count(job: Job) -> None:
    v = job.variable(0.0)

    @px.function
    def step() -> Any:
        return v.assign_add(v.read_value() * 0 + 1.0) + 0.0

    with closure(Token(1), job.servers) as first:
        step()
    with closure(Token(2), job.servers) as second:
        step()
    for attempt in (first, second):
        job.servers.push(attempt.token, attempt.updates)
    assert float(v) == 2.0


def test_outside_of_closures_it_is_a_commit(job: Job) -> None:
    v, w = job.variable(1.0), job.variable(1.0)

    @px.function
    def step(x: Any) -> None:
        v.assign_add(x)
        w.assign_sub(x)

    step(2.0)
    assert (float(v), float(w)) == (3.0, -1.0)
    assert len(job.servers.pushes) == 1


def test_other_variables_take_part(job: Job) -> None:
    remote, local = job.variable(1.0), px.Variable(10.0)

    @px.function
    def step() -> Any:
        local.assign_add(remote)
        remote.assign_add(local)
        return remote + local

    assert float(step()) == 23.0
    assert (float(remote), float(local)) == (12.0, 11.0)
    assert float(job.run(step)) == 23.0 + 35.0
    assert (float(remote), float(local)) == (35.0, 23.0)


def test_a_step_that_fails_leaves_everything(job: Job) -> None:
    remote, local = job.variable(1.0), px.Variable(1.0)

    @px.function
    def inner() -> None:
        remote.assign_add(1.0)
        local.assign_add(1.0)

    def work() -> None:
        inner()
        raise KeyError("no")

    with pytest.raises(KeyError):
        job.strategy.run(work)
    assert (float(remote), float(local)) == (1.0, 1.0)


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_are_fetched_by_what_the_step_computes(shards: int) -> None:
    job = Job(2, FIXED(shards))
    start = np.arange(40, dtype=np.float32).reshape(20, 2)
    table, bias = job.variable(start), job.variable(np.float32(1.0))

    @px.function
    def step(ids: Any, y: Any) -> Any:
        ids = (ids * 7) % 20

        def loss() -> Any:
            return ((px.nn.embedding_lookup(table, ids).sum(-1) + bias - y) ** 2).mean()

        value, (sparse, dense) = px.value_and_grad(loss, [table, bias])()
        table.scatter_sub(px.IndexedSlices(0.1 * sparse.values, sparse.indices))
        bias.assign_sub(0.1 * dense)
        return value, px.nn.embedding_lookup(table, ids)

    ids, y = np.array([1, 2, 3, 1]), np.ones(4, "f")
    value, after = job.run(step, ids, y)
    assert len(job.servers.pulls) == 1  # rows and the rest in one round trip
    assert sum(len(r.rows) for r in job.servers.pulls[0] if r.rows is not None) == 4
    rows = (ids * 7) % 20

    def expected_loss(t: Any, b: Any) -> Any:
        return ((t[rows].sum(-1) + b - y) ** 2).mean()

    expected, (of_table, of_bias) = jax.value_and_grad(expected_loss, (0, 1))(start, 1.0)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(table.numpy(), start - 0.1 * of_table, rtol=1e-5)
    np.testing.assert_allclose(after, table.numpy()[rows], rtol=1e-5)
    np.testing.assert_allclose(float(bias), 1.0 - 0.1 * of_bias, rtol=1e-6)
    assert step.trace_count == 1


@pytest.mark.parametrize("shards", [1, 3])
def test_operands_that_no_program_computes(shards: int) -> None:
    job = Job(2, FIXED(shards))
    table, copy = job.variable(np.zeros((20, 2), "f")), job.variable(np.zeros(2, "f"))
    fixed = np.array([3, 19, 3])

    @px.function
    def step(rows: Any, ids: Any) -> Any:
        table.scatter_add(px.IndexedSlices(rows, ids))
        table.scatter_add(px.IndexedSlices(px.nn.embedding_lookup(table, fixed)[:2] + 1, fixed[:2]))
        copy.assign(rows[0])
        return ids

    def twice() -> Any:
        rows, ids = np.ones((2, 2), "f"), np.array([0, 19])
        returned = step(rows, ids)
        rows[:], ids[:] = 7, 5  # the step has happened
        assert isinstance(returned, jax.Array)
        step(np.full((2, 2), 2, "f"), np.array([1, 19]))

    job.run(twice)
    expected = np.zeros(20, "f")
    for i, n in ((0, 1), (1, 2)):  # each time the rows of the arguments, then the fixed ones
        expected[[i, 19]] += n
        expected[[3, 19]] += expected[[3, 19]] + 1
    np.testing.assert_array_equal(table.numpy(), expected[:, None] + [0, 0])
    np.testing.assert_array_equal(copy.numpy(), [2, 2])


def test_rows_may_depend_on_rows(job: Job) -> None:
    links = job.variable(np.array([3, 2, 1, 0, 4], np.int32))
    table = job.variable(np.arange(5, dtype=np.float32) * 10)
    offset = job.variable(1)

    @px.function
    def step(ids: Any) -> Any:
        first = links.sparse_read(ids)
        second = links.sparse_read((first + offset) % 5)
        return table.sparse_read(second), table.sparse_read(ids)

    found, direct = job.run(step, np.array([0, 2]))
    hops = np.array([3, 2, 1, 0, 4])[(np.array([3, 1]) + 1) % 5]
    np.testing.assert_array_equal(found, hops * 10.0)
    np.testing.assert_array_equal(direct, [0.0, 20.0])
    sizes = [[None if r.rows is None else len(r.rows) for r in p] for p in job.servers.pulls]
    assert sizes == [[2, 2, None], [2], [2]]  # offset comes along with the first rows


def test_rows_that_do_not_exist_are_an_error(job: Job) -> None:
    table = job.variable(np.arange(5, dtype=np.float32))

    @px.function
    def step(ids: Any) -> Any:
        table.scatter_add(px.IndexedSlices(jnp.ones(1), jnp.array([0])))
        return table.sparse_read(ids)

    with pytest.raises(
        px.errors.InvalidArgumentError, match=r"rows from 0 to 4. Received: the indices \[5\]"
    ):
        job.run(step, np.array([0, 5]))
    assert table.numpy()[0] == 0.0


@pytest.mark.parametrize("shards", [1, 2])
def test_inside_staged_code_the_whole_variable_is_read(shards: int) -> None:
    job = Job(2, FIXED(shards))
    table = job.variable(np.arange(6, dtype=np.float32))

    @px.function
    def step(ids: Any) -> Any:
        def body(total: Any, i: Any) -> Any:
            return total + px.nn.embedding_lookup(table, i), None

        def loss() -> Any:
            return jax.lax.scan(body, 0.0, ids)[0]

        return px.value_and_grad(loss, table)(), jax.vmap(table.sparse_read)(ids)

    (total, gradient), mapped = job.run(step, np.array([1, 1, 5]))
    assert float(total) == 7.0
    np.testing.assert_array_equal(gradient, [0, 2, 0, 0, 0, 1])
    np.testing.assert_array_equal(mapped, [1, 1, 5])


# -- everything else that functions do -------------------------------------------------------------


def test_a_loop_runs_as_python(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    v = job.variable(0.0)

    @px.function
    def epoch() -> None:
        for i in px.range(4):
            v.assign_add(i)

    job.run(epoch)
    assert float(v) == 6.0
    assert "a loop over px.range changes variables on parameter servers" in caplog.text


def test_a_loop_may_read(job: Job) -> None:
    v, total = job.variable(2.0), px.Variable(0.0)

    @px.function
    def epoch() -> None:
        for _ in px.range(4):
            total.assign_add(v)

    job.run(epoch)
    assert float(total) == 8.0


def test_train_loop_makes_one_step_after_the_other(job: Job) -> None:
    v = job.variable(0.0)

    @px.function
    def step(x: Any) -> Any:
        v.assign_add(x)
        return v.read_value()

    batches = iter([np.float32(i) for i in range(4)])
    results = job.run(lambda: px.train.loop(step, batches, steps=4))
    assert [float(x) for x in results] == [0.0, 1.0, 3.0, 6.0]
    assert float(v) == 6.0


def test_variables_made_on_the_first_call(job: Job) -> None:
    made: list[Any] = []

    @px.function
    def step(x: Any) -> Any:
        if not made:
            made.append(px.Variable(1.0))
        return made[0].assign_add(x) + 0.0

    with job.strategy.scope():
        assert float(step(1.0)) == 2.0
        assert float(step(1.0)) == 3.0
    assert isinstance(made[0], px.RemoteVariable)


def test_what_lower_shows(job: Job) -> None:
    v = job.variable(np.ones((4, 4), "f"))

    @px.function
    def step(x: Any) -> Any:
        return v @ x

    x = np.ones((4, 4), "f")
    assert "dot_general" in step.lower(x).as_text()
    assert step.cost(x)["flops"] > 0
    assert job.servers.pulls == []


def test_a_pickled_function_is_a_reference(job: Job) -> None:
    v = job.variable(1.0)

    @px.function
    def step(x: Any) -> Any:
        return v.assign_add(x) + 0.0

    again = cloudpickle.loads(cloudpickle.dumps(step))
    assert again is step
    sent = cloudpickle.dumps(step)
    name = step.shared_key
    del step, again
    gc.collect()
    remade = cloudpickle.loads(sent)
    assert remade.shared_key == name
    assert cloudpickle.loads(sent) is remade
    assert float(job.run(remade, 2.0)) == 3.0
    assert float(v) == 3.0


class Counter:
    """A class as users write them, with a method that is compiled."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable

    @px.function
    def add(self, x: Any) -> Any:
        """Add to the variable."""
        return self.variable.assign_add(x) + 0.0


def test_a_pickled_method_belongs_to_its_object(job: Job) -> None:
    counter = Counter(job.variable(1.0))
    again = cloudpickle.loads(cloudpickle.dumps(counter.add))
    assert float(job.run(again, 2.0)) == 3.0
    assert float(counter.variable) == 3.0


def test_gradients_of_compiled_steps_reach_local_variables_too(job: Job) -> None:
    remote, local = job.variable(2.0), px.Variable(3.0)

    @px.function
    def step() -> Any:
        return px.value_and_grad(lambda: remote * remote * local, {"r": remote, "l": local})()

    value, gradients = job.run(step)
    assert (float(value), float(gradients["r"]), float(gradients["l"])) == (12.0, 12.0, 4.0)
