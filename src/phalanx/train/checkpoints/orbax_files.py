"""Checkpoints in the format of Orbax, which other tools of JAX read. Needs ``phalanx[orbax]``.

Arrays are in the item ``default``, a nest of dicts by the parts of their names; small values are in the
item ``values``, as JSON, with the checksums of all arrays and of itself: Orbax does not notice a bit of
an array that has flipped. It refuses arrays without elements, so these stand there, too. Checkpoints
that other programs wrote with Orbax are read as well; if they have several items of arrays, or one with
another name than ``default``, its name comes before those of its arrays.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.regions import Region, assemble, whole
from phalanx.errors import (
    DataLossError,
    DeadlineExceededError,
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
)
from phalanx.runtime import laboratory
from phalanx.runtime.formatting import array_text, shown
from phalanx.train.checkpoints.contents import Contents
from phalanx.train.checkpoints.directories import flush_folder, put_in_place
from phalanx.train.checkpoints.files import ArrayEntry, ArraySource, Saved, checksum_of

__all__ = ["SavedByOrbax", "write", "write_elsewhere"]

Array = np.ndarray[Any, Any]
_ARRAYS, _VALUES = "default", "values"
_CHECKSUM, _CHECKSUMS, _EMPTY = "checksum", "checksums", "empty"
_OF_ARRAYS = ("_METADATA", "manifest.ocdbt")  # what an item of arrays has


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise MissingPackageError(
            "Checkpoints in the format of Orbax need the package: pip install 'phalanx[orbax]'. "
            f"Received: {error}"
        ) from error
    logging.getLogger("absl").setLevel(logging.ERROR)  # which tells of every file
    return orbax


def _handler(orbax: Any) -> Any:
    """Writes and reads in this process alone, without a word to others."""
    alone = orbax.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix="phalanx",
    )
    arrays = orbax.PyTreeCheckpointHandler(multiprocessing_options=alone)
    values = orbax.JsonCheckpointHandler(multiprocessing_options=alone)
    together = orbax.CompositeOptions(multiprocessing_options=alone)
    handler = orbax.CompositeCheckpointHandler(
        default=arrays, values=values, composite_options=together
    )
    if jax.process_count() == 1:
        return orbax.Checkpointer(handler)
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


def write(partial: Path, path: Path, contents: Contents) -> None:
    """Write a checkpoint; one that is there is replaced.

    Args:
        partial: a directory beside, to write in.
        path: the directory that it becomes.
        contents: what to write.
    """
    orbax = _orbax()
    tree: dict[str, Any] = {}
    arrays = {name: _whole(source) for name, source in contents.arrays.items()}
    checksums = {name: checksum_of(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        _check_dtype(name, array)
        if array.size:
            _insert(tree, name, array)
    empty = {name: [x.dtype.name, list(x.shape)] for name, x in arrays.items() if not x.size}
    keys = {name: source.key for name, source in contents.arrays.items() if source.key}
    values = {name: {"same": value} for name, value in contents.values.items()}
    about = _signed({"values": values, "keys": keys, _CHECKSUMS: checksums, _EMPTY: empty})
    target = (partial / "orbax").absolute()
    arguments = {_ARRAYS: orbax.args.PyTreeSave(tree), _VALUES: orbax.args.JsonSave(about)}
    with _handler(orbax) as writer:
        writer.save(target, args=orbax.args.Composite(**arguments))
    flush_folder(target)
    put_in_place(target, path)
    laboratory.note("committed", path=str(path.absolute()), digest=None)
    shutil.rmtree(partial, ignore_errors=True)


def write_elsewhere(source: Path, path: Path, seconds: float) -> None:
    """Write a checkpoint of the usual format anew, in a process of its own.

    Orbax waits for all processes of JAX's runtime, also for those that do not save. So a process that
    is none of them does it.

    Args:
        source: the directory of the checkpoint.
        path: the directory to write.
        seconds: how long it may take.
    """
    _orbax()  # a missing package is an error here
    own = ("TF_CONFIG", "PHALANX_", "XLA_FLAGS", laboratory.FOLDER)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    code = "import sys, phalanx; phalanx.train.convert_checkpoint(*sys.argv[1:])"
    try:
        subprocess.run(
            [sys.executable, "-c", code, str(source.absolute()), str(path.absolute()), "orbax"],
            env={**environ, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceededError(
            f"Orbax did not write a checkpoint within {seconds:g} seconds (PHALANX_DEADLINE). "
            f"Received: {shown(str(path))}"
        ) from None
    except subprocess.CalledProcessError as error:
        raise DataLossError(
            f"Orbax could not write a checkpoint: {error.stderr[-1000:]} Received: {shown(str(path))}"
        ) from None


def _whole(source: ArraySource) -> Array:
    parts = [(part.region, part.array) for part in source.parts]
    flat = assemble(source.shape, jnp.dtype(source.dtype), whole(source.shape), parts)
    return flat.reshape(source.shape)


def _signed(about: Mapping[str, Any]) -> dict[str, Any]:
    """What is said beside arrays, with its checksum."""
    rest = {name: value for name, value in about.items() if name != _CHECKSUM}
    return {**rest, _CHECKSUM: zlib.crc32(json.dumps(rest, sort_keys=True).encode())}


def _check_dtype(name: str, array: Array) -> None:
    import tensorstore

    try:
        tensorstore.dtype(array.dtype)
    except (TypeError, ValueError):
        raise InvalidTypeError(
            "Orbax has no arrays of this dtype; the usual format has. "
            f"Received: {shown(name)}, which is {array_text(array.dtype.name, array.shape)}"
        ) from None


def _insert(tree: dict[str, Any], name: str, value: Array) -> None:
    *way, last = name.split("/")
    place: Any = tree
    for step in way:
        place = place.setdefault(step, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last in place:
        raise InvalidValueError(
            "A checkpoint of Orbax is a nest of dicts, in which an array cannot have the name of a "
            f"dict. Received: {shown(name)}"
        )
    place[last] = value


class SavedByOrbax(Saved):
    """A checkpoint in the format of Orbax that is read.

    Args:
        path: its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        orbax = _orbax()
        try:
            tree, about = _read(orbax, path.absolute())
        except Exception as error:
            raise DataLossError(
                f"Orbax cannot read a checkpoint: {error!s:.500}. Received: {shown(str(path))}"
            ) from error
        if about != _signed(about):
            raise DataLossError(
                "The item 'values' of a checkpoint is damaged: its checksum does not fit. "
                f"Received: {shown(str(path))}"
            )
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
        self._arrays = {
            jax.tree_util.keystr(way, simple=True, separator="/"): np.asarray(x) for way, x in pairs
        }
        for name, (dtype, shape) in about.get(_EMPTY, {}).items():
            self._arrays[name] = np.empty(shape, jnp.dtype(dtype))
        self._checksums = {name: checksum_of(x) for name, x in self._arrays.items()}
        wanted = about.get(_CHECKSUMS, self._checksums)  # others write none
        names = set(self._checksums)
        self._wrong = {name for name in names if self._checksums[name] != wanted.get(name)}
        if missing := sorted(set(wanted) - names):
            raise self._damaged(missing[0], "it is missing")
        keys = about.get("keys", {})
        self.entries = {
            name: ArrayEntry(tuple(x.shape), jnp.dtype(x.dtype).name, key=keys.get(name))
            for name, x in self._arrays.items()
        }
        self.values = about.get("values", {})

    @property
    def digest(self) -> int:
        """A number that tells this checkpoint from others."""
        found = [sorted(self._checksums.items()), self.values]
        return zlib.crc32(json.dumps(found, sort_keys=True).encode())

    def read(self, name: str, region: Region | None = None) -> Array:
        """An array or a region of it; a whole array in its shape."""
        self.verify(name)
        array = np.ascontiguousarray(self._arrays[name]).reshape(self.entries[name].shape)
        if region is None:
            return array
        flat = array.reshape(-1)
        return assemble(array.shape, array.dtype, region, [(whole(array.shape), lambda: flat)])

    def verify(self, name: str) -> None:
        """Check an array, which Orbax has read."""
        if name in self._wrong:
            raise self._damaged(name, "its checksum does not fit")


def _read(orbax: Any, path: Path) -> tuple[Any, Mapping[str, Any]]:
    """The arrays, as a pytree, and the values if there are any."""
    tree = _read_arrays(orbax, path) if _has_arrays(path) else _read_items(orbax, path)
    if not (path / _VALUES).is_dir():
        return tree, _signed({})
    with orbax.Checkpointer(orbax.JsonCheckpointHandler()) as reader:
        about: Mapping[str, Any] = reader.restore(path / _VALUES, args=orbax.args.JsonRestore())
    is_ours = not {"values", "keys", _CHECKSUMS, _CHECKSUM}.isdisjoint(about)
    return tree, about if is_ours else _signed({})


def _has_arrays(path: Path) -> bool:
    return any((path / name).exists() for name in _OF_ARRAYS)


def _read_items(orbax: Any, path: Path) -> Any:
    """The arrays of items, by their names, but for the one whose name says nothing."""
    names = sorted(each.name for each in path.iterdir() if _has_arrays(each))
    if names in ([], [_ARRAYS]):
        return _read_arrays(orbax, path / _ARRAYS)  # or the error that says what is damaged
    return {name: _read_arrays(orbax, path / name) for name in names}


def _read_arrays(orbax: Any, where: Path) -> Any:
    handler = orbax.PyTreeCheckpointHandler()
    with orbax.Checkpointer(handler) as reader:
        metadata = reader.metadata(where)
        shapes = getattr(metadata, "item_metadata", metadata)
        shapes = getattr(shapes, "tree", shapes)
        as_numpy = jax.tree.map(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), shapes)
        return reader.restore(where, args=orbax.args.PyTreeRestore(restore_args=as_numpy))
