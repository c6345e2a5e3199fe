"""Input of other libraries: `make test-loaders` runs this where TensorFlow or torch is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import keras
import numpy as np
import pytest

import phalanx as px
from tests.integrations.keras.cases import BATCH, EPOCHS, X, Y, classifier

LIBRARIES = [name for name in ("tensorflow", "torch") if importlib.util.find_spec(name)]


def loaded(library: str, *arrays: Any) -> Any:
    """Batches of the library's own loader; the last one is smaller."""
    if library == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)
    import torch

    rows = torch.utils.data.TensorDataset(*(torch.from_numpy(x) for x in arrays))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=False)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("library", LIBRARIES)
def test_loaders_equal_arrays(library: str, replicas: int) -> None:
    keras.utils.set_random_seed(1)
    expected = classifier(metrics=["accuracy"])
    keras.utils.set_random_seed(1)
    with px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]).scope():
        model = classifier(metrics=["accuracy"])
    data = loaded(library, X, Y)
    history = model.fit(data, epochs=EPOCHS, validation_data=data, verbose=0, shuffle=False).history
    wanted = expected.fit(X, Y, BATCH, EPOCHS, verbose=0, shuffle=False, validation_data=(X, Y)).history
    for name, values in wanted.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-5)
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    found = model.evaluate(data, verbose=0)
    np.testing.assert_allclose(found, expected.evaluate(X, Y, BATCH, verbose=0), atol=1e-5)
    rows = model.predict(loaded(library, X), verbose=0)
    np.testing.assert_allclose(rows, expected.predict(X, BATCH, verbose=0), atol=1e-5)
