"""Metrics and a test loop, as the tutorial on custom training has them."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import metrics

tf.random.set_seed(1)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
rng = np.random.RandomState(1)
x = rng.normal(size=(64, 2)).astype("float32")
y = (x[:, 0] + x[:, 1] > 0).astype("int32")
train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).batch(16).prefetch(tf.data.AUTOTUNE)
train = strategy.experimental_distribute_dataset(train)

with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )
    weights = tf.Variable(tf.zeros([2, 2]))
    bias = tf.Variable(tf.zeros([2]))
    optimizer = tf.keras.optimizers.Adam(0.1)
    train_loss = metrics.Mean(name="train_loss")
    accuracy = metrics.SparseCategoricalAccuracy(name="accuracy")


def step(images, labels):
    with tf.GradientTape() as tape:
        logits = tf.matmul(images, weights) + bias
        per_example = loss_object(labels, logits)
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=16)
    grads = tape.gradient(loss, [weights, bias])
    optimizer.apply_gradients(zip(grads, [weights, bias]))
    train_loss.update_state(per_example)
    accuracy.update_state(labels, logits)


@tf.function
def train_epoch(iterator):
    for _ in tf.range(4):
        strategy.run(step, args=next(iterator))


for epoch in range(5):
    train_loss.reset_states()
    accuracy.reset_states()
    train_epoch(iter(train))
print("accuracy above 0.9", float(accuracy.result()) > 0.9)
