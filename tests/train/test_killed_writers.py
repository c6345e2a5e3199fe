"""Writers that are killed at any moment: the last whole checkpoint is always found."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import phalanx as px
from phalanx.train.checkpoint_files import Saved, is_checkpoint

PROGRAM = str(Path(__file__).with_name("kill_program.py"))
SIZE = 200_000


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_the_last_whole_checkpoint_is_found(kills: int, tmp_path: Path) -> None:
    rng = random.Random(kills)
    told = 0
    for _ in range(kills):
        with subprocess.Popen(
            [sys.executable, PROGRAM, str(tmp_path), str(told + 1), str(SIZE)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            told = int(process.stdout.readline())  # it is killed somewhere in the next ones
            timer = threading.Timer(rng.uniform(0.0, 0.02), process.kill)
            timer.start()
            told = max([told, *map(int, process.stdout.read().split())])
            timer.join()
        told = max(told, check(tmp_path, told))


def check(folder: Path, told: int) -> int:
    """See that nothing that was told is lost, and nothing is half there; the newest number."""
    for path in folder.glob("ckpt-*"):
        assert is_checkpoint(path)
        saved = Saved(path)
        number = saved.values["number"]["same"]
        assert path.name == f"ckpt-{number}"
        for name in ("a", "b"):
            np.testing.assert_array_equal(saved.read(name), np.full(SIZE, number))
    latest = px.train.latest_checkpoint(str(folder))
    assert latest is not None
    newest = int(latest.rpartition("-")[2])
    assert newest >= told, "a checkpoint that was complete is lost"
    value = np.zeros(SIZE, np.int64)
    manager = px.train.CheckpointManager(px.train.Checkpoint(a=value), str(folder), 2)
    path = manager.restore_or_initialize()
    assert path is not None
    assert not list(folder.glob(".*.partial")), "what the dead process left is removed"
    found = int(path.rpartition("-")[2])
    assert manager.checkpoint.a[0] == found >= newest  # type: ignore[attr-defined]
    return found
