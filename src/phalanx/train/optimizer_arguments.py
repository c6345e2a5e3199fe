"""What the user gives to an optimizer: gradients and variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.values import DistributedValues
from phalanx.core.variables import Variable
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = ["checked_pairs", "checked_variables"]


def checked_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Pairs of a gradient and a variable, as the user gave them."""
    listed = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in listed:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidTypeError(
                "apply_gradients needs pairs of a gradient and its variable, as from "
                f"zip(gradients, variables). Received: {shown(pairs)}"
            )
        gradient = pair[0]
        if gradient is not None and not isinstance(gradient, IndexedSlices | DistributedValues):
            try:
                known = jnp.asarray(gradient)
            except Exception as error:
                raise InvalidTypeError(
                    "A gradient must be an array, px.IndexedSlices or None. "
                    f"Received: {shown(gradient)}"
                ) from error
            if jnp.shape(known) != getattr(pair[1], "shape", ()):
                raise InvalidValueError(
                    "A gradient must have the shape of its variable. "
                    f"Received: a gradient of shape {jnp.shape(known)} for {shown(pair[1])}"
                )
    return listed


def checked_variables(variables: Sequence[Any]) -> list[Variable]:
    """A list of variables, each of which occurs once."""
    listed = list(variables) if isinstance(variables, Iterable) else []
    if not listed or not all(isinstance(v, Variable) for v in listed):
        raise InvalidTypeError(f"A list of px.Variable is needed. Received: {shown(variables)}")
    if len({id(v) for v in listed}) != len(listed):
        raise InvalidValueError(f"A variable occurs twice. Received: {[v.name for v in listed]}")
    return listed
