"""Writers that are killed at any moment: the last whole checkpoint is always found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.train.kill_program import SIZE

import phalanx as px

PROGRAM = str(Path(__file__).with_name("kill_program.py"))


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_the_last_whole_checkpoint_is_found(kills: int, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, PROGRAM, str(tmp_path), str(kills)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    _, last, _, interrupted = ended.stdout.split()
    assert int(interrupted) >= kills // 4  # most were in the middle of a save
    value = np.zeros(SIZE, np.int64)
    manager = px.train.CheckpointManager(px.train.Checkpoint(a=value), str(tmp_path), 2)
    assert manager.restore_or_initialize() == str(tmp_path / f"ckpt-{last}")
    assert manager.checkpoint.a[0] == int(last)  # type: ignore[attr-defined]
