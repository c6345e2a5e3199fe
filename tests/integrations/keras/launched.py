"""A program for `phalanx run`: Keras on workers, or on workers and parameter servers."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np

import phalanx as px
from tests.integrations.keras.cases import BATCH, FIT, X, Y, classifier


def together(folder: Path) -> None:
    """Workers train together; only one of them prints and writes."""
    strategy = px.MultiWorkerMirroredStrategy()
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = classifier()
    saver = keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras")
    model.fit(X, Y, **(FIT | {"shuffle": False, "verbose": 2}), callbacks=[saver])
    np.savez(folder / f"worker{strategy.cluster_resolver.task_id}.npz", *model.get_weights())


def on_servers(folder: Path) -> None:
    """The chief trains with the help of workers; the others serve."""
    resolver = px.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        px.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return
    with px.ParameterServerStrategy(resolver).scope():
        keras.utils.set_random_seed(1)
        model = classifier(metrics=["accuracy"])

    def batches(context: px.InputContext) -> px.data.Dataset:
        return px.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(BATCH)

    creator = px.keras.DatasetCreator(batches)
    history = model.fit(
        creator, steps_per_epoch=10, epochs=3, validation_data=(X, Y), verbose=0
    ).history
    assert history["val_loss"][-1] < history["val_loss"][0], history
    print(f"{int(model.optimizer.iterations.numpy())} steps", flush=True)
    model.save(folder / "trained.keras")


if __name__ == "__main__":
    {"together": together, "on_servers": on_servers}[sys.argv[1]](Path(sys.argv[2]))
