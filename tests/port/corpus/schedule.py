"""A learning rate schedule, and the number of iterations before the first step."""

import tensorflow as tf

strategy = tf.distribute.get_strategy()
with strategy.scope():
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.1])
    optimizer = tf.keras.optimizers.SGD(rate)
    v = tf.Variable(5.0)
print("before", optimizer.iterations.numpy())
for _ in range(3):
    with tf.GradientTape() as tape:
        loss = v * 2.0
    grads = tape.gradient(loss, [v])
    optimizer.apply_gradients(zip(grads, [v]))
print("v", round(float(v.numpy()), 3), "after", int(optimizer.iterations.numpy()))
