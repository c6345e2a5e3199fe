"""Calls: the arguments of a compiled function, taken apart into arrays and constants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.core import context as ctx, input_requests
from phalanx.core.padding import Padded, Shape
from phalanx.core.values import PerReplica, ReplicaLayout
from phalanx.core.variables.variable import Variable
from phalanx.execution.lifetimes import Identity, Whole, identity
from phalanx.execution.running import deleted
from phalanx.runtime import compat

_ARGUMENT = "An argument of a compiled function"
_NONE = object()  # no type of an array
_flatten = jax.tree_util.tree_flatten
_x64: Any = jax.enable_x64  # asked for its value, which `jax.config` takes three times as long for


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
                arrays.append(_input(x))
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
                    raise deleted(_ARGUMENT, x.padded.array)
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


class Pattern:
    """What the arguments of a call look like, so that a call like it is recognized at less expense.

    Args:
        call: what the call was taken apart into.
        args: its arguments.
        kwargs: its keyword arguments.
    """

    __slots__ = ("_expected", "_hash", "_in_tuple", "_layouts", "_treedef", "_where")

    def __init__(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flat, treedef = _flatten((args, kwargs))
        self._treedef: Any = treedef
        self._hash = hash(treedef)
        _, parts, self._where = call.key
        # Most arrays come again with the same type, and with the same devices if they have several.
        avals = [getattr(x, "aval", _NONE) for x in flat]
        spread = [_sharding_over_several(x) for x in flat]
        self._expected = list(zip(avals, spread, parts, strict=True))
        # Mostly a batch is all there is: values of replicas, or a tuple of them.
        self._in_tuple = len(args) == 1 and type(args[0]) is tuple
        values = args[0] if self._in_tuple else args
        is_batch = not kwargs and all(type(x) is PerReplica for x in values)
        is_whole = ctx.active_replica() is None  # elsewhere their leaves are components
        self._layouts = [x.layout for x in values] if is_batch and is_whole else None

    @staticmethod
    def of(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pattern | None:
        """The pattern of a call; None if values of replicas in it are no single arrays."""
        if any(constant is not None and constant.is_array for constant in call.constants):
            return None
        return Pattern(call, args, kwargs)

    def arrays_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The arrays among the arguments of a call; None if it is not like this one."""
        strategy, is_cross_replica, is_x64 = self._where
        mode = ctx.current_mode()
        if strategy() is not mode.strategy or is_cross_replica is not (mode.replica_context is None):
            return None
        if is_x64 is not _x64.value:
            return None
        if self._layouts is not None and not kwargs:
            batch = self._arrays_of_batch(args)
            if batch is not None:
                return batch
        flat, treedef = _flatten((args, kwargs))
        if hash(treedef) != self._hash or treedef != self._treedef:
            return None
        arrays: list[Any] = []
        for x, (aval, spread, part) in zip(flat, self._expected):  # noqa: B905 - which takes longer
            if getattr(x, "aval", None) is aval:
                if x.is_deleted():
                    raise deleted(_ARGUMENT, x)
                arrays.append(x if x.sharding is spread else compat.movable(x))
            elif _is_array(x):
                if _array_key(x) != part:
                    return None
                arrays.append(_input(x))
            elif _differ(_constant_key(x), part):
                return None
        return arrays

    def _arrays_of_batch(self, args: tuple[Any, ...]) -> list[Any] | None:
        """The arrays in a batch, without taking it apart as JAX does; None for what is not like it."""
        values: Any = args
        if self._in_tuple:
            if len(args) != 1 or type(args[0]) is not tuple:
                return None
            values = args[0]
        layouts = self._layouts
        if layouts is None or len(values) != len(layouts):
            return None
        arrays = []
        for x, layout, (aval, spread, _) in zip(values, layouts, self._expected):  # noqa: B905 - which takes longer
            array = x.array_as(layout) if type(x) is PerReplica else None
            if array is None or array.aval is not aval or array.sharding is not spread:
                return None
            if array.is_deleted():
                raise deleted(_ARGUMENT, array)
            arrays.append(array)
        return arrays


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

    layout: ReplicaLayout
    is_array = True

    def around(self, array: Any) -> Any:
        return PerReplica.from_global(array, self.layout)


def _is_array(x: Any) -> bool:
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "USOmM"  # which JAX has not
    return isinstance(x, jax.Array)


def _input(x: Any) -> Any:
    """An array, as a program takes it."""
    if isinstance(x, jax.Array) and x.is_deleted():
        raise deleted(_ARGUMENT, x)
    return compat.movable(x)


def _sharding_over_several(x: Any) -> Any:
    """How an array lies on several devices; None for all others."""
    if not isinstance(x, jax.Array) or compat.is_tracer(x) or len(x.sharding.device_set) == 1:
        return None
    return x.sharding


def _array_key(x: Any) -> Any:
    return x.shape, x.dtype, getattr(x, "weak_type", False)


def _is_ragged(x: Any) -> bool:
    return isinstance(x, PerReplica) and not x.is_one_leaf


def _differ(a: Any, b: Any) -> bool:
    """Whether a dict would tell two keys apart: what has another hash is never compared."""
    return hash(a) != hash(b) or not a == b  # noqa: SIM201 - weak references differ by other rules


def _constant_key(x: Any) -> Any:
    if input_requests.is_input(x):
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
