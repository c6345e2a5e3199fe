"""Small programs in the style of Keras's examples, on made data; each gives what it has learned.

They are written as for one device. `strategy` is where they differ: the scope in which models are made.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import keras
import numpy as np
from keras import layers

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


class Gan(keras.Model):
    """Two networks and a train step of its own, with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((2,)), layers.Dense(8, activation="relu"), layers.Dense(4)]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8, activation="relu"),
                layers.Dropout(0.2),
                layers.Dense(1),
            ]
        )
        self.seeds = keras.random.SeedGenerator(1337)
        self.built = True

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile(optimizer=d_optimizer)
        self.g_optimizer = g_optimizer
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        d_optimizer.build(self.discriminator.trainable_variables)
        g_optimizer.build(self.generator.trainable_variables)

    def call(self, x: Any) -> Any:
        return self.generator(x)

    def train_step(self, state: Any, real: Any) -> Any:
        trainable, non_trainable, d_slots, metrics = state
        mine = [id(v) for v in self.generator.trainable_variables]
        is_g = [id(v) in mine for v in self.trainable_variables]
        g = [x for x, own in zip(trainable, is_g, strict=True) if own]
        d = [x for x, own in zip(trainable, is_g, strict=True) if not own]
        known = {id(v): i for i, v in enumerate(self.non_trainable_variables)}

        def value(variable: Any) -> Any:
            return non_trainable[known[id(variable)]]

        with keras.StatelessScope(state_mapping=[(self.seeds.state, value(self.seeds.state))]) as scope:
            noise = keras.random.normal((real.shape[0], 2), seed=self.seeds)
        seeds = scope.get_current_value(self.seeds.state)
        d_state = [value(v) for v in self.discriminator.non_trainable_variables]

        def d_loss(d: Any) -> Any:
            fake, _ = self.generator.stateless_call(g, [], noise)
            both = keras.ops.concatenate([fake, real])
            labels = keras.ops.concatenate(
                [keras.ops.ones((len(real), 1)), keras.ops.zeros((len(real), 1))]
            )
            logits, new = self.discriminator.stateless_call(d, d_state, both, training=True)
            return self.cross_entropy(labels, logits), new

        (d_value, new), gradients = jax.value_and_grad(d_loss, has_aux=True)(d)
        d, d_slots = self.optimizer.stateless_apply(d_slots, gradients, d)

        def g_loss(g: Any) -> Any:
            fake, _ = self.generator.stateless_call(g, [], noise)
            logits, _ = self.discriminator.stateless_call(d, new, fake)
            return self.cross_entropy(keras.ops.zeros((len(real), 1)), logits)

        g_value, gradients = jax.value_and_grad(g_loss)(g)
        g = [x - 0.05 * dx for x, dx in zip(g, gradients, strict=True)]
        left = {True: iter(g), False: iter(d)}
        trainable = [next(left[own]) for own in is_g]
        changed = {
            id(v): x for v, x in zip(self.discriminator.non_trainable_variables, new, strict=True)
        }
        changed[id(self.seeds.state)] = seeds
        non_trainable = [
            changed.get(id(v), x)
            for v, x in zip(self.non_trainable_variables, non_trainable, strict=True)
        ]
        logs = {"d_loss": d_value, "g_loss": g_value}
        return logs, (trainable, non_trainable, d_slots, metrics)
