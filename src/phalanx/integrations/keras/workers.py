"""What only one worker does: it prints, and writes files.

Callbacks that do nothing but write are left out on other workers. What a backup holds reaches them from
the first worker: its values count at the first step, and they begin with its epoch. Orbax lets
all workers wait for each other while the first one writes, so its callback is called by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.integrations.keras import touch_points
from phalanx.integrations.keras.distribution import ModelDistribution
from phalanx.integrations.keras.tensorboard import TensorBoardSummary


def said(distribution: ModelDistribution, verbose: Any) -> Any:
    """How much this worker prints."""
    return verbose if distribution.strategy.extended.should_save_summary else 0


def callbacks_here(distribution: ModelDistribution, callbacks: Any) -> Any:
    """The callbacks that this worker calls."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    listed = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks or ())
    for callback in listed:  # TensorFlow, where it is installed, writes only with TensorBoard's package
        if isinstance(callback, keras.callbacks.TensorBoard):
            touch_points.write_events_with(callback, TensorBoardSummary())
    devices = distribution.devices
    if not devices.spans_workers:
        return listed
    for callback in listed:
        # Orbax refuses arrays of JAX that only one process has, and lets the first one write NumPy's.
        if isinstance(callback, getattr(keras.callbacks, "OrbaxCheckpoint", ())):
            touch_points.save_values_with(callback, np.asarray)
    if not distribution.strategy.extended.should_checkpoint:
        listed = _without_writers(listed)
    return [*listed, _begins_like_the_first(devices)]


def _without_writers(callbacks: Sequence[Any]) -> list[Any]:
    from keras import callbacks as known

    writers = (
        known.ModelCheckpoint,
        known.CSVLogger,
        known.TensorBoard,
        known.BackupAndRestore,
        known.RemoteMonitor,
    )
    return [callback for callback in callbacks if not isinstance(callback, writers)]


def _begins_like_the_first(devices: Any) -> Any:
    """A callback by which all workers begin with the epoch that the first one has read of a backup."""
    import keras

    class BeginsLikeTheFirst(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            epochs = devices.exchange("first epoch", touch_points.first_epoch(self.model))
            touch_points.set_first_epoch(self.model, int(epochs[0]))

    return BeginsLikeTheFirst()
