"""`Checkpoint`: variables, arrays and positions in files, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core import context as ctx
from phalanx.core.variables import transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import DataLossError, InvalidValueError
from phalanx.job.bootstrap import JobConnection
from phalanx.job.connection import connected
from phalanx.runtime import laboratory
from phalanx.train.checkpoints import orbax_files
from phalanx.train.checkpoints.calling import require_between_steps
from phalanx.train.checkpoints.contents import Contents, contents_of, is_iterator, spans_workers
from phalanx.train.checkpoints.directories import is_orbax
from phalanx.train.checkpoints.files import Saved
from phalanx.train.checkpoints.options import as_options
from phalanx.train.checkpoints.pairing import pairing_of
from phalanx.train.checkpoints.progress import ProgressLine
from phalanx.train.checkpoints.restoring import Restoring
from phalanx.train.checkpoints.saving import Order, Saver
from phalanx.train.checkpoints.state import add_to_state, numbered, path_of
from phalanx.train.checkpoints.status import CheckpointStatus
from phalanx.train.checkpoints.trackables import found, other_names, replaced, without_state
from phalanx.train.checkpoints.waiting import WaitingValues, waiting_values

__all__ = ["Checkpoint", "open_checkpoint"]

_COUNTER = "save_counter"


class Checkpoint:
    """A group of objects whose variables, arrays and positions are saved and restored together.

    Values are known by the way that leads to them: ``Checkpoint(model=model)`` saves the attribute
    ``w`` of ``model`` as ``model/w``. An object that is there twice is saved once, and restored by
    any of its names. A checkpoint is a directory. It is complete or not there, and every part of an
    array has a checksum.

    Values do not depend on the strategy, nor on how many replicas, workers or shards there are. Those
    of one `save` belong to the same step of a training in this process. Where several workers train
    together, all of them save, to one directory that all of them see; each writes what no worker
    before it has, and none waits in a collective. With parameter servers, call
    `ClusterCoordinator.join` first; what an optimizer keeps on the servers, its moments for example,
    is not saved here, but by `ClusterCoordinator.checkpoint`.

    Arrays and pytrees of arrays cannot be changed, so a restored one is a new object: read it from the
    attribute of the checkpoint, or from `root`. Before the next `save`, put the new value there.

    Args:
        root: an object whose parts are saved without a name in front; see `root`.
        **objects: variables, optimizers, metrics, iterators, random keys, arrays, objects with
            ``state()`` and ``restore(state)``, nests of them, pytrees, and objects with such
            attributes. None is an empty pytree. They are attributes of the checkpoint too.

    Examples:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> import phalanx as px
        >>> step, params = px.Variable(7), {"w": jnp.ones(2)}
        >>> checkpoint = px.train.Checkpoint(step=step, params=params)
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = checkpoint.save(f"{folder.name}/ckpt")
        >>> path.rpartition("/")[2]
        'ckpt-1'
        >>> _ = step.assign(0)
        >>> checkpoint.params = {"w": jnp.zeros(2)}
        >>> _ = checkpoint.restore(path).assert_consumed()
        >>> int(step), checkpoint.params["w"].tolist()
        (7, [1.0, 1.0])
        >>> folder.cleanup()
    """

    def __init__(self, root: Any = None, **objects: Any) -> None:
        if taken := sorted(name for name in objects if hasattr(type(self), name)):
            raise InvalidValueError(
                f"A checkpoint has these names itself; choose others. Received: {taken}"
            )
        self._root, self._names = root, list(objects)
        self._counter: Variable | None = None
        self._saver = Saver()
        self._waiting: list[WaitingValues] = []
        for name, thing in objects.items():
            setattr(self, name, thing)
        self._found()  # what cannot be saved is an error now

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are saved, as in TensorFlow."""
        super().__setattr__(name, value)
        is_own = name.startswith("_") or isinstance(getattr(type(self), name, None), property)
        if not is_own and name not in self._names:
            self._names.append(name)

    def __delattr__(self, name: str) -> None:
        """What is no attribute any more is not saved."""
        super().__delattr__(name)
        self._names = [each for each in self._names if each != name]

    @property
    def root(self) -> Any:
        """The object whose parts are saved without a name in front, or None.

        It is a new object after `restore` if it cannot be changed, such as a tuple or a module of
        equinox. Put the new value here before the next `save`.

        >>> import phalanx as px
        >>> checkpoint = px.train.Checkpoint((1.0, 2.0))
        >>> checkpoint.root = (3.0, 4.0)
        >>> list(checkpoint.things())
        ['0', '1', 'save_counter']
        """
        return self._root

    @root.setter
    def root(self, value: Any) -> None:
        self._root = value

    @property
    def save_counter(self) -> Variable:
        """How often `save` was called, as a variable that is saved too."""
        if self._counter is None:
            with ctx.push(ctx.default_mode()):
                self._counter = Variable(np.int32(0), trainable=False, name=_COUNTER)
        return self._counter

    # -- saving ----------------------------------------------------------------------------------

    def save(self, file_prefix: str, options: Any = None) -> str:
        """Save to ``file_prefix-N``, where N counts the calls; returns that path.

        The checkpoint becomes the latest of its directory; see `px.train.latest_checkpoint`.

        Args:
            file_prefix: the path without the number.
            options: `px.train.CheckpointOptions`.
        """
        require_between_steps("Checkpoint.save")
        # Counted before anything can fail: what only one worker knows must not let it count otherwise.
        self.save_counter.assign_add(1)
        given = numbered(file_prefix, int(self.save_counter))
        path = given.absolute()  # the program may go to another directory meanwhile
        self.write_then(path, options, lambda: add_to_state(path.parent, path.name))
        return str(given)

    def write(self, file_prefix: str, options: Any = None) -> str:
        """Save to exactly this path, and return it; the checkpoint is not counted."""
        self.write_then(path_of(file_prefix).absolute(), options)
        return str(file_prefix)

    def write_then(
        self,
        path: Path,
        options: Any,
        written: Callable[[], None] | None = None,
        followed: Callable[[], None] = lambda: None,
        positions: Mapping[str, Any] | None = None,
    ) -> None:
        """Save to a path, and call a function when the checkpoint is there.

        Args:
            path: the directory, an absolute path.
            options: `CheckpointOptions` or None.
            written: called by the process that has written it, to write it down in its directory.
            followed: called by other workers then.
            positions: states of iterators to save in place of the present ones, by name.
        """
        require_between_steps("Checkpoint.write")
        is_counted = written is not None
        try:
            chosen = as_options(options)
            self.sync()
            things = self._found()
            connection = _connection_of(things)
            rank = 0 if connection is None else connection.rank
            contents = self._contents(things, rank, positions, chosen.is_async)
            laboratory.reach("save", path=str(path.absolute()))
        except BaseException as error:
            job = connected()
            if job is not None:
                pairing_of(job).give_up(path, is_counted, error)
            raise
        joint = None
        if connection is not None:
            joint = pairing_of(connection).begin(path, is_counted, contents.is_spread)
        order = Order(path, contents, chosen, connection, joint, written or _nothing, followed)
        self._saver.save(order)

    def _contents(
        self,
        things: Mapping[str, Any],
        rank: int,
        positions: Mapping[str, Any] | None,
        is_async: bool,
    ) -> Contents:
        variables = [thing for thing in things.values() if isinstance(thing, Variable)]

        def read() -> Contents:
            contents = contents_of(things, rank, positions, later=is_async)
            return _values_now(contents) if is_async else contents

        contents = transactions.between_steps(variables, read)
        for each in self._waiting:
            contents.arrays |= each.sources()
        return contents

    def positions(self) -> dict[str, Any]:
        """The positions of all iterators, by name."""
        return {name: thing.state() for name, thing in self._found().items() if is_iterator(thing)}

    def sync(self) -> None:
        """Wait for a checkpoint that is being written, and raise what went wrong with it."""
        self._saver.wait()

    def settle(self) -> None:
        """Wait for a checkpoint that is being written; the next call raises what went wrong with it."""
        self._saver.settle()

    def raise_failure(self) -> None:
        """Raise what went wrong with a checkpoint that was written, without waiting for one."""
        self._saver.raise_failure()

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._saver.is_saving

    # -- restoring -------------------------------------------------------------------------------

    def restore(self, save_path: str | None, options: Any = None) -> CheckpointStatus:
        """Give the objects the values of a checkpoint.

        Nothing changes unless all values are whole and fit, on all workers. Objects that the checkpoint
        does not have stay as they are; the result tells of them. An optimizer or a lifted Keras
        model that has no variables yet gets its values when it makes them.

        Args:
            save_path: what `save` returned; None, as `px.train.latest_checkpoint` returns it, changes
                nothing.
            options: not used.
        """
        require_between_steps("Checkpoint.restore")
        self.sync()
        things = self._found()
        if save_path is None:
            return CheckpointStatus(None, [name for name in things if name != _COUNTER])
        connection = _connection_of(things)
        path = path_of(save_path)
        line = ProgressLine(f"Restoring {path.name}", 0)
        laboratory.reach("restore", path=str(path.absolute()))
        try:
            saved = open_checkpoint(path)
            objects = self._objects()
            names = other_names(objects)
            restoring = Restoring(saved, things, 0 if connection is None else connection.rank, names)
            restoring.read(line.add_of)
            waiting = waiting_values(saved, restoring.unused, without_state(objects), names)
        except Exception as error:
            if connection is not None:  # the others wait for what this one could read
                problem = f"{type(error).__name__}: {error!s:.500}"
                connection.member.exchange("restore", {"error": problem})
            raise
        if connection is not None:
            _agree(connection, saved, path)
        line.total = restoring.size
        others = restoring.give()
        if others:
            self.replace_values(others)
        self._waiting = waiting or [x for x in self._waiting if not x.is_given]
        for each in waiting:
            each.wait()
        line.done()
        laboratory.note("restored", path=str(path.absolute()), digest=saved.digest)
        missing = [name for name in restoring.missing if name != _COUNTER]
        count = len(things) - len({*restoring.missing, _COUNTER})
        return CheckpointStatus(str(save_path), missing, restoring.unused, count, waiting)

    def read(self, save_path: str, options: Any = None) -> CheckpointStatus:
        """As `restore`, for what `write` has written."""
        return self.restore(save_path, options)

    # -- objects ---------------------------------------------------------------------------------

    def _objects(self) -> dict[str, Any]:
        objects = {name: getattr(self, name) for name in self._names}
        if self._root is not None:
            objects = {"": self._root, **objects}
        return {**objects, _COUNTER: self.save_counter}

    def _found(self) -> dict[str, Any]:
        return found(self._objects())

    def things(self) -> dict[str, Any]:
        """The variables, arrays, numbers and stateful objects, by name."""
        return self._found()

    def replace_values(self, values: Mapping[str, Any]) -> None:
        """Put arrays and numbers where they belong."""
        for name, thing in replaced(self._objects(), values).items():
            if name == "":
                self._root = thing
            elif name != _COUNTER and getattr(self, name) is not thing:
                setattr(self, name, thing)


def _nothing() -> None:
    """Nothing is to be written down."""


def _values_now(contents: Contents) -> Contents:
    """The contents with the values that are in other processes, as they are at this moment."""
    arrays = {
        name: replace(source, parts=tuple(part.now() for part in source.parts))
        for name, source in contents.arrays.items()
    }
    return replace(contents, arrays=arrays)


def open_checkpoint(path: Path) -> Saved:
    """A checkpoint to read, in either format."""
    return orbax_files.SavedByOrbax(path) if is_orbax(path) else Saved(path)


def _connection_of(things: Mapping[str, Any]) -> JobConnection | None:
    """The connection to other workers, if things are theirs too."""
    connection = connected()
    if connection is None or not any(map(spans_workers, things.values())):
        return None
    return connection


def _agree(connection: JobConnection, saved: Saved, path: Path) -> None:
    """Make sure that all workers have read the same checkpoint, and that all could."""
    told = connection.member.exchange("restore", {"digest": saved.digest})
    for worker, answer in zip(connection.roster, told, strict=True):
        if answer is None or "error" in answer:
            why = "has finished" if answer is None else f"cannot: {answer['error']}"
            raise DataLossError(
                f"No worker restores the checkpoint, because {worker['worker']} {why}. "
                f"Received: {str(path)!r}"
            )
        if answer["digest"] != saved.digest:
            raise DataLossError(
                f"{worker['worker']} reads another checkpoint at this path than this worker. Its "
                f"directory must be on a file system that all workers see. Received: {str(path)!r}"
            )
