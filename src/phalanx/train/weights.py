"""`export_weights` and `load_weights`: arrays in a file of safetensors, for other frameworks."""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.variables import transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import (
    DataLossError,
    InvalidArgumentError,
    InvalidTypeError,
    InvalidValueError,
    MissingPackageError,
    NotFoundError,
)
from phalanx.runtime import compat
from phalanx.runtime.formatting import array_text, shown
from phalanx.train.checkpoints.calling import require_between_steps
from phalanx.train.checkpoints.directories import partial_of, remove_leftovers
from phalanx.train.checkpoints.files import checksum_of
from phalanx.train.checkpoints.state import path_of
from phalanx.train.checkpoints.trackables import found, replaced
from phalanx.train.weights_files import check_types, read_file

__all__ = ["export_weights", "load_weights"]

_CHECKSUMS = "phalanx.crc32"  # in the metadata of a file: the format has none itself
_OBJECT = "object"  # stands for the name of the only object, which has none


def export_weights(path: str, objects: Any, metadata: Mapping[str, str] | None = None) -> list[str]:
    """Write the variables and arrays of an object to a file of safetensors; returns their names.

    Names are the ways that lead to the arrays, with dots: ``layers.0.w``. Positions, keys and numbers
    are not written. Where several workers train together, call it on all of them: slices are gathered,
    and the first worker writes. Needs ``phalanx[safetensors]``.

    Args:
        path: of the file; one that is there is replaced, in one step.
        objects: a nest or an object with variables or arrays, as for `px.train.Checkpoint`.
        metadata: texts by name, kept in the file.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> model = {"dense": {"w": px.Variable([1.0, 2.0])}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     px.train.export_weights(f"{folder}/model.safetensors", model)
        ...     _ = model["dense"]["w"].assign([0.0, 0.0])
        ...     _ = px.train.load_weights(f"{folder}/model.safetensors", model)
        ['dense.w']
        >>> model["dense"]["w"].numpy().tolist()
        [1.0, 2.0]
    """
    require_between_steps("px.train.export_weights")
    numpy_files = _safetensors()
    things = _weights(objects)
    variables = [thing for thing in things.values() if isinstance(thing, Variable)]

    def read() -> dict[str, Any]:
        return {_dotted(name): np.asarray(_value(thing), order="C") for name, thing in things.items()}

    arrays = transactions.between_steps(variables, read)
    check_types(arrays)
    strategies = {id(v.distribute_strategy): v.distribute_strategy for v in variables}
    ranks = [s.extended._input_worker[1] for s in strategies.values() if s is not None]
    if max(ranks, default=0) == 0:
        target = path_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent, glob.escape(target.name))
        fresh = partial_of(target)
        try:
            checksums = {name: checksum_of(array) for name, array in arrays.items()}
            about = {"format": "np", **(metadata or {}), _CHECKSUMS: json.dumps(checksums)}
            numpy_files.save_file(arrays, str(fresh), metadata=about)
            with open(fresh, "rb+") as file:
                os.fsync(file.fileno())
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    return list(arrays)


def load_weights(path: str, objects: Any, strict: bool = True) -> Any:
    """Give the variables and arrays of an object the values of a file of safetensors.

    Nothing changes unless all values fit and are whole: what `export_weights` writes has checksums,
    files of other programs have none. Needs ``phalanx[safetensors]``.

    Args:
        path: of the file.
        objects: as for `export_weights`.
        strict: whether the file must have all arrays of the object, and no others.

    Returns:
        The object; a new one if it is a tuple or another pytree that cannot be changed.
    """
    require_between_steps("px.train.load_weights")
    _safetensors()
    if not path_of(path).is_file():
        raise NotFoundError(f"There is no such file. Received: {shown(str(path))}")
    try:
        arrays, metadata = read_file(str(Path(path)))
        damaged = _damaged(arrays, metadata)
    except Exception as error:
        raise DataLossError(
            f"The file cannot be read as safetensors: {error!s:.300}. Received: {shown(str(path))}"
        ) from error
    if damaged:
        raise DataLossError(
            f"The array {damaged[0]!r} of a file is damaged: its checksum does not fit. "
            f"Received: {shown(str(path))}"
        )
    things = _weights(objects)
    names = {_dotted(name): name for name in things}
    missing, unused = sorted(set(names) - set(arrays)), sorted(set(arrays) - set(names))
    problems = [f"the file has no {name!r}" for name in missing] if strict else []
    problems += [f"no variable takes {name!r}" for name in unused] if strict else []
    for dotted, name in names.items():
        if dotted in arrays and (text := _problem(dotted, things[name], arrays[dotted])):
            problems.append(text)
    if problems:
        raise InvalidArgumentError(
            f"The weights do not fit: {'; '.join(problems[:10])}"
            f"{f', and {len(problems) - 10} more' if len(problems) > 10 else ''}. "
            f"Received: {shown(str(path))}"
        )
    others = {}
    for dotted, name in names.items():
        thing = things[name]
        if dotted not in arrays:
            continue
        if isinstance(thing, Variable):
            thing.load_state(arrays[dotted])
        else:
            value = arrays[dotted]
            others[name] = jnp.asarray(value) if isinstance(thing, jax.Array) else value
    return replaced({_OBJECT: objects}, others)[_OBJECT]


def _safetensors() -> Any:
    try:
        import safetensors.numpy as numpy_files
    except ImportError as error:
        raise MissingPackageError(
            "Files of safetensors need the package: pip install 'phalanx[safetensors]'. "
            f"Received: {error}"
        ) from error
    return numpy_files


def _damaged(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> list[str]:
    """The arrays of a file whose checksums do not fit; files of other programs have none."""
    checksums = json.loads(metadata.get(_CHECKSUMS, "{}"))
    return [name for name in arrays if checksums and checksum_of(arrays[name]) != checksums.get(name)]


def _weights(objects: Any) -> dict[str, Any]:
    """The variables and arrays of an object, by the ways that lead to them."""
    things = {
        name: thing
        for name, thing in found({_OBJECT: objects}).items()
        if isinstance(thing, Variable | jax.Array | np.ndarray) and not compat.is_key_array(thing)
    }
    if not things:
        raise InvalidTypeError(f"There are no variables or arrays. Received: {shown(objects)}")
    counts = Counter(map(_dotted, things))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InvalidValueError(
            "Two arrays have the same name, so one would be lost: names are the ways that lead to "
            f"arrays, with dots between. Rename a key or an attribute. Received: {twice[0]!r} twice"
        )
    return things


def _dotted(name: str) -> str:
    return name.removeprefix(f"{_OBJECT}/").replace("/", ".")


def _value(thing: Any) -> Any:
    return np.asarray(thing.state() if isinstance(thing, Variable) else thing)


def _problem(name: str, thing: Any, value: Any) -> str:
    own = array_text(jnp.dtype(thing.dtype).name, thing.shape)
    there = array_text(jnp.dtype(value.dtype).name, value.shape)
    return "" if own == there else f"{name!r} is {own}, and {there} in the file"
