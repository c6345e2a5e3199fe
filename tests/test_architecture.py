"""The shape of the package: layers, public names, and the homes of private JAX calls."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import phalanx as px

ROOT = Path(px.__file__).parent
LAYERS = ["core", "data", "execution", "collectives", "strategies"]
BESIDE = {
    "cluster": {"core"},
    "train": {"cluster", "core", "data", "execution"},
    "comm": {*LAYERS, "cluster"},
    "testing": {*LAYERS, "cluster"},
    "cli": {*LAYERS, "cluster", "comm", "train"},
}
SEEKING = {"core/compat.py", "cluster/processes.py", "cluster/hub/service.py"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_point_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    if layer not in LAYERS and layer not in BESIDE:
        return  # the façade
    below = set(LAYERS[: LAYERS.index(layer)]) if layer in LAYERS else BESIDE[layer]
    allowed = below | {layer} | ({"cluster"} if layer == "strategies" else set())
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "phalanx" and len(parts) > 1 and (ROOT / parts[1]).is_dir():
            assert parts[1] in allowed, f"{path} must not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_private_jax_is_sought_where_it_is_used(path: Path) -> None:
    private = ("jax._src", "jax.experimental", "jax.extend", "jax.interpreters", "jaxlib")
    assert not [name for name in imported(path) if name.startswith(private)]
    if path.relative_to(ROOT).as_posix() not in SEEKING:
        assert "phalanx.core.private" not in imported(path)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_hold_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def public_modules() -> list[str]:
    names = ["phalanx"]
    for info in pkgutil.iter_modules([str(ROOT)]):
        module = importlib.import_module(f"phalanx.{info.name}")
        if hasattr(module, "__all__"):
            names.append(module.__name__)
    return names


@pytest.mark.parametrize("name", public_modules())
def test_public_names_exist_are_sorted_and_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for symbol in module.__all__:
        thing = getattr(module, symbol)
        assert inspect.getdoc(thing), f"{name}.{symbol} has no docstring"


def test_public_methods_are_documented() -> None:
    for symbol in px.__all__:
        thing = getattr(px, symbol)
        if not inspect.isclass(thing):
            continue
        for name, member in vars(thing).items():
            if name.startswith("_") or not (callable(member) or isinstance(member, property)):
                continue
            assert inspect.getdoc(getattr(thing, name)), f"px.{symbol}.{name} has no docstring"


SEED_NAMES = """
CrossDeviceOps HierarchicalCopyAllReduce InputContext InputReplicationMode MirroredStrategy
NcclAllReduce OneDeviceStrategy ReduceOp ReductionToOneDevice ReplicaContext Strategy StrategyExtended
experimental_set_strategy get_replica_context get_strategy has_strategy in_cross_replica_context
cluster_resolver experimental
"""


def test_seed_names_exist() -> None:
    assert [name for name in SEED_NAMES.split() if not hasattr(px, name)] == []
    for name in ("CentralStorageStrategy", "TPUStrategy", "ValueContext", "CommunicationOptions"):
        assert hasattr(px.experimental, name)
    for error in vars(px.errors).values():
        if isinstance(error, type) and issubclass(error, Exception):
            assert issubclass(error, px.PhalanxError)
