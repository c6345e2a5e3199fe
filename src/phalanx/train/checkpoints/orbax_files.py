"""Checkpoints in the format of Orbax, which other tools of JAX read. Needs ``phalanx[orbax]``.

Arrays are in the item ``default``, a nest of dicts by the parts of their names; small values are in the
item ``values``, as JSON. Checkpoints that other programs wrote with Orbax are read too.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
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
    InvalidValueError,
    MissingPackageError,
)
from phalanx.runtime import laboratory
from phalanx.runtime.formatting import shown
from phalanx.train.checkpoints.contents import Contents
from phalanx.train.checkpoints.files import (
    ArrayEntry,
    ArraySource,
    Saved,
    flush_folder,
    put_in_place,
)

__all__ = ["SavedByOrbax", "write", "write_elsewhere"]

Array = np.ndarray[Any, Any]
_ARRAYS, _VALUES = "default", "values"


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
    for name, source in contents.arrays.items():
        _insert(tree, name, _whole(source))
    keys = {name: source.key for name, source in contents.arrays.items() if source.key}
    about = {"values": {name: {"same": value} for name, value in contents.values.items()}, "keys": keys}
    target = (partial / "orbax").absolute()
    arguments = {_ARRAYS: orbax.args.PyTreeSave(tree), _VALUES: orbax.args.JsonSave(about)}
    with _handler(orbax) as writer:
        writer.save(target, args=orbax.args.Composite(**arguments))
    flush_folder(target)
    put_in_place(target, path)
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
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
        self._arrays = {
            jax.tree_util.keystr(way, simple=True, separator="/"): np.asarray(x) for way, x in pairs
        }
        keys = about.get("keys", {})
        self.entries = {
            name: ArrayEntry(tuple(x.shape), jnp.dtype(x.dtype).name, key=keys.get(name))
            for name, x in self._arrays.items()
        }
        self.values = about.get("values", {})

    @property
    def digest(self) -> int:
        """A number that tells this checkpoint from others: here only what arrays it has."""
        return len(str(sorted(self.entries.items())))

    def read(self, name: str, region: Region | None = None) -> Array:
        """An array or a region of it; a whole array in its shape."""
        array = np.ascontiguousarray(self._arrays[name]).reshape(self.entries[name].shape)
        if region is None:
            return array
        flat = array.reshape(-1)
        return assemble(array.shape, array.dtype, region, [(whole(array.shape), lambda: flat)])

    def verify(self, name: str) -> None:
        """Nothing: Orbax has read everything."""


def _read(orbax: Any, path: Path) -> tuple[Any, Mapping[str, Any]]:
    """The arrays, as a pytree, and the values if there are any."""
    where = path / _ARRAYS if (path / _ARRAYS).is_dir() else path
    handler = orbax.PyTreeCheckpointHandler()
    with orbax.Checkpointer(handler) as reader:
        metadata = reader.metadata(where)
        shapes = getattr(metadata, "item_metadata", metadata)
        shapes = getattr(shapes, "tree", shapes)
        as_numpy = jax.tree.map(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), shapes)
        tree = reader.restore(where, args=orbax.args.PyTreeRestore(restore_args=as_numpy))
    if not (path / _VALUES).is_dir():
        return tree, {}
    with orbax.Checkpointer(orbax.JsonCheckpointHandler()) as reader:
        about: Mapping[str, Any] = reader.restore(path / _VALUES, args=orbax.args.JsonRestore())
    return tree, about
