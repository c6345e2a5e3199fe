"""Functions that are sent to workers once, and named by numbers afterwards."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.runtime.pickling import noting
from phalanx.runtime.shipping import pack

__all__ = ["Functions", "Shipped"]


class Shipped:
    """A function as workers get it.

    Args:
        number: what it is known by.
        name: for people.
        blob: pickled.
        variables: those that it refers to, which last as long as it does.
    """

    __slots__ = ("__weakref__", "blob", "name", "number", "variables")

    def __init__(self, number: int, name: str, blob: bytes, variables: Sequence[Any]) -> None:
        self.number, self.name, self.blob, self.variables = number, name, blob, variables


class Functions:
    """The functions that a coordinator has pickled.

    A function that the program no longer refers to is forgotten, here and on workers.

    Args:
        forget: called with the number of a function that no closure needs any more.
    """

    def __init__(self, forget: Callable[[int], None]) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Shipped] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._forget = forget

    def shipped(self, fn: Any) -> Shipped:
        """The function as workers get it; pickled when it is first asked for."""
        found = self._known.get(fn)
        if found is None:
            with self._lock:
                found = self._known.get(fn)
                if found is None:
                    name = getattr(fn, "__name__", type(fn).__name__)
                    inner = getattr(fn, "python_function", fn)
                    variables: list[Any] = []
                    with noting(variables):
                        blob = pack(fn, inner)
                    found = self._known[fn] = self.packed(name, blob, variables)
        return found

    def packed(self, name: str, blob: bytes, variables: Sequence[Any]) -> Shipped:
        """A function that was pickled before, and the variables that it refers to."""
        found = Shipped(next(self._numbers), name, blob, variables)
        weakref.finalize(found, self._forget, found.number).atexit = False
        return found

    def close(self) -> None:
        """Forget all functions: none is sent any more."""
        with self._lock:
            self._known.clear()
