"""Translations of the examples in TensorFlow's documentation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.runtime.printing import format_component
from tests.conformance.harness import V, case, cases, comps, differs, dist, fresh, mirrored, rid

CLUSTER = px.train.ClusterSpec(
    {
        "worker": ["localhost:12345", "localhost:12346"],
        "ps": ["localhost:12347"],
    }
)


def tf_text(text: str) -> str:
    """What we print, with our names replaced by TensorFlow's: all the rest must be the same."""
    for ours, theirs in (
        ("<px.Variable ", "<tf.Variable "),
        ("<Array: ", "<tf.Tensor: "),
        ("Array(", "tf.Tensor("),
        ("px.InputContext(", "tf.distribute.InputContext("),
    ):
        text = text.replace(ours, theirs)
    return text


_TF_CLASSES = {
    "DefaultReplicaContext": "_DefaultReplicaContext",
    "ReplicaContext": "_MirroredReplicaContext",
    "DefaultStrategy": "_DefaultDistributionStrategy",
}


def tf_class(x: Any) -> str:
    """TensorFlow's private name for the class of `x`."""
    return _TF_CLASSES[type(x).__name__]


# -- strategies -----------------------------------------------------------------------------------


@differs()
def s001_removed_names() -> None:
    names = [
        "experimental_distribute_dataset",
        "experimental_distribute_datasets_from_function",
        "experimental_local_results",
        "experimental_run",
        "extended",
        "gather",
        "make_dataset_iterator",
        "make_input_fn_iterator",
        "num_replicas_in_sync",
        "reduce",
        "run",
        "scope",
        "unwrap",
    ]
    missing = [n for n in names if not hasattr(px.Strategy, n)]
    assert not missing
    # TensorFlow no longer has these.
    assert hasattr(px.Strategy, "experimental_make_numpy_dataset")
    s = mirrored(2)
    y = dist(s, V(10, 11))
    result = s.experimental_run_v2(lambda x, y: x + y, args=(1,), kwargs={"y": y})
    assert [int(x) for x in result.values] == [11, 12]


@case()
def s001_reduce_axis_none() -> Any:
    s = mirrored(2)
    v = s.experimental_distribute_values_from_function(
        lambda c: jnp.arange(4) + 4 * c.replica_id_in_sync_group
    )
    return s.reduce(px.ReduceOp.SUM, v, axis=None)


@case()
def s001_reduce_axis0() -> Any:
    s = mirrored(2)
    v = s.experimental_distribute_values_from_function(
        lambda c: jnp.arange(4) + 4 * c.replica_id_in_sync_group
    )
    return s.reduce(px.ReduceOp.SUM, v, axis=0)


@case()
def s001_reduce_partial_batch_axis_none() -> Any:
    s = mirrored(2)
    parts = [jnp.array([0.0, 1.0, 2.0, 3.0]), jnp.array([4.0, 5.0])]
    v = s.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])
    return s.reduce(px.ReduceOp.SUM, v, axis=None)


@case()
def s001_reduce_partial_batch_mean_axis0() -> Any:
    s = mirrored(2)
    parts = [jnp.array([0.0, 1.0, 2.0, 3.0]), jnp.array([4.0, 5.0])]
    v = s.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])
    means = s.run(jnp.mean, args=(v,))
    return {
        "mean_axis0": s.reduce("MEAN", v, axis=0),
        "mean_of_means": s.reduce("MEAN", means, axis=None),
    }


@case()
def s001_local_results() -> Any:
    s = mirrored(2)
    with s.scope():
        v = px.Variable(3.0)
    pr = s.run(rid)
    return {
        "per_replica": s.experimental_local_results(pr),
        "variable": s.experimental_local_results(v),
        "tensor": s.experimental_local_results(jnp.array(1.0)),
        "int": s.experimental_local_results(5),
    }


@case()
def s003_run_returns_replica_id() -> Any:
    s = mirrored(2)

    @px.function
    def f() -> Any:
        return px.get_replica_context().replica_id_in_sync_group

    r = s.run(f)
    return {"value": r, "repr": tf_text(repr(r))}


@case()
def s003_replica_context_example() -> Any:
    s = mirrored(2)

    def f() -> Any:
        return px.get_replica_context().replica_id_in_sync_group

    return s.run(f)


@case()
def s003_gather_values() -> Any:
    s = mirrored(2)
    v = s.experimental_distribute_values_from_function(lambda _: fresh(jnp.array([[1], [2]])))
    return s.gather(v, axis=0)


@case()
def s003_gather_variable() -> Any:
    s = mirrored(2)
    with s.scope():
        v = px.Variable([[1], [2]])
    return s.gather(v, axis=0)


@case()
def s003_one_device() -> Any:
    s = px.OneDeviceStrategy(device="/cpu:0")
    with s.scope():
        v = px.Variable(1.0)
    r = 0
    for i in range(10):
        r += s.run(lambda x: x * 2, args=(i,))
    return {"device": v.device, "result": r}


# -- contexts -------------------------------------------------------------------------------------


@case()
def s003_get_replica_context() -> Any:
    s = mirrored(2)
    out: dict[str, Any] = {"outside": tf_class(px.get_replica_context())}
    with s.scope():
        out["in_scope"] = px.get_replica_context()
    r = s.run(px.get_replica_context)
    out["run"] = [tf_class(c) for c in s.experimental_local_results(r)]
    out["run_container"] = type(r).__name__
    return out


@case()
def s003_get_strategy() -> Any:
    s = mirrored(2)
    d = tf_class(px.get_strategy())
    with s.scope():
        same = px.get_strategy() is s
    return {"outside": d, "inside_is_strategy": same}


@case()
def s003_has_strategy() -> Any:
    s = mirrored(2)
    a = px.has_strategy()
    with s.scope():
        b = px.has_strategy()
    c = s.run(px.has_strategy)
    return {"outside": a, "scope": b, "run": c}


@case()
def s003_in_cross_replica_context() -> Any:
    s = mirrored(2)
    a = px.in_cross_replica_context()
    with s.scope():
        b = px.in_cross_replica_context()
    c = s.run(px.in_cross_replica_context)
    return {"outside": a, "scope": b, "run": c}


# -- variables ------------------------------------------------------------------------------------


@case()
def s003_mirrored_variable() -> Any:
    s = mirrored(2)
    with s.scope():
        x = px.Variable(1.0)
    return {
        "class": type(x).__name__,
        "values": comps(x),
        "names": [c.name for c in x.values],
        "repr": tf_text(repr(x)),
    }


@case()
def s003_scope_example() -> Any:
    s = mirrored(2)
    with s.scope():
        a = px.Variable(1.0)
    b = px.Variable(1.0)
    return {
        "inside": type(a).__name__,
        "outside": type(b).__name__,
        "outside_repr": tf_text(repr(b)),
    }


@case()
def s003_fixed_shards_partitioner() -> Any:
    p = px.experimental.partitioners.FixedShardsPartitioner(num_shards=2)
    return {
        "axis0": p((10, 3), jnp.float32, axis=0),
        "axis1": p((10, 3), jnp.float32, axis=1),
    }


@case()
def s003_min_size_partitioner() -> Any:
    MinSize = px.experimental.partitioners.MinSizePartitioner
    return {
        "max4": MinSize(min_shard_bytes=24, max_shards=4)((10, 3), jnp.float32, axis=0),
        "max8": MinSize(min_shard_bytes=24, max_shards=8)((10, 3), jnp.float32, axis=0),
    }


# -- clusters and input contexts ------------------------------------------------------------------


@case()
def s003_task_id() -> Any:
    r = px.cluster_resolver.SimpleClusterResolver(CLUSTER, task_type="worker", task_id=0)
    return {
        "task_type": r.task_type,
        "task_id": r.task_id,
        "branch": "worker0" if r.task_type == "worker" and r.task_id == 0 else "other",
    }


@case()
def s003_task_type() -> Any:
    r = px.cluster_resolver.SimpleClusterResolver(CLUSTER, task_type="worker", task_id=1)
    if r.task_type == "worker":
        return "worker"
    return "ps" if r.task_type == "ps" else None


@case()
def s003_task_defaults_none() -> Any:
    r = px.cluster_resolver.SimpleClusterResolver(CLUSTER)
    return {
        "task_type": r.task_type,
        "task_id": r.task_id,
        "environment": r.environment,
        "num_accelerators": r.num_accelerators(),
        "rpc_layer": r.rpc_layer,
        "master": r.master(),
    }


@case()
def s003_input_context() -> Any:
    c = px.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    return {
        "pipelines": c.num_input_pipelines,
        "id": c.input_pipeline_id,
        "replicas": c.num_replicas_in_sync,
        "per_replica": c.get_per_replica_batch_size(8),
        "str": tf_text(str(c)),
    }


# -- input ----------------------------------------------------------------------------------------


def fives() -> Any:
    return px.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)


@case()
def s000_run_and_reduce_sum() -> Any:
    strategy = mirrored(2)
    dataset = px.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(4)
    ds = strategy.experimental_distribute_dataset(dataset)

    def train_step(x: Any) -> Any:
        return jnp.mean(x)

    per = strategy.run(train_step, args=(next(iter(ds)),))
    return {"per_replica": per, "losses": strategy.reduce(px.ReduceOp.SUM, per, axis=None)}


@case()
def s001_custom_training_loop() -> Any:
    my_strategy = mirrored(2)
    out = []
    with my_strategy.scope():

        @px.function
        def distribute_train_epoch(dataset: Any) -> Any:
            def replica_fn(x: Any) -> Any:
                return jnp.sum(x)

            total = 0
            for x in dataset:
                per = my_strategy.experimental_run_v2(replica_fn, args=(x,))
                total += my_strategy.reduce(px.ReduceOp.SUM, per, axis=None)
            return total

        dist = my_strategy.experimental_distribute_dataset(px.data.Dataset.range(8).batch(4))
        for _ in range(2):
            out.append(distribute_train_epoch(dist))
    return out


@case()
def s001_datasets_from_function() -> Any:
    strategy = mirrored(2)
    seen = []

    def dataset_fn(c: px.InputContext) -> Any:
        seen.append([c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync])
        batch_size = c.get_per_replica_batch_size(4)
        d = px.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(c.num_input_pipelines, c.input_pipeline_id)

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    batch = next(iter(inputs))
    run = strategy.experimental_run_v2(jnp.sum, args=(batch,))
    return {"contexts": seen, "batch": batch, "run": run}


@case()
def s001_distribute_unbatched_dataset() -> Any:
    strategy = mirrored(2)
    dataset = strategy.experimental_make_numpy_dataset(np.ones([10], dtype=np.float32))
    return list(strategy.experimental_distribute_dataset(dataset))


@case()
def s001_make_numpy_dataset() -> Any:
    strategy = mirrored(2)
    dataset = strategy.extended.experimental_make_numpy_dataset(np.arange(10, dtype=np.float32))
    distributed = strategy.experimental_distribute_dataset(dataset.batch(4))
    return {"elements": [float(e) for e in dataset], "distributed": list(distributed)}


@case()
def s001_make_numpy_dataset_nest() -> Any:
    nest = (np.arange(3, dtype=np.float32), np.arange(6, dtype=np.float32).reshape(3, 2))
    return list(mirrored(2).experimental_make_numpy_dataset(nest))


@case()
def s001_make_numpy_dataset_list_is_stacked() -> Any:
    rows = [np.arange(3, dtype=np.float32), np.arange(3, 6).astype(np.float32)]
    return list(mirrored(2).experimental_make_numpy_dataset(rows))


@case()
def s001_tfrecord_files() -> Any:
    folder = Path(tempfile.mkdtemp())
    files = [str(folder / f"{i + 1}.tfr") for i in range(4)]
    for i, name in enumerate(files):
        with px.io.TFRecordWriter(name) as writer:
            for j in range(2):
                writer.write(b"r%d" % (2 * i + j))
    strategy = mirrored(2)
    dataset = px.data.TFRecordDataset(files)
    with pytest.raises(IndexError):
        list(strategy.experimental_distribute_dataset(dataset))
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(4))
    return {"as_in_seed": {"raises": "IndexError"}, "batch4": list(dist_dataset)}


@case()
def s003_distributed_dataset_print() -> Any:
    dist_dataset = mirrored(2).experimental_distribute_dataset(fives())
    return [tf_text(str(x)) for x in dist_dataset]


@case()
def s003_distributed_dataset_next_repr() -> Any:
    dataset_iterator = iter(mirrored(2).experimental_distribute_dataset(fives()))
    return tf_text(repr(next(dataset_iterator)))


@case()
def s003_run_input() -> Any:
    s = mirrored(2)
    distributed_values = next(iter(s.experimental_distribute_dataset(fives())))

    @px.function
    def f(x: Any) -> Any:
        return x * 2.0

    return s.run(f, args=(distributed_values,))


@case()
def s003_reduce_axis0() -> Any:
    s = mirrored(2)
    r = s.reduce(px.ReduceOp.SUM, next(iter(s.experimental_distribute_dataset(fives()))), axis=0)
    return {"value": r, "repr": tf_text(format_component(r, repr))}


@case()
def s003_distribute_datasets_from_function() -> Any:
    def dataset_fn(input_context: px.InputContext) -> Any:
        global_batch_size = 4
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        dataset = px.data.Dataset.range(8).batch(global_batch_size)
        dataset = dataset.unbatch().batch(batch_size)
        return dataset.prefetch(2)

    dist_dataset = mirrored(2).distribute_datasets_from_function(dataset_fn)
    return [tf_text(str(x)).replace("int32", "int64") for x in dist_dataset]


@case()
def s003_experimental_distribute_dataset() -> Any:
    s = mirrored(2)

    @px.function
    def f(x: Any) -> Any:
        return x * 2.0

    dist_dataset = s.experimental_distribute_dataset(fives())
    return [tf_text(str(s.run(f, args=(x,)))) for x in dist_dataset]


def rebatched(rows: int, size: int, replicas: int) -> Any:
    dataset = px.data.Dataset.range(rows).batch(size, drop_remainder=False)
    return list(mirrored(replicas).experimental_distribute_dataset(dataset))


@case()
def s003_autoshard_option() -> Any:
    dataset = px.data.Dataset.range(16).batch(4)
    options = px.data.Options()
    policy = px.data.experimental.AutoShardPolicy.DATA
    options.experimental_distribute.auto_shard_policy = policy
    return list(mirrored(2).experimental_distribute_dataset(dataset.with_options(options)))


# -- servers -------------------------------------------------------------------------------------


@case()
def s003_create_local_server() -> Any:
    with px.Server.create_local_server() as server:
        return {
            "job_name": server.server_def.job_name,
            "task_index": server.server_def.task_index,
            "protocol": server.server_def.protocol,
            "target_prefix": server.target.split("://")[0],
        }


@case()
def s002_public_names() -> Any:
    names = """
    cluster_resolver experimental CrossDeviceOps HierarchicalCopyAllReduce InputContext
    InputReplicationMode MirroredStrategy NcclAllReduce OneDeviceStrategy ReduceOp ReductionToOneDevice
    ReplicaContext Server Strategy StrategyExtended experimental_set_strategy get_replica_context
    get_strategy has_strategy in_cross_replica_context
    """
    return {name: hasattr(px, name) for name in names.split()}


# -- one expression each ---------------------------------------------------------------------------

cases(
    {
        "s003_input_context_not_divisible": lambda: px.InputContext(
            num_replicas_in_sync=4
        ).get_per_replica_batch_size(6),
        "s003_distributed_dataset_values": lambda: list(
            mirrored(2).experimental_distribute_dataset(fives())
        ),
        "s003_rebatch_example_1": lambda: rebatched(10, 4, 2),
        "s003_rebatch_example_2": lambda: rebatched(8, 4, 3),
        "s003_rebatch_example_3": lambda: rebatched(10, 5, 3),
    }
)
