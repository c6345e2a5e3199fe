"""A custom loop over a mirrored strategy."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
GLOBAL_BATCH = 8
x = np.random.RandomState(0).normal(size=(32, 3)).astype("float32")
y = x @ np.array([1.0, -2.0, 3.0], "float32")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH)
dist_dataset = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    w = tf.Variable(tf.zeros([3]), name="w")
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.1)


def train_step(inputs):
    features, labels = inputs
    with tf.GradientTape() as tape:
        predictions = tf.reduce_sum(features * w, axis=1)
        per_example = tf.square(predictions - labels)
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
    gradients = tape.gradient(loss, [w])
    optimizer.apply_gradients(zip(gradients, [w]))
    return loss


@tf.function
def distributed_step(inputs):
    losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


for epoch in range(10):
    for batch in dist_dataset:
        loss = distributed_step(batch)
print("steps", int(optimizer.iterations.numpy()))
print("w", [round(float(v), 2) for v in w.numpy()])
