"""Clusters of real processes that the tests of collectives share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px

collect_ignore = ["record_mindspore.py", "record_torch.py"]  # programs, which need what they record


@pytest.fixture(scope="session")
def pair() -> Iterator[px.testing.MultiProcess]:
    with px.testing.MultiProcess(workers=2, preload=["phalanx"]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def trio() -> Iterator[px.testing.MultiProcess]:
    # Copies of one process have equal hashes of strings; these have not, and must agree.
    with px.testing.MultiProcess(workers=3) as cluster:
        yield cluster
