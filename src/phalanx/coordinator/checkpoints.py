"""Checkpoints of a coordinator: what servers hold, and closures that have not run."""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.coordinator.dispatcher import Dispatcher
from phalanx.coordinator.peer import Entry, Resource
from phalanx.coordinator.remote_value import RemoteValue, ResourceValue
from phalanx.errors import DataLossError, InvalidValueError, NotFoundError
from phalanx.parameter_server.client import ServerConnections
from phalanx.runtime.file_names import exchange_names
from phalanx.runtime.formatting import shown

__all__ = ["SavedState", "read", "write"]

_QUEUE = "queue"
_VERSION = 2


@dataclass(frozen=True)
class _Function:
    name: str
    blob: bytes


@dataclass(frozen=True)
class _Closure:
    function: int
    arguments: bytes
    inputs: tuple[int | bytes | BaseException, ...]  # the place of a closure, or what it has returned


@dataclass(frozen=True)
class _Resource:
    function: int
    arguments: bytes
    number: int


@dataclass(frozen=True)
class _State:
    version: int
    functions: dict[int, _Function]
    closures: tuple[_Closure, ...]
    resources: tuple[_Resource, ...]
    next_closure: int
    runs: tuple[str, ...]  # those that its variables belong to


def write(
    directory: str | Path,
    state: tuple[Sequence[Entry], Mapping[int, Resource], int],
    servers: ServerConnections,
    runs: tuple[str, ...],
) -> None:
    """Write a checkpoint. What `read` finds is complete: this one, or the one before."""
    target = Path(directory).absolute()
    _check(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _clean(target)
    fresh = target.parent / f".{target.name}.{secrets.token_hex(6)}"
    fresh.mkdir()
    try:
        servers.save(str(fresh))
        with open(fresh / _QUEUE, "wb") as file:
            pickle.dump(_described(*state, runs), file, protocol=5)
            file.flush()
            os.fsync(file.fileno())
        _replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _check(target: Path) -> None:
    """Require that there is nothing but a checkpoint, because that goes."""
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not is_free and not (target / _QUEUE).is_file():
        raise InvalidValueError(
            "The checkpoint of a coordinator needs a directory of its own, which is replaced as a "
            f"whole. Received: {shown(str(target))}, where something else is"
        )


def _replace(fresh: Path, target: Path) -> None:
    """Put a directory where another one may be, which `read` finds until the new one is there."""
    old = _before(target)
    if not (target.exists() and exchange_names(fresh, target)):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _before(target: Path) -> Path:
    """Where the checkpoint before is for a moment, if names cannot be exchanged in one step."""
    return target.with_name(f".{target.name}.old")


def _clean(target: Path) -> None:
    """Remove what coordinators have left that died while they wrote a checkpoint."""
    unfinished = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}")
    for path in target.parent.iterdir():
        if unfinished.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _described(
    entries: Sequence[Entry],
    resources: Mapping[int, Resource],
    next_closure: int,
    runs: tuple[str, ...],
) -> _State:
    places = {id(entry.value): i for i, entry in enumerate(entries)}
    functions: dict[int, _Function] = {}
    closures, kept = [], []
    for entry in entries:
        functions[entry.function.number] = _Function(entry.function.name, entry.function.blob)
        inputs = tuple(places[id(v)] if id(v) in places else v.error or v.data() for v in entry.inputs)
        closures.append(_Closure(entry.function.number, entry.arguments, inputs))
    for number, resource in resources.items():
        function = resource.function
        functions[function.number] = _Function(function.name, function.blob)
        kept.append(_Resource(function.number, resource.arguments, number))
    return _State(_VERSION, functions, tuple(closures), tuple(kept), next_closure, runs)


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that was read.

    Args:
        folder: where it is.
        state: the closures.
    """

    folder: Path
    state: _State

    @property
    def next_closure(self) -> int:
        """The number of the closure that is scheduled next."""
        return self.state.next_closure

    def load_variables(self, servers: ServerConnections) -> None:
        """Let servers hold what they held."""
        servers.load(str(self.folder))

    def schedule(
        self,
        dispatcher: Dispatcher,
        wait: Callable[[RemoteValue, Any], None],
        variables: Sequence[Any],
    ) -> list[RemoteValue]:
        """Schedule the closures again; returns their values.

        Args:
            dispatcher: has the workers.
            wait: for values.
            variables: of the program; those that a function refers to are among them.
        """
        packed = dispatcher.functions.packed
        functions = {n: packed(f.name, f.blob, variables) for n, f in self.state.functions.items()}
        for kept in self.state.resources:
            values = [ResourceValue(wait) for _ in dispatcher.links]
            resource = Resource(functions[kept.function], kept.arguments, (), values)
            dispatcher.restore_resource(kept.number, resource)
        made: list[RemoteValue] = []
        for closure in self.state.closures:
            inputs = [made[x] if isinstance(x, int) else _there(wait, x) for x in closure.inputs]
            value = RemoteValue(wait)
            entry = Entry(functions[closure.function], closure.arguments, inputs, (), value)
            dispatcher.put(entry)
            made.append(value)
        return made


def _there(wait: Callable[[RemoteValue, Any], None], found: bytes | BaseException) -> RemoteValue:
    value = RemoteValue(wait)
    if isinstance(found, BaseException):
        value.settle(b"", found)
    else:
        value.settle(found)
    return value


def read(directory: str | Path) -> SavedState:
    """Read a checkpoint; servers load their part later."""
    folder = Path(directory).absolute()
    if not folder.exists() and _before(folder).exists():  # its coordinator died in between
        folder = _before(folder)
    try:
        data = (folder / _QUEUE).read_bytes()
    except OSError as error:
        raise NotFoundError(
            "There is no checkpoint of a coordinator: ClusterCoordinator.checkpoint writes one. "
            f"Received: {shown(str(directory))}"
        ) from error
    try:
        state = pickle.loads(data)
        is_whole = isinstance(state, _State) and state.version == _VERSION
    except Exception:  # noqa: BLE001 - what pickle raises for bytes that are none of its own
        is_whole = False
    if not is_whole:
        raise DataLossError(
            "The checkpoint of a coordinator is damaged, or one of another version. "
            f"Received: {shown(str(directory))}"
        )
    return SavedState(folder, state)
