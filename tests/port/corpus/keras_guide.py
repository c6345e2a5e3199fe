"""The first program of the guide on distribution strategies: a scope, compile, fit, evaluate."""

import tensorflow as tf
import numpy as np

mirrored_strategy = tf.distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
with mirrored_strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    model.compile(loss="mse", optimizer="sgd")

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
print("better", model.evaluate(dataset, verbose=0) <= losses[-1] <= losses[0])

inputs, targets = np.ones((100, 1)), np.ones((100, 1))
model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)

# Compute global batch size using number of replicas.
BATCH_SIZE_PER_REPLICA = 5
global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100)
dataset = dataset.batch(global_batch_size)

LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15}
learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]
print("batches", len(list(dataset)), "rate", learning_rate)
