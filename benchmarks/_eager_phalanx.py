"""A child of `eager.py`: the training step under Phalanx's MirroredStrategy.

``python _eager_phalanx.py REPLICAS plain|jit``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

import _eager_common as common
import phalanx as px


def loss_fn(parameters: Sequence[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    w1, b1, w2, b2, w3, b3 = parameters
    hidden = jax.nn.relu(x @ w1 + b1)
    hidden = jax.nn.relu(hidden @ w2 + b2)
    logits = hidden @ w3 + b3
    return -jnp.sum(jax.nn.log_softmax(logits) * y) / common.GLOBAL_BATCH


def main(replicas: int, compile_gradients: bool) -> None:
    px.config.set_logical_device_configuration(
        px.config.list_physical_devices("CPU")[0],
        [px.config.LogicalDeviceConfiguration()] * replicas,
    )
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        variables = [px.Variable(p) for p in common.initial_parameters()]
    loss_and_gradients = jax.value_and_grad(loss_fn)
    if compile_gradients:
        loss_and_gradients = jax.jit(loss_and_gradients)

    def replica_step(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, gradients = loss_and_gradients([v.value() for v in variables], x, y)
        context = px.get_replica_context()
        gradients = context.all_reduce(px.ReduceOp.SUM, gradients)
        context.merge_call(apply, args=(gradients,))
        return loss

    def apply(strategy: px.Strategy, gradients: Sequence[Any]) -> None:
        for variable, gradient in zip(variables, gradients, strict=True):
            strategy.extended.update(variable, apply_one, args=(gradient,))

    def apply_one(variable: px.Variable, gradient: jax.Array) -> None:
        variable.assign_sub(common.LEARNING_RATE * gradient)

    def distribute(parts: list[Any]) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tuple(jnp.asarray(a) for a in parts[context.replica_id_in_sync_group])
        )

    batches = [distribute(parts) for parts in common.batches(replicas)]

    def reset() -> None:
        for variable, initial in zip(variables, common.initial_parameters(), strict=True):
            variable.assign(initial)
        wait()

    def wait() -> None:
        for variable in variables:
            for copy in variable.values:
                copy.value().block_until_ready()

    def step(i: int) -> Any:
        return strategy.run(replica_step, args=batches[i % len(batches)])

    def finish(per_replica_loss: Any) -> float:
        wait()
        return float(strategy.reduce(px.ReduceOp.SUM, per_replica_loss, axis=None))

    versions = {"Phalanx": version("phalanx"), "JAX": jax.__version__}
    common.serve(versions, reset, step, finish)


if __name__ == "__main__":
    main(int(sys.argv[1]), {"plain": False, "jit": True}[sys.argv[2]])
