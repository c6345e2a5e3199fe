"""The custom training loop of tf.distribute, line by line.

    python examples/custom_training_loop.py --strategy mirrored --replicas 4

The loop is the usual one: a dataset; a model, an optimizer and metrics that are made in the strategy's
scope; a step that is written for one replica; a compiled function that runs the step on all of them.
The letters stand at the lines below.

      TensorFlow                                            Phalanx
    A tf.distribute.MirroredStrategy()                      px.MirroredStrategy()
    B with strategy.scope():                                the same
    C tf.data.Dataset, experimental_distribute_dataset      px.data.Dataset, the same
    D tf.Variable                                           px.Variable
    E tf.keras.optimizers.Adam(0.01)                        px.train.Optimizer(optax.adam(0.01))
    F tf.keras.metrics.Mean()                               px.train.Mean()
    G tf.keras.metrics.SparseCategoricalAccuracy()          px.train.Accuracy()
    H tf.nn.compute_average_loss                            px.nn.compute_average_loss
    I tf.nn.scale_regularization_loss                       px.nn.scale_regularization_loss
    J with tf.GradientTape() as tape: ...                   px.value_and_grad(loss, variables)
      gradients = tape.gradient(loss, variables)
    K optimizer.apply_gradients(zip(gradients, variables))  the same
    L metric.update_state(...), result(), reset_state()     the same
    M @tf.function                                          @px.function
    N strategy.run(train_step, args=(inputs,))              the same
    O strategy.reduce(tf.distribute.ReduceOp.SUM, ...)      strategy.reduce(px.ReduceOp.SUM, ...)

Every strategy prints the same losses, because the global batch is the same for any number of replicas.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

FEATURES, HIDDEN, CLASSES = 16, 32, 4
GLOBAL_BATCH_SIZE = 64
EPOCHS = 4


def parse_options(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--strategy", choices=["one", "mirrored", "central"], default="mirrored")
    parser.add_argument("--replicas", type=int, default=4)
    options = parser.parse_args()
    if options.replicas < 1 or GLOBAL_BATCH_SIZE % options.replicas:
        parser.error(f"--replicas must divide the global batch of {GLOBAL_BATCH_SIZE}")
    return options


def make_strategy(name, replicas):
    cpu = px.config.list_physical_devices("CPU")[0]
    px.config.set_logical_device_configuration(cpu, [px.config.LogicalDeviceConfiguration()] * replicas)
    devices = [f"CPU:{i}" for i in range(replicas)]
    if name == "one":
        return px.OneDeviceStrategy("CPU:0")
    if name == "central":
        return px.CentralStorageStrategy(devices)
    return px.MirroredStrategy(devices)  # A


def make_data(examples, seed):
    """Points around one centre for each class."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=examples)
    points = centres[labels] + 1.5 * rng.normal(size=(examples, FEATURES))
    return points.astype(np.float32), labels.astype(np.int32)


def make_datasets(strategy):
    """Training and test data in global batches, divided over the replicas."""
    train = px.data.Dataset.from_tensor_slices(make_data(512, seed=1))  # C
    train = train.shuffle(512, seed=3).batch(GLOBAL_BATCH_SIZE)
    test = px.data.Dataset.from_tensor_slices(make_data(128, seed=2)).batch(GLOBAL_BATCH_SIZE)
    return tuple(strategy.experimental_distribute_dataset(dataset) for dataset in (train, test))


def main():
    options = parse_options("The custom training loop of tf.distribute.")
    strategy = make_strategy(options.strategy, options.replicas)
    train_data, test_data = make_datasets(strategy)

    with strategy.scope():  # B
        first, second = jax.random.split(jax.random.key(0))
        w1 = px.Variable(0.3 * jax.random.normal(first, (FEATURES, HIDDEN)), name="w1")  # D
        b1 = px.Variable(jnp.zeros(HIDDEN), name="b1")
        w2 = px.Variable(0.3 * jax.random.normal(second, (HIDDEN, CLASSES)), name="w2")
        b2 = px.Variable(jnp.zeros(CLASSES), name="b2")
        trainable_variables = [w1, b1, w2, b2]
        optimizer = px.train.Optimizer(optax.adam(0.01))  # E
        test_loss = px.train.Mean(name="test_loss")  # F
        train_accuracy = px.train.Accuracy(name="train_accuracy")  # G
        test_accuracy = px.train.Accuracy(name="test_accuracy")

    def model(x):
        return jax.nn.relu(x @ w1 + b1) @ w2 + b2

    def per_example_loss(labels, predictions):
        return optax.softmax_cross_entropy_with_integer_labels(predictions, labels)

    def compute_loss(labels, predictions):
        losses = per_example_loss(labels, predictions)
        loss = px.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH_SIZE)  # H
        penalty = 1e-3 * (jnp.sum(w1**2) + jnp.sum(w2**2))
        return loss + px.nn.scale_regularization_loss(penalty)  # I

    def train_step(inputs):
        x, labels = inputs

        def loss_and_predictions():
            predictions = model(x)
            return compute_loss(labels, predictions), predictions

        tape = px.value_and_grad(loss_and_predictions, trainable_variables, has_aux=True)
        (loss, predictions), gradients = tape()  # J
        optimizer.apply_gradients(zip(gradients, trainable_variables, strict=True))  # K
        train_accuracy.update_state(labels, predictions)  # L
        return loss

    def test_step(inputs):
        x, labels = inputs
        predictions = model(x)
        test_loss.update_state(per_example_loss(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    @px.function  # M
    def distributed_train_step(inputs):
        per_replica_losses = strategy.run(train_step, args=(inputs,))  # N
        return strategy.reduce(px.ReduceOp.SUM, per_replica_losses, axis=None)  # O

    @px.function
    def distributed_test_step(inputs):
        strategy.run(test_step, args=(inputs,))

    for epoch in range(EPOCHS):
        total_loss, batches = 0.0, 0
        for inputs in train_data:
            total_loss += distributed_train_step(inputs)
            batches += 1
        for inputs in test_data:
            distributed_test_step(inputs)
        print(
            f"epoch {epoch + 1}: loss {total_loss / batches:.6f}, "
            f"accuracy {train_accuracy.result():.4f}, "
            f"test loss {test_loss.result():.6f}, test accuracy {test_accuracy.result():.4f}"
        )
        for metric in (train_accuracy, test_loss, test_accuracy):
            metric.reset_state()  # L


if __name__ == "__main__":
    main()
