"""A child of `data.py`: the pipelines in Grain.

``python _data_grain.py pipelines FOLDER``, or ``memory MEGABYTES``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import grain
import numpy as np

import _data_common as common

READ_AHEAD = {
    "reading ahead": grain.ReadOptions(),
    "no threads": grain.ReadOptions(num_threads=0, prefetch_buffer_size=0),
}


class Rows:
    """Arrays as a source of examples."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self._x[i], self._y[i]


def settings(dataset: grain.MapDataset) -> dict[str, Callable[[], Iterable[Any]]]:
    def make(options: grain.ReadOptions) -> Callable[[], Iterable[Any]]:
        return lambda: dataset.to_iter_dataset(options)

    return {name: make(options) for name, options in READ_AHEAD.items()}


def scaled(element: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    x, y = element
    return x * common.SCALE, y


def pipelines() -> common.Pipelines:
    x, y = common.arrays()
    rows = grain.MapDataset.source(Rows(x, y))
    few = grain.MapDataset.source(Rows(x[: common.MAPPED_ROWS], y[: common.MAPPED_ROWS]))
    window = grain.experimental.WindowShuffleMapDataset(rows, window_size=common.SMALL_BUFFER, seed=1)
    return {
        "batch": settings(rows.batch(common.BATCH)),
        "batch, all": settings(rows.batch(common.BATCH)),
        "shuffle": settings(rows.shuffle(seed=1).batch(common.BATCH)),
        "small shuffle": settings(window.batch(common.BATCH)),
        "python map": settings(few.map(scaled).batch(common.BATCH)),
        "batch map": settings(rows.batch(common.BATCH).map(scaled)),
    }


def for_memory(data: tuple[np.ndarray, np.ndarray], batch: int) -> Iterable[Any]:
    batches = grain.MapDataset.source(Rows(*data)).shuffle(seed=1).batch(batch)
    return batches.to_iter_dataset(READ_AHEAD["no threads"])


def main(what: str, argument: str) -> None:
    versions = {"Grain": version("grain")}
    if what == "memory":
        common.serve_memory(versions, int(argument), for_memory)
    else:
        common.serve_pipelines(versions, pipelines())


if __name__ == "__main__":
    main(*sys.argv[1:])
