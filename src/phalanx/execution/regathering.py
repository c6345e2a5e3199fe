"""Gradients that gather parameters again, in place of keeping them from the forward pass.

A parameter that is kept in slices is gathered where the loss is computed. Its gradient needs it again,
much later: meanwhile it would fill the memory that slices save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.variables.sliced_variables import SlicedVariable
from phalanx.runtime import compat

_MADE_AGAIN = frozenset(
    {
        "all_gather",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "expand_dims",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
        compat.AGREED_BY_ALL_REPLICAS,
    }
)
"""What is computed again: gathers, and other forms of what they gave."""


def is_gathered_again(variable: Any) -> bool:
    """Whether a variable is gathered again for the gradient, in the program that is being traced."""
    is_sliced = isinstance(variable, SlicedVariable) and variable.regather
    return is_sliced and isinstance(variable._held(), SpmdPerReplica)


def stand_in(variable: Any) -> jax.Array:
    """What the loss is differentiated with respect to, in place of the value: costs no memory."""
    return jnp.zeros(variable.shape, variable.dtype)


def gathers_again(
    function: Callable[..., Any], variables: Sequence[Any]
) -> Callable[[list[Any], Any], Any]:
    """A function of values, which keeps none of those that are gathered.

    Args:
        function: takes the values of variables, and something else.
        variables: the variables; stand-ins are given for those that are gathered again.
    """
    chosen = [is_gathered_again(v) for v in variables]
    if not any(chosen):
        return function
    parts = [v.local_slice if again else None for v, again in zip(variables, chosen, strict=True)]

    def of_parts(values: list[Any], *rest: Any) -> Any:
        whole = [
            _whole(v, part, x) if again else x
            for v, part, x, again in zip(variables, parts, values, chosen, strict=True)
        ]
        return function(whole, *rest)

    return jax.checkpoint(of_parts, policy=keeps_no_gathers)


def keeps_no_gathers(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint`: whether a gradient may keep what the forward pass computed."""
    return primitive.name not in _MADE_AGAIN


def _whole(variable: SlicedVariable, part: Any, stands_in: Any) -> jax.Array:
    """The value of a variable; its gradient is that of the stand-in."""

    @jax.custom_vjp
    def gathered(part: Any, stands_in: Any) -> jax.Array:
        del stands_in
        return variable.joined(part)

    gathered.defvjp(
        lambda part, _: (variable.joined(part), None),
        lambda _, gradient: (jnp.zeros_like(part), gradient),
    )
    whole: jax.Array = gathered(part, stands_in)
    return whole
