"""The child of `parameter_server.py` that runs Phalanx's coordinator.

``python _ps_phalanx.py WORKERS SERVERS [OPTION=VALUE …]`` starts the workers and servers as processes
of its own. The options are those of `px.experimental.ParameterServerOptions`. Under `phalanx run`,
``_ps_phalanx.py launched ROUNDS`` is each task of the job.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

import _ps_common as common
from _child import phalanx_versions


def serve_task(cluster: str, job: str, index: str) -> None:
    """Be a worker or a parameter server."""
    common.end_with_coordinator()
    import phalanx as px

    spec = px.train.ClusterSpec(json.loads(cluster))
    px.Server(spec, job_name=job, task_index=int(index)).join()


def main(workers: int, servers: int, options: dict[str, Any]) -> None:
    """Be the coordinator of tasks that this process starts."""
    os.environ.setdefault("PHALANX_TOKEN", secrets.token_hex())
    cluster = common.start_tasks(__file__, workers, servers)
    import phalanx as px

    resolver = px.cluster_resolver.SimpleClusterResolver(px.train.ClusterSpec(cluster))
    common.serve(phalanx_versions(), closures(resolver, options))


def launched(rounds: int) -> None:
    """Be a task of a job that `phalanx run` has started; the chief prints what it has measured."""
    import phalanx as px

    resolver = px.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        px.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return
    run = closures(resolver, {})
    for case, steps in common.LAUNCHED.items():
        run(case, steps)
        seconds = [common.measured(run, case, steps)["seconds"] for _ in range(rounds)]
        print(
            common.MARK + json.dumps({"case": case, "rates": [steps / x for x in seconds]}), flush=True
        )


def closures(resolver: Any, options: dict[str, Any]) -> Callable[[str, int], None]:
    """What schedules so many closures of a case, and waits for them."""
    import jax.numpy as jnp

    import phalanx as px

    servers = resolver.cluster_spec().num_tasks("ps")
    shards = px.partitioners.FixedShardsPartitioner(servers)

    def partitioner(shape: Any, dtype: Any, **kwargs: Any) -> Any:
        return shards(shape, dtype, **kwargs) if shape[0] == common.ROWS else [1] * len(shape)

    chosen = px.experimental.ParameterServerOptions(**options)
    strategy = px.ParameterServerStrategy(resolver, partitioner, options=chosen)
    coordinator = px.coordinator.ClusterCoordinator(strategy)
    batch, ids = common.inputs(), common.indices()
    rate = common.RATE
    with strategy.scope():
        matrices = [px.Variable(w) for w in common.weights()]
        large = px.Variable(jnp.zeros(common.LARGE))
        table = px.Variable(
            lambda partition_shape, partition_offset: jnp.zeros(partition_shape),
            shape=(common.ROWS, common.DIMENSION),
        )

    @px.function
    def trivial() -> Any:
        return 1

    @px.function
    def step() -> Any:
        def loss() -> Any:
            guess = jnp.tanh(batch @ matrices[0]) @ matrices[1]
            return jnp.mean((guess - batch) ** 2)

        value, gradients = px.value_and_grad(loss, matrices)()
        for variable, gradient in zip(matrices, gradients, strict=True):
            variable.assign_sub(rate * gradient)
        return value

    @px.function
    def sparse() -> Any:
        rows = px.nn.embedding_lookup(table, ids)
        table.scatter_sub(px.IndexedSlices(rows * 0.1 + 1e-3, ids))
        return jnp.sum(rows)

    @px.function
    def dense() -> None:
        large.assign_add(jnp.full(large.shape, 1e-3))

    @px.function
    def touch() -> None:
        large.scatter_add(px.IndexedSlices(jnp.ones((1, common.LARGE[1])), jnp.zeros(1, int)))

    @px.function
    def read() -> Any:
        return jnp.sum(large)

    functions = {"trivial": trivial, "step": step, "sparse": sparse, "dense": dense, "read": read}

    def run(case: str, steps: int) -> None:
        for _ in range(steps):
            if case == "read":
                coordinator.schedule(touch)
            coordinator.schedule(functions[case])
        coordinator.join()

    return run


if __name__ == "__main__":
    if sys.argv[1] == "task":
        serve_task(*sys.argv[2:5])
    elif sys.argv[1] == "launched":
        launched(int(sys.argv[2]))
    else:
        words = [word.partition("=")[::2] for word in sys.argv[3:]]
        chosen = {k: int(v) if v.isdigit() else v == "True" or v for k, v in words}
        main(int(sys.argv[1]), int(sys.argv[2]), chosen)
