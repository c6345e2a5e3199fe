"""`px.experimental.ParameterServerStrategy`: workers that run the whole program, without a coordinator.

The workers here are threads, each with a strategy of its own, as processes have.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.coordinator.jobs import TIMEOUT, Job

import phalanx as px

TASKS = {"worker": ["host0:1", "host1:1"], "ps": ["host2:1"]}


def strategy_of(cluster: Any, task: str | None, index: int | None, **options: Any) -> Any:
    resolver = px.cluster_resolver.SimpleClusterResolver(
        px.train.ClusterSpec(cluster), task_type=task, task_id=index
    )
    given = {"worker_timeout": TIMEOUT, "server_timeout": 10.0, **options}
    partitioner = px.partitioners.FixedShardsPartitioner(2)
    return px.experimental.ParameterServerStrategy(
        resolver, partitioner, options=px.experimental.ParameterServerOptions(**given)
    )


class Workers:
    """Two workers of a cluster with two servers."""

    def __init__(self) -> None:
        self.job = Job(2, 2, start=False)
        for index in range(2):
            self.job.start("ps", index)
        self._made: list[Any] = []
        self._threads = ThreadPoolExecutor(2)

    def strategy(self, index: int, **options: Any) -> Any:
        made = strategy_of(self.job.cluster, "worker", index, **options)
        self._made.append(made)
        return made

    def run(self, program: Callable[[Any, int], Any], *, first: int = 0) -> list[Any]:
        """Run the program of both workers; the other one begins when the first waits, or is done."""
        order = [first, 1 - first]
        futures = {i: self._threads.submit(program, self.strategy(i), i) for i in order}
        return [futures[i].result(TIMEOUT) for i in range(2)]

    def close(self) -> None:
        self._threads.shutdown()
        for made in reversed(self._made):
            made.close()
        self.job.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


# -- what it says of itself -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "index", "leads"),
    [("worker", 0, True), ("worker", 1, False), (None, None, True)],
)
def test_the_first_worker_leads(task: Any, index: Any, leads: bool) -> None:
    extended = strategy_of(TASKS, task, index).extended
    assert extended.experimental_between_graph
    found = (
        extended.experimental_should_init,
        extended.should_checkpoint,
        extended.should_save_summary,
    )
    assert found == (leads,) * 3


def test_a_chief_leads_if_there_is_one() -> None:
    cluster = {**TASKS, "chief": ["host3:1"]}
    assert strategy_of(cluster, "chief", 0).extended.should_checkpoint
    assert not strategy_of(cluster, "worker", 0).extended.should_checkpoint


def test_it_is_a_parameter_server_strategy() -> None:
    made = strategy_of(TASKS, "worker", 0)
    assert isinstance(made, px.ParameterServerStrategy)
    assert repr(made) == "<ParameterServerStrategy: 2 workers, 1 parameter server>"
    with pytest.raises(ValueError, match="This task is a worker"):
        px.coordinator.ClusterCoordinator(made)


# -- training -----------------------------------------------------------------------------------------


def test_workers_share_variables_which_the_first_one_makes(workers: Workers) -> None:
    together = threading.Barrier(2)

    def program(strategy: Any, index: int) -> Any:
        with strategy.scope():
            table = px.Variable(np.full((4, 2), float(index + 1), np.float32))
            count = px.Variable(10 * index)
        began = table.numpy().sum(), int(count)
        together.wait(TIMEOUT)

        @px.function
        def train() -> Any:
            return strategy.run(lambda: count.assign_add(1) + 0)

        for _ in range(20):
            train()
            table.scatter_add(px.IndexedSlices(np.ones((1, 2), np.float32), np.array([3 * index])))
        together.wait(TIMEOUT)
        return began, int(count), table.numpy()[:, 0].tolist()

    one, other = workers.run(program, first=1)
    assert one == other == ((8.0, 0), 40, [21.0, 1.0, 1.0, 21.0])


def test_gradients_of_all_workers_count(workers: Workers) -> None:
    def program(strategy: Any, index: int) -> Any:
        with strategy.scope():
            v = px.Variable(100.0)
            optimizer = px.train.Optimizer(optax.sgd(1.0))

        @px.function
        def train(x: Any) -> Any:
            return strategy.run(lambda x: optimizer.minimize(lambda: v * x, [v]), args=(x,))

        for _ in range(10):
            train(jnp.float32(index + 1))
        return v, optimizer

    ((v, optimizer), _) = workers.run(program)
    assert (float(v), int(optimizer.iterations)) == (100.0 - 10 * 1 - 10 * 2, 20)


def test_a_worker_that_drops_a_variable_leaves_it_to_the_others(workers: Workers) -> None:
    dropped = threading.Event()

    def program(strategy: Any, index: int) -> Any:
        with strategy.scope():
            v, w = px.Variable(1.0), px.Variable(2.0)
        if index == 0:
            del v
            gc.collect()
            assert float(w) == 2.0
            dropped.set()
            return 1.0
        assert dropped.wait(TIMEOUT)
        return float(v)

    assert workers.run(program) == [1.0, 1.0]


def test_reductions_are_those_of_one_worker(workers: Workers) -> None:
    def program(strategy: Any, index: int) -> Any:
        value = strategy.run(lambda: jnp.float32(index))
        return float(strategy.reduce("sum", value, axis=None))

    assert workers.run(program) == [0.0, 1.0]


# -- input --------------------------------------------------------------------------------------------


def test_every_worker_reads_the_whole_dataset_unless_its_function_divides_it() -> None:
    dataset = px.data.Dataset.range(4).batch(2)
    for index in range(2):
        made = strategy_of(TASKS, "worker", index)
        whole = made.experimental_distribute_dataset(dataset)
        assert [x.tolist() for x in whole] == [[0, 1], [2, 3]]
        contexts: list[Any] = []

        def mine(context: Any, contexts: list[Any] = contexts) -> Any:
            contexts.append(context)
            return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)

        divided = made.distribute_datasets_from_function(mine)
        assert [x.tolist() for x in divided] == [[2 * index, 2 * index + 1]]
        (context,) = contexts
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (2, 1)


def test_a_chief_reads_as_the_first_worker() -> None:
    made = strategy_of({**TASKS, "chief": ["host3:1"]}, "chief", 0)
    pipelines: list[tuple[int, int]] = []

    def mine(context: Any) -> Any:
        pipelines.append((context.input_pipeline_id, context.num_input_pipelines))
        return px.data.Dataset.range(2).batch(2)

    distributed = made.distribute_datasets_from_function(mine)
    assert [x.tolist() for x in distributed] == [[0, 1]]
    assert set(pipelines) == {(0, 3)}
    assert distributed.element_spec.dtype == np.int32


# -- what goes wrong ----------------------------------------------------------------------------------


def test_a_missing_first_worker_is_named(workers: Workers) -> None:
    late = workers.strategy(1, worker_timeout=0.3)
    with late.scope(), pytest.raises(px.errors.DeadlineExceededError, match="Missing is worker 0 at"):
        px.Variable(1.0)


def test_a_variable_that_the_first_worker_does_not_make_is_named(workers: Workers) -> None:
    first, late = workers.strategy(0), workers.strategy(1, worker_timeout=0.3)
    with first.scope():
        px.Variable(1.0)
    with late.scope():
        px.Variable(1.0)
        with pytest.raises(px.errors.DeadlineExceededError, match=r"worker 0 has not made .*'extra'"):
            px.Variable(2.0, name="extra")


def test_workers_that_make_different_variables(workers: Workers) -> None:
    first, other = workers.strategy(0), workers.strategy(1)
    with first.scope():
        v = px.Variable(np.zeros(2), name="v")
    with other.scope(), pytest.raises(ValueError, match="another variable with this id"):
        px.Variable(np.zeros(4), name="w")
    assert v.numpy().tolist() == [0.0, 0.0]


def test_a_missing_server_is_named() -> None:
    job = Job(2, 1, start=False)
    late = strategy_of(job.cluster, "worker", 1, worker_timeout=0.3)
    with late.scope(), pytest.raises(px.errors.DeadlineExceededError, match="Missing is ps 0 at"):
        px.Variable(1.0)
    job.close()


# -- with a coordinator -------------------------------------------------------------------------------


def test_a_coordinator_can_use_it_too() -> None:
    with Job(1, 1) as job:
        strategy = strategy_of(job.cluster, None, None)
        coordinator = job.coordinate(strategy)
        with strategy.scope():
            total = px.Variable(0)
        made = coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(
                lambda _: px.data.Dataset.from_tensor_slices([3] * 3).batch(1)
            )
        )

        @px.function
        def worker_fn(iterator: Any) -> Any:
            x = next(iterator)[0]
            total.assign_add(x)
            return x

        iterator = iter(made)
        assert int(coordinator.schedule(worker_fn, args=(iterator,)).fetch()) == 3
        assert int(total) == 3
