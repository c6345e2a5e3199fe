"""A model that is fitted, and beside it a loop without Keras's models, with its metrics and optimizers."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.ones((8, 3), "float32")
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss=tf.keras.losses.MeanSquaredError())
    w = tf.Variable(tf.ones([3]))
    optimizer = tf.keras.optimizers.SGD(0.1)
    seen = tf.keras.metrics.Mean()
losses = model.fit(x, x[:, :1], epochs=3, verbose=0).history["loss"]


@tf.function
def step(batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(batch * w) / 4
    grads = tape.gradient(loss, [w])
    optimizer.apply_gradients(zip(grads, [w]))
    seen.update_state(loss)


dataset = tf.data.Dataset.from_tensor_slices(x).batch(4)
for batch in strategy.experimental_distribute_dataset(dataset):
    strategy.run(step, args=(batch,))
print("fitted", losses[-1] < losses[0])
print("seen %.3f" % seen.result(), "w %.3f" % w.numpy()[0])
