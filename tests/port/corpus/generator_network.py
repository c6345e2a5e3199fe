"""Two networks with a loss each: a small adversarial pair."""

import tensorflow as tf

tf.random.set_seed(3)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    g = tf.Variable(tf.random.normal([2, 2]), name="generator")
    d = tf.Variable(tf.random.normal([2, 1]), name="discriminator")
    cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    g_optimizer = tf.keras.optimizers.Adam(1e-2)
    d_optimizer = tf.keras.optimizers.Adam(1e-2)


def train_step(real, noise):
    with tf.GradientTape() as tape:
        fake = tf.matmul(noise, g)
        real_loss = cross_entropy(tf.ones([4, 1]), tf.matmul(real, d))
        fake_loss = cross_entropy(tf.zeros([4, 1]), tf.matmul(fake, d))
        d_loss = tf.nn.compute_average_loss(real_loss + fake_loss, global_batch_size=8)
    d_gradients = tape.gradient(d_loss, [d])
    d_optimizer.apply_gradients(zip(d_gradients, [d]))
    with tf.GradientTape() as g_tape:
        g_loss = tf.nn.compute_average_loss(
            cross_entropy(tf.ones([4, 1]), tf.matmul(tf.matmul(noise, g), d)), global_batch_size=8
        )
    g_gradients = g_tape.gradient(g_loss, [g])
    g_optimizer.apply_gradients(zip(g_gradients, [g]))
    return d_loss, g_loss


@tf.function
def step(real, noise):
    d_loss, g_loss = strategy.run(train_step, args=(real, noise))
    return strategy.reduce("SUM", d_loss, axis=None), strategy.reduce("SUM", g_loss, axis=None)


for i in range(20):
    d_loss, g_loss = step(tf.ones([4, 2]), tf.random.normal([4, 2]))
print("finite", bool(tf.math.is_nan(d_loss) == False), bool(g_loss > 0.0))
