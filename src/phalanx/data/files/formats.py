"""What a format is: how the elements of one file are read. Which file comes when, `source` says."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.files.streams import StreamFault, data_loss, open_stream
from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import BlockCursor, Cursor
from phalanx.data.plan.nodes import UNKNOWN
from phalanx.errors import DataLossError, InvalidTypeError
from phalanx.runtime.formatting import shown

STRING = TensorSpec((), np.dtype(object))


class Format:
    """How files of one kind are read."""

    spec: Any
    """The spec of their elements."""

    def open(self, path: str) -> Cursor:
        """Start reading a file."""
        raise NotImplementedError

    def count(self, path: str) -> int:
        """How many elements a file has, or UNKNOWN if only reading it would tell."""
        return UNKNOWN


@dataclass(frozen=True)
class BytesFormat(Format):
    """Files of byte strings."""

    cursor: Callable[..., BytesCursor]
    arguments: tuple[Any, ...]  # behind the name of the file
    spec = STRING

    def open(self, path: str) -> Cursor:
        """Start reading a file."""
        return self.cursor(path, *self.arguments)


class BytesCursor(BlockCursor):
    """The byte strings of one file.

    Subclasses say with `read_block` what comes next, and count: the number of the next string, and the
    byte at which it starts. What is wrong with the file is raised after everything before it was read.

    Args:
        path: the file.
        compression: of the file.
        buffer_size: how many bytes to read at once.
        most: how many bytes a string may have.
    """

    part = "record"
    """What a string is called in messages."""

    def __init__(self, path: str, compression: str, buffer_size: int, most: int | None = None) -> None:
        self._path, self._most = path, most
        self._stream = open_stream(path, compression)
        self._buffer_size = buffer_size
        self._number = self._offset = 0

    def read_block(self) -> list[bytes]:
        """The next strings; none at the end."""
        raise NotImplementedError

    def next_block(self, limit: int) -> Chunk | None:
        """The next strings as a column."""
        items = self.read_block()
        return Chunk((strings(items),), len(items)) if items else None

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _read_bytes(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except StreamFault as fault:
            raise self._fault(str(fault)) from fault

    def _skip_bytes(self, size: int) -> int:
        try:
            return self._stream.skip(size)
        except StreamFault as fault:
            raise self._fault(str(fault)) from fault

    def _fault(self, reason: str) -> DataLossError:
        return data_loss(self._path, self.part, self._number, self._offset, reason)


def strings(items: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A column of strings."""
    column = np.empty(len(items), object)
    column[:] = items
    return column


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
