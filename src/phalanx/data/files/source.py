"""Elements that come from files: one file after the other, or several at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data.dataset import Dataset
from phalanx.data.files.formats import Format, as_name
from phalanx.data.files.streams import check_regular
from phalanx.data.plan import argument_checks as checks
from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import ChainCursor, Cursor, Run
from phalanx.data.plan.nodes import UNKNOWN, PlanNode
from phalanx.data.plan.opening import open_plan
from phalanx.data.run.round_robin import Opened, RoundRobinCursor
from phalanx.data.run.thread_pool import threads_for
from phalanx.errors import DataLossError, InvalidTypeError, NotFoundError

_CYCLE = 8
"""How many files AUTOTUNE reads at a time; a fixed number, since the order depends on it."""


@dataclass(frozen=True, eq=False)
class FileSource(PlanNode):
    """The elements of files. The only input, if there is one, yields the names of the files."""

    format: Format
    names: tuple[str, ...] | None  # if an input yields the names, those that count (None: all)
    parallel: int | None = None  # how many files are read at a time; None: one after the other

    def spec(self, *inputs: Any) -> Any:
        """The spec of the format."""
        return self.format.spec

    def known_spec(self) -> Any:
        """The spec of the format."""
        return self.format.spec

    @property
    def element_spec(self) -> Any:
        """The spec of the format."""
        return self.format.spec

    def size(self, *inputs: int) -> int:
        """The number of elements of all files, if that can be known without reading them."""
        if self.inputs:
            return UNKNOWN
        sizes = [self.format.count(name) for name in self.names or ()]
        return UNKNOWN if UNKNOWN in sizes else sum(sizes)

    def open(self, run: Run) -> Cursor:
        """Open files when they are needed."""
        inputs = tuple(open_plan(node, run) for node in self.inputs)
        names = names_from(inputs[0], self.names) if inputs else iter(self.names or ())

        def open_file() -> Cursor | None:
            name = next(names, None)
            if name is None or run.on_failure is None:
                return None if name is None else self.format.open(name)
            return _UntilDamage(self.format.open(name), run.on_failure)

        if self.parallel is None:
            return _FilesCursor(open_file, inputs)

        def open_next() -> Opened | None:
            cursor = open_file()
            return None if cursor is None else (cursor, None)

        most = self.parallel if inputs else max(1, len(self.names or ()))  # that are ever open
        threads = threads_for(min(self.parallel, most))
        return RoundRobinCursor(open_next, inputs, self.parallel, block=1, threads=threads)

    @property
    def is_file_source(self) -> bool:
        """Unless the plan that yields the names is made of file names itself."""
        return not any(_has_file_source(node) for node in self.inputs)

    @property
    def files(self) -> tuple[str, ...]:
        """The names, each once if a plan yields them."""
        if not self.inputs:
            return self.names or ()
        return tuple(dict.fromkeys(names_in(self.inputs[0], self.names)))

    def with_files(self, files: Sequence[str]) -> PlanNode:
        """The same source over other files; if a plan yields the names, over these of them."""
        return dataclasses.replace(self, names=tuple(files))


class _FilesCursor(ChainCursor):
    def __init__(self, open_file: Callable[[], Cursor | None], inputs: Sequence[Cursor]) -> None:
        self.open_next, self.inputs = open_file, inputs  # type: ignore[method-assign]


class _UntilDamage(Cursor):
    """The elements of a file before the first that is damaged; all are read, also to skip them."""

    def __init__(self, input_: Cursor, on_failure: Callable[[Exception], None]) -> None:
        self.inputs = (input_,)
        self._on_failure, self._ended = on_failure, False

    def read(self, limit: int) -> Chunk | None:
        if self._ended:
            return None
        try:
            return self.inputs[0].read(limit)
        except DataLossError as error:
            self._ended = True
            self._on_failure(error)
            return None


def _has_file_source(node: PlanNode) -> bool:
    return node.is_file_source or any(_has_file_source(input_) for input_ in node.inputs)


def names_in(node: PlanNode, only: tuple[str, ...] | None = None) -> Iterator[str]:
    """The names that a plan yields."""
    cursor = open_plan(node, Run())
    try:
        yield from names_from(cursor, only)
    finally:
        cursor.close()


def names_from(cursor: Cursor, only: tuple[str, ...] | None) -> Iterator[str]:
    """The names that a cursor yields, or of these only some."""
    wanted = None if only is None else frozenset(only)
    while (chunk := cursor.read(1)) is not None:
        name = as_name(chunk.element(0)[0])
        if wanted is None or name in wanted:
            yield name


def check_files(names: Sequence[str]) -> tuple[str, ...]:
    """Names of files that exist."""
    missing = [name for name in names if not os.path.exists(name)]
    if missing:
        shown = ", ".join(repr(name) for name in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise NotFoundError(
            f"{len(missing)} of {len(names)} files do not exist. Received: {shown}{more}"
        )
    for name in names:
        check_regular(name)
    return tuple(names)


def named_files(filenames: Any) -> tuple[tuple[str, ...] | None, tuple[PlanNode, ...]]:
    """What the user named: either names, or a plan that yields them."""
    if isinstance(filenames, Dataset):
        return _named_by_plan(filenames)
    if isinstance(filenames, list | tuple) or (isinstance(filenames, np.ndarray) and filenames.ndim):
        given = list(filenames)
    else:
        given = [filenames]
    return check_files([as_name(name) for name in given]), ()


def _named_by_plan(dataset: Dataset) -> tuple[tuple[str, ...] | None, tuple[PlanNode, ...]]:
    node = dataset._node
    spec = node.element_spec
    if getattr(spec, "shape", None) != () or np.dtype(spec.dtype).kind != "O":
        raise InvalidTypeError(
            f"A dataset of file names must have strings for elements. Received: elements of {spec}"
        )
    if node.cardinality >= 0:
        check_files(list(names_in(node)))
    return None, (node,)


def check_parallel(num_parallel_reads: Any) -> int | None:
    """`num_parallel_reads` as a number of files, or None."""
    if num_parallel_reads is None:
        return None
    number = checks.integer(num_parallel_reads, "num_parallel_reads")
    if number == checks.AUTOTUNE:
        return _CYCLE
    return checks.integer(number, "num_parallel_reads", 1)


def source(filenames: Any, format_: Format, num_parallel_reads: Any = None) -> FileSource:
    """A source over what the user named."""
    parallel = check_parallel(num_parallel_reads)
    names, inputs = named_files(filenames)
    return FileSource(inputs, format_, names, parallel)
