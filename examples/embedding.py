"""An embedding of a million rows, divided among parameter servers.

    phalanx run -n 2 --ps 2 examples/embedding.py
    phalanx run -n 4 --ps 4 --evaluator examples/embedding.py --checkpoints /tmp/embedding

The table has 1,000,000 x 64 numbers, 256 MB. Those who train never have it whole: it is made, kept and
saved shard by shard, and a step reads and updates the few hundred rows that its batch names. With
--checkpoints the chief saves from time to time, and the evaluator, which trains nothing, measures each
checkpoint.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=1_000_000)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--checkpoints", help="a directory that all tasks see")
options = parser.parse_args()

POPULAR = 500  # rows that nearly all examples are about, as in life


def examples(seed=None):
    """Ids of items, and whether users liked them: those with even ids."""
    rng = np.random.default_rng(seed)
    popular = rng.integers(0, POPULAR, 200_000)
    ids = np.where(rng.random(200_000) < 0.9, popular, rng.integers(0, options.rows, 200_000))
    return ids.astype(np.int32), (ids % 2 == 0).astype(np.float32)


def batches():
    return px.data.Dataset.from_tensor_slices(examples()).repeat().batch(options.batch)


def initial_rows(shape=None, dtype=np.float32, partition_shape=None, partition_offset=None):
    """The first values of a shard; called for each, with its shape and where it begins."""
    seed = 0 if partition_offset is None else partition_offset[0]
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.05, partition_shape or shape).astype(dtype)


def losses_of(rows, head, liked):
    return optax.sigmoid_binary_cross_entropy(rows @ head, liked)


def train(resolver):
    servers = resolver.cluster_spec().num_tasks("ps")
    strategy = px.ParameterServerStrategy(resolver, px.partitioners.FixedShardsPartitioner(servers))
    coordinator = px.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = px.Variable(
            initial_rows, shape=(options.rows, options.width), dtype=jnp.float32, name="table"
        )
    with strategy.scope():
        head = px.Variable(jnp.full(options.width, 0.1), name="head")
        optimizer = px.train.Optimizer(optax.adagrad(0.1))

    @px.function
    def step(iterator):
        ids, liked = next(iterator)

        def loss_fn():
            return losses_of(px.nn.embedding_lookup(table, ids), head.value(), liked).mean()

        loss, gradients = px.value_and_grad(loss_fn, [table, head])()
        optimizer.apply_gradients(zip(gradients, [table, head], strict=True))
        return loss

    manager = None
    if options.checkpoints:
        checkpoint = px.train.Checkpoint(table=table, head=head)
        manager = px.train.CheckpointManager(checkpoint, options.checkpoints, max_to_keep=2)
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    begun = time.perf_counter()
    for i in range(0, options.steps, 100):
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(100)]
        coordinator.join()
        print(f"step {i + 100}: loss {np.mean(coordinator.fetch(losses)):.4f}", flush=True)
        if manager is not None:
            manager.save()
    rate = options.steps / (time.perf_counter() - begun)
    print(f"{rate:.0f} steps per second, {table.num_shards} shards", flush=True)


def evaluate():
    table = px.Variable(jnp.zeros((options.rows, options.width)))
    head = px.Variable(jnp.zeros(options.width))
    ids, liked = examples(seed=1)

    @jax.jit
    def accuracy(table, head):
        return jnp.mean((table[ids[:5000]] @ head > 0) == (liked[:5000] > 0.5))

    evaluator = px.coordinator.SidecarEvaluator(
        px.train.Checkpoint(table=table, head=head),
        lambda: float(accuracy(table.value(), head.value())),
        options.checkpoints,
        on_result=lambda path, result: print(f"{path}: accuracy {result:.3f}", flush=True),
    )
    evaluator.start()


resolver = px.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    cluster = resolver.cluster_spec()
    px.Server(cluster, job_name=resolver.task_type, task_index=resolver.task_id).join()
elif resolver.task_type == "evaluator":
    evaluate()
else:
    train(resolver)
