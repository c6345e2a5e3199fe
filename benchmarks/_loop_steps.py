"""A child of `loops.py`: many training steps of a small convolutional network, written in one way.

``python _loop_steps.py REPLICAS hand|range|loop|loop_inside|unrolled|dataset|single STEPS``

One step of the protocol is a call that makes STEPS steps of training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import phalanx as px
from _child import phalanx_strategy, phalanx_versions, serve

ROWS = 32  # of a global batch
LEARNING_RATE = 1e-3


def initial_weights() -> list[np.ndarray]:
    """The weights of two convolutions and a dense layer."""
    rng = np.random.default_rng(0)
    shapes = [(3, 3, 1, 8), (3, 3, 8, 16), (7 * 7 * 16, 10)]
    return [(rng.standard_normal(s) * 0.1).astype(np.float32) for s in shapes]


def losses(weights: Sequence[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of each example."""
    first, second, dense = weights
    for kernel in (first, second):
        x = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    logits = x.reshape(x.shape[0], -1) @ dense
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def batches(steps: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    images = rng.standard_normal((steps * ROWS, 28, 28, 1)).astype(np.float32)
    return images, rng.integers(0, 10, steps * ROWS).astype(np.int32)


def by_hand(replicas: int, steps: int) -> Callable[[], jax.Array]:
    """All steps as one scan, in JAX alone."""
    mesh = jax.make_mesh((replicas,), ("replica",), axis_types=(AxisType.Auto,))
    whole, split = PartitionSpec(), PartitionSpec(None, "replica")
    optimizer = optax.adam(LEARNING_RATE)

    def step(state: Any, batch: Any) -> Any:
        weights, slots = state
        x, y = batch
        loss, gradients = jax.value_and_grad(lambda w: jnp.sum(losses(w, x, y)) / ROWS)(weights)
        loss, gradients = lax.psum((loss, gradients), "replica")
        updates, slots = optimizer.update(gradients, slots, weights)
        return (optax.apply_updates(weights, updates), slots), loss

    @jax.jit
    def epoch(state: Any, xs: jax.Array, ys: jax.Array) -> Any:
        def all_steps(state: Any, xs: Any, ys: Any) -> Any:
            return lax.scan(step, state, (xs, ys))

        return jax.shard_map(
            all_steps,
            mesh=mesh,
            in_specs=(whole, split, split),
            out_specs=(whole, whole),
            check_vma=False,
        )(state, xs, ys)

    weights = jax.device_put([jnp.asarray(w) for w in initial_weights()], NamedSharding(mesh, whole))
    state = [(weights, optimizer.init(weights))]
    images, labels = batches(steps)

    def run() -> jax.Array:
        xs = images.reshape(steps, ROWS, 28, 28, 1)
        place = NamedSharding(mesh, split)
        inputs = jax.device_put(xs, place), jax.device_put(labels.reshape(steps, ROWS), place)
        state[0], values = epoch(state[0], *inputs)
        return values[-1]

    return run


def with_phalanx(replicas: int, kind: str, steps: int) -> Callable[[], jax.Array]:
    strategy = phalanx_strategy(replicas)
    with strategy.scope():
        weights = [px.Variable(w) for w in initial_weights()]
        optimizer = px.train.Optimizer(optax.adam(LEARNING_RATE))
        last = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)

    def train(batch: Any) -> None:
        def loss() -> jax.Array:
            values = losses([w.value() for w in weights], *batch)
            return px.nn.compute_average_loss(values, global_batch_size=ROWS)

        last.assign(optimizer.minimize(loss, weights))

    def step(*batch: Any) -> None:
        strategy.run(train, args=(batch,))

    compiled = px.function(step)

    @px.function
    def in_range(iterator: Any) -> None:
        for _ in px.range(steps):
            step(*next(iterator))

    @px.function
    def unrolled(iterator: Any) -> None:
        for _ in range(steps):
            step(*next(iterator))

    @px.function
    def loop_inside(iterator: Any) -> None:
        px.train.loop(compiled, iterator, steps)

    @px.function
    def over_dataset(dataset: Any) -> None:
        for batch in dataset:
            step(*batch)

    def single(dataset: Any) -> None:
        for batch in dataset:
            compiled(*batch)

    way: Callable[[Any], Any] = {
        "range": lambda dataset: in_range(iter(dataset)),
        "unrolled": lambda dataset: unrolled(iter(dataset)),
        "loop": lambda dataset: px.train.loop(compiled, iter(dataset), steps),
        "loop_inside": lambda dataset: loop_inside(iter(dataset)),
        "dataset": over_dataset,
        "single": single,
    }[kind]
    dataset = strategy.experimental_distribute_dataset(
        px.data.Dataset.from_tensor_slices(batches(steps)).batch(ROWS)
    )

    def run() -> jax.Array:
        way(dataset)
        return last.value()

    return run


def main(replicas: int, kind: str, steps: int) -> None:
    px.config.ensure_cpu_devices(replicas)
    run = by_hand(replicas, steps) if kind == "hand" else with_phalanx(replicas, kind, steps)
    serve(phalanx_versions(), lambda: None, lambda _: run(), float)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
