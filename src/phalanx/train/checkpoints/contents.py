"""What a checkpoint holds of objects: arrays and small values by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.regions import whole
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_parts import (
    HeldParts,
    Part,
    array_parts,
    held_parts,
)
from phalanx.data.distribute.distributed_dataset import DistributedIterator
from phalanx.data.run.iterator import Iterator as DatasetIterator
from phalanx.errors import InvalidArgumentError, InvalidTypeError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.train.checkpoints.files import ArraySource, Saved
from phalanx.train.checkpoints.trackables import check_array, is_stateful, same_name

__all__ = [
    "ARRAY",
    "Contents",
    "contents_of",
    "encoded",
    "held_of",
    "is_iterator",
    "is_key",
    "source_of",
    "spans_workers",
    "whole_contents",
]

ARRAY = "$array"
"""The name of an array in the state of an object."""


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
            source = source_of(held, key, later and not isinstance(thing, Variable))
            _add(contents.arrays, name, source)
            if held.is_spread:
                contents.spread.add(name)
        elif is_stateful(thing):
            state = (positions or {}).get(name)
            state = thing.state() if state is None else state
            before = set(contents.arrays)
            contents.values[name] = encoded(name, state, contents.arrays, rank, later)
            if not is_iterator(thing) or state.get("workers", 1) > 1:
                contents.spread |= {name, *(contents.arrays.keys() - before)}
        else:
            contents.values[name] = thing
    return contents


def _add(arrays: dict[str, ArraySource], name: str, source: ArraySource) -> None:
    if name in arrays:
        raise same_name(name)
    arrays[name] = source


def held_of(thing: Any) -> tuple[HeldParts, str | None]:
    """The parts of an array or a variable, and which random keys they are."""
    if isinstance(thing, Variable) and not is_key(thing.dtype):
        return held_parts(thing), None
    value = thing.state() if isinstance(thing, Variable) else thing
    if compat.is_key_array(value):
        data = jax.random.key_data(value)
        return array_parts(data), str(jax.random.key_impl(value))
    if isinstance(value, jax.Array):
        return array_parts(value), None
    copy = np.array(value, np.asarray(value).dtype.newbyteorder("="))
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


def is_key(dtype: Any) -> bool:
    """Whether arrays of a dtype are random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def encoded(path: str, state: Any, arrays: dict[str, ArraySource], rank: int, later: bool) -> Any:
    """The state of an object as JSON, with its arrays beside."""
    if isinstance(state, str):  # also one of NumPy
        return str(state)
    if isinstance(state, jax.Array | np.ndarray | np.generic):
        check_array(path, state)
        name = f"{path}@{rank}" if rank else path
        _add(arrays, name, source_of(*held_of(state), later))
        return {ARRAY: name}
    if isinstance(state, Mapping):
        if strange := [key for key in state if not isinstance(key, str) or key == ARRAY]:
            raise InvalidTypeError(
                f"The keys of a state must be strings. Received: {shown(strange[0])} in {path!r}"
            )
        return {key: encoded(f"{path}/{key}", x, arrays, rank, later) for key, x in state.items()}
    if isinstance(state, list | tuple):
        return [encoded(f"{path}/{i}", x, arrays, rank, later) for i, x in enumerate(state)]
    if state is None or isinstance(state, bool | int | float):
        return state
    raise InvalidTypeError(
        "A state is made of dicts, lists, numbers, texts and arrays. "
        f"Received: {shown(state)} in {path!r}"
    )
