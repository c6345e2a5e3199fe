"""What `regression.py` runs in its children, and what their workers run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any


def mlp_step(px: Any, strategy: Any, width: int, batch: int, compiled: bool) -> Callable[[], Any]:
    """A step of SGD of an MLP on one batch that is on the devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    sizes = [784, width, width, 10]
    with strategy.scope():
        weights = [
            px.Variable(rng.normal(size=shape).astype(np.float32) * 0.05)
            for shape in itertools.pairwise(sizes)
        ]
        biases = [px.Variable(np.zeros(size, np.float32)) for size in sizes[1:]]

    def loss(x: Any, y: Any) -> Any:
        for w, b in zip(weights, biases, strict=True):
            logits = x @ w.value() + b.value()
            x = jax.nn.relu(logits)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))

    def replica_step(x: Any, y: Any) -> Any:
        value, gradients = px.value_and_grad(loss, weights + biases)(x, y)
        context = px.get_replica_context()
        for variable, gradient in zip(weights + biases, gradients, strict=True):
            variable.assign_sub(0.01 * context.all_reduce("mean", gradient))
        return value

    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("mean", strategy.run(replica_step, args=(x, y)), axis=None)

    data = rng.normal(size=(batch, 784)).astype(np.float32), rng.integers(0, 10, batch)
    dataset = px.data.Dataset.from_tensors(data)
    x, y = next(iter(strategy.experimental_distribute_dataset(dataset)))
    run = px.function(step) if compiled else step
    return lambda: run(x, y)


_kept: dict[Any, Callable[[], Any]] = {}


def on_worker(case: str, steps: int) -> float:
    """The steps of one of two workers."""
    import jax
    import numpy as np

    import phalanx as px

    if case not in _kept:
        kind, size = case.split()
        if kind == "train":
            strategy = px.MultiWorkerMirroredStrategy()
            _kept[case] = mlp_step(px, strategy, int(size), 256, compiled=True)
        else:
            px.comm.init()
            x = np.ones(int(size), np.float32)
            _kept[case] = lambda: px.comm.all_reduce(x)
    step = _kept[case]
    begin, result = time.perf_counter(), None
    for _ in range(steps):
        result = step()
    jax.block_until_ready(jax.tree.leaves(result))
    return time.perf_counter() - begin
