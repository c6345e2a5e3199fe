"""A deep convolutional GAN: two Keras models, two tapes around one block."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

tf.random.set_seed(2)
tf.keras.utils.set_random_seed(2)
BATCH_SIZE = 4
noise_dim = 3
train_images = np.random.RandomState(0).uniform(-1, 1, (8, 4, 4, 1)).astype("float32")
train_dataset = tf.data.Dataset.from_tensor_slices(train_images).shuffle(8).batch(BATCH_SIZE)


def make_generator_model():
    model = tf.keras.Sequential()
    model.add(layers.Input((noise_dim,)))
    model.add(layers.Dense(2 * 2 * 2, use_bias=False))
    model.add(layers.BatchNormalization())
    model.add(layers.LeakyReLU())
    model.add(layers.Reshape((2, 2, 2)))
    model.add(layers.Conv2DTranspose(1, (2, 2), strides=(2, 2), padding="same", activation="tanh"))
    return model


def make_discriminator_model():
    model = tf.keras.Sequential()
    model.add(layers.Input((4, 4, 1)))
    model.add(layers.Conv2D(2, (2, 2), strides=(2, 2), padding="same"))
    model.add(layers.LeakyReLU())
    model.add(layers.Dropout(0.3))
    model.add(layers.Flatten())
    model.add(layers.Dense(1))
    return model


generator = make_generator_model()
discriminator = make_discriminator_model()
cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)


def discriminator_loss(real_output, fake_output):
    real_loss = cross_entropy(tf.ones_like(real_output), real_output)
    fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
    total_loss = real_loss + fake_loss
    return total_loss


def generator_loss(fake_output):
    return cross_entropy(tf.ones_like(fake_output), fake_output)


generator_optimizer = tf.keras.optimizers.Adam(1e-2)
discriminator_optimizer = tf.keras.optimizers.Adam(1e-2)
checkpoint_prefix = os.path.join(tempfile.mkdtemp(), "ckpt")
checkpoint = tf.train.Checkpoint(
    generator_optimizer=generator_optimizer,
    discriminator_optimizer=discriminator_optimizer,
    generator=generator,
    discriminator=discriminator,
)


@tf.function
def train_step(images):
    noise = tf.random.normal([BATCH_SIZE, noise_dim])

    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated_images = generator(noise, training=True)

        real_output = discriminator(images, training=True)
        fake_output = discriminator(generated_images, training=True)

        gen_loss = generator_loss(fake_output)
        disc_loss = discriminator_loss(real_output, fake_output)

    gradients_of_generator = gen_tape.gradient(gen_loss, generator.trainable_variables)
    gradients_of_discriminator = disc_tape.gradient(disc_loss, discriminator.trainable_variables)

    generator_optimizer.apply_gradients(zip(gradients_of_generator, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(
        zip(gradients_of_discriminator, discriminator.trainable_variables)
    )
    return gen_loss, disc_loss


before = [v.numpy() for v in generator.trainable_variables]
for epoch in range(2):
    for image_batch in train_dataset:
        gen_loss, disc_loss = train_step(image_batch)
    checkpoint.save(file_prefix=checkpoint_prefix)
moved = [float(np.abs(v.numpy() - b).max()) > 0 for v, b in zip(generator.trainable_variables, before)]
predictions = generator(tf.random.normal([2, noise_dim]), training=False)
print("moved", all(moved), "finite", bool(np.isfinite(float(gen_loss) + float(disc_loss))))
print("pictures", tuple(predictions.shape), "steps", int(generator_optimizer.iterations.numpy()))
