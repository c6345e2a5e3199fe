"""The documentation is true: examples run, every name is described, every claim has a test."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.launching import as_user, new_processes

import phalanx as px

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COVERAGE = ROOT / "docs" / "coverage.md"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- examples ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block of Python, with the comment in the line before it and the output after it, if any.

    ``no-run`` is for code that is not Phalanx's. ``own-process`` is for whole programs; all other
    blocks of a page are one program. A block of plain text that follows is what the code prints.
    """

    page: Path
    line: int
    mark: str
    code: str
    output: str | None


_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[\w-]+) -->\n)?^```python\n(?P<code>.*?)^```$"
    r"(?:\n\n^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        yield Block(page, line, match["mark"] or "", match["code"], match["output"])


BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [block for block in BLOCKS if block.mark == "own-process"]


@pytest.fixture(scope="module")
def fresh() -> Iterator[px.testing.MultiProcess]:
    with new_processes() as cluster:
        yield cluster


def run_blocks(page: str, listed: list[tuple[int, str]]) -> list[str]:
    """What each block prints; all of them are one program, as for a reader who pastes them."""
    as_user()
    program = sys.modules["__main__"] = ModuleType("__main__")
    outputs = []
    for line, code in listed:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, page, "exec"), program.__dict__)  # errors show its line
        outputs.append(printed.getvalue())
    assert not px.has_strategy(), "an example left its strategy set"
    return outputs


def test_every_block_is_found_and_every_mark_means_something() -> None:
    fences = sum(page.read_text().count("```python") for page in PAGES)
    assert len(BLOCKS) == fences
    assert {block.mark for block in BLOCKS} <= {"", "no-run", "own-process"}


def test_only_code_for_tensorflow_is_left_out() -> None:
    assert all("tf." in block.code for block in BLOCKS if block.mark == "no-run")


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if not b.mark}), ids=name_of)
def test_examples_run(page: Path, fresh: px.testing.MultiProcess) -> None:
    listed = [block for block in blocks(page) if not block.mark]
    [outputs] = fresh.run(run_blocks, str(page), [(x.line, x.code) for x in listed], timeout=300)
    for block, output in zip(listed, outputs, strict=True):
        assert block.output in (None, output), f"{name_of(page)}:{block.line}"


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda b: f"{name_of(b.page)}:{b.line}")
def test_programs_run(block: Block, fresh: px.testing.MultiProcess) -> None:
    fresh.run(run_blocks, str(block.page), [(block.line, block.code)], timeout=300)


@pytest.mark.parametrize("name", ["README.md", "docs/guide/quickstart.md"])
def test_the_first_programs_are_short(name: str) -> None:
    """With real input and a compiled step, in less than forty lines."""
    text = (ROOT / name).read_text().partition("## Without compiling")[0]
    code = "".join(match["code"] for match in _BLOCK.finditer(text))
    assert len(code.splitlines()) < 40
    for needed in ("px.data.", "strategy.experimental_distribute_dataset", "@px.function"):
        assert needed in code


def test_the_line_to_change_in_the_readme(fresh: px.testing.MultiProcess) -> None:
    """The example of the README learns the same weights with each strategy of its table."""
    (block,) = (b for b in PROGRAMS if b.page.name == "README.md")
    (line,) = re.findall(r"^strategy = .*$", block.code, re.MULTILINE)
    table = re.findall(r"\| `(strategy = [^`]*)` \|", block.page.read_text())
    assert line in table
    alone = [other for other in table if "TPU" not in other and "ParameterServer" not in other]
    variants = [block.code.replace(line, other) for other in alone]
    assert len(variants) == 6
    [outputs] = fresh.run(run_blocks, "README.md", [(block.line, code) for code in variants])
    output = "".join(outputs)
    replicas = re.findall(r"^(\d+) replicas", output, re.MULTILINE)
    assert replicas == ["1", "1", "4", "4", "2", "1"]
    weights = re.findall(r"^w = \[(.*)\]", output, re.MULTILINE)
    assert [[round(float(x)) for x in w.split()] for w in weights] == [[1, -2, 3]] * 6


# -- the reference -------------------------------------------------------------------------------


def public_modules(within: ModuleType = px) -> list[ModuleType]:
    """A module and the modules that it exports and that belong to it, as deep as they go."""
    exported = [getattr(within, name) for name in sorted(getattr(within, "__all__", ()))]
    inside = within.__name__ + "."
    inner = [m for m in exported if inspect.ismodule(m) and m.__name__.startswith(inside)]
    return [within, *(deeper for module in inner for deeper in public_modules(module))]


def public_names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is None:  # px.errors takes everything from one module
        listed = [k for k, v in vars(module).items() if inspect.isclass(v)]
    return [f"{module.__name__}.{name}" for name in listed]


_DIRECTIVE = re.compile(r"^\.\. (?:auto|py:)[a-z]+:: (phalanx[\w.]*)", re.MULTILINE)


def directives() -> list[str]:
    """What the pages describe: by Sphinx from the docstring, or in words of their own."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return [name for page in pages for name in _DIRECTIVE.findall(page.read_text())]


@pytest.mark.parametrize("module", public_modules(), ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    described = set(directives())
    same = {name for name in px.__all__ if getattr(module, name, None) is getattr(px, name)}
    missing = [name for name in public_names(module) if name not in described]
    assert [name for name in missing if name.rpartition(".")[2] not in same] == []


def test_the_reference_describes_nothing_else_and_nothing_twice() -> None:
    described = directives()
    assert len(set(described)) == len(described)
    public = {name for module in public_modules() for name in (module.__name__, *public_names(module))}
    assert set(described) - public == set()


# -- coverage ------------------------------------------------------------------------------------

# Every name that a user of tf.distribute, of MindSpore's automatic parallelism or of torch's all_reduce
# may look for.
SEED_NAMES = """
cluster_resolver experimental
CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce ReductionToOneDevice
InputContext InputContext.get_per_replica_batch_size InputContext.input_pipeline_id
InputContext.num_input_pipelines InputContext.num_replicas_in_sync InputReplicationMode
ReduceOp ReduceOp.SUM ReduceOp.MEAN
ReplicaContext ReplicaContext.all_gather ReplicaContext.all_reduce ReplicaContext.merge_call
ReplicaContext.num_replicas_in_sync ReplicaContext.replica_id_in_sync_group ReplicaContext.strategy
Strategy Strategy.__init__ Strategy.extended Strategy.num_replicas_in_sync Strategy.scope Strategy.run
Strategy.reduce Strategy.gather Strategy.experimental_run Strategy.experimental_run_v2
Strategy.experimental_local_results Strategy.experimental_make_numpy_dataset
Strategy.experimental_distribute_dataset Strategy.experimental_distribute_datasets_from_function
Strategy.distribute_datasets_from_function Strategy.experimental_distribute_values_from_function
StrategyExtended StrategyExtended.call_for_each_replica
experimental_set_strategy get_replica_context get_strategy has_strategy in_cross_replica_context
MirroredStrategy MirroredStrategy.cluster_resolver OneDeviceStrategy CentralStorageStrategy
experimental.CentralStorageStrategy experimental.MultiWorkerMirroredStrategy
experimental.ParameterServerStrategy
DistributedDataset DistributedIterator DistributedValues PerReplica MirroredVariable
data.Dataset data.Options data.experimental.DistributeOptions
data.experimental.AutoShardPolicy.AUTO data.experimental.AutoShardPolicy.FILE
data.experimental.AutoShardPolicy.DATA data.experimental.AutoShardPolicy.OFF
cluster_resolver.ClusterResolver cluster_resolver.ClusterResolver.cluster_spec
cluster_resolver.ClusterResolver.num_accelerators cluster_resolver.ClusterResolver.task_id
cluster_resolver.ClusterResolver.task_type
cluster_resolver.SimpleClusterResolver cluster_resolver.TFConfigClusterResolver
coordinator.ClusterCoordinator coordinator.ClusterCoordinator.create_per_worker_dataset
coordinator.ClusterCoordinator.done coordinator.ClusterCoordinator.fetch
coordinator.ClusterCoordinator.join coordinator.ClusterCoordinator.schedule
coordinator.RemoteValue coordinator.RemoteValue.fetch
partitioners.Partitioner partitioners.Partitioner.__call__ partitioners.FixedShardsPartitioner
partitioners.MinSizePartitioner
Server Server.create_local_server Server.join Server.start
train.ClusterSpec train.ClusterDef train.ServerDef
set_auto_parallel_context device_num global_rank gradients_mean gradient_fp32_sync parallel_mode
search_mode auto_parallel_search_mode parameter_broadcast strategy_ckpt_load_file
strategy_ckpt_save_file dataset_strategy enable_parallel_optimizer enable_alltoall
all_reduce_fusion_config pipeline_stages parallel_optimizer_config gradient_accumulation_shard
parallel_optimizer_threshold comm_fusion allreduce allgather
torch.distributed.all_reduce mindspore.communication.comm_func.all_reduce tensor op group async_op
CommHandle
"""


@dataclass(frozen=True)
class Row:
    """One row of a table of the page."""

    name: str
    lives_in: str
    shown_by: str


@functools.cache
def rows() -> dict[str, list[Row]]:
    """The rows of each table, by the heading of its first column."""
    tables: dict[str, list[Row]] = {}
    current: list[Row] | None = None
    for line in COVERAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) != 3:
            current = None
        elif current is None:
            current = tables.setdefault(cells[0], [])
        elif set(cells[0]) != {"-"}:
            current.append(Row(*cells))
    return tables


def resolve(name: str) -> Any:
    """What a name under `px` stands for; an AttributeError if there is no such thing."""
    return functools.reduce(getattr, name.split("."), px)


def all_rows() -> list[Row]:
    return [row for table in rows().values() for row in table]


@pytest.mark.parametrize("row", rows()["Name"], ids=lambda row: row.name.strip("`"))
def test_planned_means_that_it_does_not_exist(row: Row) -> None:
    name = row.name.strip("`")
    if row.shown_by == "planned":
        assert not row.lives_in
        with pytest.raises(AttributeError):
            resolve(name)
    else:
        resolve(name)
        assert name.rpartition(".")[2] in (ROOT / "src" / row.lives_in.strip("`")).read_text()


def test_every_file_exists() -> None:
    files = [row.lives_in.strip("`") for row in all_rows() if row.lives_in]
    assert files
    assert [f for f in files if not (ROOT / "src" / f).is_file()] == []


@functools.cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@functools.cache
def recorded_cases() -> set[str]:
    recorded = importlib.import_module("tests.conformance.test_recorded")
    return {r["case"] for r in recorded.RECORDS if r["case"] not in recorded.AWAITING}


def test_every_test_exists() -> None:
    missing = []
    for row in all_rows():
        if row.shown_by in ("planned", "no test yet"):
            continue
        match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)(?:\[(\w+)\])?`", row.shown_by)
        assert match, f"{row.name} is shown by {row.shown_by}"
        path, test, case = match.groups()
        known = (ROOT / path).is_file() and test in functions_of(path)
        if not known or (case is not None and case not in recorded_cases()):
            missing.append(row.shown_by)
    assert missing == []


@pytest.mark.parametrize("name", SEED_NAMES.split())
def test_every_name_has_a_row(name: str) -> None:
    page = COVERAGE.read_text()
    assert re.search(rf"`(?:[\w]+\[\")?{re.escape(name)}(?:\"\])?`", page), f"{name} is missing"


def test_names_stand_once() -> None:
    names = [row.name for row in rows()["Name"]]
    assert len(set(names)) == len(names)
