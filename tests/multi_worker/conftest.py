"""Clusters of real processes that tests share, because JAX takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px

SHAPES = {"2x1": (2, 1), "2x2": (2, 2), "3x1": (3, 1), "3x2": (3, 2)}
SLOW = [pytest.param("3x2", marks=pytest.mark.soak)]
QUICK = [shape for shape in SHAPES if shape != "3x2"]


@pytest.fixture(scope="session", params=[*QUICK, *SLOW], ids=str)
def cluster(request: pytest.FixtureRequest) -> Iterator[px.testing.MultiProcess]:
    """Workers times devices."""
    workers, devices = SHAPES[request.param]
    env = {"PHALANX_DEADLINE": "20"}
    # The copies of one process have equal hashes of strings; new processes have not, and must agree.
    preload = () if request.param == "3x1" else ("phalanx", "tests.multi_worker.rules")
    with px.testing.MultiProcess(workers, devices, env=env, preload=preload) as opened:
        yield opened
