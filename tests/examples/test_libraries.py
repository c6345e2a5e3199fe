"""The example with other libraries: the same losses on one and four replicas, and on two workers."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest

import phalanx as px

SCRIPT = Path(__file__).parents[2] / "examples" / "libraries.py"
LIBRARIES = ["optax", "flax_linen", "flax_nnx", "equinox", "grain", "orbax"]


def printed(library: str, workers: bool, replicas: int = 1) -> str:
    train = runpy.run_path(str(SCRIPT))["train"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if workers:
            train(library, px.MultiWorkerMirroredStrategy())
        else:
            train(library, px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]))
    return out.getvalue()


def on_worker(libraries: list[str]) -> list[str]:
    return [printed(library, workers=True) for library in libraries]


@pytest.fixture(scope="module")
def expected() -> str:
    alone = printed("optax", workers=False)
    losses = [float(line.rpartition(" ")[2]) for line in alone.splitlines()]
    assert losses[1] < losses[0]
    return alone


@pytest.mark.parametrize("library", LIBRARIES)
def test_four_replicas_learn_what_one_learns(library: str, expected: str) -> None:
    assert printed(library, workers=False) == expected
    assert printed(library, workers=False, replicas=4) == expected


@pytest.mark.soak
def test_two_workers_learn_what_one_process_learns(expected: str) -> None:
    with px.testing.MultiProcess(workers=2, preload=["phalanx"]) as cluster:
        first, second = cluster.run(on_worker, LIBRARIES, timeout=200)
    assert first == [expected] * len(LIBRARIES)
    assert second == [""] * len(LIBRARIES)
