"""Counting: does every example of an epoch reach exactly one replica?"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.data.dataset import Dataset
from phalanx.data.distribute.distributed_dataset import DistributedDataset
from phalanx.data.distribute.rebatching import BEGINNING
from phalanx.data.distribute.steps import PerReplicaStepReader, StepReader
from phalanx.data.plan.cursors import Run
from phalanx.data.plan.elements import Ragged
from phalanx.data.plan.loaders import Loader, as_loader
from phalanx.data.plan.nodes import INFINITE, PlanNode
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

Key = bytes
_SHOWN = 5


@dataclass
class AuditReport:
    """What `px.data.audit` found.

    Attributes:
        ok: whether every example was seen exactly once.
        examples: how many examples the dataset has; None if there is nothing to compare with.
        seen: how many examples all replicas of all workers got together.
        steps: how many steps each worker made.
        shares: how many examples each replica got, by worker.
        duplicates: examples that were seen more often than the dataset has them, and how much more.
        losses: examples that were seen less often than the dataset has them, and how much less.
        strangers: examples that the dataset does not have, and how often they were seen.
    """

    examples: int | None
    seen: int
    steps: list[int]
    shares: list[list[int]]
    duplicates: list[tuple[Any, int]] = field(default_factory=list)
    losses: list[tuple[Any, int]] = field(default_factory=list)
    strangers: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every example was seen exactly once."""
        return not (self.duplicates or self.losses or self.strangers)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.examples is None:
            lines = [f"{self.seen} examples were seen; nothing was given to compare them with"]
        elif self.ok:
            lines = [f"every one of {self.examples} examples was seen exactly once"]
        else:
            lines = [f"NOT every one of {self.examples} examples was seen exactly once"]
        for worker, share in enumerate(self.shares):
            each = ", ".join(map(str, share))
            lines.append(f"  worker {worker}: {self.steps[worker]} steps, examples by replica: {each}")
        for name, found in (
            ("seen too often", self.duplicates),
            ("lost", self.losses),
            ("not in the dataset", self.strangers),
        ):
            if found:
                total = sum(count for _, count in found)
                lines.append(f"  {name}: {total}")
                lines += [f"    {count} x {example}" for example, count in found[:_SHOWN]]
                lines += ["    …"] if len(found) > _SHOWN else []
        return "\n".join(lines)

    __repr__ = __str__


def audit(
    dist_dataset: DistributedDataset, *, reference: Any = None, seed: int = 0, epoch: int = 0
) -> AuditReport:
    """Count whether every example of one epoch is seen exactly once, over all workers and replicas.

    The parts of all workers are read in this process, and compared with the dataset itself by what the
    examples contain; functions of the user must therefore give the same result each time.

    Args:
        dist_dataset: a finite distributed dataset.
        reference: a dataset of batches, or another iterable, that holds what should be seen. The
            default is the dataset that was distributed. One that was made from a function has none:
            without a reference only examples that were seen twice are reported.
        seed: the root seed of the epoch.
        epoch: which epoch.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
        >>> dataset = px.data.Dataset.range(10).shuffle(10).batch(4)
        >>> print(px.data.audit(strategy.experimental_distribute_dataset(dataset)))
        every one of 10 examples was seen exactly once
          worker 0: 3 steps, examples by replica: 5, 5, 0
    """
    if not isinstance(dist_dataset, DistributedDataset):
        raise InvalidTypeError(
            "audit needs what experimental_distribute_dataset or distribute_datasets_from_function "
            f"returned. Received: {shown(dist_dataset)}"
        )
    run = Run(seed, (epoch,))
    _check(dist_dataset._nodes)
    original = dist_dataset._reference
    if reference is not None:
        original = reference._node if isinstance(reference, Dataset) else as_loader(reference)
    with _progress() as report:
        there: Counter[Key] = Counter()
        examples: dict[Key, Any] = {}
        if original is not None:
            _check([original])
            report("reading the dataset")
            reader = StepReader(original, 1, run)
            _count(reader, 1, there, examples, report)
        result = AuditReport(sum(there.values()) if original is not None else None, 0, [], [])
        seen: Counter[Key] = Counter()
        for worker in range(dist_dataset._topology.workers):
            report(f"reading as worker {worker}")
            mine = dist_dataset._as_worker(worker)
            own = mine._open_reader(run, BEGINNING, 0)
            steps, shares = _count(own, mine._topology.replicas, seen, examples, report)
            result.steps.append(steps)
            result.shares.append(shares)
    result.seen = sum(seen.values())
    if original is None:
        result.duplicates = [(examples[k], n - 1) for k, n in seen.items() if n > 1]
        return result
    result.losses = [(examples[k], n) for k, n in (there - seen).items()]
    extra = seen - there
    result.duplicates = [(examples[k], n) for k, n in extra.items() if k in there]
    result.strangers = [(examples[k], n) for k, n in extra.items() if k not in there]
    return result


def _check(nodes: list[PlanNode]) -> None:
    for node in nodes:
        if node.cardinality == INFINITE:
            raise InvalidValueError(
                "An endless dataset has no epoch to count. Audit it without repeat(), or with take(n). "
                "Received: a dataset of infinite cardinality"
            )
        if isinstance(node, Loader) and node.is_one_shot:
            raise InvalidValueError(
                "A generator can be read only once, so it cannot be counted first. Give an iterable "
                f"that begins anew. Received: {shown(node.source)}"
            )


def _count(
    reader: StepReader | PerReplicaStepReader,
    replicas: int,
    counts: Counter[Key],
    examples: dict[Key, Any],
    report: Callable[[str | int], None],
) -> tuple[int, list[int]]:
    """Count the examples of a reader; how many steps it had and how many examples each replica got."""
    shares, steps = [0] * replicas, 0
    try:
        while (step := reader.next()) is not None:
            steps += 1
            for replica in range(replicas):
                rows = 0
                for example in _examples([parts[replica] for parts in step.parts]):
                    key = _key(example)
                    if key not in counts:
                        examples.setdefault(key, _shown(example))
                    counts[key] += 1
                    rows += 1
                shares[replica] += rows
            report(sum(shares))
    finally:
        reader.close()
    return steps, shares


def _examples(leaves: list[Any]) -> Iterator[list[Any]]:
    """The rows of what a replica got; leaves of different lengths are counted by themselves."""
    columns = [leaf if isinstance(leaf, Ragged) else np.atleast_1d(leaf) for leaf in leaves]
    if len({len(column) for column in columns}) == 1:
        yield from (list(row) for row in zip(*columns, strict=True))
    else:
        yield from ([i, row] for i, column in enumerate(columns) for row in column)


def _key(example: list[Any]) -> Key:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in example:
        array = np.asarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes())
    return digest.digest()


def _shown(example: list[Any]) -> Any:
    """An example as it is printed: small ones whole, large ones by their shape."""
    texts = []
    for leaf in example:
        array = np.asarray(leaf)
        texts.append(str(array.tolist()) if array.size <= 8 else f"{array.dtype}{array.shape}")
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str | int], None]]:
    """Show on a terminal how far the counting is."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:.0f} examples"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("audit", total=None)

        def report(what: str | int) -> None:
            if isinstance(what, str):
                bar.reset(task, description=what)
            else:
                bar.update(task, completed=what)

        yield report
