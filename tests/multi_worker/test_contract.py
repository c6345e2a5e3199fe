"""`MultiWorkerMirroredStrategy` keeps the contract of all strategies, over real processes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import phalanx as px
from tests.multi_worker import rules

FIRST = list(rules.rules(all_arguments=False))
OTHERS = [rule for rule in rules.rules(all_arguments=True) if rule not in FIRST]


def each(found: list[Any]) -> Any:
    def name(x: Any) -> str:
        return "-".join(map(str, x.values())) if isinstance(x, dict) else x.split("test_")[-1]

    return pytest.mark.parametrize(("module", "function", "arguments"), found, ids=name)


# Two workers with two devices find what two with one do.
@pytest.mark.parametrize("cluster", [pytest.param("2x1", marks=pytest.mark.soak), "2x2"], indirect=True)
@each(FIRST)
def test_rule(
    cluster: px.testing.MultiProcess, module: str, function: str, arguments: dict[str, Any]
) -> None:
    cluster.run(rules.check, module, function, arguments)


# Three workers differ from two in their programs, and hardly in how replicas take turns.
@pytest.mark.parametrize("cluster", ["3x1"], indirect=True)
@each([x if "compiled" in x[2].values() else pytest.param(*x, marks=pytest.mark.soak) for x in FIRST])
def test_rule_on_three(
    cluster: px.testing.MultiProcess, module: str, function: str, arguments: dict[str, Any]
) -> None:
    cluster.run(rules.check, module, function, arguments)


@pytest.mark.parametrize("cluster", ["2x2"], indirect=True)
@each(OTHERS)
def test_rule_with_other_arguments(
    cluster: px.testing.MultiProcess, module: str, function: str, arguments: dict[str, Any]
) -> None:
    cluster.run(rules.check, module, function, arguments)


def test_the_exceptions_exist() -> None:
    modules = [importlib.import_module(f"tests.contract.test_{m}") for m in rules.MODULES]
    assert all(any(hasattr(m, name) for m in modules) for name in rules.NOT_FOR_WORKERS)
