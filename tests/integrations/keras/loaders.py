"""Input of other libraries, in their own environments: ``make test-loaders`` runs it with pytest.

It is no test of the suite, since neither TensorFlow nor PyTorch is a dependency.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import keras
import pytest

import phalanx as px
from tests.integrations.keras import cases
from tests.integrations.keras.cases import BATCH, EPOCHS, FIT, X, Y, classifier


def of_tensorflow(*arrays: Any) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0]).batch(BATCH)


def of_torch(*arrays: Any) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(*map(torch.as_tensor, arrays)), batch_size=BATCH)


LOADERS = {"tensorflow": of_tensorflow, "torch": of_torch}
HERE = [name for name in LOADERS if importlib.util.find_spec(name)]
STRATEGIES = {
    "one device": lambda: px.OneDeviceStrategy("CPU:1"),
    "mirrored 2": lambda: px.MirroredStrategy(["CPU:0", "CPU:1"]),
    "mirrored 3": lambda: px.MirroredStrategy([f"CPU:{i}" for i in range(3)]),
    "central": lambda: px.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:2"),
    "planned": lambda: px.AutoParallelStrategy(devices=["CPU:0", "CPU:1"]),
}


def test_there_is_a_library_to_test() -> None:
    assert HERE


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("library", HERE)
def test_training_equals_that_on_arrays(library: str, kind: str) -> None:
    loader = LOADERS[library]
    keras.utils.set_random_seed(3)
    one = classifier(metrics=["accuracy"])
    one.fit(X, Y, validation_data=(X[:7], Y[:7]), shuffle=False, **FIT)
    keras.utils.set_random_seed(3)
    with STRATEGIES[kind]().scope():
        model = classifier(metrics=["accuracy"])
    model.fit(
        loader(X, Y), validation_data=loader(X[:7], Y[:7]), epochs=EPOCHS, verbose=0, shuffle=False
    )
    results = [
        cases.result(each, each.evaluate(*data, verbose=0), each.predict(*data[:1], verbose=0))
        for each, data in ((model, (loader(X, Y),)), (one, (X, Y)))
    ]
    cases.assert_close("loaders", *results)


@pytest.mark.parametrize("library", HERE)
def test_tensorboard_where_tensorflow_may_be(library: str, tmp_path: Any) -> None:
    with STRATEGIES["mirrored 2"]().scope():
        model = classifier()
    board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)
    model.fit(LOADERS[library](X, Y), epochs=1, verbose=0, shuffle=False, callbacks=[board])
    assert list((tmp_path / "train").glob("events.out.tfevents.*"))
