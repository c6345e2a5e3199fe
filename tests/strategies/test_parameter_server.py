"""`ParameterServerStrategy`: where variables are, how they are divided, and what it refuses."""

from __future__ import annotations

import gc
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.parameter_server.jobs import Job
from tests.parameter_server.running import connections, running

import phalanx as px
from phalanx.parameter_server.client import ServerConnections

FIXED = px.partitioners.FixedShardsPartitioner
Simple = px.cluster_resolver.SimpleClusterResolver
TASKS = {"worker": ["a:1", "b:1"], "ps": ["c:1", "d:1", "e:1"]}


def strategy(tasks: Any = None, **kwargs: Any) -> px.ParameterServerStrategy:
    return px.ParameterServerStrategy(Simple(px.train.ClusterSpec(tasks or TASKS)), **kwargs)


def test_what_it_says_of_itself() -> None:
    made = strategy()
    assert repr(made) == "<ParameterServerStrategy: 2 workers, 3 parameter servers>"
    assert made.num_replicas_in_sync == 1
    assert made.extended.parameter_devices == tuple(
        f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(3)
    )
    assert made.cluster_resolver.cluster_spec().as_dict() == TASKS
    assert made.options == px.experimental.ParameterServerOptions()
    assert not made.extended.experimental_between_graph


def test_the_cluster_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs a cluster"):
        px.ParameterServerStrategy()
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}}')
    assert px.ParameterServerStrategy().extended.num_servers == 1


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"variable_partitioner": 3}, TypeError),
        ({"placement": "anywhere"}, ValueError),
        ({"options": {"window": 3}}, TypeError),
        ({"compute_devices": ["CPU:77"]}, ValueError),
    ],
)
def test_what_it_does_not_take(kwargs: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Received"):
        strategy(**kwargs)
    with pytest.raises(ValueError, match="ClusterResolver"):
        px.ParameterServerStrategy(TASKS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one task in job 'worker'"):
        strategy({"ps": ["a:1"]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"delivery": "twice"},
        {"durability": True},
        {"max_staleness": -1},
        {"window": 0},
        {"backup_workers": 1, "delivery": "at_least_once"},
        {"sync": "yes"},
        {"worker_timeout": 0},
        {"server_timeout": "soon"},
    ],
)
def test_options_are_checked(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="Received"):
        px.experimental.ParameterServerOptions(**wrong)


# -- where variables are ---------------------------------------------------------------------------


def servers_of(variables: list[Any]) -> list[int]:
    return [v.definition.server for v in variables]


def test_by_size_the_emptiest_server_is_next() -> None:
    job = Job(2, placement="by_size")
    made = [job.variable(np.zeros(n, "f")) for n in (100, 10, 10, 200, 1)]
    assert servers_of(made) == [0, 1, 1, 1, 0]


def test_a_function_may_place_variables() -> None:
    seen = []

    def choose(plan: Any) -> int:
        seen.append((plan.name, plan.shape, plan.nbytes, plan.held))
        return 1 if plan.name.startswith("table") else 0

    job = Job(2, FIXED(2), placement=choose)
    table = job.variable(np.zeros((3, 2), "f"), name="table")
    bias = job.variable(0.0, name="bias")
    assert servers_of([*table, bias]) == [1, 1, 0]
    assert seen[1] == ("table/part_1", (1, 2), 8, (0, 16))
    wrong = Job(2, placement=lambda plan: 2)
    with pytest.raises(ValueError, match="What placement returns"):
        wrong.variable(1.0)


def test_colocated_variables_stay_together_and_whole() -> None:
    job = Job(3, FIXED(2))
    first, other = job.variable(1.0), job.variable(2.0)
    with job.strategy.scope(), job.strategy.extended.colocate_vars_with(other):
        slot = px.Variable(np.zeros((4, 2), "f"))
    assert isinstance(slot, px.RemoteVariable)
    assert servers_of([first, other, slot]) == [0, 1, 1]
    assert job.variable(3.0).definition.server == 2  # which takes no turn


@pytest.mark.parametrize("answer", [[1, 2], [2], [0, 1], "ab", None, [1.5, 1]])
def test_partitioners_divide_rows_only(answer: Any) -> None:
    job = Job(2, lambda shape, dtype: answer)
    with pytest.raises(ValueError, match="only rows are divided"):
        job.variable(np.zeros((2, 2)))


def test_thirteen_rows_in_five_shards() -> None:
    job = Job(2, FIXED(5))
    assert [s.shape[0] for s in job.variable(np.zeros(13))] == [3, 3, 3, 2, 2]
    assert isinstance(job.variable(1.0), px.RemoteVariable)
    assert isinstance(job.variable(np.zeros(1)), px.RemoteVariable)


def test_variables_end_with_the_program_that_made_them() -> None:
    job = Job(2, FIXED(2))

    def use_one() -> None:
        v = job.variable(np.zeros((4, 2), "f"))
        job.run(px.function(lambda: v.assign_add(np.ones((4, 2), "f")).name))

    use_one()
    gc.collect()
    assert job.strategy.extended.variables == []


# -- running ---------------------------------------------------------------------------------------


def test_run_and_reduce_have_one_replica() -> None:
    job = Job()
    v = job.variable(2.0)
    result = job.strategy.run(lambda x: v * x, args=(3.0,))
    assert float(result) == 6.0
    assert float(job.strategy.reduce("sum", result, axis=None)) == 6.0
    with job.strategy.scope():
        assert px.in_cross_replica_context()
        assert px.get_strategy() is job.strategy
    other = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with other.scope(), pytest.raises(RuntimeError, match="another strategy"):
        v.assign(1.0)


def test_update_runs_once_where_the_variable_is() -> None:
    job = Job()
    v = job.variable(1.0)
    calls = []
    job.strategy.extended.update(v, lambda x, y: calls.append(x) or x.assign_add(y), args=(4.0,))
    assert [c is v for c in calls] == [True]
    assert float(v) == 5.0
    assert job.strategy.extended.non_slot_devices([v]) is v


def test_metrics_count_on_servers() -> None:
    job = Job()
    with job.strategy.scope():
        mean = px.train.Mean()
    step = px.function(mean.update_state)
    for i in range(3):
        job.run(step, jnp.array([i, i + 1.0]))
    assert float(mean.result()) == 1.5


def test_input_is_read_by_workers() -> None:
    job = Job()
    dataset = px.data.Dataset.range(4).batch(2)
    for distributed in (
        job.strategy.experimental_distribute_dataset(dataset),
        job.strategy.distribute_datasets_from_function(lambda context: dataset),
    ):
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            iter(distributed)
        found = job.run(lambda d: [x.tolist() for x in d], distributed)
        assert found == [[0, 1], [2, 3]]


def test_a_job_over_real_connections() -> None:
    with running(2) as tasks:
        job = Job(2, FIXED(2))
        found: ServerConnections
        with connections(tasks) as found:
            job.use(found)
            table = job.variable(np.arange(12, dtype=np.float32).reshape(6, 2))
            total = job.variable(0.0)

            @px.function
            def step(ids: Any) -> Any:
                rows = px.nn.embedding_lookup(table, ids)
                table.scatter_sub(px.IndexedSlices(rows, ids))
                return total.assign_add(rows.sum()) + 0.0

            ids = np.array([5, 0])
            assert [float(job.run(step, ids)) for _ in range(2)] == [22.0, 22.0]
            assert table.numpy().sum() == 66 - 22
