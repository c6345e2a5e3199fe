"""Components of different shapes in one array, which programs need.

The array is laid out over the devices like that of components of one shape: each replica has a part of
the largest size in every dimension, and its component is the beginning of that part. What else is in
it must not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from phalanx.runtime import compat

Shape = tuple[int, ...]


class CannotJoin(BaseException):
    """There is no one program for replicas of different shapes; says why, after "because they do, and".

    No error: the code that traces runs the replicas in another way. Do not catch it on its way there.
    """


@dataclass(frozen=True, slots=True)
class Padded:
    """Components of different shapes, as one array.

    Args:
        array: the parts with the components, joined along their leading dimension.
        shapes: the shapes of the components of all replicas.
    """

    array: jax.Array
    shapes: tuple[Shape, ...]

    def components(self) -> tuple[jax.Array, ...]:
        """The components; those of this process alone, unless the array is traced."""
        count = len(self.shapes)
        if compat.is_tracer(self.array):
            rows = self.array.shape[0] // count
            parts = [self.array[i * rows : (i + 1) * rows] for i in range(count)]
            return tuple(_beginning(x, s) for x, s in zip(parts, self.shapes, strict=True))
        span = compat.span_of(self.array)
        shapes = self.shapes
        if span is not None:
            here = jax.process_index()
            shapes = tuple(s for s, d in zip(shapes, span, strict=True) if d.process_index == here)
        return tuple(_taken_out(x, s) for x, s in zip(compat.pieces(self.array), shapes, strict=True))


def room_for(shapes: Sequence[Shape]) -> Shape | None:
    """The largest size in every dimension; None if arrays of these shapes cannot be padded to one."""
    if not all(shapes) or len({len(s) for s in shapes}) > 1:
        return None
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def whole_shape(room: Shape, count: int) -> Shape:
    """The shape of the array that has room for the components of all replicas."""
    return (room[0] * count, *room[1:])


def pad(
    values: Sequence[Any], sharding: NamedSharding | None, devices: Sequence[jax.Device]
) -> Padded | None:
    """Components of different shapes as one array; None if they cannot be.

    Args:
        values: the components of all replicas.
        sharding: how the array is to lie on the devices; None if the components are traced.
        devices: the device of each component, unless they are traced.
    """
    if not all(isinstance(x, jax.Array) for x in values):
        return None
    shapes = tuple(tuple(x.shape) for x in values)
    room = room_for(shapes)
    if room is None or all(s == room for s in shapes) or compat.is_key_array(values[0]):
        return None
    if any(x.dtype != values[0].dtype for x in values):
        return None
    if sharding is None:
        return Padded(jnp.concatenate([_filled(x, room) for x in values]), shapes)
    with jax.ensure_compile_time_eval():  # they outlive the program that may ask first
        pieces = [_on_device(x, room, d) for x, d in zip(values, devices, strict=True)]
    return Padded(compat.assemble(whole_shape(room, len(pieces)), sharding, pieces), shapes)


def _filled(x: jax.Array, room: Shape) -> jax.Array:
    return jnp.pad(x, [(0, m - n) for n, m in zip(x.shape, room, strict=True)])


def _beginning(x: Any, shape: Shape) -> Any:
    return x[tuple(slice(n) for n in shape)]


# On the host nothing has to be compiled for each shape and device.


def _on_device(x: jax.Array, room: Shape, device: jax.Device) -> jax.Array:
    if x.shape == room:
        return x
    if not _is_on_host(x, device):
        with jax.default_device(device):
            return _filled(x, room)
    padded = np.zeros(room, x.dtype)
    _beginning(padded, x.shape)[...] = np.asarray(x)
    return compat.put_on(padded, device)


def _taken_out(part: jax.Array, shape: Shape) -> jax.Array:
    if part.shape == shape:
        return compat.uncommitted(part)
    (device,) = part.devices()
    if not _is_on_host(part, device):
        with jax.ensure_compile_time_eval():
            return compat.uncommitted(_beginning(part, shape))
    return compat.put_on(np.array(_beginning(np.asarray(part), shape)), device)


def _is_on_host(x: jax.Array, device: jax.Device) -> bool:
    readable = not compat.is_key_array(x) and compat.has_whole_bytes(x.dtype)
    return device.platform == "cpu" and readable
