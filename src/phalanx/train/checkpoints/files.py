"""What a checkpoint is on disk: a directory that is complete or not there.

``arrays-00000`` and so on hold the bytes of arrays, one file for each worker that wrote some.
``index.json`` says what each array is called, its dtype and shape, where its parts lie, and their
checksums, besides small values as JSON. All of it is written to a directory with another name, which is
changed when everything is safe on the disk.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.core.regions import Box, Flat, Region, assemble, whole
from phalanx.core.variables.variable_parts import Part
from phalanx.errors import DataLossError, InvalidArgumentError, NotFoundError
from phalanx.runtime import laboratory
from phalanx.runtime.formatting import array_text, shown
from phalanx.train.checkpoints.directories import INDEX, flush_folder, put_in_place
from phalanx.train.checkpoints.packing import PIECE, Packer, Progress

__all__ = [
    "ArrayEntry",
    "ArraySource",
    "Saved",
    "checksum_of",
    "commit",
    "read_part",
    "write_index",
    "write_part",
]

Array = np.ndarray[Any, Any]

VERSION = 2

_DAMAGES = {"EIO", "EISDIR", "ENODATA", "EBADMSG", "EUCLEAN"}
"""Errors of reading that come again. After others, such as too many open files, a file may be whole."""


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
        packer = Packer(file, progress)
        entries = {key: _write_array(packer, name, source) for key, source in arrays.items()}
        packer.flush()
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
    if laboratory.is_active():
        laboratory.note("committed", path=str(path.absolute()), digest=Saved(path).digest)
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
    _check_complete(arrays)
    values = _merged([part["values"] for part in parts])
    body = {"version": VERSION, "workers": len(parts), "arrays": arrays, "values": values}
    _write_json(partial / INDEX, body)
    return arrays


def _check_complete(arrays: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse what could not be read: parts of an array that no process has written."""
    for name, fields in arrays.items():
        entry = ArrayEntry.from_json(fields)
        written = sum(chunk.region.size for chunk in entry.chunks)
        if entry.combine == "place" and written != whole(entry.shape).size:
            raise InvalidArgumentError(
                f"{written} of the {whole(entry.shape).size} elements of an array were written. Each "
                "part must be on the first worker, or known to the others as a part of an array over "
                f"all of them. Received: {shown(name)}"
            )


def _merged(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of all workers: one of each that is the same on all, or else all of them."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for mine in values for name in mine):
        found = [mine[name] for mine in values if name in mine]
        # As texts, in which NaN equals itself, and 1 is neither 1.0 nor True.
        is_same = len({json.dumps(value, sort_keys=True) for value in found}) == 1
        merged[name] = {"same": found[0]} if is_same else {"workers": found}
    return merged


def _write_array(packer: Packer, name: str, source: ArraySource) -> ArrayEntry:
    chunks = []
    for part in source.parts:
        data = part.array().view(np.uint8)
        offset, checksum = packer.put(data)
        chunks.append(SavedChunk(part.region, name, offset, len(data), checksum))
    about = (source.shape, source.dtype, source.combine, source.count, source.key)
    return ArrayEntry(*about, tuple(chunks))


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


def checksum_of(array: Array) -> int:
    """Of an array as a whole: its elements, its dtype and its shape."""
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1)
    about = array_text(flat.dtype.name, array.shape)
    return zlib.crc32(flat.view(np.uint8).data, zlib.crc32(about.encode()))


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
                    view = data[position : position + PIECE].data
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
        except OSError as error:
            if errno.errorcode.get(error.errno or 0) not in _DAMAGES:
                raise
            problem = f"the file {chunk.file!r} cannot be read ({error.strerror})"
            raise self._damaged(name, problem) from error
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
