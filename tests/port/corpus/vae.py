"""A variational autoencoder, as in Keras's guides: its sampling layer draws in a step and in fit."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(0)


class Sampling(layers.Layer):
    """Uses (z_mean, z_log_var) to sample z, the vector encoding a digit."""

    def call(self, inputs):
        z_mean, z_log_var = inputs
        batch = tf.shape(z_mean)[0]
        dim = tf.shape(z_mean)[1]
        epsilon = tf.random.normal(shape=(batch, dim))
        return z_mean + tf.exp(0.5 * z_log_var) * epsilon


def networks():
    encoder_inputs = keras.Input(shape=(4, 4))
    x = layers.Flatten()(encoder_inputs)
    z_mean = layers.Dense(2, name="z_mean")(x)
    z_log_var = layers.Dense(2, name="z_log_var")(x)
    z = Sampling()([z_mean, z_log_var])
    encoder = keras.Model(encoder_inputs, [z_mean, z_log_var, z], name="encoder")
    latent_inputs = keras.Input(shape=(2,))
    outputs = layers.Reshape((4, 4))(layers.Dense(16, activation="sigmoid")(latent_inputs))
    return encoder, keras.Model(latent_inputs, outputs, name="decoder")


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = tf.reduce_mean(
                tf.reduce_sum(keras.losses.binary_crossentropy(data, reconstruction), axis=-1)
            )
            kl_loss = -0.5 * (1 + z_log_var - tf.square(z_mean) - tf.exp(z_log_var))
            total_loss = reconstruction_loss + tf.reduce_mean(tf.reduce_sum(kl_loss, axis=1))
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        return {"loss": self.total_loss_tracker.result()}


class VariationalAutoEncoder(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder

    def call(self, inputs):
        z_mean, z_log_var, z = self.encoder(inputs)
        self.add_loss(-0.5 * tf.reduce_mean(z_log_var - tf.square(z_mean) - tf.exp(z_log_var) + 1))
        return self.decoder(z)


data = (np.random.RandomState(0).rand(20, 4, 4) > 0.5).astype("float32")
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    vae = VAE(*networks())
    vae.compile(optimizer=keras.optimizers.Adam(0.02))
losses = vae.fit(data, epochs=4, batch_size=10, verbose=0).history["loss"]
print("loss falls", losses[-1] < losses[0])
with strategy.scope():
    vae = VariationalAutoEncoder(*networks())
    vae.compile(tf.keras.optimizers.Adam(learning_rate=0.02), loss=tf.keras.losses.MeanSquaredError())
losses = vae.fit(data, data, epochs=4, batch_size=10, verbose=0).history["loss"]
print("loss falls", losses[-1] < losses[0])
first, second = (vae.predict(data, batch_size=10, verbose=0) for _ in range(2))
print("samples differ", not np.allclose(first, second), not np.allclose(first[:10], first[10:]))
