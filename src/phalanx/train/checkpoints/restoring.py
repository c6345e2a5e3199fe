"""What a checkpoint gives back to objects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.regions import Region, whole
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_parts import (
    array_of,
    array_regions,
    take_parts,
    wanted_regions,
)
from phalanx.errors import InvalidArgumentError
from phalanx.runtime.formatting import array_text, shown
from phalanx.train.checkpoints import scalars
from phalanx.train.checkpoints.contents import ARRAY, is_key
from phalanx.train.checkpoints.files import ArrayEntry, Saved
from phalanx.train.checkpoints.trackables import is_stateful

__all__ = ["Restoring"]

_Description = tuple[tuple[int, ...], str, str | None]
"""The shape and dtype of an array, and which random keys it has."""


class Restoring:
    """Values of a checkpoint for things: first all are read and checked, then they are given.

    Arrays and variables take what has their shape and dtype. For numbers see `scalars`.

    Args:
        saved: the checkpoint.
        things: variables, arrays, numbers and objects with a state, by name.
        rank: the number of this worker.
        other_names: says by which other names a thing may have been saved.
    """

    def __init__(
        self,
        saved: Saved,
        things: Mapping[str, Any],
        rank: int = 0,
        other_names: Callable[[str], Iterable[str]] = lambda name: (),
    ) -> None:
        self._saved, self._rank = saved, rank
        known = {**saved.entries, **saved.values}
        self._things: dict[str, Any] = {}  # by the names in the checkpoint
        self._names: dict[str, str] = {}  # their own, by those
        self._read: dict[str, dict[Region, Any]] = {}
        self._values: dict[str, Any] = {}
        self.missing: list[str] = []
        """Names of things that the checkpoint does not have."""
        for name, thing in things.items():
            names = [name] if name in known else [x for x in other_names(name) if x in known]
            if names:
                self._things[names[0]], self._names[names[0]] = thing, name
            else:
                self.missing.append(name)
        states = {name for name in saved.values if self._number(name) is None}
        others = {entry for entry in saved.entries if states.isdisjoint(_above(entry))}
        free = [name for name in known if name not in self._things]
        self.unused = [name for name in free if name in others or name in saved.values]
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
        sizes = {
            name: sum(region.size for region in _regions(thing, entry))
            * jnp.dtype(entry.dtype).itemsize
            for name, thing in self._things.items()
            if (entry := self._entry(name)) is not None
        }
        total = sum(sizes.values())
        for name, thing in self._things.items():
            if name in sizes:
                self._read_array(name, thing)
                progress(sizes[name], total)
            else:
                self._values[name] = self._decoded(self._mine(name))

    def _entry(self, name: str) -> ArrayEntry | None:
        """What a saved array is; None if it is a small value, which may have arrays of its name."""
        return None if name in self._saved.values else self._saved.entries[name]

    def _number(self, name: str) -> scalars.Number | None:
        """A saved number; None if it is something else."""
        value = self._saved.values.get(name, {}).get("same")
        return value if scalars.is_number(value) else None

    def _problem(self, name: str, thing: Any) -> str:
        """Why a saved value does not fit a thing; empty if it does."""
        entry, number = self._entry(name), self._number(name)
        if is_stateful(thing):
            return "" if entry is None else f"{name!r} is a state, and an array in the checkpoint"
        is_number = scalars.is_number(thing)
        if entry is None and number is None:
            what = "a number" if is_number else "an array"
            return f"{name!r} is {what}, and a state in the checkpoint"
        if is_number:
            own, fits = f"the number {thing}", _fits_number(thing, entry, number)
        else:
            description = _described(thing)
            own, fits = _text(*description), _fits_array(description, entry, number)
        called = thing.name.removesuffix(":0") if isinstance(thing, Variable) else ""
        called = f" ({called})" if called not in ("", "Variable") else ""
        there = f"the number {number}" if entry is None else _text(entry.shape, entry.dtype, entry.key)
        return "" if fits else f"{name!r}{called} is {own}, and {there} in the checkpoint"

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
            if set(value) == {ARRAY}:
                name = value[ARRAY]
                return _with_key(self._saved.read(name), self._saved.entries[name].key)
            return {key: self._decoded(x) for key, x in value.items()}
        return [self._decoded(x) for x in value] if isinstance(value, list) else value

    def give(self) -> dict[str, Any]:
        """Give variables and objects their values; returns those of arrays and numbers, by name."""
        others: dict[str, Any] = {}
        self._give_states()  # first, because objects may refuse what they get
        for name, thing in self._things.items():
            if isinstance(thing, Variable):
                self._give_variable(name, thing)
            elif is_stateful(thing):
                continue
            elif scalars.is_number(thing):
                others[self._names[name]] = scalars.like(thing, self._taken_number(name))
            else:
                others[self._names[name]] = self._array(name, thing)
        return others

    def _give_states(self) -> None:
        """Give objects their states; if one refuses, it and those before it get back what they had."""
        before: list[tuple[Any, Any]] = []
        for name, thing in self._things.items():
            if not is_stateful(thing):
                continue
            with contextlib.suppress(Exception):  # what has no state yet cannot go back to it
                before.append((thing, _copied(thing.state())))
            try:
                thing.restore(self._values.pop(name))
            except Exception as error:
                error.add_note(f"It is {name!r} of the checkpoint {self._saved.path}.")
                for changed, state in reversed(before):
                    try:
                        changed.restore(state)
                    except Exception as other:  # noqa: BLE001 - the first error is raised
                        error.add_note(f"{shown(changed)} did not take its own state back: {other}")
                raise

    def _reader(self, name: str, entry: ArrayEntry) -> Callable[[Region], Any]:
        if name in self._values:
            number = scalars.as_array(self._values.pop(name), jnp.dtype(entry.dtype))
            assert number is not None  # it was checked
            return lambda region: number.reshape(-1)
        there = self._read.pop(name)
        return lambda region: there[region] if region in there else self._saved.read(name, region)

    def _entry_for(self, name: str, thing: Any) -> ArrayEntry:
        """A saved array, or what a saved number is in the place of an array."""
        return self._entry(name) or ArrayEntry((), jnp.dtype(thing.dtype).name)

    def _give_variable(self, name: str, variable: Variable) -> None:
        entry = self._entry_for(name, variable)
        read = self._reader(name, entry)
        if entry.key is None:
            take_parts(variable, read)
        else:
            data = read(whole(entry.shape)).reshape(entry.shape)
            variable.load_state(_with_key(data, entry.key))

    def _array(self, name: str, like: Any) -> Any:
        entry = self._entry_for(name, like)
        read = self._reader(name, entry)
        if isinstance(like, jax.Array) and entry.key is None and like.committed:
            return array_of(entry.shape, jnp.dtype(entry.dtype), like.sharding, read)
        value = read(whole(entry.shape)).reshape(entry.shape)
        if isinstance(like, jax.Array):
            return _with_key(jnp.asarray(value), entry.key)
        return value[()] if isinstance(like, np.generic) else np.array(value, like.dtype)

    def _taken_number(self, name: str) -> scalars.Number:
        """A saved number, or the only element of an array."""
        if name in self._values:
            return cast("scalars.Number", self._values.pop(name))
        (array,) = self._read.pop(name).values()
        return cast("scalars.Number", array.item())


def _fits_number(present: scalars.Number, entry: ArrayEntry | None, number: Any) -> bool:
    """Whether a saved array or number may take the place of a number."""
    if entry is None:
        return scalars.fits(present, number)
    same = scalars.kind_of(jnp.dtype(entry.dtype)) == scalars.kind_of(present)
    return same and entry.shape == () and entry.key is None


def _fits_array(about: _Description, entry: ArrayEntry | None, number: Any) -> bool:
    """Whether a saved array or number may take the place of an array or a variable."""
    shape, dtype, key = about
    if entry is not None:
        return about == (entry.shape, entry.dtype, entry.key)
    return shape == () and key is None and scalars.as_array(number, jnp.dtype(dtype)) is not None


def _regions(thing: Any, entry: ArrayEntry) -> list[Region]:
    """What is to be read for a thing."""
    if isinstance(thing, Variable) and entry.key is None:
        return wanted_regions(thing)
    if isinstance(thing, jax.Array) and entry.key is None and thing.committed:
        return array_regions(entry.shape, thing.sharding)
    return [whole(entry.shape)]


def _described(thing: Any) -> _Description:
    """The shape and dtype in which an array or a variable would be written, and its kind of keys."""
    if not is_key(thing.dtype):
        return tuple(int(n) for n in thing.shape), jnp.dtype(thing.dtype).name, None
    value = thing.state() if isinstance(thing, Variable) else thing
    data = jax.random.key_data(value)
    return tuple(data.shape), data.dtype.name, str(jax.random.key_impl(value))


def _text(shape: tuple[int, ...], dtype: str, key: str | None) -> str:
    return array_text(dtype, shape) + (f" of keys ({key})" if key else "")


def _with_key(data: Any, key: str | None) -> Any:
    return data if key is None else jax.random.wrap_key_data(jnp.asarray(data), impl=key)


def _copied(state: Any) -> Any:
    """A state whose NumPy arrays do not change with the object."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, state)


def _above(name: str) -> set[str]:
    """The names of objects to whose state an array may belong."""
    parts = name.split("/")
    ways = {"/".join(parts[:i]) for i in range(1, len(parts))}
    return {*ways, name.partition("@")[0]}
