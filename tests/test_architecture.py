"""The shape of the package: layers, public names, and the homes of private JAX calls."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import phalanx as px

ROOT = Path(px.__file__).parent
LAYERS = [
    "errors",
    "runtime",
    "net",
    "cluster",
    "job",
    "core",
    "data",
    "execution",
    "collectives",
    "parameter_server",
    "strategies",
    "comm",
    "train",
    "coordinator",
    "parallel",
    "integrations",
    "testing",
    "cli",
]
"""What may import what: each only those before it. Modules that are not named are the façade."""

DATA = [
    "plan",
    "run",
    "ops",
    "sequence_transformations",
    "transformations",
    "dataset",
    "files",
    "distribute",
    "experimental",
    "__init__",
]
"""The parts of `phalanx.data`: each imports only those before it."""

UPWARDS = {
    ("core/context.py", "phalanx.strategies.default"),
    ("runtime/late_imports.py", "phalanx.integrations.keras.installing"),
}
"""Imports by name that point upwards: of what the first who needs it loads."""

COMPAT = "runtime/compat.py"
SEEKING = {COMPAT, "job/jax_distributed.py", "job/hub/coordination_service.py"}
"""Where private names of JAX are sought."""


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def trees() -> dict[str, ast.Module]:
    return {name_of(path): tree_of(path) for path in modules()}


def layer_of(module: str) -> str | None:
    """The layer of a module; None for the façade."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else None


def imported(tree: ast.AST, module: str) -> set[str]:
    """What a module imports: at its top, in its functions, for type checkers, or by name."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *base.split(".")]).rstrip(".")
            # `from phalanx import core` asks for a part of the package, not for the package itself.
            names |= {base} - {"phalanx"} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            names |= {x.value for x in node.args if isinstance(x, ast.Constant)}
    return names


def _called(function: ast.AST) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def broken_arrows(path: str, tree: ast.AST) -> list[str]:
    """What a file of the package imports although it must not."""
    module = "phalanx." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    layer = layer_of(module)
    if layer is None:
        return []
    below = {*LAYERS[: LAYERS.index(layer)], layer}
    wrong = []
    for name in imported(tree, module):
        if name.split(".")[0] != "phalanx" or (path, name) in UPWARDS:
            continue
        target = layer_of(name)
        # The package itself is the façade, which is above all of them but the command.
        facade = target is None and not name.startswith("phalanx.__") and layer != "cli"
        if facade or (target is not None and target not in below):
            wrong.append(name)
    return wrong


def test_arrows_point_one_way() -> None:
    broken = {name: broken_arrows(name, tree) for name, tree in trees().items()}
    assert {name: wrong for name, wrong in broken.items() if wrong} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "import phalanx",
        "import phalanx as px",
        "def f():\n    import phalanx",
        "import phalanx.strategies.mirrored",
        "from phalanx import strategies",
        "from phalanx import MirroredStrategy",
        "from phalanx.strategies import mirrored",
        "from ..strategies import mirrored",
        "def f():\n    from phalanx.comm import world",
        "import importlib\nimportlib.import_module('phalanx.comm')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from phalanx.cli import run",
    ],
)
def test_an_arrow_that_points_upwards_is_seen(statement: str) -> None:
    assert broken_arrows("core/values.py", ast.parse(statement))
    deeper = ast.parse(statement.replace("..", "..."))
    assert broken_arrows("execution/joint/reading.py", deeper)
    for allowed in ("from phalanx.runtime import compat", "from phalanx import __version__, errors"):
        assert not broken_arrows("core/values.py", ast.parse(allowed))


def data_imports() -> dict[str, set[str]]:
    """The modules of `phalanx.data`, and which of them each imports."""
    paths = {f"phalanx.{name_of(path)[:-3].replace('/', '.')}": path for path in modules()}
    names = {name for name in paths if name.startswith("phalanx.data.")}
    found = {name: imported(tree_of(paths[name]), name) & names for name in names}
    # Its methods return datasets: it imports the name of their type.
    found["phalanx.data.transformations"].remove("phalanx.data.dataset")
    found["phalanx.data.sequence_transformations"].remove("phalanx.data.dataset")
    return found


def test_parts_of_data_have_an_order() -> None:
    def rank(module: str) -> int:
        return DATA.index(module.split(".")[2])

    wrong = [(a, b) for a, others in data_imports().items() for b in others if rank(a) < rank(b)]
    assert wrong == []
    graphlib.TopologicalSorter(data_imports()).prepare()  # raises where modules need each other


FOLDERS = {p.name for p in ROOT.iterdir() if any(p.glob("*.py"))}


def test_every_folder_has_its_place() -> None:
    assert set(LAYERS) >= FOLDERS
    assert [p for p in ROOT.rglob("*.py") if not (p.parent / "__init__.py").is_file()] == []


def test_the_package_has_a_map() -> None:
    mapped = [line.split("``")[1] for line in (px.__doc__ or "").splitlines() if "* ``" in line]
    assert mapped == [layer for layer in LAYERS if layer == "errors" or layer in FOLDERS]


def test_the_readme_lists_the_packages() -> None:
    readme = (ROOT.parents[1] / "README.md").read_text()
    listed = readme.partition("## The packages")[2].partition("[src")[0]
    assert re.findall(r"`(\w+)`", listed) == LAYERS


PRIVATE = ("jax._src", "jax.experimental", "jax.extend", "jax.interpreters", "jaxlib")


def private_imports(path: str, tree: ast.AST) -> list[str]:
    """What a file of the package imports of the inside of JAX, itself or by way of its seeker."""
    seeker = () if path in SEEKING else ("phalanx.runtime.private_names",)
    return [name for name in imported(tree, "phalanx") if name.startswith(PRIVATE + seeker)]


def test_private_jax_is_sought_where_it_is_used() -> None:
    found = {name: private_imports(name, tree) for name, tree in trees().items()}
    assert {name: private for name, private in found.items() if private} == {}
    assert [name for name in found if name.endswith("compat.py")] == [COMPAT]


def test_a_private_import_is_seen() -> None:
    assert private_imports("core/values.py", ast.parse("from jax._src import core"))
    assert private_imports("core/values.py", ast.parse("import phalanx.runtime.private_names"))
    assert not private_imports(COMPAT, ast.parse("import phalanx.runtime.private_names"))


CONTRACT = {
    # What strategies implement for the layers between them and `core`.
    *("_span", "_first_replica", "_devices", "_replica_devices", "_input_worker", "_wraps_values"),
    # What a variable holds: programs take it out and put it back.
    *("_value", "_bundle", "_place", "_stored", "_exclusive", "_wrap", "_held", "_require_own"),
    "_global",  # the array behind a distributed value
    "_keeps_layout",  # whether a variable holds an array over several devices as it is
    "_updating",  # how the update of an optimizer runs
    "_computed",  # what is made of the values of variables, laid out like them
    "_input_place",  # who puts input on devices, if not each part on its replica's
    # What an iterator gives to functions, and takes back from them.
    *("_mark", "_give_back"),
}
"""Private names that layers share; each stands in a docstring of its class."""

PYTHONS = {"_current_frames", "_Decompress", "_getframe", "_exit", "_asdict", "_fields", "_replace"}
"""Names with an underscore that Python documents."""

JAXS = {("runtime/compat.py", "_arrays"), ("runtime/compat.py", "_update_thread_local_hook")}
"""Names with an underscore of objects of JAX."""


KERAS = "integrations/keras/touch_points.py"
"""Where names with an underscore of objects of Keras are used."""


def private_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The private names that a module defines, and those that it takes from other objects."""
    defined: set[str] = set()
    taken: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Call) and _called(node.func) == "__setattr__":
            defined |= {x.value for x in node.args if isinstance(x, ast.Constant)}
        elif isinstance(node, ast.Call) and _called(node.func) in ("getattr", "setattr", "hasattr"):
            names = [x.value for x in node.args[1:2] if isinstance(x, ast.Constant)]
            taken |= {name for name in names if name.startswith("_")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phalanx"):
            taken |= {alias.name for alias in node.names if alias.name.startswith("_")}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own:
                taken.add(node.attr)
            elif isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
    return defined, {name for name in taken if not name.startswith("__")}


def reached_into(files_of: dict[str, ast.Module]) -> list[tuple[str, str]]:
    """The private names that files take from objects of other layers."""
    found = {name: private_names(tree) for name, tree in files_of.items()}
    wrong = []
    for layer in LAYERS:
        files = [name for name in found if name.split("/")[0].removesuffix(".py") == layer]
        defined = set().union(*(found[name][0] for name in files))
        known = defined | CONTRACT | PYTHONS
        wrong += [(name, attr) for name in files for attr in found[name][1] if attr not in known]
    elsewhere = [w for w in wrong if w not in JAXS and w[0] != KERAS]
    return [w for w in elsewhere if not w[0].startswith("cli/")]  # argparse


def test_layers_do_not_reach_into_each_other() -> None:
    assert reached_into(trees()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "def f(iterator):\n    return iterator._hidden",
        "def f(iterator):\n    iterator._hidden = 1",
        "def f(iterator):\n    return getattr(iterator, '_hidden', None)",
        "from phalanx.data.dataset import _hidden",
        "import jax\nx = jax._src.core",
    ],
)
def test_a_private_name_of_another_layer_is_seen(statement: str) -> None:
    taking = ast.parse(statement)
    text = "class Iterator:\n    def __init__(self):\n        self._hidden = 0\n_src = 1"
    defining = ast.parse(text)
    assert reached_into({"execution/loops.py": taking, "data/dataset.py": defining})
    if "jax" not in statement:
        assert not reached_into({"data/experimental.py": taking, "data/dataset.py": defining})


def test_files_hold_one_idea() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in modules()}
    assert {name: count for name, count in lines.items() if count > 500} == {}


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


NAMESAKES = {
    # Both are public, and have the names that TensorFlow gives them.
    "Server": {"coordinator/rpc.py", "coordinator/server.py"},
    # Both are public, and have the names that Keras gives them: a loss, and its mean as a metric.
    **{
        name: {"train/error_metrics.py", "train/losses.py"}
        for name in (
            "BinaryCrossentropy",
            "CategoricalCrossentropy",
            "CosineSimilarity",
            "MeanAbsoluteError",
            "MeanSquaredError",
            "SparseCategoricalCrossentropy",
        )
    },
}
"""Classes of one name, and why there may be two."""


def classes_of_one_name(files_of: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The names that several modules give to a class, and these modules."""
    homes: dict[str, set[str]] = {}
    for path, tree in files_of.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(path)
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_a_class_has_its_name_alone() -> None:
    assert classes_of_one_name(trees()) == NAMESAKES


def test_a_class_with_the_name_of_another_is_seen() -> None:
    files = {"net/a.py": "class Link: ...", "job/b.py": "class Link: ...\nclass _Own: ..."}
    all_files = {
        name: ast.parse(text) for name, text in {**files, "job/c.py": "class _Own: ..."}.items()
    }
    assert classes_of_one_name(all_files) == {"Link": set(files)}
