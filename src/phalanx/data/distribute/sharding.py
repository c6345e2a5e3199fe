"""Which part of a dataset each worker reads, and how the plan is rewritten for that."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import tree_util

from phalanx.data.distribute.rebatching import Pieces, Position, SizedPieces, unbatched
from phalanx.data.distribute.splitting import check_worker, deal, sizes_per_step
from phalanx.data.ops.batching import Batch
from phalanx.data.ops.mapping import Map
from phalanx.data.ops.merging import OneForm, Zip
from phalanx.data.ops.selecting import ShardHint, Slice
from phalanx.data.plan.elements import DatasetSpec
from phalanx.data.plan.nodes import PlanNode, SameElements
from phalanx.data.plan.opening import EmptyDatasetError
from phalanx.data.plan.sources import Generator, Slices
from phalanx.errors import InvalidArgumentError, NotFoundError, UnbatchedDatasetError

_log = logging.getLogger("phalanx")


@dataclass(frozen=True)
class Division:
    """How a dataset is divided over workers and replicas."""

    workers: int = 1  # how many workers read input
    worker: int = 0  # which of them this is
    replicas: int = 1  # how many replicas each worker has
    policy: str = "NONE"  # DATA, FILE, HINT or OFF; NONE if elements are passed on as they are
    batch: int | None = None  # the nominal size by which rows are cut; None: each batch by its own
    files: tuple[str, ...] = ()  # the files of this worker, if files were dealt
    reason: str = ""  # why another policy was chosen than was asked for

    @property
    def is_shared(self) -> bool:
        """Whether all workers read one stream of batches, so that they end together."""
        return self.policy == "DATA" or self.workers == 1

    def pieces(self, node: PlanNode, start: Position, steps: int) -> PlanNode:
        """The plan of this worker's pieces, from a position that was reached after some steps."""
        if self._passes_on(start):
            return node
        if self.policy == "DATA" or self.batch is None:
            dealt = self.policy == "DATA"
            return Pieces((node,), self.workers, self.replicas, self.worker, dealt)
        table = sizes_per_step(self.batch, self.workers, self.replicas, self.worker)
        return SizedPieces((node,), table, start, steps)

    def skipped(self, start: Position, steps: int) -> int:
        """How many pieces of that plan were delivered before the position."""
        if self._passes_on(start):
            return start.elements
        if self.is_shared and (self.policy == "DATA" or self.batch is None):
            return start.elements * self.replicas  # one batch per step
        return 0 if self.batch is not None else steps * self.replicas

    def _passes_on(self, start: Position) -> bool:
        """Whether elements need no cutting."""
        return self.policy == "NONE" or (self.workers * self.replicas == 1 and not start.rows)


def divide(
    node: PlanNode, policy: str, workers: int, worker: int, replicas: int
) -> tuple[PlanNode, Division]:
    """Choose how to divide a dataset of global batches, and what this worker reads of it.

    Args:
        node: the plan of the dataset.
        policy: the name of the auto-shard policy that was asked for.
        workers: how many workers there are.
        worker: which of them this is.
        replicas: how many replicas each worker has.

    Returns:
        The plan of this worker, and how its elements are to be cut.
    """
    check_worker(workers, worker)
    check_batched(node, workers * replicas)
    whole = Division(workers, worker, replicas)
    sources = file_sources(node)
    chosen, reason = _choose(policy, sources, workers)
    if reason:
        _log.warning("%s", reason)
    batch = None if chosen == "DATA" else nominal_batch(node)
    division = dataclasses.replace(whole, policy=chosen, batch=batch, reason=reason)
    if chosen == "FILE" and workers > 1:
        dealt: list[str] = []

        def keep_mine(source: PlanNode) -> PlanNode:
            if not source.is_file_source:
                return source
            mine = deal(source.files, workers, worker)
            dealt.extend(mine)
            return source.with_files(mine)

        node = rewrite(node, keep_mine)
        division = dataclasses.replace(division, files=tuple(dealt))
    if chosen == "HINT":
        node = rewrite(node, lambda n: _fill_hint(n, workers, worker))
    return node, division


def _choose(policy: str, sources: Sequence[PlanNode], workers: int) -> tuple[str, str]:
    """The policy to use, and why it is another one than was asked for."""
    if policy not in ("AUTO", "FILE"):
        return policy, ""
    if not sources:
        if policy == "FILE" and workers > 1:
            raise NotFoundError(
                "The auto-shard policy is FILE, but the dataset reads no files that could be dealt to "
                f"the {workers} workers. Use AutoShardPolicy.DATA or AUTO."
            )
        return ("FILE" if policy == "FILE" else "DATA"), ""
    fewest = min(sources, key=lambda source: len(source.files))
    if workers == 1 or len(fewest.files) >= workers:
        return "FILE", ""
    problem = f"there are {len(fewest.files)} files for {workers} workers ({', '.join(fewest.files)})"
    if policy == "FILE":
        raise InvalidArgumentError(
            f"The auto-shard policy is FILE, but {problem}: some workers would have nothing to read. "
            "Use at least as many files as workers, or AutoShardPolicy.DATA."
        )
    return "DATA", f"Every worker reads all files and keeps its own rows, because {problem}."


def check_batched(node: PlanNode, pieces: int) -> None:
    """Refuse elements that cannot be cut into pieces, as far as that is known."""
    spec = node.known_spec()
    for leaf in tree_util.tree_leaves(spec):
        if isinstance(leaf, DatasetSpec):
            raise UnbatchedDatasetError(
                "Elements that are datasets cannot be distributed. Use flat_map or interleave to make "
                f"one dataset of them. Received: elements of {spec}"
            )
        if pieces > 1 and not leaf.shape:
            raise unbatched(pieces, spec)


def nominal_batch(node: PlanNode) -> int | None:
    """The batch size that a plan asks for; None if batches may have different sizes."""
    rows = fixed_rows(node)
    if rows is not None or isinstance(node, Batch):
        return node.batch_size if isinstance(node, Batch) else rows
    return _agreed(node, nominal_batch) if isinstance(node, SameElements | Zip | OneForm) else None


def fixed_rows(node: PlanNode) -> int | None:
    """How many rows every element of a plan has; None if that may differ."""
    if isinstance(node, Batch):
        return node.batch_size if node.drop_remainder else None
    if isinstance(node, SameElements | Zip | OneForm):
        return _agreed(node, fixed_rows)
    if isinstance(node, Map | Generator) and node.signature is not None:
        return _rows_of(node.signature)
    if isinstance(node, Map):  # the first result shows whether the function keeps the rows
        below = fixed_rows(node.inputs[0])
        return below if below is not None and below == _rows_of(_spec_of(node)) else None
    if isinstance(node, Slices):
        return _rows_of(node.known_spec())
    return None


def _agreed(node: PlanNode, question: Callable[[PlanNode], int | None]) -> int | None:
    """What all inputs of a node answer; None if they do not agree."""
    inputs = node.sources() if isinstance(node, OneForm) else node.inputs
    answers = {question(input_) for input_ in inputs}
    return answers.pop() if len(answers) == 1 else None


def _spec_of(node: PlanNode) -> Any:
    try:
        return node.element_spec
    except EmptyDatasetError:
        return None


def _rows_of(spec: Any) -> int | None:
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in tree_util.tree_leaves(spec)}
    return sizes.pop() if len(sizes) == 1 else None


def file_sources(node: PlanNode) -> list[PlanNode]:
    """The nodes of a plan that read files, or name them."""
    found = [source for input_ in node.inputs for source in file_sources(input_)]
    return [*found, node] if node.is_file_source else found


def rewrite(node: PlanNode, fn: Callable[[PlanNode], PlanNode]) -> PlanNode:
    """The plan with each node replaced by what `fn` makes of it, from the sources up."""
    inputs = tuple(rewrite(input_, fn) for input_ in node.inputs)
    same = all(new is old for new, old in zip(inputs, node.inputs, strict=True))
    return fn(node if same else node.with_inputs(inputs))


def _fill_hint(node: PlanNode, workers: int, worker: int) -> PlanNode:
    return Slice(node.inputs, worker, step=workers) if isinstance(node, ShardHint) else node
