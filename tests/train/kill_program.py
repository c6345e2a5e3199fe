"""Kills processes that save one checkpoint after another; run by test_killed_writers."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import warnings
from pathlib import Path

import numpy as np

from phalanx.core.regions import Flat
from phalanx.core.variables.variable_parts import Part
from phalanx.train.checkpoints import directories, files
from phalanx.train.checkpoints.retention import Kept, Retention
from phalanx.train.checkpoints.state import DirectoryState, change_state, latest_checkpoint

SIZE = 200_000


def save(folder: Path, number: int, kept: Kept, size: int) -> Kept:
    """Save a checkpoint whose arrays hold its number, as `CheckpointManager` does, without JAX."""
    array = np.full(size, number, np.int64)
    source = files.ArraySource((size,), "int64", [Part(Flat(0, size), array)])
    path = folder / f"ckpt-{number}"
    partial = directories.begin(path)
    part = files.write_part(partial, 0, {"a": source, "b": source}, {"number": number})
    files.commit(partial, path, [part])
    kept, removed = Retention(2).after(kept, path.name, float(number))
    names, times = zip(*kept.current, strict=True)
    change_state(folder, lambda _: DirectoryState(names, times))
    for old in removed:
        directories.remove(folder / old)
    return kept


def write_until_killed(folder: Path, first: int, told: int) -> None:
    """Save until the end, and tell of each checkpoint that is complete."""
    kept = Kept(tuple((p.name, 0.0) for p in sorted(folder.glob("ckpt-*"))))
    for number in range(first, 10**9):
        kept = save(folder, number, kept, SIZE)
        os.write(told, number.to_bytes(8, "little"))


def kill_one(folder: Path, first: int, seconds: float) -> int:
    """Let a process write, and kill it somewhere after its first checkpoint; the last that it told."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_until_killed(folder, first, writing)
    os.close(writing)
    with open(reading, "rb") as told:
        last = told.read(8)
        select.select([], [], [], seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        rest = told.read()
    return int.from_bytes(rest[-8:] or last, "little")


def check(folder: Path, told: int) -> int:
    """See that nothing that was told is lost, and nothing is half there; the newest number."""
    for path in folder.glob("ckpt-*"):
        saved = files.Saved(path)
        number = saved.values["number"]["same"]
        assert path.name == f"ckpt-{number}"
        for name in ("a", "b"):
            np.testing.assert_array_equal(saved.read(name), np.full(SIZE, number))
    latest = latest_checkpoint(str(folder))
    assert latest is not None
    newest = int(latest.rpartition("-")[2])
    assert newest >= told, "a checkpoint that was complete is lost"
    directories.remove_leftovers(folder)
    assert not list(folder.glob(".*")), "what the dead process left is removed"
    return max(int(path.name.rpartition("-")[2]) for path in folder.glob("ckpt-*"))


def main(folder: Path, kills: int) -> None:
    """Kill writers, and look after each what they have left."""
    rng = random.Random(kills)
    last = interrupted = 0
    for _ in range(kills):
        told = kill_one(folder, last + 1, rng.uniform(0.0, 0.02))
        interrupted += bool(list(folder.glob(".*.partial")))
        last = check(folder, told)
    print("last", last, "interrupted", interrupted)


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # of forks: nothing of JAX has been started
    main(Path(sys.argv[1]), int(sys.argv[2]))
