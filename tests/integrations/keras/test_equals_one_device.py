"""Training under a strategy is training on one device, whatever the number of replicas."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from tests.integrations.keras import cases


@functools.cache
def expected(name: str) -> Any:
    return cases.run(name)


def check(name: str, strategy: px.Strategy) -> None:
    with strategy.scope():
        found = cases.run(name)
    cases.assert_close(name, found, expected(name))


def mirrored(count: int) -> px.Strategy:
    return px.MirroredStrategy([f"CPU:{i}" for i in range(count)])


NAMES = list(cases.CASES)
ELSEWHERE = (
    "files_of_callbacks",
    "saved_and_loaded",
)  # test_models_in_scopes.py has these for two replicas
SLOW = ("not_compiled",)
IN_TURN = [
    (name, 2 if i % 4 else 4)  # fewer programs to compile
    for i, name in enumerate(NAMES)
    if name not in (*ELSEWHERE, *SLOW)
]
OTHERS = [(name, n) for name in NAMES for n in (1, 2, 3, 4, 8) if (name, n) not in IN_TURN]


@pytest.mark.parametrize(("name", "replicas"), IN_TURN)
def test_mirrored(name: str, replicas: int) -> None:
    check(name, mirrored(replicas))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "replicas"), OTHERS)
def test_mirrored_on_more(name: str, replicas: int) -> None:
    check(name, mirrored(replicas))


def test_every_case_has_a_row() -> None:
    page = (Path(__file__).parents[3] / "docs" / "coverage.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in page] == []


STRATEGIES = {
    "central": lambda: px.CentralStorageStrategy(["CPU:0", "CPU:1", "CPU:2"], "CPU:0"),
    "planned": lambda: px.AutoParallelStrategy(devices=[f"CPU:{i}" for i in range(4)]),
    "one device": lambda: px.OneDeviceStrategy("CPU:1"),
}


@pytest.mark.soak
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_other_strategies(name: str, kind: str) -> None:
    check(name, STRATEGIES[kind]())
