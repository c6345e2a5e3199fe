"""Training under a strategy is training on one device, whatever the number of replicas."""

from __future__ import annotations

import functools
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
IN_TURN = [(name, 2 if name == "not_compiled" else (4, 2)[i % 2]) for i, name in enumerate(NAMES)]
OTHERS = [(name, n) for name in NAMES for n in (1, 2, 3, 4, 8) if (name, n) not in IN_TURN]


@pytest.mark.parametrize(("name", "replicas"), IN_TURN)
def test_mirrored(name: str, replicas: int) -> None:
    check(name, mirrored(replicas))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "replicas"), OTHERS)
def test_mirrored_on_more(name: str, replicas: int) -> None:
    check(name, mirrored(replicas))


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
