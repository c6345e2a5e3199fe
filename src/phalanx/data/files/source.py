"""Elements that come from files: one file after the other, or several at a time.

A format says how one file is read; everything else here is the same for all of them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from phalanx.core.errors import InvalidTypeError, NotFoundError
from phalanx.core.showing import shown
from phalanx.data import checks
from phalanx.data.columns import Chunk
from phalanx.data.files.streams import check_regular
from phalanx.data.node import UNKNOWN, Cursor, Node, Run, open_plan

if TYPE_CHECKING:
    from phalanx.data.dataset import Dataset

_CYCLE = 8
"""How many files AUTOTUNE reads at a time; a fixed number, since the order depends on it."""


class Blocks(Protocol):
    """One open file, read in blocks of a size that suits it."""

    def next(self) -> Chunk | None:
        """The next elements; None at the end."""

    def skip(self, count: int) -> int:
        """Leave out up to `count` elements after the last block; how many there were."""

    def close(self) -> None:
        """Close the file."""


class Format(Protocol):
    """How a file is read."""

    @property
    def spec(self) -> Any:
        """The spec of its elements."""

    def open(self, path: str) -> Blocks:
        """Start reading a file."""

    def count(self, path: str) -> int:
        """How many elements a file has, or UNKNOWN if only reading it would tell."""


class FileReader:
    """Reads one file in chunks of any size."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._chunk: Chunk | None = None
        self._at = 0

    def read(self, limit: int) -> Chunk | None:
        """Up to `limit` elements; None at the end."""
        if self._left() == 0:
            self._chunk, self._at = self._blocks.next(), 0
            if self._chunk is None:
                return None
        assert self._chunk is not None
        start, self._at = self._at, min(self._at + limit, self._chunk.count)
        return self._chunk.rows(start, self._at)

    def skip(self, count: int) -> int:
        """Leave out up to `count` elements; how many there were."""
        skipped = min(count, self._left())
        self._at += skipped
        if skipped < count:
            skipped += self._blocks.skip(count - skipped)
        while skipped < count and (chunk := self.read(count - skipped)) is not None:
            skipped += chunk.count
        return skipped

    def _left(self) -> int:
        return 0 if self._chunk is None else self._chunk.count - self._at

    def close(self) -> None:
        """Close the file."""
        self._blocks.close()


@dataclass(frozen=True, eq=False)
class FileSource(Node):
    """The elements of files.

    Args:
        inputs: nothing, or one plan that yields the names of the files.
        format: how each is read.
        names: the names; if a plan yields them, those that count (None: all).
        parallel: how many files are read at a time; None for one after the other.
    """

    format: Format
    names: tuple[str, ...] | None
    parallel: int | None = None

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
        names = Names(self, run)
        if self.parallel is None:
            return SequentialCursor(names)
        from phalanx.data.files.lanes import InterleavedCursor

        return InterleavedCursor(names, self.parallel)

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

    def with_files(self, files: Sequence[str]) -> Node:
        """The same source over other files; if a plan yields the names, over these of them."""
        return dataclasses.replace(self, names=tuple(files))


def _has_file_source(node: Node) -> bool:
    return node.is_file_source or any(_has_file_source(input_) for input_ in node.inputs)


class Names:
    """The names of the files to read, one by one, and how to open them."""

    def __init__(self, node: FileSource, run: Run) -> None:
        self.cursor = open_plan(node.inputs[0], run) if node.inputs else Cursor()
        self._names = _from_plan(self.cursor, node.names) if node.inputs else iter(node.names or ())
        self._format = node.format

    def open_next(self) -> FileReader | None:
        """The next file, opened; None if there are no more."""
        name = next(self._names, None)
        return None if name is None else FileReader(self._format.open(name))


def _from_plan(cursor: Cursor, only: tuple[str, ...] | None) -> Iterator[str]:
    wanted = None if only is None else frozenset(only)
    while (chunk := cursor.read(1)) is not None:
        name = as_name(chunk.element(0)[0])
        if wanted is None or name in wanted:
            yield name


def names_in(node: Node, only: tuple[str, ...] | None = None) -> Iterator[str]:
    """The names that a plan yields."""
    cursor = open_plan(node, Run())
    try:
        yield from _from_plan(cursor, only)
    finally:
        cursor.close()


class SequentialCursor(Cursor):
    """One file after the other."""

    def __init__(self, names: Names) -> None:
        self.inputs = (names.cursor,)
        self._names = names
        self._reader: FileReader | None = None

    def read(self, limit: int) -> Chunk | None:
        """The next elements, of one file."""
        while (reader := self._open()) is not None:
            chunk = reader.read(limit)
            if chunk is not None:
                return chunk
            self._leave()
        return None

    def skip(self, count: int) -> int:
        """Leave out elements as cheaply as the format can."""
        skipped = 0
        while skipped < count and (reader := self._open()) is not None:
            skipped += reader.skip(count - skipped)
            if skipped < count:
                self._leave()
        return skipped

    def _open(self) -> FileReader | None:
        if self._reader is None:
            self._reader = self._names.open_next()
        return self._reader

    def _leave(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def close(self) -> None:
        """Close the file that is open."""
        super().close()
        self._leave()


# -- arguments ------------------------------------------------------------------------------


def as_name(name: Any) -> str:
    """The name of a file, given as a string, bytes or a path."""
    if isinstance(name, np.ndarray) and name.ndim == 0:
        name = name.item()
    if isinstance(name, str | bytes | os.PathLike):
        return os.fsdecode(name)
    raise InvalidTypeError(
        "The name of a file is a string or a path. "
        f"Received: {shown(name)} of type {type(name).__name__}"
    )


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


def named_files(filenames: Any) -> tuple[tuple[str, ...] | None, tuple[Node, ...]]:
    """What the user named: either names, or a plan that yields them."""
    from phalanx.data.dataset import Dataset

    if isinstance(filenames, Dataset):
        return _named_by_plan(filenames)
    if isinstance(filenames, list | tuple) or (isinstance(filenames, np.ndarray) and filenames.ndim):
        given = list(filenames)
    else:
        given = [filenames]
    return check_files([as_name(name) for name in given]), ()


def _named_by_plan(dataset: Dataset) -> tuple[tuple[str, ...] | None, tuple[Node, ...]]:
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
