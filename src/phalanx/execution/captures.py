"""Functions as pytrees: what a function has captured are the leaves.

A function that is defined inside a loop is a new object in each round. It needs no new program if
its code is the same, and if it captured the same objects, or arrays of the same shapes.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.core.values import DistributedValues
from phalanx.core.variables.variable import Variable
from phalanx.execution.lifetimes import KeptIdentity, Whole

_ARRAYS = (jax.Array, np.ndarray, DistributedValues, Variable)
_SIMPLE = (*_ARRAYS, int, float, complex, str, bytes)


@jax.tree_util.register_pytree_node_class
class Captured:
    """A callable that can be an argument of a compiled function: arrays that it captured are inputs.

    Args:
        fn: the callable.
        around: the functions that have captured it.
    """

    def __init__(self, fn: Callable[..., Any], around: tuple[Any, ...] = ()) -> None:
        self.x = fn
        self._around = around
        self._copies: list[tuple[Any, Any]] = []  # of captured lists and dicts, and what was in them

    def check_unchanged(self) -> None:
        """Refuse a function that has changed a copy of a list or dict that it captured."""
        for copy, before in self._copies:
            now = jax.tree.flatten(copy)
            same = now[1] == before[1] and all(map(operator.is_, now[0], before[0]))
            if not same:
                raise ChangesCaptured

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """What it has captured, and how to make it again."""
        form, parts = _taken_apart(self.x, self._around)
        inside = (*self._around, self.x)
        return tuple(_as_child(x, inside) for x in parts), form

    @classmethod
    def tree_unflatten(cls, form: Any, children: Sequence[Any]) -> Captured:
        """The callable with other arrays."""
        parts = [x.x if isinstance(x, Captured | Whole) else x for x in children]
        made = cls(form.rebuild(parts))
        for x in children:
            if isinstance(x, Captured):
                made._copies += x._copies
            elif isinstance(x, list | dict):
                made._copies.append((x, jax.tree.flatten(x)))
        return made


class ChangesCaptured(Exception):
    """A function changes a list or a dict with arrays that it captured."""


def _as_child(x: Any, around: tuple[Any, ...]) -> Any:
    if isinstance(x, Whole):
        return x
    if isinstance(x, _CALLABLES):
        return Captured(x, around)
    return x if _is_value(x) else Whole(x)


def _is_value(x: Any) -> bool:
    """Whether something is a value, of which a copy is as good, and no object with a state."""
    if isinstance(x, _SIMPLE) or x is None:
        return True
    if isinstance(x, tuple) and all(map(_is_value, x)):
        return True
    parameters = getattr(type(x), "__dataclass_params__", None)
    if not isinstance(x, list | tuple | dict) and not (parameters and parameters.frozen):
        return False
    flat = jax.tree.leaves(x, is_leaf=lambda y: isinstance(y, _SIMPLE))
    # A list of other things is perhaps one that the function adds to.
    return any(isinstance(y, _ARRAYS) for y in flat) and all(isinstance(y, _SIMPLE) for y in flat)


# -- how callables are made --------------------------------------------------------------------------


@dataclass(frozen=True)
class _AsItIs:
    def rebuild(self, parts: Sequence[Any]) -> Any:
        return parts[0]


@dataclass(frozen=True)
class _Method:
    def rebuild(self, parts: Sequence[Any]) -> Any:
        return types.MethodType(*parts)


@dataclass(frozen=True)
class _Partial:
    names: tuple[str, ...]

    def rebuild(self, parts: Sequence[Any]) -> Any:
        count = len(parts) - len(self.names)
        keywords = dict(zip(self.names, parts[count:], strict=True))
        return functools.partial(parts[0], *parts[1:count], **keywords)


@dataclass(frozen=True)
class _Plain:
    """A function of Python: its captured values come first, then the defaults of its arguments."""

    code: types.CodeType
    namespace: KeptIdentity
    names: tuple[str, str, str]
    defaults: int
    keywords: tuple[str, ...]
    attributes: tuple[str, ...]

    def rebuild(self, parts: Sequence[Any]) -> Any:
        cells = len(self.code.co_freevars)
        closure = tuple(types.CellType(x) for x in parts[:cells])
        defaults = tuple(parts[cells : cells + self.defaults])
        name, qualname, module = self.names
        fn = types.FunctionType(self.code, self.namespace.x, name, defaults, closure)
        rest = iter(parts[cells + self.defaults :])
        fn.__kwdefaults__ = {name: next(rest) for name in self.keywords}
        fn.__dict__.update({name: next(rest) for name in self.attributes})
        fn.__qualname__, fn.__module__ = qualname, module
        return fn


def _taken_apart(fn: Any, around: tuple[Any, ...]) -> tuple[Any, Sequence[Any]]:
    if isinstance(fn, types.MethodType):
        return _Method(), (fn.__func__, fn.__self__)
    if type(fn) is functools.partial:
        return _Partial(tuple(fn.keywords)), (fn.func, *fn.args, *fn.keywords.values())
    calls_itself = any(fn is outer for outer in around)
    if not isinstance(fn, types.FunctionType):
        return _AsItIs(), (Whole(fn),)
    if calls_itself or not _can_be_rebuilt(fn):
        return _AsItIs(), (Whole(fn), *_watched(fn, []))
    cells = _contents(fn)
    defaults, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
    names = (fn.__name__, fn.__qualname__, fn.__module__)
    attributes = dict(fn.__dict__)
    form = _Plain(
        fn.__code__,
        KeptIdentity(fn.__globals__),
        names,
        len(defaults),
        tuple(keywords),
        tuple(attributes),
    )
    return form, (*cells, *defaults, *keywords.values(), *attributes.values())


def _watched(fn: Any, seen: list[Any]) -> list[Any]:
    """What a callable that must be taken as it is has captured: another value needs another program.

    Names that it assigns are its own business.
    """
    seen.append(fn)
    found: list[Any] = []
    for x in _inside(fn):
        if any(x is y for y in seen):
            continue
        if isinstance(x, _CALLABLES):
            found += [Whole(x), *_watched(x, seen)]
        else:
            found.append(x if isinstance(x, int | float | complex | str | bytes) else Whole(x))
    return found


_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def _inside(fn: Any) -> list[Any]:
    """What a callable has captured, other than names that it assigns, or that have no value yet."""
    if isinstance(fn, types.MethodType):
        return [fn.__func__, fn.__self__]
    if isinstance(fn, functools.partial):
        return [fn.func, *fn.args, *fn.keywords.values()]
    own, found = _assigned(fn.__code__), []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            if name not in own:
                found.append(cell.cell_contents)
        except ValueError:
            continue
    return [*found, *fn.__dict__.values()]


def _calls_itself(fn: Any, seen: list[Any]) -> bool:
    """Whether a function has captured itself, perhaps by way of others."""
    for x in _inside(fn):
        if seen and x is seen[0]:
            return True
        if isinstance(x, _CALLABLES) and not any(x is y for y in seen):
            seen.append(x)
            if _calls_itself(x, seen):
                return True
    return False


def _contents(fn: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in fn.__closure__ or ()]


def _can_be_rebuilt(fn: types.FunctionType) -> bool:
    try:
        _contents(fn)
    except ValueError:  # a name that has no value yet
        return False
    return not _assigned(fn.__code__) and not _calls_itself(fn, [fn])


@functools.lru_cache(maxsize=1000)
def _assigned(code: types.CodeType) -> frozenset[str]:
    """The names of the function around it that a function, or one inside it, assigns to."""
    inner = [_assigned(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF")
    }
    return frozenset(names.union(*inner) & set(code.co_freevars))
