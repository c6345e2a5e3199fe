"""Plans: a tree of nodes, and cursors that run it.

A node says what it yields (`element_spec`, `cardinality`) and opens a cursor. A cursor answers
`read(limit)` with a chunk of at least one and at most `limit` elements, or None at the end.

Nodes that only move elements (`moves = True`) are run on row numbers where their source can gather any
rows (`rows()`); one gather on top then fetches them. Their code is the same in both cases, because row
numbers are just another column. `open_plan` decides; cursors open their inputs with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.core.errors import DataLossError, InvalidValueError
from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.columns import Chunk, Column, Indices, gather_all
from phalanx.data.elements import structure_of

INFINITE = -1
"""The number of elements of a dataset that never ends."""

UNKNOWN = -2
"""The number of elements of a dataset of which nobody knows how many it has."""


# -- runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run of a plan: what all randomness and all choices of a run come from.

    Args:
        seed: the root seed, for everything random that has no seed of its own.
        passes: which iteration of the dataset this is, then which pass of each `repeat` on the way.
        branch: which way was taken where a node has several inputs.
        deterministic: whether parallel nodes keep the order unless told otherwise.
        on_row_numbers: whether what is read are row numbers, which cost nothing to read.
    """

    seed: int = 0
    passes: tuple[int, ...] = (0,)
    branch: tuple[int, ...] = ()
    deterministic: bool = True
    on_row_numbers: bool = False

    def in_pass(self, number: int) -> Run:
        """The run of one pass of a `repeat`."""
        return dataclasses.replace(self, passes=(*self.passes, number))

    def in_branch(self, index: int) -> Run:
        """The run of one of several inputs."""
        return dataclasses.replace(self, branch=(*self.branch, index))

    def first_pass(self) -> Run:
        """The same run as if it were the first: what is cached must not depend on when it was read."""
        return dataclasses.replace(self, passes=(0,))

    def generator(self, seed: int | None, depth: int, each_pass: bool = True) -> np.random.Generator:
        """A random generator for one node of the plan.

        Args:
            seed: the node's own seed, or None to use the root seed.
            depth: tells nodes of one branch apart: how many random nodes are below.
            each_pass: whether each pass has an order of its own.
        """
        passes = self.passes if each_pass else ()
        own = (0, self.seed) if seed is None else (1, seed)
        words = (*own, depth, len(passes), *passes, *self.branch)
        return np.random.default_rng([word % 2**64 for word in words])


# -- cursors ---------------------------------------------------------------------------------------


class Cursor:
    """An open position in a plan.

    Subclasses put the cursors they read from into `inputs`, and are read by one thread at a time.
    """

    inputs: Sequence[Cursor] = ()

    def read(self, limit: int) -> Chunk | None:
        """The next elements, at least one and at most `limit`; None at the end, and from then on."""
        raise NotImplementedError

    def skip(self, count: int) -> int:
        """Leave out up to `count` elements; how many there were."""
        skipped = 0
        while skipped < count and (chunk := self.read(min(count - skipped, 1024))) is not None:
            skipped += chunk.count
        return skipped

    def cancel(self) -> None:
        """Wake whoever waits in this cursor; may be called by any thread."""
        for cursor in self.inputs:
            cursor.cancel()

    def close(self) -> None:
        """Give back threads and files. Safe to call twice; nothing can be read afterwards."""
        for cursor in self.inputs:
            cursor.close()


def read_exactly(cursor: Cursor, count: int, held: Chunk | None = None) -> Chunk | None:
    """`count` elements in one chunk, fewer only at the end; None if there are none left.

    Damaged data is an end too: what comes before it is given first. It is raised by the next read,
    because sources raise it again and again. Whoever stops at an end must therefore read once more.

    Args:
        cursor: what to read.
        count: how many elements are wanted.
        held: elements that were read before, which come first.
    """
    chunks = [] if held is None else [held]
    have = 0 if held is None else held.count
    try:
        while have < count and (chunk := cursor.read(count - have)) is not None:
            chunks.append(chunk)
            have += chunk.count
    except DataLossError:
        if not chunks:
            raise
    return Chunk.concat(chunks) if chunks else None


# -- nodes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Columns from which rows can be fetched in any order."""

    columns: tuple[Column, ...]
    count: int


@dataclass(frozen=True, eq=False)
class Node:
    """One step of a plan. Nodes are immutable; rewriting makes new ones with `with_inputs`.

    Subclasses implement `spec`, `size` and `open`. File sources also implement `files` and
    `with_files`, and say so with `is_file_source`.
    """

    inputs: tuple[Node, ...]

    moves = False
    """Whether the node only moves the elements of its one input, and never looks into them."""

    groups = False
    """Whether a node that moves elements also puts them into batches or takes them out."""

    starts_anew = False
    """Whether what is below is kept, and must not depend on the pass in which it was read."""

    probe_below = False
    """Whether the first element of the input can stand for the first element of this node."""

    def spec(self, *inputs: Any) -> Any:
        """The element spec, given the ones of the inputs."""
        raise NotImplementedError

    def size(self, *inputs: int) -> int:
        """The cardinality, given the ones of the inputs."""
        raise NotImplementedError

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
        return structure_of(self.element_spec if known is None else known)

    @property
    def cardinality(self) -> int:
        """The number of elements, or INFINITE, or UNKNOWN."""
        return self.size(*(node.cardinality for node in self.inputs))

    def rows(self) -> Rows | None:
        """The rows behind this node, if any of them can be fetched at once."""
        return None

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
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

    def with_files(self, files: Sequence[str]) -> Node:
        """The same file source over other files."""
        raise NotImplementedError


class SameElements(Node):
    """Base of nodes that yield elements of their one input as they are."""

    def spec(self, *inputs: Any) -> Any:
        """The spec of the input."""
        return inputs[0]

    @property
    def input(self) -> Node:
        """The one input."""
        return self.inputs[0]


class EmptyDatasetError(InvalidValueError):
    """The form of the elements cannot be found out, because there are none."""


def first_element(node: Node) -> Chunk:
    """The first element of a plan, read as cheaply as possible."""
    while node.probe_below:
        node = node.inputs[0]
    cursor = open_plan(node, Run())
    try:
        chunk = cursor.read(1)
    finally:
        cursor.close()
    if chunk is None:
        raise EmptyDatasetError(
            "What a function makes of a dataset is found out with its first element, and this dataset "
            "has none; give an output_signature. Received: an empty dataset"
        )
    return chunk


# -- running on row numbers ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowNumbers(Node):
    """The numbers 0 … count-1."""

    count: int = 0

    def spec(self, *inputs: Any) -> Any:
        """One row number."""
        return TensorSpec((), number_dtype(self.count))

    def size(self, *inputs: int) -> int:
        """How many rows there are."""
        return self.count

    def open(self, run: Run) -> Cursor:
        """Count."""
        return CountingCursor(self.count)


def number_dtype(count: int) -> Any:
    """The smaller type that can number so many rows: a shuffle may hold a number for each of them."""
    return np.int32 if count <= 2**31 else np.int64


class CountingCursor(Cursor):
    """Counts from 0."""

    def __init__(self, count: int) -> None:
        self.position, self._count = 0, count
        self._dtype = number_dtype(count)

    def read(self, limit: int) -> Chunk | None:
        """The next numbers."""
        start, stop = self.position, min(self.position + limit, self._count)
        if start == stop:
            return None
        self.position = stop
        return Chunk((np.arange(start, stop, dtype=self._dtype),), stop - start)

    def skip(self, count: int) -> int:
        """Add."""
        start = self.position
        self.position = min(start + count, self._count)
        return self.position - start


class GatherCursor(Cursor):
    """Fetches the rows whose numbers it reads."""

    def __init__(self, numbers: Cursor, columns: Sequence[Column]) -> None:
        self.inputs = (numbers,)
        self.columns = columns

    def read(self, limit: int) -> Chunk | None:
        """Elements made of rows: single ones, or batches where the numbers are batched."""
        numbers = self.inputs[0].read(limit)
        if numbers is None:
            return None
        (column,) = numbers.columns
        if isinstance(column, list):  # batches of different sizes
            parts = [_fetch(self.columns, batch) for batch in column]
            return Chunk([list(leaves) for leaves in zip(*parts, strict=True)], numbers.count)
        return Chunk(_fetch(self.columns, column), numbers.count)

    def skip(self, count: int) -> int:
        """Leave out rows without fetching them."""
        return self.inputs[0].skip(count)


def _fetch(columns: Sequence[Column], numbers: Any) -> list[Column]:
    """Rows by number, in the shape that the numbers have."""
    flat: Indices = numbers.reshape(-1)
    parts = gather_all(columns, flat)
    if numbers.ndim == 1:
        return parts
    return [part.reshape(*numbers.shape, *part.shape[1:]) for part in parts]  # type: ignore[union-attr]


def open_plan(node: Node, run: Run) -> Cursor:
    """Open a plan for reading: on row numbers where that is possible, as it stands elsewhere."""
    steps: list[Node] = []
    source = node
    rows = source.rows()
    while rows is None and source.moves:
        steps.append(source)
        (source,) = source.inputs
        rows = source.rows()
    if rows is None:
        return node.open(run)
    columns = rows.columns
    if any(isinstance(column, list) for column in columns) and any(step.groups for step in steps):
        return node.open(run)  # only arrays can be regrouped by their row numbers
    plan: Node = RowNumbers((), rows.count)
    for step in reversed(steps):
        plan = step.with_inputs((plan,))
    return GatherCursor(plan.open(dataclasses.replace(run, on_row_numbers=True)), columns)
