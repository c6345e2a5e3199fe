"""What the workers of a cluster do in the tests; they import this before they start."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx as px
from tests.integrations.keras import cases
from tests.integrations.keras.cases import CROSSENTROPY, FIT, X, Y, classifier


@functools.cache
def strategy() -> px.Strategy:
    return px.MultiWorkerMirroredStrategy()


def run(name: str) -> Any:
    """The result of a case; layers draw other seeds on the other worker."""
    with strategy().scope():
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(3 + 100 * rank())
        return cases.CASES[name]()


def rank() -> int:
    return strategy().cluster_resolver.task_id


def model() -> Any:
    with strategy().scope():
        keras.utils.set_random_seed(1)
        return classifier()


def train_with_files(folder: str) -> Any:
    """Files and output of one worker."""
    made, where = model(), Path(folder)
    callbacks = [
        keras.callbacks.ModelCheckpoint(where / "{epoch}.keras"),
        keras.callbacks.CSVLogger(where / "log.csv"),
        keras.callbacks.BackupAndRestore(where / "backup", delete_checkpoint=False),
        keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1),
    ]
    if rank():
        where.rename(where.with_name("of the other worker"))  # nothing here may need it
        where.with_name("of the other worker").rename(where)
    made.fit(X, Y, batch_size=12, epochs=2, verbose=2, shuffle=False, callbacks=callbacks)
    return made.get_weights(), float(made.optimizer.learning_rate.numpy())


def go_on(folder: str) -> Any:
    """The epochs after those of a backup, which only the first worker can read."""
    made = model()
    where = Path(folder) / ("backup" if rank() == 0 else "nothing")
    history = made.fit(
        X, Y, **(FIT | {"shuffle": False}), callbacks=[keras.callbacks.BackupAndRestore(where)]
    )
    return history.epoch, made.get_weights()


def functional() -> Any:
    """A classifier whose variables have the same paths when it is loaded again."""
    rows = keras.Input((6,))
    made = keras.Model(rows, keras.layers.Dense(3)(keras.layers.Dense(4)(rows)))
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), CROSSENTROPY)
    return made


def train_with_orbax(folder: str) -> Any:
    """Checkpoints that Keras writes with Orbax, of the latest two epochs."""
    with strategy().scope():
        keras.utils.set_random_seed(1)
        made = functional()
    writer = keras.callbacks.OrbaxCheckpoint(folder, max_to_keep=2)
    made.fit(X, Y, **(FIT | {"shuffle": False}), callbacks=[writer])
    return made.get_weights()


class Fails(keras.callbacks.Callback):
    """One worker fails, or dies, after the fourth step."""

    def __init__(self, guilty: int, how: str) -> None:
        super().__init__()
        self.guilty, self.how = guilty, how

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 3 and rank() == self.guilty:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("a callback of one worker")


def fails(how: str) -> Any:
    """What the worker that is left raises, and its weights."""
    made = model()
    try:
        made.fit(X, Y, **(FIT | {"shuffle": False}), callbacks=[Fails(1, how)])
    except Exception as error:
        if rank() == 1:
            raise
        return str(error), made.get_weights()
    return "nothing", []


def close(a: Any, b: Any) -> bool:
    return all(np.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True))
