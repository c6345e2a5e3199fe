"""What variables hold: arrays of their own, or a place in what a program gave to several of them.

A program that runs again and again takes the arrays of its variables and gives new ones to them. If
nothing else has touched these variables in between, the whole list goes in and the whole list comes
out, and no variable need be looked at: that is a `Bundle`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from phalanx.core.variables.recorded_updates import Home

STATE = threading.RLock()
"""Guards what variables hold. Held while programs start, because they overwrite their inputs."""


class Bundle:
    """The arrays that a program gave to its variables. Call everything with the state locked.

    Args:
        variables: whose arrays they are. They are not kept alive.
    """

    __slots__ = ("__weakref__", "_members", "arrays", "is_whole")

    def __init__(self, variables: Sequence[Holder]) -> None:
        this = weakref.ref(self)
        self._members = [
            weakref.ref(v, functools.partial(_end_of_member, this, i)) for i, v in enumerate(variables)
        ]
        self.arrays: list[Any] = [None] * len(variables)  # None for variables that are elsewhere
        self.is_whole = False
        """Whether all variables are there, and what they hold is in `arrays`."""

    def give(self, arrays: list[jax.Array]) -> None:
        """Give arrays to the variables, wherever they are now."""
        self.arrays = arrays
        if self.is_whole:
            return
        self.is_whole = True
        for i, reference in enumerate(self._members):
            variable = reference()
            if variable is None:
                self.drop(i)
                continue
            before = variable._bundle
            if before is not self:
                if before is not None:
                    before.drop(variable._place)
                variable._place = i
                variable._bundle = self
                variable._stored = None  # which would keep old arrays

    def drop(self, place: int) -> None:
        """A variable holds something else from now on."""
        self.is_whole = False
        self.arrays[place] = None


def _end_of_member(bundle: weakref.ref[Bundle], place: int, _: weakref.ref[Any]) -> None:
    # In whatever thread and moment the garbage is collected, so it must wait for no lock.
    here = bundle()
    if here is not None:
        here.drop(place)


class Holder:
    """Holds a value: an array, or a distributed value with all copies."""

    home: Home | None = None
    """Where the value is, if other processes hold it."""

    _exclusive = False
    """Whether no other object can have the arrays it holds, so that a program may overwrite them."""

    _bundle: Bundle | None = None
    """Where the array is that a program gave, if it was not read since."""

    _place = 0
    """Which array it is there."""

    _stored: Any = None
    """What is held, unless it is in a bundle."""

    _wrap: Callable[[jax.Array], Any]
    """Makes what is held of what a program gives."""

    @property
    def _value(self) -> Any:
        """What is held; only to be looked at."""
        with STATE:
            bundle = self._bundle
            if bundle is not None:
                # In this order an interrupt between two lines does no harm.
                bundle.is_whole = False
                self._stored, self._exclusive = self._wrap(bundle.arrays[self._place]), True
                self._bundle = None
                bundle.arrays[self._place] = None
            return self._stored

    @_value.setter
    def _value(self, held: Any) -> None:
        with STATE:
            bundle = self._bundle
            if bundle is not None:
                bundle.is_whole = False
            self._stored, self._bundle = held, None
            if bundle is not None:
                bundle.arrays[self._place] = None

    def _committed(self) -> Any:
        """What is held after the latest step, for a caller who may keep it."""
        with STATE:
            held = self._value
            self._exclusive = False
            return held
