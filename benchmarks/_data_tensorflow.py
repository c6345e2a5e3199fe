"""A child of `data.py`: the pipelines in tf.data.

``python _data_tensorflow.py pipelines FOLDER``, or ``memory MEGABYTES``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import _data_common as common

AUTOTUNE = tf.data.AUTOTUNE


def settings(
    make: Callable[[int | None], tf.data.Dataset], parallel: bool = False
) -> dict[str, Callable[[], Iterable[Any]]]:
    """`make` gets `num_parallel_calls`; with `parallel` there is also a setting in which that is on."""
    made: dict[str, Callable[[], Iterable[Any]]] = {
        "prefetch(AUTOTUNE)": lambda: Epochs(make(None).prefetch(AUTOTUNE)),
        "no prefetch": lambda: Epochs(make(None)),
    }
    if parallel:
        made["prefetch(AUTOTUNE), num_parallel_calls=AUTOTUNE"] = lambda: Epochs(
            make(AUTOTUNE).prefetch(AUTOTUNE)
        )
    return made


class Epochs:
    """A dataset whose batches are NumPy arrays; these share the tensors' memory."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Any:
        return self._dataset.as_numpy_iterator()


def scaled(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x * common.SCALE, y


def scaled_by_numpy(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    result = tf.numpy_function(lambda x: x * common.SCALE, [x], tf.float32, stateful=False)
    result.set_shape(x.shape)
    return result, y


def pipelines(folder: Path) -> common.Pipelines:
    x, y = common.arrays()
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    few = tf.data.Dataset.from_tensor_slices((x[: common.MAPPED_ROWS], y[: common.MAPPED_ROWS]))
    size = common.BATCH
    features = {
        "x": tf.io.FixedLenFeature([common.WIDTH], tf.float32),
        "y": tf.io.FixedLenFeature([], tf.int64),
    }

    def parsed(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        found = tf.io.parse_example(records, features)
        return found["x"], found["y"]

    def records() -> tf.data.Dataset:
        return tf.data.TFRecordDataset(str(folder / common.RECORD_FILE)).batch(size)

    return {
        "batch": settings(lambda _: rows.batch(size)),
        "batch, all": settings(lambda _: rows.batch(size)),
        "shuffle": settings(lambda _: rows.shuffle(common.ROWS).batch(size)),
        "small shuffle": settings(lambda _: rows.shuffle(common.SMALL_BUFFER).batch(size)),
        "cache": settings(
            lambda _: rows.cache().shuffle(common.ROWS).batch(size).repeat(common.REPEATS)
        ),
        "python map": settings(lambda n: few.map(scaled_by_numpy, n).batch(size), parallel=True),
        "native map": settings(lambda n: few.map(scaled, n).batch(size), parallel=True),
        "batch map": settings(lambda n: rows.batch(size).map(scaled, n), parallel=True),
        "records": settings(lambda _: records()),
        "parse": settings(lambda n: records().map(parsed, n), parallel=True),
    }


def for_memory(data: tuple[np.ndarray, np.ndarray], batch: int) -> Iterable[Any]:
    return Epochs(tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0])).batch(batch))


def main(what: str, argument: str) -> None:
    versions = {"TensorFlow": tf.__version__}
    if what == "memory":
        common.serve_memory(versions, int(argument), for_memory)
    else:
        common.serve_pipelines(versions, pipelines(Path(argument)))


if __name__ == "__main__":
    main(*sys.argv[1:])
