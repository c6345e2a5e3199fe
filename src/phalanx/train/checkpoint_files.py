"""What a checkpoint is on disk: a directory that is complete or not there.

It has two files. ``arrays`` holds the bytes of all arrays, one after another. ``index.json`` says what
each is called, its dtype and shape, where it lies, and its checksum, besides small values as JSON. Both
are written under another name, which is changed when they are safe on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from phalanx.errors import DataLossError, NotFoundError
from phalanx.runtime.formatting import shown
from phalanx.runtime.processes import is_alive

__all__ = ["ArrayEntry", "ArraySource", "Saved", "is_checkpoint", "remove", "remove_leftovers", "write"]

Array = np.ndarray[Any, Any]

VERSION = 1
_INDEX, _ARRAYS = "index.json", "arrays"
_ALIGNMENT = 64  # bytes
_PIECE = 16 << 20  # bytes that are checked at a time
_PARTIAL = ".partial"


@dataclass(frozen=True)
class ArraySource:
    """An array to write.

    Args:
        shape: of the whole.
        dtype: of the whole.
        pieces: its rows, in order, in pieces that need not be there at the same time.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: Callable[[], Iterable[Array]]


@dataclass(frozen=True)
class ArrayEntry:
    """An array of a checkpoint: what it is, where it lies, and its checksum."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int
    checksum: int


def write(path: Path, arrays: Mapping[str, ArraySource], values: Mapping[str, Any]) -> None:
    """Write a checkpoint; one that is there is replaced.

    Args:
        path: the directory that it becomes.
        arrays: the arrays by name.
        values: small values by name, as JSON has them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{socket.gethostname()}@{os.getpid()}@{secrets.token_hex(4)}"
    partial = path.parent / f".{path.name}@{mark}{_PARTIAL}"
    partial.mkdir()
    try:
        with open(partial / _ARRAYS, "wb") as file:
            entries = {name: _write_array(file, source) for name, source in arrays.items()}
            _flush(file)
        body = {
            "version": VERSION,
            "arrays": {name: vars(entry) for name, entry in entries.items()},
            "values": dict(values),
        }
        text = json.dumps(body, sort_keys=True)
        with open(partial / _INDEX, "w") as file:
            file.write(json.dumps({"checksum": zlib.crc32(text.encode()), "body": text}))
            _flush(file)
        _flush_folder(partial)
        _put_in_place(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def is_checkpoint(path: Path) -> bool:
    """Whether there is a complete checkpoint."""
    return (path / _INDEX).is_file()


def remove(path: Path) -> None:
    """Remove a checkpoint; those who read it at this moment still can."""
    aside = path.parent / f".{path.name}.{secrets.token_hex(4)}.removed"
    with contextlib.suppress(FileNotFoundError):  # another process was quicker
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes of this machine began to write and died over."""
    own = socket.gethostname()
    for path in folder.glob(f".*{_PARTIAL}"):
        *_, host, pid, _ = ("", "", *path.name.split("@"))
        if host == own and pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


class Saved:
    """A checkpoint that is read.

    Args:
        path: its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            outer = json.loads((path / _INDEX).read_text())
            text = str(outer["body"])
            if zlib.crc32(text.encode()) != outer["checksum"]:
                raise ValueError("its checksum does not fit")
            body = json.loads(text)
            if body["version"] != VERSION:
                raise ValueError(f"it has version {body['version']}")
        except OSError as error:
            raise NotFoundError(
                f"There is no checkpoint: {error.strerror}. Received: {shown(str(path))}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataLossError(
                f"The index of a checkpoint is damaged: {error}. Received: {shown(str(path))}"
            ) from error
        self.values: dict[str, Any] = body["values"]
        """Small values by name."""
        self.entries = {
            name: ArrayEntry(**{**fields, "shape": tuple(fields["shape"])})
            for name, fields in body["arrays"].items()
        }
        """The arrays by name."""

    def read(self, name: str) -> Array:
        """An array, whose memory is the file's own and must not be changed."""
        entry = self.entries[name]
        dtype = jnp.dtype(entry.dtype)
        if not entry.size:
            return np.zeros(entry.shape, dtype)
        try:
            flat = np.memmap(self.path / _ARRAYS, np.uint8, "r", entry.offset, (entry.size,))
        except FileNotFoundError:
            raise NotFoundError(
                f"The checkpoint was removed while it was read. Received: {shown(str(self.path))}"
            ) from None
        except ValueError as error:
            raise self._damaged(name, "the file is too short") from error
        if _checksum(flat) != entry.checksum:
            raise self._damaged(name, "its checksum does not fit")
        return flat.view(dtype).reshape(entry.shape)

    def _damaged(self, name: str, problem: str) -> DataLossError:
        return DataLossError(
            f"The array {name!r} of a checkpoint is damaged: {problem}. "
            f"Received: {shown(str(self.path))}"
        )


def _write_array(file: BinaryIO, source: ArraySource) -> ArrayEntry:
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset, checksum = file.tell(), 0
    for piece in source.pieces():
        data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
        checksum = _checksum(data, checksum)
        file.write(data.data)
    return ArrayEntry(source.shape, source.dtype, offset, file.tell() - offset, checksum)


def _checksum(data: Array, checksum: int = 0) -> int:
    for begin in range(0, len(data), _PIECE):
        checksum = zlib.crc32(data[begin : begin + _PIECE].data, checksum)
    return checksum


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, path: Path) -> None:
    """Give a directory its name; one that has it already goes."""
    try:
        os.rename(partial, path)
    except OSError:
        if not path.exists():
            raise
        remove(path)
        os.rename(partial, path)
    _flush_folder(path.parent)
