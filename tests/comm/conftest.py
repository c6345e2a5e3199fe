"""Clusters of real processes that the tests of collectives share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px

collect_ignore = ["record_mindspore.py", "record_torch.py"]  # programs, which need what they record


@pytest.fixture(scope="module")
def pair() -> Iterator[px.testing.MultiProcess]:
    with px.testing.MultiProcess(workers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trio() -> Iterator[px.testing.MultiProcess]:
    with px.testing.MultiProcess(workers=3) as cluster:
        yield cluster
