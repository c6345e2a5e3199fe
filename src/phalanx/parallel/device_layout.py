"""`Layout`: how a tensor is cut over a matrix of devices, as in MindSpore."""

from __future__ import annotations

import copy
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = ["Layout"]

_VIRTUAL = "interleaved_parallel"
_WHOLE = "None"


class Layout:
    """A matrix of devices with named axes; called with one axis per dim, it says how a tensor is cut.

    Args:
        device_matrix: the sizes of the axes.
        alias_name: their names. "interleaved_parallel", which must be the last, cuts into copies on one
            device.
        rank_list: the devices, in the order of the matrix; None for the first ones.

    Examples:
        >>> layout = Layout((2, 4), ("data", "model"))
        >>> layout("data", "None").to_dict()["tensor_map"]
        (1, -1)
        >>> layout("None", ("data", "model")).partition_spec
        P(None, ('data', 'model'))
    """

    def __init__(
        self,
        device_matrix: tuple[int, ...],
        alias_name: tuple[str, ...],
        rank_list: list[int] | None = None,
    ) -> None:
        _check_matrix(device_matrix)
        _check_names(alias_name)
        if len(device_matrix) != len(alias_name):
            raise InvalidValueError("device_matrix length should be equal to alias_name length")
        self._matrix, self._names = device_matrix, alias_name
        self._virtual = _VIRTUAL in alias_name
        self._ranks = self._checked_ranks(rank_list)
        self._axes: tuple[Any, ...] | None = None

    def __call__(self, *axes: str | tuple[str, ...]) -> Layout:
        """A copy that says for each dim of a tensor which axes cut it: a name, several, or "None"."""
        seen: list[str] = []
        for axis in axes:
            for name in axis if isinstance(axis, tuple) else (axis,):
                if name == _WHOLE:
                    continue
                if name not in self._names:
                    raise InvalidValueError(f"The axis {name} is not found in {self._names}")
                if name in seen:
                    raise InvalidValueError(
                        f"The axis {name} has been set more than one in {self._names}"
                    )
                seen.append(name)
        result = copy.copy(self)
        result._axes = axes
        return result

    @property
    def axes(self) -> tuple[Any, ...]:
        """For each dim of the tensor, the axes that cut it."""
        if self._axes is None:
            raise InvalidValueError("The tensor_map of layout is None")
        return self._axes

    def to_dict(self) -> dict[str, Any]:
        """The layout in MindSpore's form; `tensor_map` counts axes from the right."""
        axes = self.axes
        return {
            "device_matrix": self._matrix,
            "tensor_map": tuple(self._mapped(axis) for axis in axes),
            "interleaved_parallel": self._virtual,
            "alias_name": self._names,
            "rank_list": list(self._ranks),
        }

    @property
    def partition_spec(self) -> PartitionSpec:
        """The layout in JAX's form. Copies on one device are not in it: XLA overlaps by itself."""
        return PartitionSpec(*(_as_spec(axis) for axis in self.axes))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Into how many parts each dim is cut, on all devices."""
        sizes = self.axis_sizes
        return tuple(
            math.prod(sizes.get(n, 1) for n in (a if isinstance(a, tuple) else (a,))) for a in self.axes
        )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The number of devices along each axis."""
        pairs = zip(self._names, self._matrix, strict=True)
        return {name: size for name, size in pairs if name != _VIRTUAL}

    @property
    def ranks(self) -> list[int]:
        """The numbers of the devices, in the order of the matrix."""
        return list(self._ranks)

    def mesh(self, devices: tuple[jax.Device, ...] | None = None) -> Mesh:
        """The devices as a mesh of JAX."""
        available = tuple(jax.devices()) if devices is None else devices
        if len(self._ranks) > len(available) or max(self._ranks, default=0) >= len(available):
            raise InvalidValueError(
                f"The layout needs devices up to rank {max(self._ranks, default=0)}, and there are "
                f"{len(available)}. Received: {self!r}"
            )
        chosen = np.array([available[rank] for rank in self._ranks], dtype=object)
        sizes = self.axis_sizes
        return Mesh(
            chosen.reshape(tuple(sizes.values())),
            tuple(sizes),
            axis_types=(AxisType.Auto,) * len(sizes),
        )

    def sharding(self, devices: tuple[jax.Device, ...] | None = None) -> NamedSharding:
        """The layout on devices."""
        return NamedSharding(self.mesh(devices), self.partition_spec)

    def __repr__(self) -> str:
        called = "" if self._axes is None else f"({', '.join(map(repr, self._axes))})"
        return f"Layout({self._matrix}, {self._names}){called}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self._matrix, self._names, tuple(self._ranks), self._axes

    def _mapped(self, axis: Any) -> Any:
        if isinstance(axis, tuple):
            return tuple(self._mapped(name) for name in axis)
        return -1 if axis == _WHOLE else len(self._names) - 1 - self._names.index(axis)

    def _checked_ranks(self, ranks: list[int] | None) -> list[int]:
        count = math.prod(self.axis_sizes.values())
        if ranks is None:
            return list(range(count))
        if not isinstance(ranks, list):
            raise InvalidTypeError(f"The rank_list should be a list, but got {type(ranks).__name__}.")
        for rank in ranks:
            if not isinstance(rank, int):
                raise InvalidTypeError(
                    f"The element of rank_list should be int, but got {type(rank).__name__}."
                )
        if len(ranks) != count:
            raise InvalidValueError(
                "The length of rank_list should be equal to the product of device_matrix, "
                f"but got {len(ranks)} and {count}."
            )
        return list(ranks)


def _check_matrix(matrix: Any) -> None:
    if not isinstance(matrix, tuple):
        raise InvalidTypeError(f"device_matrix must be tuple type, but got:{type(matrix)}")
    for size in matrix:
        if not isinstance(size, int):
            raise InvalidTypeError(
                f"The element of device_matrix must be int type, but got:{type(size)}"
            )
        if size < 1:
            raise InvalidValueError(
                f"The element of device_matrix must be at least 1. Received: {shown(matrix)}"
            )


def _check_names(names: Any) -> None:
    if not isinstance(names, tuple):
        raise InvalidTypeError(f"alias_name must be tuple type, but got:{type(names)}")
    for name in names:
        if not isinstance(name, str):
            raise InvalidTypeError(f"The element of alias_name must be str type, but got:{type(name)}")
        if not name:
            raise InvalidValueError("The element of alias_name can not be empty.")
        if name == _WHOLE:
            raise InvalidValueError(
                "The element of alias_name can not set 'None', because 'None' means no sharding."
            )
    if len(set(names)) != len(names):
        raise InvalidValueError(f"Each element of alias_name {names} should be different")
    if _VIRTUAL in names[:-1]:
        raise InvalidValueError(
            f"When alias_name {names} contains keyword 'interleaved_parallel', it should be at the "
            "last dim of alias_name, which means the virtual sharding."
        )


def _as_spec(axis: Any) -> Any:
    if isinstance(axis, tuple):
        kept = tuple(name for name in axis if name not in (_WHOLE, _VIRTUAL))
        return kept or None
    return None if axis in (_WHOLE, _VIRTUAL) else axis
