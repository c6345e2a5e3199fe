"""Several devices on any machine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import phalanx as px

PROGRAM = """
import phalanx as px
px.testing.logical_devices(3)
print(px.MirroredStrategy().num_replicas_in_sync)
"""


def test_a_process_gets_as_many_devices_as_it_asks_for() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "3\n", done.stderr


def test_the_number_cannot_change_once_there_are_devices() -> None:
    px.testing.logical_devices(len(px.config.list_logical_devices("CPU")))
    with pytest.raises(RuntimeError, match="already started"):
        px.testing.logical_devices(5)


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2", None])
def test_numbers_that_make_no_sense(n: Any) -> None:
    with pytest.raises(ValueError, match="n must be"):
        px.testing.logical_devices(n)
