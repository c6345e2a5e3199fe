"""One small training run for each feature of Keras, of which every strategy must give the same result.

Each case builds a model and trains it for at least twenty steps; the last batch of each epoch has two
rows, or one. Stateful layers know one size of batches only: theirs has ten rows, which three, four and
eight replicas cannot divide evenly. A case returns whatever must be equal.
"""

from __future__ import annotations

import csv
import os
import tempfile

os.environ.setdefault("KERAS_BACKEND", "jax")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from keras import layers

import phalanx as px

ROWS, BATCH, EPOCHS = 50, 12, 4
_random = np.random.default_rng(7)
X = _random.normal(size=(ROWS, 6)).astype("float32")
Y = _random.integers(0, 3, ROWS)
T = _random.normal(size=(ROWS, 1)).astype("float32")
W = _random.uniform(0.1, 2.0, ROWS).astype("float32")
IDS = _random.integers(0, 5, (ROWS, 4))
IMAGES = _random.normal(size=(ROWS, 4, 4, 1)).astype("float32")

TOLERANCES = {
    "half_precision_with_loss_scaling": 2e-3,
    "bfloat16": 2e-2,
}  # sums of half-precision numbers are rounded so
CASES: dict[str, Callable[[], Any]] = {}
FIT = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def case(build: Callable[[], Any]) -> Callable[[], Any]:
    CASES[build.__name__] = build
    return build


def result(model: Any, *more: Any) -> dict[str, Any]:
    """What must be equal: weights, what was logged, and more."""
    logged = dict(getattr(model, "history", None).history) if getattr(model, "history", None) else {}
    return {"weights": model.get_weights(), "logs": logged, "more": more}


def classifier(*hidden: Any, **compiled: Any) -> Any:
    hidden = hidden or (layers.Dense(4, activation="relu"),)
    model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])
    model.compile(**({"optimizer": keras.optimizers.SGD(0.1), "loss": CROSSENTROPY} | compiled))
    return model


@case
def metrics_validation_and_class_weights() -> Any:
    model = classifier(metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=2)])
    model.fit(X, Y, validation_split=0.3, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, **FIT)
    return result(model, model.evaluate(X, Y, verbose=0), model.predict(X, 7, verbose=0))


@case
def sample_weights() -> Any:
    model = classifier(weighted_metrics=["accuracy"])
    model.fit(X, Y, sample_weight=W, validation_data=(X[:7], Y[:7], W[:7]), **FIT)
    return result(model)


@case
def sum_reduction() -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model = classifier(loss=loss, optimizer=keras.optimizers.SGD(0.01))
    model.fit(X, Y, sample_weight=W, **FIT)
    return result(model)


@case
def mean_with_sample_weight_reduction() -> Any:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), loss)
    model.fit(X, T, sample_weight=W, **FIT)
    return result(model)


@case
def adam_schedule_and_clipping() -> Any:
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.7)
    model = classifier(optimizer=keras.optimizers.Adam(rate, global_clipnorm=0.1))
    model.fit(X, Y, **FIT)
    return result(model)


@case
def moving_averages_and_weight_decay() -> Any:
    optimizer = keras.optimizers.AdamW(
        0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7, clipvalue=0.1
    )
    model = classifier(optimizer=optimizer)
    model.fit(X, Y, **FIT)
    return result(model)


@case
def gradient_accumulation() -> Any:
    model = classifier(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3))
    model.fit(X, Y, **FIT)
    return result(model)


class AddsLoss(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@case
def regularizers_and_add_loss() -> Any:
    hidden = layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1")
    model = classifier(hidden, AddsLoss())
    model.fit(X, Y, **FIT)
    return result(model)


@case
def several_inputs_and_outputs() -> Any:
    a, b = keras.Input((6,), name="a"), keras.Input((1,), name="b")
    both = layers.Concatenate()([layers.Dense(3)(a), b])
    outputs = {"kind": layers.Dense(3, name="kind")(both), "size": layers.Dense(1, name="size")(both)}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        keras.optimizers.SGD(0.05),
        loss={"kind": CROSSENTROPY, "size": "mse"},
        loss_weights={"kind": 0.3, "size": 0.7},
        metrics={"size": ["mae"]},
    )
    model.fit({"a": X, "b": T}, {"kind": Y, "size": T}, **FIT)
    return result(model, model.predict({"a": X, "b": T}, 9, verbose=0))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = layers.Dense(4, activation="tanh"), layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.hidden(x))


@case
def subclassed_and_not_built() -> Any:
    model = Subclassed()
    before = model.predict(X, BATCH, verbose=0)
    model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY)
    model.fit(X, Y, **FIT)
    return result(model, before)


class OwnSteps(keras.Sequential):
    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        x, y = data

        def loss(trainable: Any) -> Any:
            y_pred, new = self.stateless_call(trainable, non_trainable, x, training=True)
            return keras.ops.mean(keras.ops.square(y_pred - y)), new

        (value, non_trainable), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"own": value}, (trainable, non_trainable, optimizer, metrics)


@case
def custom_train_step() -> Any:
    model = OwnSteps([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05))
    model.fit(X, T, **FIT)
    return result(model)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:
        return keras.ops.max(keras.ops.abs(y - y_pred)) + keras.ops.mean(keras.ops.square(y - y_pred))


class TwoNetworks(keras.Model):
    """A GAN, whose steps are written as for TensorFlow; each network has an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.g = keras.Sequential([keras.Input((2,)), layers.Dense(6), layers.Dropout(0.3)])
        self.d = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh", kernel_regularizer="l2")])
        self.rate = keras.metrics.Mean(name="rate")

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self) -> list[Any]:
        return [self.rate]

    def _scores(self, data: Any) -> tuple[Any, Any]:
        real, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        noise = jax.random.normal(px.random.next_key(), (real.shape[0], 2))
        return self.d(real, training=True), self.d(self.g(noise, training=True))

    @px.keras.stateful
    def train_step(self, data: Any) -> Any:
        def losses() -> Any:
            real, made = self._scores(data)
            loss = keras.ops.mean(keras.ops.square(made))
            return (keras.ops.mean(keras.ops.square(real - 1)) + loss + sum(self.d.losses), -loss), made

        both = self.d.trainable_variables, self.g.trainable_variables
        ((d_loss, _), made), gradients = px.keras.values_and_grads(losses, both, has_aux=True)()
        self.d_optimizer.apply_gradients(zip(gradients[0], both[0], strict=True))
        self.g_optimizer.apply(gradients[1], both[1])
        self.rate.update_state(made)
        return {"d_loss": d_loss, "rate": self.rate.result()}

    @px.keras.stateful
    def test_step(self, data: Any) -> Any:
        self.rate.update_state(self.d(data))
        return {"rate": self.rate.result()}

    @px.keras.stateful
    def predict_step(self, data: Any) -> Any:
        return self.d(data)


@case
def steps_that_write_variables() -> Any:
    model = TwoNetworks()
    model.compile(keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1, momentum=0.9))
    model.fit(X, validation_data=(X[:7],), **FIT)
    slots = [np.asarray(v) for o in (model.d_optimizer, model.g_optimizer) for v in o.variables]
    return result(model, slots, model.evaluate(X, verbose=0), model.predict(X, 7, verbose=0))


@case
def custom_compute_loss() -> Any:
    model = OwnLoss([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05))
    model.fit(X, T, **FIT)
    return result(model)


@case
def dropout_and_layer_normalization() -> Any:
    model = classifier(layers.Dense(8), layers.LayerNormalization(), layers.Dropout(0.5))
    model.fit(X, Y, **FIT)
    return result(model)


@case
def batch_normalization() -> Any:
    hidden = layers.Dense(4), layers.BatchNormalization(synchronized=px.has_strategy())
    model = classifier(*hidden, optimizer=keras.optimizers.SGD(0.02))
    model.fit(X, Y, **FIT)
    return result(model, model.evaluate(X, Y, verbose=0))


@case
def masks_and_recurrence() -> Any:
    embedded = layers.Embedding(5, 3, mask_zero=True)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), embedded, layers.GRU(3)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(IDS, np.tile(T, 3), **FIT)
    return result(model)


@case
def masked_sequences() -> Any:
    # The loss and the metrics of a batch divide by the number of words that are not masked.
    embedded = layers.Embedding(5, 3, mask_zero=True)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), embedded, layers.Dense(5)])
    model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY, weighted_metrics=["accuracy"])
    model.fit(IDS, IDS[:, ::-1], **FIT)
    return result(model, model.evaluate(IDS, IDS[:, ::-1], verbose=0))


@case
def stateful_recurrence() -> Any:
    model = keras.Sequential([keras.Input(batch_shape=(10, 4, 1)), layers.SimpleRNN(2, stateful=True)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = X[:, :4, None]
    model.fit(x, X[:, :2], batch_size=10, epochs=4, verbose=0, shuffle=False)
    return result(model)


@case
def attention() -> Any:
    x = keras.Input((4,), dtype="int32")
    h = layers.Embedding(5, 4)(x)
    h = h + layers.MultiHeadAttention(2, 2)(h, h, use_causal_mask=True)
    model = keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))
    model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY)
    model.fit(IDS, Y, **FIT)
    return result(model)


@case
def convolution() -> Any:
    hidden = [
        layers.Conv2D(2, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ]
    model = keras.Sequential([keras.Input((4, 4, 1)), *hidden, layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.05), CROSSENTROPY)
    model.fit(IMAGES, Y, **FIT)
    return result(model)


@case
def half_precision_with_loss_scaling() -> Any:
    dense = layers.Dense(1, dtype=keras.DTypePolicy("mixed_float16"))
    model = keras.Sequential([keras.Input((6,)), dense])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)), "mse")
    model.fit(X, T, **FIT)
    return result(model)


@case
def loss_scales_fall_and_grow() -> Any:
    # In float32, so that the scale alone decides: the first gradients overflow, and steps are left out.
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05), initial_scale=2.0**127, dynamic_growth_steps=4
    )
    model.compile(scaled, "mse")
    model.fit(X, T, **FIT)
    steps = int(scaled.inner_optimizer.iterations.numpy())
    assert 0 < steps < 20
    return result(model, steps, np.log2(scaled.dynamic_scale.numpy()))


@case
def bfloat16() -> Any:
    policy = keras.DTypePolicy("mixed_bfloat16")
    hidden = layers.Dense(4, activation="relu", dtype=policy), layers.Dropout(0.2, dtype=policy)
    model = classifier(*hidden, metrics=["accuracy"])
    model.fit(X, Y, **FIT)
    assert all(v.dtype == "float32" for v in model.trainable_variables)
    return {"weights": model.get_weights()}


@case
def clipping_of_each_variable() -> Any:
    model = classifier(optimizer=keras.optimizers.RMSprop(0.01, clipnorm=0.05))
    model.fit(X, Y, **FIT)
    return result(model)


@case
def callbacks() -> Any:
    known = keras.callbacks
    seen: list[float] = []
    stock = [
        known.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
        known.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
        known.EarlyStopping("val_loss", patience=1, restore_best_weights=True, start_from_epoch=3),
        known.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])),
        known.SwapEMAWeights(swap_on_epoch=True),
        known.TerminateOnNaN(),
    ]
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)
    model = classifier(optimizer=optimizer)
    model.fit(X, Y, validation_data=(X[:7], Y[:7]), callbacks=stock, **FIT)
    return result(model, seen, float(model.optimizer.learning_rate.numpy()))


@case
def files_of_callbacks() -> Any:
    known, model = keras.callbacks, classifier(metrics=["accuracy"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writers = [
            known.ModelCheckpoint(folder / "{epoch}.keras"),
            known.ModelCheckpoint(folder / "best.weights.h5", "loss", 0, True, True),
            known.BackupAndRestore(folder / "backup", delete_checkpoint=False),
            known.CSVLogger(folder / "log.csv"),
            known.TensorBoard(folder / "board"),
        ]
        model.fit(X, Y, callbacks=writers if px.has_strategy() else writers[:-1], **FIT)
        again = classifier(metrics=["accuracy"])
        again.fit(X, Y, callbacks=[writers[2]], **(FIT | {"epochs": EPOCHS + 1}))
        assert again.history.epoch == [EPOCHS]
        if not (folder / "log.csv").exists():  # another worker has written
            return result(model)
        kept = [keras.models.load_model(folder / f"{i}.keras").get_weights() for i in (1, 4)]
        rows = csv.DictReader((folder / "log.csv").read_text().splitlines())
        logged = [(float(row["loss"]), float(row["accuracy"])) for row in rows]
    return result(model, kept, logged, again.get_weights())


@case
def saved_and_loaded() -> Any:
    model = classifier(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
    with tempfile.TemporaryDirectory() as folder:
        model.fit(X, Y, **(FIT | {"epochs": 2}))
        model.save(f"{folder}/m.keras")
        loaded = keras.models.load_model(f"{folder}/m.keras")
        loaded.fit(X, Y, **(FIT | {"epochs": 2}))
    return result(loaded, model.get_weights())


@case
def several_steps_per_execution() -> Any:
    model = classifier(steps_per_execution=3, metrics=["accuracy"])
    model.fit(X, Y, **FIT)
    return result(model, model.predict(X, 9, verbose=0))


@case
def not_compiled() -> Any:
    model = classifier(jit_compile=False, metrics=["accuracy"])
    model.fit(X, Y, **FIT)
    return result(model, model.predict(X, 7, verbose=0))


@case
def areas_and_confusion() -> Any:
    metrics = [keras.metrics.AUC(num_thresholds=20), keras.metrics.Precision(), keras.metrics.F1Score()]
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
    model.fit(X, (Y[:, None] > 0).astype("float32"), **FIT)
    return result(model)


@case
def single_batches() -> Any:
    model = classifier(metrics=["accuracy"])
    starts = [*range(0, ROWS, 7), *range(0, ROWS, 7), 0, 7, 14]
    logs = [model.train_on_batch(X[i : i + 7], Y[i : i + 7]) for i in starts]
    logs += [model.train_on_batch(X[:7], Y[:7], class_weight={0: 1.0, 1: 0.2, 2: 3.0})]
    return result(model, logs, model.test_on_batch(X, Y), model.predict_on_batch(X[:5]))


# -- where batches come from ---------------------------------------------------------------------------


@case
def dataset() -> Any:
    model = classifier()
    if not px.has_strategy():
        model.fit(X, Y, shuffle=False, **FIT)
        return result(model, model.predict(X, verbose=0))
    data = px.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    model.fit(data, epochs=EPOCHS, verbose=0)
    rows = px.data.Dataset.from_tensor_slices(X).batch(BATCH)
    return result(model, model.predict(rows, verbose=0))


@case
def endless_dataset_with_class_weights() -> Any:
    model = classifier()
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    if px.has_strategy():
        data = px.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
        model.fit(data, steps_per_epoch=5, epochs=EPOCHS, class_weight=weights, verbose=0)
    else:
        model.fit(X, Y, shuffle=False, class_weight=weights, **FIT)
    return result(model)


@case
def distributed_dataset() -> Any:
    model = classifier()
    data: Any = (X, Y)
    strategy = px.get_strategy()
    if px.has_strategy():
        whole = px.data.Dataset.from_tensor_slices(data).batch(BATCH)
        model.fit(strategy.experimental_distribute_dataset(whole), epochs=EPOCHS, verbose=0)
    else:
        model.fit(*data, shuffle=False, **FIT)
    return result(model)


@case
def datasets_from_function() -> Any:
    model, size, epochs = classifier(), 24, 7  # a size that so many replicas can divide evenly
    strategy = px.get_strategy()
    if not px.has_strategy():
        model.fit(X, Y, shuffle=False, batch_size=size, epochs=epochs, verbose=0)
        return result(model)

    def make(context: px.InputContext) -> Any:
        rows = px.data.Dataset.from_tensor_slices((X, Y))
        pieces = rows.batch(context.get_per_replica_batch_size(size))
        return pieces.shard(context.num_input_pipelines, context.input_pipeline_id)

    for _ in range(epochs):
        data = strategy.distribute_datasets_from_function(make)
        model.fit(data, steps_per_epoch=3, verbose=0)
    return {"weights": model.get_weights()}


def _batches(epochs: Any = range(1)) -> Iterator[Any]:
    for _ in epochs:
        for i in range(0, ROWS, BATCH):
            yield X[i : i + BATCH], Y[i : i + BATCH]


@case
def generator() -> Any:
    model = classifier()
    model.fit(_batches(range(EPOCHS)), steps_per_epoch=5, epochs=EPOCHS, verbose=0, shuffle=False)
    return result(model)


class Pieces(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> Any:
        return X[i * BATCH : (i + 1) * BATCH], Y[i * BATCH : (i + 1) * BATCH]


@case
def python_dataset() -> Any:
    model = classifier()
    model.fit(Pieces(), epochs=EPOCHS, verbose=0)
    return result(model)


def run(name: str) -> Any:
    """The result of a case, in the current scope if there is one."""
    keras.utils.set_random_seed(3)
    keras.backend.clear_session(free_memory=False)  # names begin with 0 again
    return CASES[name]()


def assert_close(name: str, found: Any, expected: Any) -> None:
    """Whether the results of a case are equal, to rounding."""
    tolerance = TOLERANCES.get(name, 1e-5)
    found, expected = ({k: x[k] for k in x if k in found} for x in (found, expected))
    found, expected = (x | {"logs": dict(sorted(x.get("logs", {}).items()))} for x in (found, expected))
    a, b = (jax.tree.leaves(jax.tree.map(np.asarray, x)) for x in (found, expected))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert a
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
