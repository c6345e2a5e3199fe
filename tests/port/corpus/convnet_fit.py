"""Image classification with a convolutional network: tf.data input, augmentation, fit under a strategy."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(3)
AUTOTUNE = tf.data.AUTOTUNE
num_classes = 3
img_height = img_width = 8

rng = np.random.RandomState(1)
y_train = rng.randint(0, num_classes, size=(90,))
x_train = rng.uniform(0, 60, size=(90, img_height, img_width, 1))
for image, label in zip(x_train, y_train):
    image[label * 2 : label * 2 + 3] += 180

strategy = tf.distribute.MirroredStrategy(devices=["CPU:0", "CPU:1", "CPU:2"])
batch_size = 8 * strategy.num_replicas_in_sync


def to_float(image, label):
    return tf.cast(image, tf.float32), tf.one_hot(label, num_classes)


options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
train_ds = dataset.take(70).map(to_float, num_parallel_calls=AUTOTUNE).cache().shuffle(70)
train_ds = train_ds.batch(batch_size).prefetch(buffer_size=AUTOTUNE).with_options(options)
val_ds = dataset.skip(70).map(to_float).batch(batch_size).prefetch(AUTOTUNE)


def make_model(input_shape):
    inputs = keras.Input(shape=input_shape)
    x = layers.Rescaling(1.0 / 255)(inputs)
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    previous = x
    x = layers.SeparableConv2D(8, 3, padding="same")(x)
    x = layers.add([x, previous])
    x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    x = layers.Dropout(0.1)(x)
    return keras.Model(inputs, layers.Dense(num_classes, activation="softmax")(x))


with strategy.scope():
    model = make_model((img_height, img_width, 1))
    model.compile(
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.02),
        loss=tf.keras.losses.CategoricalCrossentropy(label_smoothing=0.05),
        metrics=["accuracy", tf.keras.metrics.TopKCategoricalAccuracy(k=2, name="top_2")],
    )

folder = tempfile.mkdtemp()
callbacks = [
    tf.keras.callbacks.ModelCheckpoint(
        os.path.join(folder, "best.keras"), monitor="val_accuracy", save_best_only=True
    ),
    tf.keras.callbacks.EarlyStopping(monitor="val_loss", patience=4),
    tf.keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=2),
]
history = model.fit(train_ds, validation_data=val_ds, epochs=12, callbacks=callbacks, verbose=0)
print("loss falls", history.history["loss"][-1] < 0.5 * history.history["loss"][0])

best = tf.keras.models.load_model(os.path.join(folder, "best.keras"))
loss, accuracy, top_2 = best.evaluate(val_ds, verbose=0)
print("accuracy above 0.8", accuracy > 0.8, "top 2 above", top_2 >= accuracy)
predictions = best.predict(val_ds, verbose=0)
print("predictions", predictions.shape, "class", int(tf.argmax(predictions[0])) == y_train[70])
