"""What a checkpoint holds of objects: arrays and small values by name, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.regions import Region, whole
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_parts import (
    HeldParts,
    Part,
    array_of,
    array_parts,
    array_regions,
    held_parts,
    take_parts,
    wanted_regions,
)
from phalanx.data.distribute.distributed_dataset import DistributedIterator
from phalanx.data.run.iterator import Iterator as DatasetIterator
from phalanx.errors import InvalidArgumentError, InvalidTypeError
from phalanx.runtime import compat
from phalanx.runtime.formatting import array_text, shown
from phalanx.train.checkpoints.files import ArrayEntry, ArraySource, Saved
from phalanx.train.checkpoints.trackables import is_stateful

__all__ = [
    "Contents",
    "Restoring",
    "contents_of",
    "encoded",
    "held_of",
    "is_iterator",
    "source_of",
    "spans_workers",
    "whole_contents",
]

_ARRAY = "$array"  # the name of an array in the state of an object


@dataclass
class Contents:
    """What is to be written, as far as this worker has it.

    `spread` are the names of what differs between workers, so that each has to write its own.
    """

    arrays: dict[str, ArraySource] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    spread: set[str] = field(default_factory=set)

    @property
    def is_spread(self) -> bool:
        """Whether all workers have to write something."""
        return bool(self.spread)

    @property
    def own(self) -> Contents:
        """What another worker than the first has to write."""
        arrays = {name: x for name, x in self.arrays.items() if name in self.spread}
        values = {name: x for name, x in self.values.items() if name in self.spread}
        return Contents(arrays, values, self.spread)

    @property
    def size(self) -> int:
        """The bytes of the arrays that this process writes."""
        return sum(source.size for source in self.arrays.values())


def whole_contents(saved: Saved) -> Contents:
    """All that a checkpoint holds, to write it anew in one piece."""
    if strange := [name for name, value in saved.values.items() if "same" not in value]:
        raise InvalidArgumentError(
            f"The states of {strange} differ between workers, so they cannot be written as one. "
            f"Received: {shown(str(saved.path))}"
        )
    contents = Contents(values={name: value["same"] for name, value in saved.values.items()})
    for name, entry in saved.entries.items():
        part = Part(whole(entry.shape), saved.read(name))
        contents.arrays[name] = ArraySource(entry.shape, entry.dtype, [part], key=entry.key)
    return contents


def is_iterator(x: Any) -> bool:
    """Whether something is an iterator of a dataset, whose state is a position."""
    return isinstance(x, DistributedIterator | DatasetIterator)


def spans_workers(thing: Any) -> bool:
    """Whether something belongs to all workers of a job."""
    if isinstance(thing, Variable):
        strategy = thing.distribute_strategy
        return strategy is not None and strategy.extended._input_worker[0] > 1
    return isinstance(thing, jax.Array) and not thing.is_fully_addressable


# -- what to write ---------------------------------------------------------------------------------


def contents_of(
    things: Mapping[str, Any],
    rank: int = 0,
    positions: Mapping[str, Any] | None = None,
    later: bool = False,
) -> Contents:
    """What to write of things that `found` has found; call it between steps.

    NumPy arrays are copied, because they can change. Variables are not: one that was read is not
    overwritten by the next step. An array of JAX may be donated to the next step, so what is written
    later has a copy of it, on its device.

    Args:
        things: variables, arrays, numbers and objects with a state, by name.
        rank: the number of this worker.
        positions: states of iterators to write in place of the present ones.
        later: whether the next steps begin before everything is written.
    """
    contents = Contents()
    for name, thing in things.items():
        if isinstance(thing, (Variable, jax.Array | np.ndarray | np.generic)):
            held, key = held_of(thing)
            contents.arrays[name] = source_of(held, key, later and not isinstance(thing, Variable))
            if held.is_spread:
                contents.spread.add(name)
        elif is_stateful(thing):
            state = (positions or {}).get(name)
            state = thing.state() if state is None else state
            arrays: dict[str, ArraySource] = {}
            contents.values[name] = encoded(name, state, arrays, rank, later)
            contents.arrays |= arrays
            if not is_iterator(thing) or state.get("workers", 1) > 1:
                contents.spread |= {name, *arrays}
        else:
            contents.values[name] = thing
    return contents


def held_of(thing: Any) -> tuple[HeldParts, str | None]:
    """The parts of an array or a variable, and which random keys they are."""
    if isinstance(thing, Variable) and not _is_key(thing.dtype):
        return held_parts(thing), None
    value = thing.state() if isinstance(thing, Variable) else thing
    if compat.is_key_array(value):
        data = jax.random.key_data(value)
        return array_parts(data), str(jax.random.key_impl(value))
    if isinstance(value, jax.Array):
        return array_parts(value), None
    copy = np.array(value)
    return HeldParts(copy.shape, copy.dtype, (Part(whole(copy.shape), copy),)), None


def source_of(held: HeldParts, key: str | None, copied: bool) -> ArraySource:
    """What is written of parts; a copy of them if they may be gone by then."""
    parts = tuple(Part(x.region, _copy(x.source)) for x in held.parts) if copied else held.parts
    for part in parts:
        if isinstance(part.source, jax.Array):
            part.source.copy_to_host_async()
    dtype = jnp.dtype(held.dtype).name
    return ArraySource(held.shape, dtype, parts, held.combine, held.count, key)


def _copy(source: Any) -> Any:
    return source.copy() if isinstance(source, jax.Array) else source


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def encoded(path: str, state: Any, arrays: dict[str, ArraySource], rank: int, later: bool) -> Any:
    """The state of an object as JSON, with its arrays beside."""
    if isinstance(state, jax.Array | np.ndarray | np.generic):
        name = f"{path}@{rank}" if rank else path
        arrays[name] = source_of(*held_of(state), later)
        return {_ARRAY: name}
    if isinstance(state, Mapping):
        if strange := [key for key in state if not isinstance(key, str) or key == _ARRAY]:
            raise InvalidTypeError(
                f"The keys of a state must be strings. Received: {shown(strange[0])} in {path!r}"
            )
        return {key: encoded(f"{path}/{key}", x, arrays, rank, later) for key, x in state.items()}
    if isinstance(state, list | tuple):
        return [encoded(f"{path}/{i}", x, arrays, rank, later) for i, x in enumerate(state)]
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise InvalidTypeError(
        "A state is made of dicts, lists, numbers, texts and arrays. "
        f"Received: {shown(state)} in {path!r}"
    )


# -- what is read ----------------------------------------------------------------------------------


class Restoring:
    """Values of a checkpoint for things: first all are read and checked, then they are given.

    Args:
        saved: the checkpoint.
        things: variables, arrays, numbers and objects with a state, by name.
        rank: the number of this worker.
    """

    def __init__(self, saved: Saved, things: Mapping[str, Any], rank: int = 0) -> None:
        self._saved, self._rank = saved, rank
        known = {**saved.entries, **saved.values}
        self._things = {name: thing for name, thing in things.items() if name in known}
        self._read: dict[str, dict[Region, Any]] = {}
        self._values: dict[str, Any] = {}
        self.missing = [name for name in things if name not in known]
        """Names of things that the checkpoint does not have."""
        of_states = {entry for n in saved.values for entry in saved.entries if _is_under(entry, n)}
        self.unused = [name for name in known if name not in things and name not in of_states]
        """Names in the checkpoint that no thing has."""

    @property
    def size(self) -> int:
        """The bytes that were read."""
        return sum(x.nbytes for regions in self._read.values() for x in regions.values())

    def read(self, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Read and check everything; no thing changes.

        `progress` is told how many bytes were read now, and how many there are in all.
        """
        problems = [
            text for name, thing in self._things.items() if (text := self._problem(name, thing))
        ]
        if problems:
            more = f", and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise InvalidArgumentError(
                f"The checkpoint does not fit the objects: {'; '.join(problems[:10])}{more}. "
                f"Received: {shown(str(self._saved.path))}"
            )
        entries = self._saved.entries
        sizes = {
            name: sum(region.size for region in _regions(thing, entries[name]))
            * jnp.dtype(entries[name].dtype).itemsize
            for name, thing in self._things.items()
            if name not in self._saved.values
        }
        for name, thing in self._things.items():
            if name in sizes:
                self._read_array(name, thing)
                progress(sizes[name], sum(sizes.values()))
            else:
                self._values[name] = self._decoded(self._mine(name))

    def _problem(self, name: str, thing: Any) -> str:
        """Why a saved value does not fit a thing; empty if it does."""
        entry = None if name in self._saved.values else self._saved.entries[name]
        takes_array = isinstance(thing, Variable | jax.Array | np.ndarray | np.generic)
        if entry is None or not takes_array:
            there = "a value" if entry is None else "an array"
            wanted = "an array" if takes_array else "a state" if is_stateful(thing) else "a number"
            fits = entry is None and not takes_array
            if fits and not is_stateful(thing) and not _is_number(self._saved.values[name]):
                return f"{name!r} is a number, and a state in the checkpoint"
            return "" if fits else f"{name!r} is {wanted}, and {there} in the checkpoint"
        shape, dtype, key = _described(thing)
        if (shape, dtype, key) == (entry.shape, entry.dtype, entry.key):
            return ""
        own = thing.name if isinstance(thing, Variable) else ""
        called = f" ({own.removesuffix(':0')})" if own and own != "Variable:0" else ""
        return (
            f"{name!r}{called} is {_text(shape, dtype, key)}, and "
            f"{_text(entry.shape, entry.dtype, entry.key)} in the checkpoint"
        )

    def _read_array(self, name: str, thing: Any) -> None:
        regions = _regions(thing, self._saved.entries[name])
        if not regions:
            self._saved.verify(name)
        self._read[name] = {region: self._saved.read(name, region) for region in regions}

    def _mine(self, name: str) -> Any:
        """The value of this worker."""
        found = self._saved.values[name]
        if "same" in found:
            return found["same"]
        if self._rank < len(found["workers"]):
            return found["workers"][self._rank]
        raise InvalidArgumentError(
            f"{name!r} has a state of its own on each of {len(found['workers'])} workers, and this is "
            f"worker {self._rank}. Received: {shown(str(self._saved.path))}"
        )

    def _decoded(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if set(value) == {_ARRAY}:
                name = value[_ARRAY]
                return _with_key(self._saved.read(name), self._saved.entries[name].key)
            return {key: self._decoded(x) for key, x in value.items()}
        return [self._decoded(x) for x in value] if isinstance(value, list) else value

    def give(self) -> dict[str, Any]:
        """Give variables and objects their values; returns those of arrays and numbers, by name."""
        others: dict[str, Any] = {}
        for name, thing in self._things.items():
            if is_stateful(thing):  # first, because it may refuse what it gets
                try:
                    thing.restore(self._values.pop(name))
                except Exception as error:
                    error.add_note(f"It is {name!r} of the checkpoint {self._saved.path}.")
                    raise
        for name, thing in self._things.items():
            if isinstance(thing, Variable):
                self._give_variable(name, thing)
            elif is_stateful(thing):
                continue
            elif name in self._read:
                others[name] = self._array(name, thing)
            else:
                others[name] = type(thing)(self._values.pop(name))
        return others

    def _reader(self, name: str) -> Callable[[Region], Any]:
        there = self._read.pop(name)
        return lambda region: there[region] if region in there else self._saved.read(name, region)

    def _give_variable(self, name: str, variable: Variable) -> None:
        entry = self._saved.entries[name]
        read = self._reader(name)
        if entry.key is None:
            take_parts(variable, read)
        else:
            data = read(whole(entry.shape)).reshape(entry.shape)
            variable.load_state(_with_key(data, entry.key))

    def _array(self, name: str, like: Any) -> Any:
        entry, read = self._saved.entries[name], self._reader(name)
        if isinstance(like, jax.Array) and entry.key is None and like.committed:
            return array_of(entry.shape, jnp.dtype(entry.dtype), like.sharding, read)
        value = read(whole(entry.shape)).reshape(entry.shape)
        if isinstance(like, jax.Array):
            return _with_key(jnp.asarray(value), entry.key)
        return value[()] if isinstance(like, np.generic) else np.array(value)


def _is_number(found: Mapping[str, Any]) -> bool:
    """Whether a saved value, the same on all workers, is a number."""
    return isinstance(found.get("same"), bool | int | float)


def _regions(thing: Any, entry: ArrayEntry) -> list[Region]:
    """What is to be read for a thing."""
    if isinstance(thing, Variable) and entry.key is None:
        return wanted_regions(thing)
    if isinstance(thing, jax.Array) and entry.key is None and thing.committed:
        return array_regions(entry.shape, thing.sharding)
    return [whole(entry.shape)]


def _described(thing: Any) -> tuple[tuple[int, ...], str, str | None]:
    """The shape and dtype in which an array or a variable would be written, and its kind of keys."""
    if not _is_key(thing.dtype):
        return tuple(int(n) for n in thing.shape), jnp.dtype(thing.dtype).name, None
    value = thing.state() if isinstance(thing, Variable) else thing
    data = jax.random.key_data(value)
    return tuple(data.shape), data.dtype.name, str(jax.random.key_impl(value))


def _text(shape: tuple[int, ...], dtype: str, key: str | None) -> str:
    return array_text(dtype, shape) + (f" of keys ({key})" if key else "")


def _with_key(data: Any, key: str | None) -> Any:
    return data if key is None else jax.random.wrap_key_data(jnp.asarray(data), impl=key)


def _is_under(name: str, path: str) -> bool:
    """Whether an array belongs to the state of an object."""
    return name.startswith(f"{path}/") or name.partition("@")[0] == path
