"""One variant of `keras.py`, as a child process: trains with ``model.fit`` when it is told.

``python -P _keras_fit.py VARIANT MODEL REPLICAS``; without -P Python would find `keras.py` for Keras.
"""

from __future__ import annotations

import os
import sys
import time

VARIANT, MODEL, REPLICAS = sys.argv[1], sys.argv[2], int(sys.argv[3])
BATCH, STEPS = 256, 8  # rows of a step, and steps of an epoch
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["KERAS_BACKEND"] = "tensorflow" if VARIANT == "tensorflow" else "jax"

import contextlib  # noqa: E402

import numpy as np  # noqa: E402

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from _child import Parent, phalanx_strategy, phalanx_versions  # noqa: E402

versions = {}

scope = contextlib.nullcontext()
if VARIANT == "tensorflow":
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    versions["TensorFlow"] = tf.__version__
    scope = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)]).scope()
else:
    import phalanx as px

    px.config.ensure_cpu_devices(REPLICAS)
    versions |= phalanx_versions()

import keras  # noqa: E402
from keras import layers  # noqa: E402

if VARIANT == "phalanx":
    scope = phalanx_strategy(REPLICAS).scope()
elif VARIANT == "data_parallel":
    keras.distribution.set_distribution(keras.distribution.DataParallel())


def model() -> keras.Model:
    if MODEL == "mlp":
        hidden = [keras.Input((784,)), *(layers.Dense(512, activation="relu") for _ in range(2))]
    else:
        hidden = [keras.Input((28, 28, 1))]
        for filters in (8, 16):
            hidden += [layers.Conv2D(filters, 3, strides=2), layers.BatchNormalization(), layers.ReLU()]
        hidden += [layers.Flatten()]
    made = keras.Sequential([*hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(0.01), loss)
    return made


random = np.random.default_rng(0)
shape = (784,) if MODEL == "mlp" else (28, 28, 1)
x = random.normal(size=(BATCH * STEPS, *shape)).astype("float32")
y = random.integers(0, 10, BATCH * STEPS)
keras.utils.set_random_seed(0)
with scope:
    trained = model()


parent = Parent(versions | {"Keras": keras.__version__})
for command in parent:
    start = time.perf_counter()
    epochs = command["steps"] // STEPS
    history = trained.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    parent.say(seconds=time.perf_counter() - start, loss=history.history["loss"][-1])
