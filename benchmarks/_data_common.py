"""What the children of `data.py` share: the data, the cases, and the conversation with the parent.

Only NumPy is needed here, because the children live in different environments.

A child makes pipelines: for each case that its library knows, one for each of the settings that a user
might choose, such as reading ahead or not. Each is an iterable of batches; iterating it is an epoch.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from _child import Parent

ROWS, WIDTH, BATCH = 60_000, 784, 256
SMALL_BUFFER = 10_000
MAPPED_ROWS = 6_000
"""Cases that call Python for each element take fewer rows."""

REPEATS = 2
RECORDS = 10_000
SCALE = np.float32(1 / 255)
RECORD_FILE = "examples.tfrecord"

MEMORY_BATCH = 8192

Pipelines = Mapping[str, Mapping[str, Callable[[], Iterable[Any]]]]


def arrays(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels; the same in every child."""
    rng = np.random.default_rng(0)
    x = rng.random((rows, WIDTH), dtype=np.float32)
    return x, rng.integers(0, 10, rows)


# -- what is done with a batch -------------------------------------------------------------------


def first_column(batch: tuple[np.ndarray, np.ndarray]) -> tuple[int, float]:
    """How many examples there are, and a sum that needs every one of them."""
    x, y = batch
    return len(x), float(x[:, 0].sum(dtype=np.float64)) + int(y.sum())


def every_number(batch: tuple[np.ndarray, np.ndarray]) -> tuple[int, float]:
    """The same, but reads the whole batch."""
    x, y = batch
    return len(x), float(x.sum(dtype=np.float64)) + int(y.sum())


def lengths(records: np.ndarray) -> tuple[int, float]:
    """The same for serialized records."""
    return len(records), float(sum(map(len, records)))


TOUCH: dict[str, Callable[[Any], tuple[int, float]]] = {"batch, all": every_number, "records": lengths}
"""For each case how its batches are used; `first_column` by default."""


# -- the conversation ----------------------------------------------------------------------------


def serve_pipelines(versions: dict[str, str], pipelines: Pipelines) -> None:
    """Say which settings there are for each case, then run epochs until the parent closes the pipe."""
    parent = Parent(versions)
    parent.say(settings={case: list(settings) for case, settings in pipelines.items()})
    made: dict[tuple[str, str], Iterable[Any]] = {}
    for command in parent:
        case, setting, epochs = command["case"], command["setting"], command["epochs"]
        if (case, setting) not in made:
            made[case, setting] = pipelines[case][setting]()
        touch = TOUCH.get(case, first_column)
        dataset = made[case, setting]
        examples, total = 0, 0.0
        begin = time.perf_counter()
        for _ in range(epochs):
            for batch in dataset:
                count, part = touch(batch)
                examples += count
                total += part
        seconds = time.perf_counter() - begin
        parent.say(seconds=seconds, examples=examples, mean=total / max(examples, 1))


# -- memory --------------------------------------------------------------------------------------


class Peak:
    """The most memory that the process has resident while a `with` block runs, in bytes.

    A thread looks every millisecond, as not all systems have a peak that can be reset.
    """

    def __init__(self) -> None:
        give_back()
        self.start = self.highest = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.highest = max(self.highest, resident())


def give_back() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident() -> int:
    """Bytes of this process that are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve_memory(
    versions: dict[str, str],
    megabytes: int,
    pipeline: Callable[[tuple[np.ndarray, np.ndarray], int], Iterable[Any]],
) -> None:
    """Iterate once over arrays of this size, shuffled and batched, and say what it took.

    Args:
        versions: of the libraries that are measured.
        megabytes: the size of the inputs.
        pipeline: makes a dataset of arrays with batches of a size, without reading ahead.
    """
    parent = Parent(versions)
    # A small dataset first, so that threads and caches of the library are not counted.
    for batch in pipeline(arrays(2 * BATCH), BATCH):
        first_column(batch)
    rows = megabytes * 2**20 // (4 * WIDTH)
    data = np.ones((rows, WIDTH), np.float32), np.ones(rows, np.int64)
    total, largest = 0.0, 0
    with Peak() as peak:
        begin = time.perf_counter()
        for batch in pipeline(data, MEMORY_BATCH):
            total += every_number(batch)[1]
            largest = max(largest, sum(a.nbytes for a in batch))
        seconds = time.perf_counter() - begin
    if total != rows * (WIDTH + 1):
        raise SystemExit(f"wrong sum: {total}")
    parent.say(
        seconds=seconds,
        rows=rows,
        data=sum(a.nbytes for a in data),
        batch=largest,
        extra=peak.highest - peak.start,
    )
    sys.stdin.read()
