"""From the host to the replicas: what the rows of a step become on the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from numpy.typing import NDArray

from phalanx.core.padding import Padded, room_for, whole_shape
from phalanx.core.values import PerReplica, ReplicaLayout
from phalanx.data.distribute.steps import RowsOf, Shape, Step
from phalanx.data.plan.elements import Ragged
from phalanx.errors import InvalidTypeError
from phalanx.runtime import compat
from phalanx.runtime.placement import Span, stacked_over

ALIGNMENT = 64
"""Where memory must begin so that CPU devices use it without copying."""

_TIMES = "mM"
_STRINGS = "OUS"


class DeviceTransfer:
    """Brings steps to the replicas' devices.

    Everything is copied once, into memory of its own: sources and functions of the user may
    write into their arrays again. CPU devices then use that memory as it is.

    Args:
        devices: the device of each local replica.
        wraps: whether leaves become `PerReplica` values; if not, there is one replica only.
        to_device: whether to move arrays to the devices; if not, they stay NumPy arrays.
        span: the devices of all replicas, if other workers have some of them.
        place: puts a leaf on devices, given its number, if not each on its replica's.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        wraps: bool,
        to_device: bool,
        span: Span | None = None,
        place: Callable[[int, Any], Any] | None = None,
    ) -> None:
        self._devices = tuple(devices)
        self._wraps, self._to_device = wraps, to_device
        self._span = span
        self._place_leaf = place
        self._everywhere = span or self._devices
        self._sharding = stacked_over(self._everywhere)

    def element(self, step: Step, shapes: Sequence[Sequence[Shape]] | None = None) -> Any:
        """The element that a step is for the strategy.

        Args:
            step: the rows of this worker's replicas.
            shapes: of each leaf, the shapes on the replicas of all workers, if they make one array.
        """
        known = [None] * len(step.parts) if shapes is None else shapes
        pairs = zip(step.parts, known, strict=True)
        if self._place_leaf is None:
            leaves = [self.leaf(parts, found) for parts, found in pairs]
        else:
            leaves = [self._whole(i, parts[0]) for i, (parts, _) in enumerate(pairs)]
        return tree_util.tree_unflatten(step.structure, leaves)

    def leaf(self, parts: Sequence[Any], shapes: Sequence[Shape] | None = None) -> Any:
        """One leaf of an element, from the part of each replica, and the shapes on all of them."""
        first = parts[0]
        if isinstance(first, Ragged | str | bytes):
            return self._on_host(parts)
        if first.dtype.kind in _STRINGS:
            return self._on_host([part.astype(object) for part in parts])
        if not self._to_device:
            return self._on_host([owned([part], part.shape)[0] for part in parts])
        shapes = [part.shape for part in parts] if shapes is None else shapes
        if any(shape != shapes[0] for shape in shapes):
            return self._uneven(parts, shapes)
        if not self._wraps:
            return self._place(first, self._devices[0])
        shape = first.shape or (1,)
        pieces = owned(parts, shape)
        whole = (shape[0] * len(self._everywhere), *shape[1:])
        array = compat.put_pieces(whole, self._sharding, pieces, self._devices)
        return PerReplica.from_global(array, ReplicaLayout(len(self._everywhere), not first.shape))

    def _whole(self, number: int, rows: Any) -> Any:
        """One leaf of an element that is laid out over devices as a whole."""
        if not self._to_device or isinstance(rows, Ragged | str | bytes) or rows.dtype.kind in _STRINGS:
            return self.leaf([rows])
        assert self._place_leaf is not None
        return self._place_leaf(number, owned([rows], rows.shape)[0])

    def _uneven(self, parts: Sequence[Any], shapes: Sequence[Shape]) -> PerReplica:
        """Parts of different shapes, each at the beginning of memory that has room for all."""
        room = room_for(shapes)
        if room is None or len(shapes) != len(self._everywhere):
            placed = [self._place(x, d) for x, d in zip(parts, self._devices, strict=True)]
            return PerReplica(placed, self._span, joins=False)
        whole = whole_shape(room, len(shapes))
        array = compat.put_pieces(whole, self._sharding, owned(parts, room), self._devices)
        return PerReplica.from_padded(Padded(array, tuple(shapes)))

    def _place(self, part: Any, device: jax.Device) -> jax.Array:
        return compat.put_on(owned([part], part.shape)[0], device)

    def _on_host(self, parts: Sequence[Any]) -> Any:
        return PerReplica(parts, self._span) if self._wraps else parts[0]


def narrow(dtype: Any) -> np.dtype[Any]:
    """The dtype that JAX has for a NumPy array: 64-bit numbers are narrowed, unless x64 is enabled."""
    dtype = np.dtype(dtype)
    if dtype.kind in _STRINGS:
        return np.dtype(object)
    if dtype.kind in _TIMES:
        raise InvalidTypeError(
            "Devices have no times. Make numbers of them in a map function. "
            f"Received: an array of dtype {dtype}"
        )
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def owned(parts: Sequence[Any], shape: tuple[int, ...]) -> list[NDArray[Any]]:
    """Copies of arrays, each at the beginning of an aligned part of one new block.

    Each part has the given shape. Smaller arrays leave zeros at its end; scalars may be of shape (1,).
    """
    dtype = narrow(parts[0].dtype)
    size = math.prod(shape) * dtype.itemsize
    stride = -(-size // ALIGNMENT) * ALIGNMENT
    block = np.empty(stride * len(parts) + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    copies = []
    for i, part in enumerate(parts):
        whole: NDArray[Any] = np.ndarray(shape, dtype, block, start + i * stride)
        copy = whole
        if part.shape and part.shape != shape:
            whole.fill(0)
            copy = whole[tuple(slice(n) for n in part.shape)]
        if isinstance(part, RowsOf) and copy.flags.c_contiguous:
            part.copy_to(copy)
        else:
            rows = np.asarray(part)
            np.copyto(copy, rows if rows.shape else rows.reshape(shape), casting="unsafe")
        copies.append(whole)
    return copies
