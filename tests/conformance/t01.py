"""Translations of the examples in TensorFlow's documentation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import phalanx as px
from tests.conformance.harness import V, awaits, case, comps, differs, dist, fresh, mirrored, rid

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
        "experimental_local_results",
        "experimental_run",
        "extended",
        "gather",
        "num_replicas_in_sync",
        "reduce",
        "run",
        "scope",
        "unwrap",
    ]
    if hasattr(px, "data"):
        names += [
            "experimental_distribute_dataset",
            "experimental_distribute_datasets_from_function",
            "make_dataset_iterator",
            "make_input_fn_iterator",
        ]
    missing = [n for n in names if not hasattr(px.Strategy, n)]
    assert not missing
    # TensorFlow no longer has this one.
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


@case()
def s003_input_context_not_divisible() -> Any:
    return px.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(6)


# -- what does not exist yet ----------------------------------------------------------------------

awaits(
    "px.data",
    "s000_run_and_reduce_sum",
    "s001_custom_training_loop",
    "s001_datasets_from_function",
    "s001_distribute_unbatched_dataset",
    "s001_make_numpy_dataset",
    "s001_make_numpy_dataset_list_is_stacked",
    "s001_make_numpy_dataset_nest",
    "s001_tfrecord_files",
    "s003_autoshard_option",
    "s003_distribute_datasets_from_function",
    "s003_distributed_dataset_next_repr",
    "s003_distributed_dataset_print",
    "s003_distributed_dataset_values",
    "s003_experimental_distribute_dataset",
    "s003_rebatch_example_1",
    "s003_rebatch_example_2",
    "s003_rebatch_example_3",
    "s003_reduce_axis0",
    "s003_run_input",
)
awaits("px.Server", "s002_public_names", "s003_create_local_server")
