"""Plans: a tree of nodes, each of which says what it yields and opens a cursor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import tree_util

from phalanx.data.plan.columns import Column
from phalanx.data.plan.cursors import Cursor, Run

INFINITE = -1
"""The number of elements of a dataset that never ends."""

UNKNOWN = -2
"""The number of elements of a dataset that only reading it would tell."""


@dataclass(frozen=True)
class Rows:
    """Columns from which rows can be fetched in any order."""

    columns: tuple[Column, ...]
    count: int


@dataclass(frozen=True, eq=False)
class PlanNode:
    """One step of a plan. Nodes are immutable; rewriting makes new ones with `with_inputs`.

    Subclasses implement `spec`, `open` and mostly `size`. File sources also implement `files` and
    `with_files`, and say so with `is_file_source`.
    """

    inputs: tuple[PlanNode, ...]

    moves = False
    """Whether the node only moves the elements of its one input, and never looks into them."""

    groups = False
    """Whether a node that moves elements also puts them into batches or takes them out."""

    starts_anew = False
    """Whether the elements below are kept, and must not depend on the pass in which they were read."""

    probe_below = False
    """Whether the first element of the input can stand for the first element of this node."""

    def spec(self, *inputs: Any) -> Any:
        """The element spec, given the ones of the inputs."""
        raise NotImplementedError

    def size(self, *inputs: int) -> int:
        """The cardinality, given those of the inputs: that of the first, unless a node changes it."""
        return inputs[0]

    def open(self, run: Run) -> Cursor:
        """Start reading. Inputs are to be opened with `open_plan`."""
        raise NotImplementedError

    def known_spec(self) -> Any | None:
        """The element spec if it is known without reading anything, else None."""
        specs = [node.known_spec() for node in self.inputs]
        return None if any(spec is None for spec in specs) else self.spec(*specs)

    def has_sure_shapes(self) -> bool:
        """Whether the shapes of a known spec hold for all elements, and not only for a first one."""
        return all(node.has_sure_shapes() for node in self.inputs)

    def keeps_order(self, deterministic: bool) -> bool:
        """Whether elements come in the same order in each run of the same seed.

        Args:
            deterministic: see `Run`.
        """
        return all(node.keeps_order(deterministic) for node in self.inputs)

    @property
    def element_spec(self) -> Any:
        """A pytree of `TensorSpec`, `RaggedSpec` or `DatasetSpec`.

        Where a function of the user makes the elements, the first element is read to find out.
        """
        return self.spec(*(node.element_spec for node in self.inputs))

    @property
    def structure(self) -> Any:
        """The structure of the elements, found out with as little reading as possible."""
        known = self.known_spec()
        return tree_util.tree_structure(self.element_spec if known is None else known)

    @property
    def cardinality(self) -> int:
        """The number of elements, or INFINITE, or UNKNOWN."""
        return self.size(*(node.cardinality for node in self.inputs))

    def rows(self) -> Rows | None:
        """The rows behind this node, if any of them can be fetched at once."""
        return None

    def with_inputs(self, inputs: Sequence[PlanNode]) -> PlanNode:
        """The same node over other inputs."""
        return dataclasses.replace(self, inputs=tuple(inputs))

    # -- what distribution asks of sources

    @property
    def is_file_source(self) -> bool:
        """Whether the elements come from, or are the names of, a list of files."""
        return False

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files of a file source."""
        return ()

    def with_files(self, files: Sequence[str]) -> PlanNode:
        """The same file source over other files."""
        raise NotImplementedError


class ParallelNode(PlanNode):
    """Base of nodes that may call a function, or read, in several threads."""

    parallel_calls: int | None
    deterministic: bool | None

    def keeps_order(self, deterministic: bool) -> bool:
        """Unless threads may overtake each other."""
        return self.is_ordered(deterministic) and super().keeps_order(deterministic)

    def is_ordered(self, deterministic: bool) -> bool:
        """Whether the node itself keeps the order; see `keeps_order`."""
        own = deterministic if self.deterministic is None else self.deterministic
        return own or self.parallel_calls is None


class SameElements(PlanNode):
    """Base of nodes that yield elements of their one input as they are."""

    def spec(self, *inputs: Any) -> Any:
        """The spec of the input."""
        return inputs[0]

    @property
    def input(self) -> PlanNode:
        """The one input."""
        return self.inputs[0]
