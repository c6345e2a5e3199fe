"""The child of `parameter_server.py` that runs TensorFlow's coordinator.

``python _ps_tensorflow.py WORKERS SERVERS`` starts the workers and servers as processes of its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import _ps_common as common

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def serve_task(cluster: str, job: str, index: str) -> None:
    """Be a worker or a parameter server."""
    common.end_with_coordinator()
    import tensorflow as tf

    spec = tf.train.ClusterSpec(json.loads(cluster))
    server = tf.distribute.Server(spec, job_name=job, task_index=int(index), protocol="grpc")
    server.join()


def main(workers: int, servers: int) -> None:
    """Be the coordinator."""
    cluster = common.start_tasks(__file__, workers, servers)
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner(servers)

    def partitioner(shape: Any, dtype: Any, **kwargs: Any) -> Any:
        return shards(shape, dtype, **kwargs) if shape[0] == common.ROWS else [1] * len(shape)

    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    batch, ids = tf.constant(common.inputs()), tf.constant(common.indices())
    with strategy.scope():
        matrices = [tf.Variable(w) for w in common.weights()]
        large = tf.Variable(tf.zeros(common.LARGE))
        table = tf.Variable(lambda: tf.zeros((common.ROWS, common.DIMENSION)))

    @tf.function
    def trivial() -> Any:
        return tf.constant(1)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            guess = tf.tanh(batch @ matrices[0]) @ matrices[1]
            loss = tf.reduce_mean((guess - batch) ** 2)
        for variable, gradient in zip(matrices, tape.gradient(loss, matrices), strict=True):
            variable.assign_sub(common.RATE * gradient)
        return loss

    @tf.function
    def sparse() -> Any:
        rows = tf.nn.embedding_lookup(table, ids)
        change = rows * 0.1 + 1e-3
        bound = common.ROWS // servers
        for i, shard in enumerate(table.variables):
            mine = tf.where((ids >= i * bound) & (ids < (i + 1) * bound))[:, 0]
            local = tf.gather(ids, mine) - i * bound
            shard.scatter_sub(tf.IndexedSlices(tf.gather(change, mine), local))
        return tf.reduce_sum(rows)

    @tf.function
    def dense() -> None:
        large.assign_add(tf.fill(common.LARGE, 1e-3))

    @tf.function
    def touch() -> None:
        large.scatter_add(tf.IndexedSlices(tf.ones((1, common.LARGE[1])), tf.zeros(1, tf.int32)))

    @tf.function
    def read() -> Any:
        return tf.reduce_sum(large)

    functions = {"trivial": trivial, "step": step, "sparse": sparse, "dense": dense, "read": read}

    def run(case: str, steps: int) -> None:
        for _ in range(steps):
            if case == "read":
                coordinator.schedule(touch)
            coordinator.schedule(functions[case])
        coordinator.join()

    common.serve({"TensorFlow": tf.__version__}, run)


if __name__ == "__main__":
    if sys.argv[1] == "task":
        serve_task(*sys.argv[2:5])
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
