"""Small programs in the style of Keras's examples, on made data; each gives what it has learned.

They are written as for one device. `strategy` is where they differ: the scope in which models are made.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import optax
from keras import layers

import phalanx as px

random = np.random.default_rng(11)
LABELS = random.integers(0, 4, 44)
IMAGES = random.normal(size=(44, 8, 8, 1)).astype("float32") + LABELS[:, None, None, None] / 2
WORDS = random.integers(1, 20, (44, 6))
SENTIMENTS = (WORDS[:, 0] > WORDS[:, 1]).astype("float32")
REAL = random.normal(size=(44, 4)).astype("float32") * 0.1 + np.array([1.0, -1.0, 0.5, 0.0], "float32")


def in_scope(strategy: Any) -> Any:
    keras.utils.set_random_seed(5)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def convnet(strategy: Any = None) -> list[Any]:
    """Classifies images: convolutions, pooling, dropout."""
    with in_scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Rescaling(0.5),
                layers.Conv2D(4, 3, activation="relu"),
                layers.MaxPooling2D(2),
                layers.Conv2D(8, 3, activation="relu"),
                layers.Flatten(),
                layers.Dropout(0.3),
                layers.Dense(4, activation="softmax"),
            ]
        )
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        IMAGES, LABELS, batch_size=10, epochs=2, validation_split=0.1, shuffle=False, verbose=0
    )
    return [history.history["loss"], history.history["val_loss"], *model.get_weights()]


@keras.saving.register_keras_serializable("tests")
class Block(layers.Layer):
    """Attention and two dense layers, each with what went in added, and normalized."""

    def __init__(self, width: int, heads: int, inner: int, **options: Any) -> None:
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(heads, width)
        self.dense = keras.Sequential([layers.Dense(inner, activation="relu"), layers.Dense(width)])
        self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()
        self.dropout = layers.Dropout(0.1)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.first(x + self.dropout(self.attention(x, x), training=training))
        return self.second(x + self.dropout(self.dense(x), training=training))


@keras.saving.register_keras_serializable("tests")
class WordsAndPlaces(layers.Layer):
    """The embedding of each word, and that of its place."""

    def __init__(self, words: int, places: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.words, self.places = layers.Embedding(words, width), layers.Embedding(places, width)

    def call(self, x: Any) -> Any:
        return self.words(x) + self.places(keras.ops.arange(0, keras.ops.shape(x)[-1]))


def transformer(strategy: Any = None) -> list[Any]:
    """Classifies sequences of words."""
    with in_scope(strategy):
        x = keras.Input((6,), dtype="int32")
        h = Block(8, 2, 8)(WordsAndPlaces(20, 6, 8)(x))
        h = layers.Dense(1, activation="sigmoid")(layers.GlobalAveragePooling1D()(h))
        model = keras.Model(x, h)
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(WORDS, SENTIMENTS, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return [history.history["loss"], model.predict(WORDS, verbose=0)]


def gan(strategy: Any = None) -> list[Any]:
    """Two networks against each other, in a loop of its own."""
    strategy = strategy or px.get_strategy()
    size = 10
    with in_scope(strategy):
        dense = layers.Dense(8, activation="leaky_relu")
        generator = keras.Sequential([keras.Input((2,)), dense, layers.Dense(4)])
        dense = layers.Dense(8, activation="leaky_relu")
        discriminator = keras.Sequential([keras.Input((4,)), dense, layers.Dense(1)])
        g, d = px.keras.lift(generator), px.keras.lift(discriminator)
        g_optimizer, d_optimizer = (px.train.Optimizer(optax.adam(0.02)) for _ in range(2))
        entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def loss_of(logits: Any, is_real: bool) -> Any:
        labels = keras.ops.ones_like(logits) if is_real else keras.ops.zeros_like(logits)
        return px.nn.compute_average_loss(entropy(labels, logits), global_batch_size=size)

    def train_step(real: Any, noise: Any) -> Any:
        def d_loss() -> Any:
            return loss_of(discriminator(real), True) + loss_of(discriminator(generator(noise)), False)

        def g_loss() -> Any:
            return loss_of(discriminator(generator(noise)), True)

        d_value, gradients = px.value_and_grad(d_loss, d.trainable_variables)()
        d_optimizer.apply_gradients(zip(gradients, d.trainable_variables, strict=True))
        g_value, gradients = px.value_and_grad(g_loss, g.trainable_variables)()
        g_optimizer.apply_gradients(zip(gradients, g.trainable_variables, strict=True))
        return d_value, g_value

    @px.function
    def step(real: Any, noise: Any) -> Any:
        losses = strategy.run(train_step, args=(real, noise))
        return [strategy.reduce("sum", loss, axis=None) for loss in losses]

    noise = np.random.default_rng(1).normal(size=(44, 2)).astype("float32")
    data = px.data.Dataset.from_tensor_slices((REAL, noise)).batch(size)
    found: list[Any] = []
    for _ in range(2):
        for real, drawn in strategy.experimental_distribute_dataset(data):
            found += [np.asarray(x) for x in step(real, drawn)]
    return [*found, *g.update_model().get_weights(), *d.update_model().get_weights()]


PROGRAMS = {"convnet": convnet, "transformer": transformer, "gan": gan}
