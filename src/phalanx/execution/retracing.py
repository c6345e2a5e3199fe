"""Functions that are traced again and again: what changed, and what can be done.

Python values are constants of a program, so another value needs another program. A number in an object
that also has arrays, such as the step of a training state, becomes an input when it changes, if the
function need not know its value. Other numbers stay constants, because Python computes with them
without limits and JAX with 32 bits.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.values import PerReplica, samples_of
from phalanx.execution.call_arguments import Call
from phalanx.execution.captures import Captured
from phalanx.execution.lifetimes import Table, Whole
from phalanx.runtime.formatting import array_text, shown

_log = logging.getLogger("phalanx")

# -- numbers that change -----------------------------------------------------------------------------


@dataclass
class _Numbers:
    """The numbers in calls of one form, by their places."""

    first: dict[int, Any]
    inputs: set[int] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)


class ChangingNumbers:
    """Which numbers among the arguments of a function change, and can be inputs of its programs."""

    def __init__(self) -> None:
        self._known: Table[_Numbers] = Table()

    def as_inputs(self, call: Call) -> Call | None:
        """The call with its changing numbers as arrays; None if it has none."""
        numbers = {
            place: constant.value
            for place, constant in enumerate(call.constants)
            if constant is not None and _is_number(constant.value)
        }
        numbers = {place: numbers[place] for place in _in_states(call) if place in numbers}
        if not numbers:
            return None
        form = call.key_without(numbers)
        known = self._known.get(form)
        if known is None:
            self._known.put(form, _Numbers(numbers), call.needs)
            return None
        changed = {place for place, x in numbers.items() if x != known.first[place]}
        known.inputs |= changed - known.constants
        if not known.inputs:
            return None
        return call.with_arrays({place: jnp.asarray(numbers[place]) for place in known.inputs})

    def must_be_known(self, call: Call) -> None:
        """Note that the function needs the values of the numbers of a call, as in ``range(n)``."""
        places = _in_states(call)
        numbers = [i for i, x in enumerate(call.constants) if x and i in places and _is_number(x.value)]
        known = self._known.get(call.key_without(numbers))
        if known is not None:
            known.constants |= known.inputs
            known.inputs = set()


def _in_states(call: Call) -> list[int]:
    """The places of leaves that are in an object with arrays, such as the state of a training."""
    found: list[int] = []

    def look(treedef: Any, first: int) -> None:
        data = treedef.node_data()
        if data is None:
            return
        places = range(first, first + treedef.num_leaves)
        if data[0] not in _CONTAINERS:
            if any(call.constants[place] is None for place in places):
                found.extend(places)
            return
        for child in treedef.children():
            look(child, first)
            first += child.num_leaves

    look(call.treedef, 0)
    return found


_CONTAINERS = (tuple, list, dict, type(None), Captured)


def _is_number(x: Any) -> bool:
    return type(x) is float or (type(x) is int and -(2**31) <= x < 2**31)


# -- telling the author -------------------------------------------------------------------------------

_OFTEN = 5
"""So many traces in twice as many calls are worth a word."""


class TraceWatch:
    """Says why a function is traced again and again."""

    def __init__(self) -> None:
        self._calls: deque[int] = deque(maxlen=_OFTEN)  # the last ones that were traced
        self._last: dict[str, tuple[str, int]] = {}
        self._said = False

    def note(
        self,
        name: str,
        call_number: int,
        fn: Callable[..., Any],
        given: tuple[Any, tuple[Any, ...], dict[str, Any]],
    ) -> None:
        """Note a trace.

        Args:
            name: of the function.
            call_number: how often it has been called.
            fn: the Python function.
            given: the elements of iterators, and the arguments.
        """
        self._calls.append(call_number)
        before, self._last = self._last, _described(fn, *given)
        calls = call_number - self._calls[0] + 1
        if self._said or len(self._calls) < _OFTEN or calls > 2 * _OFTEN:
            return
        self._said = True
        _log.warning(
            "%s was traced %d times in its last %d calls, and compiling takes longer than running. %s "
            "Python values are constants of a program, and arrays of another shape or dtype need a "
            "program of their own: give what changes as arrays of one shape, such as jnp.asarray(x).",
            name,
            _OFTEN,
            calls,
            _change(before, self._last),
        )


def _change(before: dict[str, tuple[str, int]], now: dict[str, tuple[str, int]]) -> str:
    if before.keys() != now.keys():
        return "The structure of its arguments changed since the last time."
    for path, (text, identity) in now.items():
        if before[path][0] != text:
            return f"Since the last time {path} changed from {before[path][0]} to {text}."
        if before[path][1] != identity:
            return f"Since the last time {path} became {text} that is not the same."
    return "Its arguments did not change since the last time, but the strategy or a setting of JAX did."


def _described(
    fn: Callable[..., Any], elements: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, tuple[str, int]]:
    """What each leaf of the arguments is: a text, and an identity where that says more."""
    try:
        names = [*inspect.signature(fn).parameters]
    except (TypeError, ValueError):
        names = []
    result: dict[str, tuple[str, int]] = {}

    def add(name: str, nest: Any) -> None:
        def is_leaf(x: Any) -> bool:
            return isinstance(x, PerReplica | Whole)

        for path, x in jax.tree_util.tree_flatten_with_path(nest, is_leaf)[0]:
            result[name + jax.tree_util.keystr(path)] = _text(x)

    for i, x in enumerate(args):
        add(names[i] if i < len(names) else f"args[{i}]", x)
    for name, x in kwargs.items():
        add(name, x)
    for i, x in enumerate(elements):
        add("the element of an iterator" if len(elements) == 1 else f"element {i} of iterators", x)
    return result


def _text(x: Any) -> tuple[str, int]:
    if isinstance(x, Whole):
        return f"an object of {type(x.x).__module__}.{type(x.x).__qualname__}", id(x.x)
    if isinstance(x, PerReplica):
        return f"components of {', '.join(_form(v) for v in samples_of(x))}", 0
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return f"an array of {_form(x)}", 0
    equality: Any = type(x).__eq__
    if equality is not object.__eq__:
        return shown(x), 0
    return f"an object of {type(x).__module__}.{type(x).__qualname__}", id(x)


def _form(x: Any) -> str:
    shape, dtype = np.shape(x), getattr(x, "dtype", type(x).__name__)
    weak = " (weak type)" if getattr(x, "weak_type", False) else ""
    return f"{array_text(dtype, shape)}{weak}"
