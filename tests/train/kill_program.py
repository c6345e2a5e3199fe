"""Saves one checkpoint after another until it is killed; run by test_killed_writers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from phalanx.core.regions import Flat
from phalanx.core.variable_parts import Part
from phalanx.train import checkpoint_files as files
from phalanx.train.checkpoint_retention import Kept, Retention
from phalanx.train.checkpoint_state import DirectoryState, update_state


def save(folder: Path, number: int, kept: Kept, size: int) -> Kept:
    """Save a checkpoint whose arrays hold its number, as `CheckpointManager` does, without JAX."""
    array = np.full(size, number, np.int64)
    source = files.ArraySource((size,), "int64", [Part(Flat(0, size), array)])
    path = folder / f"ckpt-{number}"
    partial = files.begin(path)
    part = files.write_part(partial, 0, {"a": source, "b": source}, {"number": number})
    files.commit(partial, path, [part])
    kept, removed = Retention(2).after(kept, path.name, float(number))
    names, times = zip(*kept.current, strict=True)
    update_state(folder, DirectoryState(names, times))
    for old in removed:
        files.remove(folder / old)
    return kept


def main(folder: str, first: int, size: int) -> None:
    """Save until the end."""
    kept = Kept(tuple((p.name, 0.0) for p in sorted(Path(folder).glob("ckpt-*"))))
    for number in range(first, 10**9):
        kept = save(Path(folder), number, kept, size)
        print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
