"""What models of a scope do besides training: files, callbacks, failures, options."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import phalanx as px
from phalanx.integrations.keras import touch_points
from tests.integrations.keras import cases
from tests.integrations.keras.cases import FIT, X, Y, classifier


def mirrored(count: int = 2) -> px.Strategy:
    return px.MirroredStrategy([f"CPU:{i}" for i in range(count)])


def in_scope(strategy: px.Strategy, **compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        return classifier(**compiled)


def fitted(model: Any, **more: Any) -> Any:
    keras.utils.set_random_seed(2)
    model.fit(X, Y, **(FIT | {"epochs": 2} | more))
    return model


def alone(**compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    return classifier(**compiled)


def same(a: Any, b: Any) -> bool:
    return all(
        np.allclose(x, y, atol=1e-5) for x, y in zip(a.get_weights(), b.get_weights(), strict=True)
    )


# -- strategies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(lambda: px.OneDeviceStrategy("CPU:1"), id="one device"),
        pytest.param(lambda: px.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:2"), id="central"),
        pytest.param(px.MultiWorkerMirroredStrategy, id="one worker"),
        pytest.param(px.get_strategy, id="default"),
    ],
)
def test_every_strategy_trains_alike(strategy: Any) -> None:
    strategy = strategy()
    assert same(fitted(in_scope(strategy)), fitted(alone()))


def test_central_storage_holds_variables_in_one_place() -> None:
    model = fitted(in_scope(px.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:2")))
    assert model.weights[0].value.devices() == {jax.devices()[2]}


def test_auto_parallel_lays_variables_out_by_name() -> None:
    strategy = px.AutoParallelStrategy(
        devices=[f"CPU:{i}" for i in range(4)], parameter_plan={"wide/kernel": (1, 4)}
    )

    def make() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, name="wide"), keras.layers.Dense(3)]
        )
        model.compile(keras.optimizers.Adam(0.01), cases.CROSSENTROPY)
        return model

    with strategy.scope():
        model = make()
    assert same(fitted(model), fitted(make()))
    kernel, slot = model.layers[0].kernel.value, model.optimizer.variables[2]
    assert kernel.sharding.shard_shape(kernel.shape) == (6, 2)
    assert "wide_kernel" in slot.path
    assert slot.value.sharding.shard_shape(slot.shape) == (6, 2)


def test_a_model_in_the_scope_trains_in_it_and_outside() -> None:
    strategy = mirrored()
    inside = in_scope(strategy)
    with strategy.scope():
        fitted(inside)
    assert same(inside, fitted(in_scope(strategy)))
    assert len(inside.weights[0].value.devices()) == 2
    assert px.keras.strategy_of(alone()) is None


def test_two_strategies_take_turns() -> None:
    two, four, one = in_scope(mirrored(2)), in_scope(mirrored(4)), alone()
    for _ in range(2):
        for model in (two, four, one):
            fitted(model)
    assert same(two, one)
    assert same(four, one)
    moved = px.keras.distribute(two, mirrored(4))
    assert same(fitted(moved), fitted(one))
    assert len(moved.weights[0].value.devices()) == 4


@pytest.mark.parametrize(
    "name",
    ["dataset", "generator", "single_batches", pytest.param("not_compiled", marks=pytest.mark.soak)],
)
def test_three_replicas_of_central_storage(name: str) -> None:
    expected = cases.run(name)
    with px.CentralStorageStrategy(["CPU:0", "CPU:1", "CPU:2"], "CPU:0").scope():
        cases.assert_close(name, cases.run(name), expected)


# -- batch normalization -------------------------------------------------------------------------------


def normalized(strategy: px.Strategy | None, kind: str = "global", rows: int = 8) -> list[Any]:
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.5)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        if strategy is not None:
            px.keras.distribute(model, batch_norm=kind)
    model.fit(X[:rows], X[:rows] ** 2, batch_size=rows, epochs=1, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("rows", [8, 7])
def test_batch_statistics_of_the_batch_or_of_replicas(rows: int) -> None:
    one = normalized(None, rows=rows)
    for found, expected in zip(normalized(mirrored(), rows=rows), one, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    moving = normalized(mirrored(), "replica", rows)
    halves = X[:rows][:4], X[:rows][4:]
    variance = 0.5 + 0.5 * np.mean([half.var(0) for half in halves], 0)
    mean = 0.5 * np.mean([half.mean(0) for half in halves], 0)
    np.testing.assert_allclose(moving[2], mean, atol=1e-5)
    np.testing.assert_allclose(moving[3], variance, atol=1e-5)
    assert not np.allclose(one[3], variance, atol=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("rows", [24, 11, 7])
@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_batch_statistics_of_any_number_of_replicas(count: int, rows: int) -> None:
    size = -(-rows // count)
    parts = [X[:rows][i : i + size] for i in range(0, rows, size)]  # the last replicas may have none
    moving = normalized(mirrored(count), "replica", rows)
    np.testing.assert_allclose(moving[2], 0.5 * np.mean([p.mean(0) for p in parts], 0), atol=1e-5)
    variance = 0.5 + 0.5 * np.mean([p.var(0) for p in parts], 0)
    np.testing.assert_allclose(moving[3], variance, atol=1e-5)
    found = normalized(mirrored(count), rows=rows)
    for x, y in zip(found, normalized(None, rows=rows), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_an_unknown_kind_of_statistics_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'global' for statistics.*Received: 'local'"):
        px.keras.distribute(alone(), mirrored(), batch_norm="local")
    with pytest.raises(TypeError, match="needs a Keras model"):
        px.keras.distribute(3)


# -- files and callbacks ------------------------------------------------------------------------------


def test_files_move_between_strategies(tmp_path: Path) -> None:
    model = fitted(in_scope(mirrored(4), optimizer=keras.optimizers.SGD(0.01, momentum=0.9)))
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    one = keras.models.load_model(tmp_path / "m.keras")
    with mirrored(2).scope():
        two = keras.models.load_model(tmp_path / "m.keras")
    assert px.keras.strategy_of(one) is None
    for each in (one, two, model):
        fitted(each, shuffle=False)
    assert same(one, two)
    assert same(one, model)
    again = in_scope(mirrored(3), optimizer=keras.optimizers.SGD(0.01, momentum=0.9))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "m.weights.h5")
    assert not same(again, model)
    assert same(fitted(again, shuffle=False), model)


def test_stock_callbacks(tmp_path: Path) -> None:
    seen: list[int] = []

    def callbacks(folder: Path) -> list[Any]:
        folder.mkdir()
        return [
            keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True),
            keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
            keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0, start_from_epoch=2),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch)),
            *more(folder),
        ]

    def more(folder: Path) -> list[Any]:
        board = keras.callbacks.TensorBoard(folder / "board", histogram_freq=1, update_freq="batch")
        return [board] if folder.name == "mirrored" else []

    def averaged() -> Any:
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)

    model, one = in_scope(mirrored(), optimizer=averaged()), alone(optimizer=averaged())
    for folder, each in (("mirrored", model), ("one", one)):
        fitted(each, epochs=5, callbacks=callbacks(tmp_path / folder), validation_data=(X, Y))
    assert same(model, one)
    files = [sorted(p.name for p in (tmp_path / folder).glob("*.*")) for folder in ("mirrored", "one")]
    assert files[0] == files[1] != []
    texts = [(tmp_path / f / "log.csv").read_text() for f in ("mirrored", "one")]
    logs = [list(csv.DictReader(text.splitlines())) for text in texts]
    for a, b in zip(*logs, strict=True):
        assert {k: float(v) for k, v in a.items()} == pytest.approx({k: float(v) for k, v in b.items()})
    metadata = json.loads((tmp_path / "mirrored/backup/training_metadata.json").read_text())
    assert metadata["epoch"] == len(logs[0]) < 5
    assert seen == 2 * list(range(len(logs[0])))
    events = list((tmp_path / "mirrored/board/train").glob("events.out.tfevents.*"))
    tags = set().union(*(tags_of(path) for path in events))
    assert {"epoch_loss", "epoch_learning_rate", "batch_loss"} <= tags
    assert any("kernel" in tag for tag in tags)


def tags_of(path: Path) -> set[str]:
    """The names of what an event file holds, which has the format of records of TensorFlow."""
    from phalanx.runtime.protobuf_wire import values

    found = set()
    for record in px.data.TFRecordDataset([str(path)]):
        for number, event in values(record):
            if number == 5:
                found |= {dict(values(value))[1].decode() for _, value in values(event)}
    return found


def test_a_backup_is_continued(tmp_path: Path) -> None:
    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    first = in_scope(mirrored())
    with pytest.raises(KeyboardInterrupt):
        fitted(first, epochs=4, shuffle=False, callbacks=[backup, Stops()])
    second = in_scope(mirrored(4))
    history = fitted(second, epochs=4, shuffle=False, callbacks=[backup]).history
    assert history.epoch == [2, 3]
    assert same(second, fitted(alone(), epochs=4, shuffle=False))


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failing_callback_keeps_the_weights(error: type[BaseException]) -> None:
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                raise error("in the middle")

    model = in_scope(mirrored())
    with pytest.raises(error, match="in the middle"):
        fitted(model, shuffle=False, callbacks=[Fails()])
    expected = alone()
    expected.fit(X[:48], Y[:48], batch_size=12, shuffle=False, verbose=0)
    assert same(model, expected)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_a_callback_that_fails_without_training_keeps_the_weights(method: str) -> None:
    class Fails(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            raise ZeroDivisionError("in the middle")

        on_predict_batch_end = on_test_batch_end

    model = fitted(in_scope(mirrored()))
    before = model.get_weights()
    data = (X, Y) if method == "evaluate" else (X,)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        getattr(model, method)(*data, verbose=0, callbacks=[Fails()])
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_failing_step_keeps_the_weights() -> None:
    class Fails(keras.layers.Layer):
        failing = False

        def call(self, x: Any) -> Any:
            if self.failing:
                raise ZeroDivisionError("while tracing")
            return x

    with mirrored().scope():
        layer = Fails()
        model = classifier(layer)
    fitted(model)
    layer.failing = True
    before = model.get_weights()
    with pytest.raises(ZeroDivisionError, match="while tracing"):
        fitted(model, batch_size=9)  # for which there is no program yet
    layer.failing = False
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    fitted(model)


def test_interrupted_input_keeps_the_weights() -> None:
    def rows() -> Any:
        for _ in range(3):  # Keras looks at two before it begins
            yield X[:12], Y[:12]
        raise OSError("the disk is gone")

    model = in_scope(mirrored())
    with pytest.raises(OSError, match="disk is gone"):
        model.fit(rows(), steps_per_epoch=9, verbose=0, shuffle=False)
    steps = int(model.optimizer.iterations.numpy())  # some versions read ahead
    assert steps
    expected = alone()
    expected.fit(X[:12], Y[:12], batch_size=12, shuffle=False, verbose=0, epochs=steps)
    assert same(model, expected)


def test_a_model_without_a_strategy_takes_datasets_too(tmp_path: Path) -> None:
    in_scope(mirrored()).save(tmp_path / "m.keras")
    data = px.data.Dataset.from_tensor_slices((X, Y)).batch(12)
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    options = {"epochs": 2, "verbose": 0, "class_weight": weights}
    by_rows, loaded = (keras.models.load_model(tmp_path / "m.keras") for _ in range(2))
    arrays = {
        "batch_size": 12,
        "shuffle": False,
        "validation_data": (X, Y),
        "validation_batch_size": 12,
    }
    expected = by_rows.fit(X, Y, **arrays, **options).history
    assert loaded.fit(data, validation_data=data, **options).history == expected
    assert same(loaded, by_rows)
    assert loaded.evaluate(data, verbose=0) == by_rows.evaluate(X, Y, 12, verbose=0)
    rows = loaded.predict(data.map(lambda x, y: x), verbose=0)
    np.testing.assert_allclose(rows, by_rows.predict(X, 12, verbose=0), atol=1e-6)
    with pytest.raises(ValueError, match="gives the targets with its batches"):
        loaded.fit(data, Y)


def test_datasets_have_their_own_targets() -> None:
    model = in_scope(mirrored())
    data = px.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(ValueError, match="gives the targets with its batches"):
        model.fit(data, Y)
    divided = px.keras.strategy_of(model).experimental_distribute_dataset(data)
    with pytest.raises(ValueError, match="divided already"):
        model.fit(divided, class_weight={0: 1.0})


# -- which Keras --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "backend", "says"),
    [
        ("3.11.3", "jax", "models of Keras 3.12 to 3.15.*Received: Keras 3.11.3"),
        ("3.16.0", "jax", "Received: Keras 3.16.0"),
        ("3.12.0", "torch", "KERAS_BACKEND=jax.*Received: Keras with the backend 'torch'"),
    ],
)
def test_other_versions_and_backends_are_named(
    monkeypatch: pytest.MonkeyPatch, version: str, backend: str, says: str
) -> None:
    assert touch_points.problem() is None
    monkeypatch.setattr(keras, "__version__", version)
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    with pytest.raises(px.PhalanxError, match=says):
        touch_points.require()


def test_a_keras_that_has_moved_a_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(touch_points.trainer(), "_get_jax_state")
    with pytest.raises(NotImplementedError, match=r"has moved.*without JAXTrainer\._get_jax_state"):
        touch_points.require()


def program(text: str, **environ: str) -> str:
    """What another Python prints, which has imported nothing."""
    command = [sys.executable, "-W", "ignore", "-c", text]
    result = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


MAKES = "model = keras.Sequential([keras.layers.Dense(1)]); print(px.keras.strategy_of(model))"


@pytest.mark.parametrize(
    "text",
    [
        f"""import phalanx as px, sys; print('keras' in sys.modules)
with px.OneDeviceStrategy('CPU:0').scope():
    import importlib.util; importlib.util.find_spec('keras')
    import keras; {MAKES}""",
        f"""import keras, phalanx as px, sys; print(False)
with px.OneDeviceStrategy('CPU:0').scope():
    {MAKES}""",
    ],
    ids=["keras in the scope", "keras first"],
)
def test_models_are_distributed_whenever_keras_is_imported(text: str) -> None:
    assert program(text, KERAS_BACKEND="jax") == "False\n<OneDeviceStrategy: 1 replica, on CPU:0>"


def test_another_backend_is_refused_in_scopes_only() -> None:
    text = (
        "import keras, phalanx as px\nkeras.Sequential()\n"
        "with px.OneDeviceStrategy('CPU:0').scope():\n"
        "    try: keras.Sequential()\n    except ValueError as error: print(error)"
    )
    assert "Received: Keras with the backend 'numpy'" in program(text, KERAS_BACKEND="numpy")
