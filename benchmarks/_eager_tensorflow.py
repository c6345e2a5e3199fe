"""A child of `eager.py`: the training step under TensorFlow's MirroredStrategy, without tf.function.

``python _eager_tensorflow.py REPLICAS``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import _eager_common as common


def main(replicas: int) -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        variables = [tf.Variable(p) for p in common.initial_parameters()]
    w1, b1, w2, b2, w3, b3 = variables

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        hidden = tf.nn.relu(x @ w1 + b1)
        hidden = tf.nn.relu(hidden @ w2 + b2)
        logits = hidden @ w3 + b3
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=logits)
        return tf.reduce_sum(losses) / common.GLOBAL_BATCH

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(x, y)
        gradients = tape.gradient(loss, variables)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        context.merge_call(apply, args=(gradients,))
        return loss

    def apply(strategy: tf.distribute.Strategy, gradients: Sequence[Any]) -> None:
        for variable, gradient in zip(variables, gradients, strict=True):
            strategy.extended.update(variable, apply_one, args=(gradient,))

    def apply_one(variable: tf.Variable, gradient: tf.Tensor) -> None:
        variable.assign_sub(common.LEARNING_RATE * gradient)

    def distribute(parts: list[Any]) -> Any:
        def value(context: tf.distribute.experimental.ValueContext) -> Any:
            i = context.replica_id_in_sync_group
            with tf.device(strategy.extended.worker_devices[i]):
                return tuple(tf.constant(a) for a in parts[i])

        return strategy.experimental_distribute_values_from_function(value)

    batches = [distribute(parts) for parts in common.batches(replicas)]

    def reset() -> None:
        for variable, initial in zip(variables, common.initial_parameters(), strict=True):
            variable.assign(initial)
        wait()

    def wait() -> None:
        for variable in variables:
            for copy in strategy.experimental_local_results(variable):
                copy.numpy()

    def step(i: int) -> Any:
        return strategy.run(replica_step, args=batches[i % len(batches)])

    def finish(per_replica_loss: Any) -> float:
        wait()
        return float(strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_loss, axis=None))

    common.serve({"TensorFlow": tf.__version__}, reset, step, finish)


if __name__ == "__main__":
    main(int(sys.argv[1]))
