"""ParameterServerStrategy, its variables, and partitioners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import phalanx as px
from tests.conformance.harness import case, differs
from tests.parameter_server.jobs import Job

P = px.partitioners
Simple = px.cluster_resolver.SimpleClusterResolver


def place(variable: Any) -> str:
    """The task of a variable, as the recordings write it."""
    return str(variable.device.removeprefix("/job:").removesuffix("/device:CPU:0"))


@case()
def ps_round_robin_placement() -> Any:
    job = Job(2)
    return [place(job.variable(float(i))) for i in range(5)]


@case()
def ps_sharded_round_robin_continues() -> Any:
    job = Job(3, P.FixedShardsPartitioner(2))
    a, b, c = job.variable([1.0, 2.0]), job.variable(1.0), job.variable([3.0, 4.0])
    return [[place(x) for x in a.variables], place(b), [place(x) for x in c.variables]]


def five_rows() -> Any:
    return Job(2, P.FixedShardsPartitioner(2)).variable([0.0, 1.0, 2.0, 3.0, 4.0])


@case()
def ps_sharded_index_out_of_range() -> Any:
    return five_rows()[5]


@case()
def ps_sharded_tensor_index() -> Any:
    return five_rows()[jnp.array(1)]


@case()
def ps_partitioner_zero() -> Any:
    return Job(2, lambda shape, dtype, axis=0: [0, 1]).variable(np.zeros((2, 4)))


@case()
def ps_partitioner_more_shards_than_rows() -> Any:
    variable = Job(2, lambda shape, dtype, axis=0: [10, 1]).variable(np.zeros((3, 1)))
    return [list(x.shape) for x in variable.variables]


@case()
def ps_sharded_checkpoint_reshard() -> Any:
    state = five_rows().state()
    sharded = Job(3, P.FixedShardsPartitioner(3)).variable(np.zeros(5, "f"))
    sharded.load_state(state)
    plain = px.Variable(np.zeros(5, "f"))
    plain.load_state(state)
    return {"resharded": {"ShardedVariable": [x.numpy() for x in sharded]}, "plain": plain.numpy()}


@case()
def ps_update_on_ps_device() -> Any:
    job, calls = Job(2), []
    v = job.variable(1.0)
    job.strategy.extended.update(v, lambda x: calls.append(1) or x.assign(5.0))
    return {"calls": len(calls), "v": v.numpy()}


@case()
def ps_model_fit_like_training() -> Any:
    job = Job(2, P.FixedShardsPartitioner(2))
    w = job.variable(np.zeros((2, 1), "f"))
    x = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 2.0]], np.float32)
    y = np.array([[4.0], [6.0], [10.0]], np.float32)

    @px.function
    def step(x: Any, y: Any) -> Any:
        def on_replica(x: Any, y: Any) -> Any:
            loss, gradients = px.value_and_grad(
                lambda: jnp.mean((x @ jnp.asarray(w) - y) ** 2), w.variables
            )()
            for gradient, shard in zip(gradients, w.variables, strict=True):
                shard.assign_sub(0.05 * gradient)
            return loss

        return job.strategy.run(on_replica, args=(x, y))

    for _ in range(400):
        job.run(step, x, y)
    return bool(np.all(np.abs(w.numpy() - 2.0) < 0.2))


# -- what makes no strategy ------------------------------------------------------------------------


def strategy(cluster: dict[str, Any], **task: Any) -> px.Strategy:
    return px.ParameterServerStrategy(Simple(px.train.ClusterSpec(cluster), **task))


TASKS = {"worker": ["localhost:1"], "ps": ["localhost:2"]}


@case()
def ps_err_empty() -> Any:
    return strategy({})


@case()
def ps_err_no_ps() -> Any:
    return strategy({"worker": ["localhost:1"]})


@case()
def ps_err_bad_job() -> Any:
    return strategy({**TASKS, "foo": ["localhost:3"]})


@case()
def ps_err_bad_task_type() -> Any:
    return strategy(TASKS, task_type="foo", task_id=0)


@case()
def ps_err_task_id_too_big() -> Any:
    return strategy(TASKS, task_type="worker", task_id=1)


# -- partitioners ----------------------------------------------------------------------------------


def partition(partitioner: Any, shape: list[int], axis: int = 0) -> Any:
    return partitioner(shape, np.float32, axis)


@case()
def part_max_size() -> Any:
    shards: Callable[..., Any] = P.MaxSizePartitioner
    return [
        partition(shards(4), [6, 1]),
        partition(shards(4, max_shards=2), [6, 1]),
        partition(shards(1024), [6, 1]),
        partition(shards(10), [6, 1]),
        partition(shards(8), [10, 3]),
        partition(shards(24), [10, 3]),
        partition(shards(30), [10, 3]),
    ]


@case()
def part_min_size() -> Any:
    shards: Callable[..., Any] = P.MinSizePartitioner
    return [
        partition(shards(4, 2), [6, 1]),
        partition(shards(4, 10), [6, 1]),
        partition(shards(), [1000, 1000]),
        partition(shards(25, 8), [10, 3]),
        partition(shards(24, 8), [10, 3]),
        partition(shards(1000, 8), [10, 3]),
    ]


@case()
def part_err_min_bytes0() -> Any:
    return P.MinSizePartitioner(min_shard_bytes=0)


@case()
def part_err_min_maxshards0() -> Any:
    return P.MinSizePartitioner(max_shards=0)


@case()
def part_err_min_axis_oob() -> Any:
    return partition(P.MinSizePartitioner(), [6, 1], axis=2)


@case()
def part_err_max_axis_oob() -> Any:
    return partition(P.MaxSizePartitioner(4), [6, 1], axis=2)


@case()
def part_err_base_call() -> Any:
    return P.Partitioner()([6, 1], np.float32)


@differs()
def part_err_fixed_zero() -> None:
    try:
        P.FixedShardsPartitioner(0)
    except ValueError:
        return
    raise AssertionError("0 shards are none")


@case()
def part_err_fixed_unknown_dim() -> Any:
    unknown: Any = [None, 3]
    return partition(P.FixedShardsPartitioner(2), unknown)
