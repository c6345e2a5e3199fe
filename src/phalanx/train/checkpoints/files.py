"""What a checkpoint is on disk: a directory that is complete or not there.

``arrays-00000`` and so on hold the bytes of arrays, one file for each worker that wrote some.
``index.json`` says what each array is called, its dtype and shape, where its parts lie, and their
checksums, besides small values as JSON. All of it is written to a directory with another name, which is
changed when everything is safe on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from phalanx.core.regions import Box, Flat, Region, assemble, whole
from phalanx.core.variables.variable_parts import Part
from phalanx.errors import DataLossError, NotFoundError
from phalanx.runtime import laboratory
from phalanx.runtime.file_names import exchange_names
from phalanx.runtime.formatting import array_text, shown
from phalanx.runtime.processes import is_alive

__all__ = [
    "ArrayEntry",
    "ArraySource",
    "Saved",
    "begin",
    "checksum_of",
    "commit",
    "is_checkpoint",
    "put_in_place",
    "read_part",
    "remove",
    "remove_leftovers",
    "write_index",
    "write_part",
]

Array = np.ndarray[Any, Any]
Progress = Callable[[int], None]
"""Called with the number of bytes that were written since the last call."""

VERSION = 2
INDEX = "index.json"
_ALIGNMENT = 64  # bytes
_PIECE = 4 << 20  # bytes that are checked and written at a time
_PARTIAL = ".partial"
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")


@dataclass(frozen=True)
class ArraySource:
    """An array to write: what it is, and the parts of it that this process has.

    `combine` and `count` are those of `HeldParts`. `key` is the implementation of random keys.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: Sequence[Part]
    combine: str = "place"
    count: int = 1
    key: str | None = None

    @property
    def size(self) -> int:
        """How many bytes this process writes."""
        return sum(part.region.size for part in self.parts) * int(jnp.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class SavedChunk:
    """A part of an array: its region, where it lies, and its checksum."""

    region: Region
    file: str
    offset: int
    size: int
    checksum: int

    def as_json(self) -> dict[str, Any]:
        """The same as JSON has it."""
        region = self.region
        where = (
            {"flat": [region.start, region.stop]}
            if isinstance(region, Flat)
            else {"box": region.ranges}
        )
        about = {"file": self.file, "offset": self.offset, "size": self.size}
        return {**where, **about, "checksum": self.checksum}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SavedChunk:
        """What `as_json` made."""
        if "flat" in fields:
            region: Region = Flat(*map(int, fields["flat"]))
        else:
            region = Box(tuple((int(a), int(b)) for a, b in fields["box"]))
        numbers = (int(fields[name]) for name in ("offset", "size", "checksum"))
        return cls(region, str(fields["file"]), *numbers)


@dataclass(frozen=True)
class ArrayEntry:
    """An array of a checkpoint: what it is, and its parts."""

    shape: tuple[int, ...]
    dtype: str
    combine: str = "place"
    count: int = 1
    key: str | None = None
    chunks: tuple[SavedChunk, ...] = field(default=(), repr=False)

    def as_json(self) -> dict[str, Any]:
        """The same as JSON has it."""
        fields = {name: value for name, value in vars(self).items() if name != "chunks"}
        return {**fields, "chunks": [chunk.as_json() for chunk in self.chunks]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ArrayEntry:
        """What `as_json` made."""
        chunks = tuple(map(SavedChunk.from_json, fields["chunks"]))
        return cls(**{**fields, "shape": tuple(map(int, fields["shape"])), "chunks": chunks})


# -- writing ---------------------------------------------------------------------------------------


def begin(path: Path) -> Path:
    """Make the directory in which a checkpoint is written before it gets its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    partial.mkdir()
    return partial


def partial_of(path: Path) -> Path:
    """What a file or a directory is called before it is complete; tells which process writes it."""
    mark = f"{socket.gethostname()}@{os.getpid()}@{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}@{mark}{_PARTIAL}")


def write_part(
    partial: Path,
    rank: int,
    arrays: Mapping[str, ArraySource],
    values: Mapping[str, Any],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write what this process has to write; returns the index of it, for `commit`.

    Args:
        partial: the directory that `begin` has made.
        rank: the number of this process among those that write.
        arrays: the arrays by name.
        values: small values by name, as JSON has them.
        progress: told of the bytes that were written.
    """
    name = f"arrays-{rank:05d}"
    with open(partial / name, "wb", buffering=0) as file:
        entries = {key: _write_array(file, name, source, progress) for key, source in arrays.items()}
        os.fsync(file.fileno())
    index = {"arrays": {key: e.as_json() for key, e in entries.items()}, "values": dict(values)}
    if rank:
        _write_json(partial / f"part-{rank:05d}.json", index)
    return index


def read_part(partial: Path, rank: int) -> dict[str, Any]:
    """The index that another process has written, as `write_part` returned it there."""
    path = partial / f"part-{rank:05d}.json"
    index = _read_json(path)
    path.unlink()
    return index


def commit(partial: Path, path: Path, parts: Sequence[Mapping[str, Any]]) -> int:
    """Make a checkpoint of what processes have written; one that is there is replaced.

    Args:
        partial: the directory that `begin` has made.
        path: the directory that it becomes.
        parts: what `write_part` returned, by rank.

    Returns:
        The bytes of its arrays.
    """
    arrays = write_index(partial, parts)
    flush_folder(partial)
    put_in_place(partial, path)
    return sum(chunk["size"] for entry in arrays.values() for chunk in entry["chunks"])


def write_index(partial: Path, parts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Write one index of what processes have written; returns its arrays."""
    arrays: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, entry in part["arrays"].items():
            if name in arrays:
                arrays[name]["chunks"] += entry["chunks"]
            else:
                arrays[name] = {**entry, "chunks": list(entry["chunks"])}
    values = _merged([part["values"] for part in parts])
    body = {"version": VERSION, "workers": len(parts), "arrays": arrays, "values": values}
    _write_json(partial / INDEX, body)
    return arrays


def _merged(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of all workers: one of each that is the same on all, or else all of them."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for mine in values for name in mine):
        found = [mine[name] for mine in values if name in mine]
        is_same = all(value == found[0] for value in found)
        merged[name] = {"same": found[0]} if is_same else {"workers": found}
    return merged


def _write_array(
    file: BinaryIO, name: str, source: ArraySource, progress: Progress | None
) -> ArrayEntry:
    chunks = []
    for part in source.parts:
        if padding := -file.tell() % _ALIGNMENT:
            file.write(bytes(padding))
        offset = file.tell()
        data = part.array().view(np.uint8)
        checksum = 0
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE].data
            checksum = zlib.crc32(piece, checksum)
            laboratory.reach("write")
            _write_all(file, piece)
            if progress is not None:
                progress(len(piece))
        chunks.append(SavedChunk(part.region, name, offset, len(data), checksum))
    about = (source.shape, source.dtype, source.combine, source.count, source.key)
    return ArrayEntry(*about, tuple(chunks))


def _write_all(file: BinaryIO, piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) :]


def _write_json(path: Path, body: Any) -> None:
    """Write JSON with its checksum, in one step."""
    text = json.dumps(body, sort_keys=True)
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "w") as file:
        json.dump({"checksum": zlib.crc32(text.encode()), "body": text}, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _read_json(path: Path) -> Any:
    outer = json.loads(path.read_text())
    text = str(outer["body"])
    if zlib.crc32(text.encode()) != outer["checksum"]:
        raise ValueError("its checksum does not fit")
    return json.loads(text)


def flush_folder(folder: Path) -> None:
    """Make sure that the names in a directory are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, path: Path) -> None:
    """Give a directory its name; one that has it already goes, in the same moment if possible."""
    laboratory.reach("commit", path=str(path.absolute()))
    _put_in_place(partial, path)
    if laboratory.is_active():
        digest = None if is_orbax(path) else Saved(path).digest
        laboratory.note("committed", path=str(path.absolute()), digest=digest)


def _put_in_place(partial: Path, path: Path) -> None:
    if path.exists() and exchange_names(partial, path):
        flush_folder(path.parent)
        shutil.rmtree(partial, ignore_errors=True)
        return
    try:
        os.rename(partial, path)
    except OSError:
        if not path.exists():
            raise
        remove(path)
        os.rename(partial, path)
    flush_folder(path.parent)


def checksum_of(array: Array) -> int:
    """Of an array as a whole: its elements, its dtype and its shape."""
    flat = np.ascontiguousarray(array).reshape(-1)
    about = array_text(flat.dtype.name, array.shape)
    return zlib.crc32(flat.view(np.uint8).data, zlib.crc32(about.encode()))


# -- the directory ---------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    """Whether there is a complete checkpoint."""
    return os.path.isfile(path / INDEX) or is_orbax(path)


def is_orbax(path: Path) -> bool:
    """Whether there is a checkpoint in the format of Orbax."""
    return any(os.path.exists(path / name) for name in _ORBAX)  # False for names that cannot be


def remove(path: Path) -> None:
    """Remove a checkpoint; those who read it at this moment still can."""
    aside = path.parent / f".{path.name}.{secrets.token_hex(4)}.removed"
    with contextlib.suppress(FileNotFoundError):  # another process was quicker
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what processes of this machine began to write, under a name, and died over."""
    own = socket.gethostname()
    for path in folder.glob(f".{name}@*{_PARTIAL}"):
        *_, host, pid, _ = ("", "", *path.name.split("@"))
        if host == own and pid.isdigit() and not is_alive(int(pid)):
            _remove_at_once(path)
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 8}.removed"):
        shutil.rmtree(path, ignore_errors=True)


def _remove_at_once(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# -- reading ---------------------------------------------------------------------------------------


class Saved:
    """A checkpoint that is read.

    Args:
        path: its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            body = _read_json(path / INDEX)
            if body["version"] != VERSION:
                raise ValueError(f"it has version {body['version']}, and this is version {VERSION}")
            self.entries = {name: ArrayEntry.from_json(e) for name, e in body["arrays"].items()}
            """The arrays by name."""
            self.values: dict[str, Any] = body["values"]
            """Small values by name: {"same": …}, or {"workers": […]} with one for each worker."""
        except OSError as error:
            raise NotFoundError(
                f"There is no checkpoint: {error.strerror}. Give what `save` has returned, or what "
                "px.train.latest_checkpoint says of a directory. "
                f"Received: {shown(str(path))}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataLossError(
                f"The index of a checkpoint is damaged: {error}. Received: {shown(str(path))}"
            ) from error

    @property
    def digest(self) -> int:
        """A number that tells this checkpoint from others."""
        found = [(name, chunk.checksum) for name, e in self.entries.items() for chunk in e.chunks]
        return zlib.crc32(json.dumps([sorted(found), self.values], sort_keys=True).encode())

    def read(self, name: str, region: Region | None = None) -> Array:
        """An array or a region of it, whose parts are checked; a whole array in its shape."""
        entry = self.entries[name]
        dtype = jnp.dtype(entry.dtype)
        everything = whole(entry.shape)
        wanted = everything if region is None else region
        if entry.combine != "place":
            total = self._combined(name, entry)
            result = assemble(entry.shape, dtype, wanted, [(everything, lambda: total)])
        else:
            parts = [(c.region, lambda c=c: self._chunk(name, c, dtype)) for c in entry.chunks]
            covered = sum(c.region.size for c in entry.chunks)
            if covered != everything.size:
                raise self._damaged(name, f"it has {covered} of {everything.size} elements")
            result = assemble(entry.shape, dtype, wanted, parts)
        return result.reshape(entry.shape) if region is None else result

    def verify(self, name: str) -> None:
        """Check all parts of an array, one at a time."""
        entry = self.entries[name]
        for chunk in entry.chunks:
            self._chunk(name, chunk, jnp.dtype(entry.dtype))

    def _combined(self, name: str, entry: ArrayEntry) -> Array:
        dtype = jnp.dtype(entry.dtype)
        parts = [self._chunk(name, chunk, dtype) for chunk in entry.chunks]
        total: Array = np.sum(parts, axis=0, dtype=dtype)
        return total if entry.combine == "sum" else (total / entry.count).astype(dtype)

    def _chunk(self, name: str, chunk: SavedChunk, dtype: Any) -> Array:
        """A part of an array, in one dimension."""
        data = np.empty(chunk.size, np.uint8)
        checksum = position = 0
        try:
            with open(self.path / chunk.file, "rb", buffering=0) as file:
                file.seek(chunk.offset)
                while position < chunk.size:
                    view = data[position : position + _PIECE].data
                    count = file.readinto(view)
                    if not count:
                        raise self._damaged(name, f"the file {chunk.file!r} is too short")
                    checksum = zlib.crc32(view[:count], checksum)
                    position += count
        except FileNotFoundError:
            if (self.path / INDEX).exists():
                raise self._damaged(name, f"the file {chunk.file!r} is missing") from None
            raise NotFoundError(
                f"The checkpoint was removed while it was read. Received: {shown(str(self.path))}"
            ) from None
        if checksum != chunk.checksum:
            raise self._damaged(name, f"its checksum in the file {chunk.file!r} does not fit")
        if chunk.size != chunk.region.size * dtype.itemsize:
            raise self._damaged(name, "its size does not fit")
        return data.view(dtype)

    def _damaged(self, name: str, problem: str) -> DataLossError:
        return DataLossError(
            f"The array {name!r} of a checkpoint is damaged: {problem}. "
            f"Received: {shown(str(self.path))}"
        )
