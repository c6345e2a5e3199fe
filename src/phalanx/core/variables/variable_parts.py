"""The parts of variables that this process holds, for checkpoints: what to write, and how to read it.

No function here waits for other processes. A variable whose parts are on several workers is written by
all of them, each its own parts, and each worker reads the parts that it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.core.options import VariableAggregation
from phalanx.core.regions import Flat, Region, region_of, whole
from phalanx.core.values import PerReplica
from phalanx.core.variables.distributed_variables import MirroredVariable, SyncOnReadVariable
from phalanx.core.variables.sliced_variables import SlicedVariable
from phalanx.core.variables.variable import Variable
from phalanx.runtime.placement import place

__all__ = [
    "HeldParts",
    "Part",
    "array_of",
    "array_parts",
    "array_regions",
    "held_parts",
    "take_parts",
    "wanted_regions",
]

Array = np.ndarray[Any, Any]
Read = Callable[[Region], Array]
"""Reads a region of a saved value, in one dimension if it is flat."""


@dataclass(frozen=True)
class Part:
    """A part of a value: its region, and an array or a function that gives one.

    The array may have more elements than the region: padding, which does not count. What is elsewhere
    is in another process, and `source` asks it for the value of that moment.
    """

    region: Region
    source: Any
    is_elsewhere: bool = False

    def now(self) -> Part:
        """The part with the value of this moment, also if that is elsewhere."""
        return Part(self.region, self.source()) if self.is_elsewhere else self

    def array(self) -> Array:
        """The elements, in one dimension. Waits for the device that has them."""
        given = self.source() if callable(self.source) else self.source
        flat: Array = np.ascontiguousarray(np.asarray(given)).reshape(-1)
        return flat if flat.size == self.region.size else flat[: self.region.size]


@dataclass(frozen=True)
class HeldParts:
    """What this process would write of a variable.

    Args:
        shape: of the whole value.
        dtype: of the whole value.
        parts: what this process has to write; other processes write the rest.
        is_spread: whether other workers have parts that this one does not have.
        combine: what makes the value of parts with the same region: "place" if there are none, or
            "sum", or "mean", which is the sum divided by `count`.
        count: see `combine`.
    """

    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[Part, ...]
    is_spread: bool = False
    combine: str = "place"
    count: int = 1


@functools.singledispatch
def held_parts(variable: Variable) -> HeldParts:
    """The parts of a variable that this process holds, at this moment of the step around."""
    shape, dtype = tuple(int(n) for n in variable.shape), variable.dtype
    shards = getattr(variable, "parts", None)
    if shards is None:
        return _one(variable.state())
    row = int(np.prod(shape[1:]))
    parts = [
        Part(Flat(first * row, first * row + int(np.prod(shard.shape))), shard.state, is_elsewhere=True)
        for shard, first in shards
    ]
    return HeldParts(shape, dtype, tuple(parts))


def _one(state: jax.Array) -> HeldParts:
    return HeldParts(tuple(state.shape), state.dtype, (Part(whole(tuple(state.shape)), state),))


@held_parts.register
def _(variable: MirroredVariable) -> HeldParts:
    return _one(variable._held().component(0))


@held_parts.register
def _(variable: SlicedVariable) -> HeldParts:
    held, slicing = variable._held(), variable.slicing
    if not isinstance(held, PerReplica):
        return _one(variable.whole_of(held))
    assert variable._strategy is not None
    first = variable._strategy.extended._first_replica
    parts = []
    for number, piece in enumerate(held.values, start=first):
        region = _slice_region(slicing, number)
        if number < slicing.parts and region.size > 0:  # other replicas have the same slices again
            parts.append(Part(region, piece))
    is_spread = len(held.values) < held.count
    return HeldParts(tuple(slicing.shape), variable.dtype, tuple(parts), is_spread)


def _slice_region(slicing: Any, number: int) -> Flat:
    start = min(number * slicing.length, slicing.size)
    return Flat(start, min(start + slicing.length, slicing.size))


@held_parts.register
def _(variable: SyncOnReadVariable) -> HeldParts:
    held, kind = variable._held(), variable.aggregation
    shape = tuple(variable.shape)
    if len(held.values) == held.count or kind is VariableAggregation.NONE:
        return _one(variable.state())  # or the error that says why there is no value
    if kind is VariableAggregation.ONLY_FIRST_REPLICA:
        assert variable._strategy is not None
        is_here = variable._strategy.extended._first_replica == 0
        parts = (Part(whole(shape), held.values[0]),) if is_here else ()
        return HeldParts(shape, variable.dtype, parts, True)

    def local() -> Array:
        total: Array = np.sum([np.asarray(x) for x in held.values], axis=0, dtype=variable.dtype)
        return total

    combine = "sum" if kind is VariableAggregation.SUM else "mean"
    part = Part(whole(shape), local)
    return HeldParts(shape, variable.dtype, (part,), True, combine, held.count)


# -- back ----------------------------------------------------------------------------------------


@functools.singledispatch
def wanted_regions(variable: Variable) -> list[Region]:
    """What `take_parts` will read; nothing if it reads shards of other processes one at a time."""
    return [] if hasattr(variable, "parts") else [whole(tuple(variable.shape))]


@wanted_regions.register
def _(variable: SlicedVariable) -> list[Region]:
    found = {_slice_region(variable.slicing, number) for number in _slice_numbers(variable)}
    return [region for region in found if region.size > 0]


@functools.singledispatch
def take_parts(variable: Variable, read: Read) -> None:
    """Give a variable a saved value, of which it reads what this process needs.

    All workers must have the same saved value, and take it together.
    """
    shards = getattr(variable, "parts", None)
    if shards is None:
        variable.load_state(read(whole(tuple(variable.shape))).reshape(variable.shape))
        return
    row = int(np.prod(variable.shape[1:]))
    with ctx.push(ctx.default_mode()):
        for shard, first in shards:
            region = Flat(first * row, first * row + int(np.prod(shard.shape)))
            shard.assign(read(region).reshape(shard.shape))


@take_parts.register
def _(variable: MirroredVariable, read: Read) -> None:
    with ctx.push(ctx.default_mode()):
        variable.replace(jnp.asarray(read(whole(tuple(variable.shape))).reshape(variable.shape)))


@take_parts.register
def _(variable: SlicedVariable, read: Read) -> None:
    assert variable._strategy is not None
    slicing = variable.slicing
    pieces = []
    for number, device in zip(_slice_numbers(variable), variable._devices, strict=True):
        piece = np.zeros(slicing.length, variable.dtype)
        region = _slice_region(slicing, number)
        if region.size > 0:
            piece[: region.size] = read(region)
        pieces.append(place(jnp.asarray(piece), device))
    variable._set(PerReplica(pieces, variable._strategy.extended._span))


def _slice_numbers(variable: SlicedVariable) -> list[int]:
    """Which slices the devices of this process hold."""
    assert variable._strategy is not None
    first = variable._strategy.extended._first_replica
    return [(first + i) % variable.slicing.parts for i in range(len(variable._devices))]


# -- arrays over devices -------------------------------------------------------------------------


def array_parts(array: jax.Array) -> HeldParts:
    """The parts of an array over devices that this process is to write."""
    shape = tuple(array.shape)
    parts = [
        Part(_box(shard.index, shape), shard.data)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    return HeldParts(shape, array.dtype, tuple(parts), not array.is_fully_addressable)


def array_regions(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> list[Region]:
    """What `array_of` will read."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return list({_box(index or (), shape) for index in indices})


def array_of(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding, read: Read
) -> jax.Array:
    """An array over devices, of which this process reads the parts of its own."""

    def piece(index: Any) -> Array:
        ranges = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        return read(region_of(ranges, shape)).reshape([stop - start for start, stop in ranges])

    return jax.make_array_from_callback(shape, sharding, piece, dtype=dtype)


def _box(index: Any, shape: tuple[int, ...]) -> Region:
    return region_of([s.indices(n)[:2] for s, n in zip(index, shape, strict=True)], shape)
