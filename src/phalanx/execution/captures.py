"""Functions as pytrees: what a function has captured are the leaves.

A function that is defined inside of a loop is a new object in each round. It needs no new program if
its code is the same, and if it captured the same objects, or arrays of the same shapes.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.core.values import DistributedValues
from phalanx.core.variables import Variable
from phalanx.execution.lifetimes import KeptIdentity, Whole

_ARRAYS = (jax.Array, np.ndarray, np.generic, DistributedValues, Variable)
_SIMPLE = (*_ARRAYS, int, float, complex, str)


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

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """What it has captured, and how to make it again."""
        form, parts = _taken_apart(self.x, self._around)
        inside = (*self._around, self.x)
        return tuple(_as_child(x, inside) for x in parts), form

    @classmethod
    def tree_unflatten(cls, form: Any, children: Sequence[Any]) -> Captured:
        """The callable with other arrays."""
        parts = [x.x if isinstance(x, Captured | Whole) else x for x in children]
        return cls(form.rebuild(parts))


def _as_child(x: Any, around: tuple[Any, ...]) -> Any:
    if isinstance(x, Whole):
        return x
    if isinstance(x, types.FunctionType | types.MethodType | functools.partial):
        return Captured(x, around)
    return x if _is_value(x) else Whole(x)


def _is_value(x: Any) -> bool:
    """Whether something is a value, of which a copy is as good, and no object with a state."""
    if isinstance(x, _SIMPLE) or x is None:
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

    def rebuild(self, parts: Sequence[Any]) -> Any:
        cells = len(self.code.co_freevars)
        closure = tuple(types.CellType(x) for x in parts[:cells])
        defaults = tuple(parts[cells : cells + self.defaults])
        name, qualname, module = self.names
        fn = types.FunctionType(self.code, self.namespace.x, name, defaults, closure)
        fn.__kwdefaults__ = dict(zip(self.keywords, parts[cells + self.defaults :], strict=True))
        fn.__qualname__, fn.__module__ = qualname, module
        return fn


def _taken_apart(fn: Any, around: tuple[Any, ...]) -> tuple[Any, Sequence[Any]]:
    if isinstance(fn, types.MethodType):
        return _Method(), (fn.__func__, fn.__self__)
    if type(fn) is functools.partial:
        return _Partial(tuple(fn.keywords)), (fn.func, *fn.args, *fn.keywords.values())
    calls_itself = any(fn is outer for outer in around)
    if not isinstance(fn, types.FunctionType) or calls_itself or not _can_be_rebuilt(fn):
        return _AsItIs(), (Whole(fn),)
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    defaults, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
    names = (fn.__name__, fn.__qualname__, fn.__module__)
    form = _Plain(fn.__code__, KeptIdentity(fn.__globals__), names, len(defaults), tuple(keywords))
    return form, (*cells, *defaults, *keywords.values())


def _can_be_rebuilt(fn: types.FunctionType) -> bool:
    if fn.__dict__ or _assigns_captured(fn.__code__):
        return False
    try:
        for cell in fn.__closure__ or ():
            _ = cell.cell_contents
    except ValueError:  # a name that has no value yet
        return False
    return True


@functools.lru_cache(maxsize=1000)
def _assigns_captured(code: types.CodeType) -> bool:
    """Whether a function assigns to names of the function around it."""
    free = set(code.co_freevars)
    inner = any(_assigns_captured(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return inner or any(
        instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in free
        for instruction in dis.get_instructions(code)
    )
