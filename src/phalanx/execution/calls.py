"""Calls: the arguments of a compiled function, taken apart into arrays and constants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.core import compat, pulls
from phalanx.core import context as ctx
from phalanx.core.padding import Padded, Shape
from phalanx.core.values import Layout, PerReplica
from phalanx.core.variables import Variable
from phalanx.execution.lifetimes import Identity, Whole, identity
from phalanx.execution.running import deleted


@dataclass(slots=True)
class Call:
    """The arguments of one call: arrays, and everything that shapes the program."""

    key: Any
    treedef: Any
    constants: tuple[_Constant | None, ...]  # None where the argument is an array
    arrays: list[Any]
    is_uneven: bool = False
    """Whether replicas hold arrays of different shapes."""

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Take arguments apart; None if replicas hold what no program can take."""
        flat, treedef = jax.tree_util.tree_flatten((args, kwargs), is_leaf=_is_ragged)
        arrays: list[Any] = []
        constants: list[_Constant | None] = []
        parts: list[Any] = []
        is_uneven = False
        for x in flat:
            if _is_array(x):
                if isinstance(x, jax.Array) and x.is_deleted():
                    raise deleted("An argument of a compiled function", x)
                arrays.append(compat.movable(x))
                constants.append(None)
                parts.append(_array_key(x))
            elif isinstance(x, PerReplica) and x.padded is None:
                numbers = x.of_arrays()
                if numbers is None or numbers.array is None:
                    return None
                arrays.append(numbers.array)
                constants.append(_Numbers(None, numbers.layout))
                parts.append((PerReplica, _array_key(numbers.array)))
            elif isinstance(x, PerReplica):
                assert x.padded is not None
                if x.padded.array.is_deleted():
                    raise deleted("An argument of a compiled function", x.padded.array)
                is_uneven = True
                arrays.append(x.padded.array)
                constants.append(_Parts(None, x.padded.shapes))
                parts.append((PerReplica, x.padded.shapes, x.padded.array.shape, x.padded.array.dtype))
            else:
                constants.append(_Constant(x))
                parts.append(_constant_key(x))
        mode = ctx.current_mode()
        where = (Identity(mode.strategy), mode.replica_context is None, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        return Call((treedef, tuple(parts), where), treedef, tuple(constants), arrays, is_uneven)

    @property
    def needs(self) -> list[Any]:
        """The objects without which this call cannot come again."""
        _, parts, (strategy, *_) = self.key
        return [part() for part in (strategy, *parts) if isinstance(part, Identity)]

    def key_without(self, places: Collection[int]) -> Any:
        """The key without the values of some constants."""
        treedef, parts, where = self.key
        types = {i: constant and type(constant.value) for i, constant in enumerate(self.constants)}
        return treedef, tuple(types[i] if i in places else x for i, x in enumerate(parts)), where

    def with_arrays(self, new: Mapping[int, jax.Array]) -> Call:
        """The call with arrays in place of some constants."""
        treedef, parts, where = self.key
        parts, constants, arrays = list(parts), list(self.constants), []
        remaining = iter(self.arrays)
        for i, constant in enumerate(self.constants):
            if i in new:
                x = compat.movable(new[i])
                arrays.append(x)
                constants[i], parts[i] = None, _array_key(x)
            elif constant is None or constant.is_array:
                arrays.append(next(remaining))
        return Call((treedef, tuple(parts), where), treedef, tuple(constants), arrays, self.is_uneven)

    def rebuild(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, with other arrays."""
        remaining = iter(arrays)
        flat = [
            next(remaining) if c is None else c.around(next(remaining)) if c.is_array else c.value
            for c in self.constants
        ]
        args, kwargs = jax.tree_util.tree_unflatten(self.treedef, flat)
        return args, kwargs


@dataclass(frozen=True)
class _Constant:
    value: Any
    is_array = False

    def around(self, array: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class _Parts(_Constant):
    """An argument that is an array with components of different shapes."""

    shapes: tuple[Shape, ...]
    is_array = True

    def around(self, array: Any) -> Any:
        return PerReplica.from_padded(Padded(array, self.shapes))


@dataclass(frozen=True)
class _Numbers(_Constant):
    """An argument that is an array with a number for each replica."""

    layout: Layout
    is_array = True

    def around(self, array: Any) -> Any:
        return PerReplica.from_global(array, self.layout)


def _is_array(x: Any) -> bool:
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "USOmM"  # which JAX has not
    return isinstance(x, jax.Array)


def _array_key(x: Any) -> Any:
    return x.shape, x.dtype, getattr(x, "weak_type", False)


def _is_ragged(x: Any) -> bool:
    return isinstance(x, PerReplica) and not x.is_one_leaf


def _constant_key(x: Any) -> Any:
    if pulls.is_input(x):
        return type(x)  # each call takes elements from its own iterator
    if isinstance(x, Whole):
        return identity(x.x)
    equality: Any = type(x).__eq__
    if equality is not object.__eq__ and not isinstance(x, Variable):
        try:
            hash(x)
        except TypeError:
            pass
        else:
            return (type(x), x)
    return identity(x)
