"""Gradients with respect to variables of other processes, of which perhaps only some rows are read.

What such a variable holds cannot be an argument that is differentiated: which rows are read is not
known beforehand. A `Tap` lets values pass, and notes the derivatives that come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown


class Tap:
    """Collects the gradient with respect to one variable.

    Args:
        variable: the variable.
        probe: a number that is being differentiated, so that derivatives come back at all.
    """

    def __init__(self, variable: Variable, probe: Any) -> None:
        if not jnp.issubdtype(variable.dtype, jnp.inexact):
            raise InvalidTypeError(
                "Only variables of real or complex numbers have gradients. "
                f"Received: {shown(variable.name)} of dtype {variable.dtype}"
            )
        self._variable, self._probe = variable, probe
        self._whole: list[Any] = []
        self._rows: list[tuple[Any, list[Any]]] = []  # indices, and what came back

    def whole(self, value: Any) -> Any:
        """The value itself, at which the derivative is taken."""
        return _passed(value, self._probe, self._whole.append)

    def rows(self, rows: Any, indices: Any) -> Any:
        """The same for rows; an index that the variable does not have has no derivative."""
        found: list[Any] = []
        self._rows.append((indices, found))
        return _passed(rows, self._probe, found.append)

    def gradient(self) -> Any:
        """What came back: rows, if only rows were read."""
        shape, dtype = self._variable.shape, self._variable.dtype
        rows = []
        for given, found in self._rows:
            indices = jnp.asarray(given)
            x = found[0] if found else jnp.zeros((*indices.shape, *shape[1:]), dtype)
            # Negative indices would count from the end.
            rows.append((jnp.where(indices < 0, shape[0], indices), x))
        if not self._whole and rows:
            values = jnp.concatenate([x for _, x in rows])
            return IndexedSlices(values, jnp.concatenate([indices for indices, _ in rows]), shape)
        total = sum(self._whole[1:], self._whole[0]) if self._whole else jnp.zeros(shape, dtype)
        for indices, x in rows:
            total = total.at[indices].add(x)
        return total


def _passed(value: Any, probe: Any, note: Callable[[Any], None]) -> Any:
    @jax.custom_vjp
    def tap(value: Any, probe: Any) -> Any:
        del probe
        return value

    def forward(value: Any, probe: Any) -> tuple[Any, None]:
        del probe
        return value, None

    def backward(_: None, derivative: Any) -> tuple[Any, None]:
        note(derivative)
        return derivative, None

    tap.defvjp(forward, backward)
    return tap(value, probe)
