"""What a variable holds, and who else may have it.

Programs overwrite the arrays of the variables that they write, which must be nobody else's. Most of
what a program gives to a variable goes to the next program as it is, so it is only made what readers of
the variable need when there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from phalanx.core import transactions


class Holder:
    """Holds a value: an array, or a distributed value with all copies."""

    _exclusive = False
    """Whether nobody else can have the arrays it holds, so that a program may overwrite them."""

    _fresh: jax.Array | None = None
    """What a program gave, if nobody has looked at it since."""

    _stored: Any = None
    """What is held, unless it is fresh."""

    _wrap: Callable[[jax.Array], Any]
    """Makes what is held of what a program gives."""

    @property
    def _value(self) -> Any:
        """What is held; only to be looked at."""
        if self._fresh is not None:
            with transactions.STATE:
                if self._fresh is not None:
                    self._stored, self._exclusive = self._wrap(self._fresh), True
                    self._fresh = None
        return self._stored

    @_value.setter
    def _value(self, held: Any) -> None:
        self._stored, self._fresh = held, None

    def _committed(self) -> Any:
        """What is held after the latest step, for a caller who may keep it."""
        with transactions.STATE:
            held = self._value
            self._exclusive = False
            return held
