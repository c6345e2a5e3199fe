"""`MultiWorkerMirroredStrategy` keeps the contract of all strategies, over real processes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import phalanx as px
from tests.multi_worker import rules
from tests.multi_worker.conftest import SHAPES


@pytest.mark.parametrize(
    ("cluster", "module", "function", "arguments"),
    [(shape, *rule) for shape in SHAPES for rule in rules.rules(all_arguments=shape == "2x2")],
    indirect=["cluster"],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else x.split("test_")[-1],
)
def test_rule(
    cluster: px.testing.MultiProcess, module: str, function: str, arguments: dict[str, Any]
) -> None:
    """Every rule in every cluster; all its arguments in the one with the most replicas."""
    cluster.run(rules.check, module, function, arguments)


def test_the_exceptions_exist() -> None:
    modules = [importlib.import_module(f"tests.contract.test_{m}") for m in rules.MODULES]
    assert all(any(hasattr(m, name) for m in modules) for name in rules.NOT_FOR_WORKERS)
