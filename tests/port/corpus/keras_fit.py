"""Distributed training with Keras: compile, fit, callbacks, checkpoints and evaluation."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, metrics

tf.keras.utils.set_random_seed(7)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
print("Number of devices: {}".format(strategy.num_replicas_in_sync))

BUFFER_SIZE = 96
BATCH_SIZE_PER_REPLICA = 8
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

rng = np.random.RandomState(0)
images = rng.uniform(0, 255, size=(90, 4, 4, 1)).astype("float32")
labels = (images.mean(axis=(1, 2, 3)) > 127).astype("int64")


def scale(image, label):
    image = image / 255
    return image, label


dataset = tf.data.Dataset.from_tensor_slices((images, labels))
train_dataset = dataset.map(scale).cache().shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
eval_dataset = dataset.map(scale).batch(BATCH_SIZE)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            layers.Input(shape=(4, 4, 1)),
            layers.Flatten(),
            layers.Dense(8, activation="relu"),
            layers.Dense(2),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.05),
        metrics=[metrics.SparseCategoricalAccuracy(name="accuracy")],
    )

checkpoint_dir = tempfile.mkdtemp()
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}.weights.h5")


def decay(epoch):
    return 0.05 if epoch < 2 else 0.01


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rates.append(round(float(self.model.optimizer.learning_rate.numpy()), 3))


rates = []
callbacks = [
    tf.keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    tf.keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]
model.fit(train_dataset, epochs=3, callbacks=callbacks, verbose=0)
before, accuracy = model.evaluate(eval_dataset, verbose=0)
model.load_weights(checkpoint_prefix.format(epoch=3))
after, _ = model.evaluate(eval_dataset, verbose=0)
print("layers", [type(layer).__name__ for layer in model.layers])
print("rates", rates, "files", len(os.listdir(checkpoint_dir)))
print("same after loading", abs(before - after) < 1e-6)
