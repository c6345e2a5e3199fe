"""A GAN in a custom loop under a strategy: two models, two tapes, losses scaled by the global batch."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

tf.random.set_seed(4)
tf.keras.utils.set_random_seed(4)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
EPOCHS = 3
NOISE_DIM = 2
BATCH_SIZE_PER_REPLICA = 8
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

points = np.random.RandomState(0).normal(2.0, 0.5, (40, 2)).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices(points).shuffle(40).batch(GLOBAL_BATCH_SIZE)
dist_dataset = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    generator = tf.keras.Sequential(
        [layers.Input(shape=(NOISE_DIM,)), layers.Dense(8, activation="relu"), layers.Dense(2)]
    )
    discriminator = tf.keras.Sequential(
        [layers.Input(shape=(2,)), layers.Dense(8), layers.LeakyReLU(0.2), layers.Dense(1)]
    )
    generator_optimizer = tf.keras.optimizers.Adam(1e-2, beta_1=0.5)
    discriminator_optimizer = tf.keras.optimizers.Adam(1e-2, beta_1=0.5)
    loss_object = tf.keras.losses.BinaryCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )
    generator_mean = tf.keras.metrics.Mean(name="generator_loss")
    discriminator_mean = tf.keras.metrics.Mean(name="discriminator_loss")


def compute_loss(labels, logits):
    per_example_loss = loss_object(labels, logits)
    return tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)


def train_step(real):
    noise = tf.random.normal([BATCH_SIZE_PER_REPLICA, NOISE_DIM])
    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated = generator(noise, training=True)
        real_output = discriminator(real, training=True)
        fake_output = discriminator(generated, training=True)
        gen_loss = compute_loss(tf.ones_like(fake_output), fake_output)
        real_loss = compute_loss(tf.ones_like(real_output), real_output)
        disc_loss = real_loss + compute_loss(tf.zeros_like(fake_output), fake_output)
    gen_gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
    disc_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gen_gradients, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(zip(disc_gradients, discriminator.trainable_variables))
    generator_mean.update_state(gen_loss)
    discriminator_mean.update_state(disc_loss)
    return gen_loss, disc_loss


@tf.function
def distributed_train_step(real):
    gen_losses, disc_losses = strategy.run(train_step, args=(real,))
    gen_loss = strategy.reduce(tf.distribute.ReduceOp.SUM, gen_losses, axis=None)
    disc_loss = strategy.reduce(tf.distribute.ReduceOp.SUM, disc_losses, axis=None)
    return gen_loss, disc_loss


for epoch in range(EPOCHS):
    for real in dist_dataset:
        gen_loss, disc_loss = distributed_train_step(real)
    if epoch < EPOCHS - 1:
        generator_mean.reset_states()
        discriminator_mean.reset_states()
finite = bool(tf.math.is_finite(gen_loss)) and bool(tf.math.is_finite(disc_loss))
print("finite", finite, "steps", int(generator_optimizer.iterations.numpy()))
print("means", float(generator_mean.result()) > 0, float(discriminator_mean.result()) > 0)
sample = generator(np.zeros((3, NOISE_DIM), np.float32), training=False)
print("sample", sample.shape)
