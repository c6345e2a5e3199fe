"""Reading one file after the other, in chunks of any size.

A format says how one file is read; everything else here is the same for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import Cursor
from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown


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


class FileQueue:
    """The files to read, in order. Each is opened when its turn comes.

    Args:
        format_: how they are read.
        names: their names; if a cursor yields the names, those that count (None: all).
        cursor: yields the names; None if they are known.
    """

    def __init__(self, format_: Format, names: tuple[str, ...] | None, cursor: Cursor | None) -> None:
        self._format = format_
        self._names = iter(names or ()) if cursor is None else names_from(cursor, names)
        self.inputs = () if cursor is None else (cursor,)

    def open_next(self) -> FileReader | None:
        """The next file, opened; None if there are no more."""
        name = next(self._names, None)
        return None if name is None else FileReader(self._format.open(name))


def names_from(cursor: Cursor, only: tuple[str, ...] | None) -> Iterator[str]:
    """The names that a cursor yields, or of these only some."""
    wanted = None if only is None else frozenset(only)
    while (chunk := cursor.read(1)) is not None:
        name = as_name(chunk.element(0)[0])
        if wanted is None or name in wanted:
            yield name


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


class SequentialCursor(Cursor):
    """One file after the other."""

    def __init__(self, files: FileQueue) -> None:
        self.inputs = files.inputs
        self._files = files
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
            self._reader = self._files.open_next()
        return self._reader

    def _leave(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def close(self) -> None:
        """Close the file that is open."""
        super().close()
        self._leave()
