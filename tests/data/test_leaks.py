"""Memory, threads and descriptors stay as they were, also for iterators that nobody ends."""

from __future__ import annotations

import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px

D = px.data.Dataset
STRATEGY = px.MirroredStrategy(["CPU:0", "CPU:1"])


def records(folder: Path) -> Any:
    paths = [str(folder / f"{i}.records") for i in range(3)]
    for path in paths:
        with px.io.TFRecordWriter(path) as writer:
            for i in range(20):
                writer.write(b"%d" % i)
    return px.data.TFRecordDataset(paths, num_parallel_reads=2)


def distributed(folder: Path) -> Any:
    return STRATEGY.experimental_distribute_dataset(D.range(40).map(lambda x: x).batch(4))


PLANS: dict[str, Callable[[Path], Any]] = {
    "plain": lambda folder: D.range(40).shuffle(10).batch(3),
    "threads": lambda folder: (
        D.range(40)
        .map(lambda x: x, num_parallel_calls=2)
        .interleave(lambda x: D.range(2), 2, num_parallel_calls=2)
        .prefetch(2)
    ),
    "any order": lambda folder: D.range(40).map(lambda x: x, num_parallel_calls=2, deterministic=False),
    "cache file": lambda folder: D.range(40).map(lambda x: x).cache(str(folder / "kept")),
    "files": records,
    "distributed": distributed,
    "loader": lambda folder: STRATEGY.experimental_distribute_dataset(
        [np.arange(4) for _ in range(10)]
    ),
}


def input_threads() -> int:
    return sum(t.name.startswith(("px-", "phalanx-input")) for t in threading.enumerate())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settle(before: tuple[int, int]) -> tuple[int, int]:
    """How many threads and descriptors there are, once those that are ending have ended."""
    end = time.monotonic() + 30
    gc.collect()
    while (now := (input_threads(), descriptors())) > before and time.monotonic() < end:
        time.sleep(0.005)
    return now


def check(plans: Iterable[str], rounds: int, folder: Path) -> None:
    datasets = [PLANS[plan](folder) for plan in plans]

    def use() -> None:
        for dataset in datasets * rounds:
            assert sum(1 for _ in dataset) > 0
            abandoned = iter(dataset)
            next(abandoned)
            with iter(dataset) as closed:
                next(closed)

    use()
    before = (0, settle((0, 10**6))[1])
    tracemalloc.start()
    try:
        use()
        settle(before)
        first = tracemalloc.get_traced_memory()[0]
        use()
        now = settle(before)
        second = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert now[0] == 0
    assert now[1] <= before[1]
    assert second - first < 50_000 + 200 * rounds  # bytes; an iterator that stays has thousands


def test_nothing_is_left_over(tmp_path: Path) -> None:
    check(PLANS, 3, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_left_over_after_long(plan: str, tmp_path: Path) -> None:
    check([plan], 100, tmp_path)
