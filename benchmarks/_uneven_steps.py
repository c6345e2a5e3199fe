"""A child of `uneven.py`: a training step on one kind of batch.

``python _uneven_steps.py REPLICAS WIDTH even|uneven|single|eager``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px
from _child import phalanx_strategy, phalanx_versions, serve

LEARNING_RATE = 0.002


def sizes(replicas: int, width: int, kind: str) -> list[int]:
    """How many rows each replica has."""
    share = (64 if width <= 64 else 256) // replicas
    if kind == "even":
        return [share] * replicas
    if kind == "single":
        return [1] + [0] * (replicas - 1)
    return [share] * (replicas - 1) + [share - 3]


def main(replicas: int, width: int, kind: str) -> None:
    strategy = phalanx_strategy(replicas)
    rng = np.random.default_rng(0)
    shapes = [(784, width), (width, width), (width, 10)]
    initial = [(rng.standard_normal(s) * np.sqrt(2 / s[0])).astype(np.float32) for s in shapes]
    with strategy.scope():
        weights = [px.Variable(w) for w in initial]
        optimizer = px.train.Optimizer(optax.sgd(LEARNING_RATE))
    rows = sizes(replicas, width, kind)

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            first, second, last = (w.value() for w in weights)
            logits = jax.nn.relu(jax.nn.relu(x @ first) @ second) @ last
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return px.nn.compute_average_loss(losses, global_batch_size=sum(rows))

        return optimizer.minimize(loss, weights)

    def run(x: Any, y: Any) -> Any:
        return strategy.run(step, args=(x, y))

    run = run if kind == "eager" else px.function(run)
    data = rng.standard_normal((sum(rows), 784)).astype(np.float32)
    labels = rng.integers(0, 10, sum(rows)).astype(np.int32)

    def distributed(whole: Any) -> Any:
        parts = np.split(whole, np.cumsum(rows)[:-1])
        return strategy.experimental_distribute_values_from_function(
            lambda context: jnp.asarray(parts[context.replica_id_in_sync_group])
        )

    batch = distributed(data), distributed(labels)

    def wait() -> None:
        for variable in weights:
            for copy in variable.values:
                copy.value().block_until_ready()

    def reset() -> None:
        for variable, value in zip(weights, initial, strict=True):
            variable.assign(value)
        wait()

    def finish(losses: Sequence[Any]) -> float:
        wait()
        return float(strategy.reduce("sum", losses, axis=None))

    serve(phalanx_versions(), reset, lambda _: run(*batch), finish)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
