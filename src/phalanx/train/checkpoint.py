"""`Checkpoint`: variables and positions in files, and back."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx, transactions
from phalanx.core.variables import Variable
from phalanx.errors import ContextError, InvalidArgumentError, InvalidTypeError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.train.checkpoint_files import ArraySource, Saved, is_checkpoint, write
from phalanx.train.trackables import found, is_position

__all__ = ["Checkpoint", "CheckpointStatus", "latest_checkpoint", "list_variables"]

_COUNTER = "save_counter"
_STATE = "checkpoint"  # the file that says which checkpoint is the latest


class _NotRestoredError(InvalidValueError, AssertionError):
    """A checkpoint and the objects that it is for do not have the same variables."""


class CheckpointStatus:
    """What `Checkpoint.restore` did.

    Attributes:
        missing: names of variables that the checkpoint does not have.
        unused: names in the checkpoint that no object has.
    """

    def __init__(
        self, path: str | None, missing: Iterable[str] = (), unused: Iterable[str] = ()
    ) -> None:
        self._path = path
        self.missing, self.unused = list(missing), list(unused)

    def assert_consumed(self) -> CheckpointStatus:
        """Check that everything in the checkpoint was used, and that every object was restored."""
        if self.unused:
            raise _NotRestoredError(
                f"The checkpoint has values that no object takes: {self.unused}. An optimizer takes "
                f"its own after `optimizer.build(variables)`. Received: {shown(self._path)}"
            )
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> CheckpointStatus:
        """Check that every variable was restored."""
        if self.missing:
            raise _NotRestoredError(
                f"The checkpoint does not have all values; those of {self.missing} are missing. "
                f"Received: {shown(self._path)}"
            )
        return self

    def expect_partial(self) -> CheckpointStatus:
        """Say that the checkpoint may have more than the objects; nothing happens."""
        return self


class Checkpoint:
    """A group of objects whose variables and positions are saved and restored together.

    Values are known by the way that leads to them: ``Checkpoint(model=model)`` saves the attribute
    ``w`` of ``model`` as ``model/w``. A checkpoint is a directory. It is complete or not there, and
    every array in it has a checksum.

    Values do not depend on the strategy, nor on how many replicas or shards there are. Those of one
    `save` belong to the same step of a training in this process. With parameter servers, call
    `ClusterCoordinator.join` first; what an optimizer keeps on the servers, its moments for example,
    is not saved here, but by `ClusterCoordinator.checkpoint`.

    Args:
        root: an object whose parts are saved without a name in front.
        **objects: variables, optimizers, metrics, iterators, dicts and lists of them, and objects with
            such attributes. They are attributes of the checkpoint too.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> step = px.Variable(7)
        >>> checkpoint = px.train.Checkpoint(step=step)
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = checkpoint.save(f"{folder.name}/ckpt")
        >>> path.rpartition("/")[2]
        'ckpt-1'
        >>> _ = step.assign(0)
        >>> _ = checkpoint.restore(path).assert_consumed()
        >>> int(step)
        7
        >>> folder.cleanup()
    """

    def __init__(self, root: Any = None, **objects: Any) -> None:
        if taken := sorted(name for name in objects if hasattr(type(self), name)):
            raise InvalidValueError(
                f"A checkpoint has these names itself; choose others. Received: {taken}"
            )
        self._root, self._objects = root, objects
        self._counter: Variable | None = None
        for name, thing in objects.items():
            setattr(self, name, thing)
        self._found()  # what cannot be saved is an error now

    @property
    def save_counter(self) -> Variable:
        """How often `save` was called, as a variable that is saved too."""
        if self._counter is None:
            with ctx.push(ctx.default_mode()):
                self._counter = Variable(np.int32(0), trainable=False, name=_COUNTER)
        return self._counter

    def save(self, file_prefix: str, options: Any = None) -> str:
        """Save to ``file_prefix-N``, where N counts the calls; returns that path.

        The checkpoint becomes the latest of its directory; see `px.train.latest_checkpoint`.

        Args:
            file_prefix: the path without the number.
            options: not used.
        """
        self.save_counter.assign_add(1)
        path = self.write(f"{file_prefix}-{int(self.save_counter)}")
        update_state(Path(path).parent, Path(path).name, [Path(path).name])
        return path

    def write(self, file_prefix: str, options: Any = None) -> str:
        """Save to exactly this path, and return it; the checkpoint is not counted."""
        if compat.is_staging():
            raise ContextError(
                "A checkpoint is saved between steps, so it cannot be a part of a compiled function. "
                "Call it outside."
            )
        things = self._found()
        variables = {name: thing for name, thing in things.items() if isinstance(thing, Variable)}

        def read() -> tuple[dict[str, ArraySource], dict[str, Any]]:
            positions = {name: thing.state() for name, thing in things.items() if is_position(thing)}
            return {name: _source(variable) for name, variable in variables.items()}, positions

        arrays, positions = transactions.between_steps(list(variables.values()), read)
        write(path_of(file_prefix), arrays, positions)
        return str(file_prefix)

    def restore(self, save_path: str | None, options: Any = None) -> CheckpointStatus:
        """Give the objects the values of a checkpoint.

        No variable changes unless all values are whole and fit. Objects that the checkpoint does not
        have stay as they are; the result tells of them.

        Args:
            save_path: what `save` returned; None, as `px.train.latest_checkpoint` returns it, changes
                nothing.
            options: not used.
        """
        if save_path is None:
            return CheckpointStatus(None, [name for name in self._found() if name != _COUNTER])
        saved, things = Saved(path_of(save_path)), self._found()
        known = {**saved.entries, **saved.values}
        values = {name: _loaded(saved, name, thing) for name, thing in things.items() if name in known}
        for name, value in values.items():
            thing = things[name]
            if isinstance(thing, Variable):
                thing.load_state(value)
            else:
                thing.restore(value)
        missing = [name for name in things if name not in known and name != _COUNTER]
        return CheckpointStatus(save_path, missing, [name for name in known if name not in things])

    def read(self, save_path: str, options: Any = None) -> CheckpointStatus:
        """As `restore`, for what `write` has written."""
        return self.restore(save_path, options)

    def _found(self) -> dict[str, Any]:
        objects: dict[str, Any] = dict(self._objects)
        if self._root is not None:
            objects = {"": self._root, **objects}
        return found({**objects, _COUNTER: self.save_counter})


def latest_checkpoint(checkpoint_dir: str, latest_filename: str | None = None) -> str | None:
    """The path of the newest checkpoint in a directory, None if there is none.

    Args:
        checkpoint_dir: the directory.
        latest_filename: the file that says which it is, by default ``checkpoint``.

    Examples:
        >>> import phalanx as px
        >>> px.train.latest_checkpoint("/no/such/directory") is None
        True
    """
    names = read_state(Path(checkpoint_dir), latest_filename or _STATE)
    for name in reversed(names):
        if is_checkpoint(Path(checkpoint_dir) / name):
            return str(Path(checkpoint_dir) / name)
    return None


def list_variables(ckpt_dir_or_file: str) -> list[tuple[str, list[int]]]:
    """The names and shapes of the arrays in a checkpoint, or in the newest one of a directory.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = px.train.Checkpoint(w=px.Variable([1.0, 2.0])).save(f"{folder}/ckpt")
        ...     px.train.list_variables(folder)
        [('save_counter', []), ('w', [2])]
    """
    path = Path(ckpt_dir_or_file)
    if not is_checkpoint(path):
        path = Path(latest_checkpoint(ckpt_dir_or_file) or path)
    return sorted((name, list(entry.shape)) for name, entry in Saved(path).entries.items())


# -- the file that says which checkpoint is the latest --------------------------------------------

_LINE = re.compile(r'^(model_checkpoint_path|all_model_checkpoint_paths): "(.*)"$', re.MULTILINE)


def read_state(folder: Path, name: str = _STATE) -> list[str]:
    """The checkpoints of a directory that count, the latest last."""
    try:
        lines = _LINE.findall((folder / name).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return []
    latest = [path for key, path in lines if key == "model_checkpoint_path"]
    return [*(path for key, path in lines if key != "model_checkpoint_path"), *latest[:1]]


def update_state(folder: Path, latest: str, everything: Iterable[str]) -> None:
    """Say which checkpoints of a directory count, in one step."""
    lines = [f'model_checkpoint_path: "{latest}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in everything]
    fresh = folder / f".{_STATE}.{secrets.token_hex(4)}"
    fresh.write_text("\n".join([*lines, ""]))
    fresh.replace(folder / _STATE)


def path_of(given: Any) -> Path:
    """A path that the user gave."""
    if not isinstance(given, str | os.PathLike):
        raise InvalidTypeError(f"A checkpoint needs a path. Received: {shown(given)}")
    return Path(given)


# -- values ---------------------------------------------------------------------------------------


def _source(variable: Variable) -> ArraySource:
    """How a variable is written; one that is in parts is never whole in this process."""
    parts = getattr(variable, "parts", None)
    shape, dtype = tuple(int(n) for n in variable.shape), jnp.dtype(variable.dtype).name
    if parts is not None:
        return ArraySource(shape, dtype, lambda: (np.asarray(part.state()) for part, _ in parts))
    state = variable.state()
    return ArraySource(tuple(state.shape), jnp.dtype(state.dtype).name, lambda: [np.asarray(state)])


def _loaded(saved: Saved, name: str, thing: Any) -> Any:
    """A value of a checkpoint for a variable or an iterator, if it fits."""
    if not isinstance(thing, Variable):
        state = saved.values.get(name)
        if not isinstance(state, Mapping):
            raise InvalidTypeError(
                f"The checkpoint has no position for {name!r}. Received: {shown(state)}"
            )
        return state
    if name not in saved.entries:
        raise InvalidTypeError(f"The checkpoint has a position for {name!r}. Received: {shown(thing)}")
    entry = saved.entries[name]
    if entry.shape != tuple(thing.shape):
        raise InvalidArgumentError(
            f"{name!r} has the shape {tuple(thing.shape)}, and {entry.shape} in the checkpoint "
            f"{str(saved.path)!r}. Received: {shown(thing.name)}"
        )
    value = saved.read(name)
    # JAX may keep the memory that it is given, and this one belongs to a file.
    return value if hasattr(thing, "parts") else np.array(value)
