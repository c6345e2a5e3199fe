"""Programs for `phalanx run`: Keras on workers that train together, and with parameter servers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import phalanx as px
from tests.integrations.keras.cases import FIT, X, Y, classifier


def made(strategy: Any) -> Any:
    with strategy.scope():
        keras.utils.set_random_seed(1)
        return classifier(metrics=["accuracy"])


class Ends(keras.callbacks.Callback):
    """One worker dies after the fourth step, or its callback fails."""

    def __init__(self, here: bool, how: str) -> None:
        super().__init__()
        self.here, self.how = here, how

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.here and batch == 3:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "interrupted":
                os.kill(os.getpid(), signal.SIGINT)
            raise ZeroDivisionError("a callback of one worker")


def together(folder: Path, how: str = "") -> None:
    """Workers of two devices each: trains, writes files, and goes on after an error of the other."""
    strategy = px.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    model = made(strategy)
    options = FIT | {"shuffle": False, "verbose": 2}
    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / "last.keras"),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.TensorBoard(folder / "board"),
    ]
    if not how:
        model.fit(X, Y, validation_data=(X[:7], Y[:7]), callbacks=callbacks, **options)
        loss, _ = model.evaluate(X, Y, verbose=0)
        rows = model.predict(X, 7, verbose=0)
        np.savez(folder / f"{rank}.npz", *model.get_weights(), rows=rows)
        print(f"loss {loss:.5f}, {strategy.num_replicas_in_sync} replicas", flush=True)
        return
    try:
        model.fit(X, Y, callbacks=[Ends(rank == 1, how)], **(options | {"verbose": 0}))
    except px.errors.PhalanxError as error:
        np.savez(folder / "kept.npz", *model.get_weights())
        print(f"kept: {type(error).__name__}: {error}", flush=True)
        raise


def on_servers(folder: Path, how: str = "") -> None:
    """The coordinator calls `fit`; the other tasks serve, and one of the workers may die."""
    resolver = px.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        px.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
        ).join()
        return
    model = made(px.ParameterServerStrategy(resolver))

    def batches(context: px.InputContext) -> px.data.Dataset:
        data = px.data.Dataset.from_tensor_slices((X, Y)).shuffle(50).repeat().batch(12)
        if not how:
            return data

        def rows() -> Any:
            for number, batch in enumerate(data):
                if number == 7:  # the coordinator reads only the first
                    with contextlib.suppress(FileExistsError):
                        (folder / "died").touch(exist_ok=False)
                        os.kill(os.getpid(), signal.SIGKILL)
                yield batch

        return px.data.Dataset.from_generator(rows, output_signature=data.element_spec)

    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
    ]
    history = model.fit(
        px.keras.DatasetCreator(batches),
        steps_per_epoch=10,
        epochs=4,
        verbose=2,
        validation_data=(X, Y),
        callbacks=callbacks,
    ).history
    steps = int(model.optimizer.iterations.numpy())
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["loss"], history["val_loss"][-1], rtol=1e-5)
    better = history["val_loss"][3] < history["val_loss"][0]
    np.savez(folder / "chief.npz", *model.get_weights())
    print(f"{steps} steps, better {better}", flush=True)  # a step of a worker that died may count twice


if __name__ == "__main__":
    if sys.argv[1] == "servers":
        on_servers(Path(sys.argv[2]), *sys.argv[3:])
    else:
        together(Path(sys.argv[2]), *sys.argv[3:])
