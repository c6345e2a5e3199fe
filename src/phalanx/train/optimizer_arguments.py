"""What the user gives to an optimizer: gradients and variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp

from phalanx.core import context as ctx
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.strategy import Strategy
from phalanx.core.values import DistributedValues
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.runtime.formatting import shown

__all__ = [
    "check_extra",
    "check_known",
    "check_place",
    "checked_pairs",
    "checked_variables",
    "raise_missing",
]


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


def raise_missing(transform: Any) -> NoReturn:
    """A transformation asks for more than gradients, and was given nothing."""
    raise InvalidTypeError(
        "The transformation asks for more than gradients, such as the loss. Call optimizer.minimize, "
        f"or give it: apply_gradients(pairs, value=loss). Received: {shown(transform)}"
    )


def check_extra(extra: dict[str, Any], replicas: int) -> None:
    """Refuse extra arguments that an optimizer cannot pass on."""
    functions = [name for name, x in extra.items() if callable(x)]
    if functions and replicas > 1:
        raise UnsupportedError(
            "A line search computes the loss again and again during the update, and this function "
            "knows a replica's part of the batch only. Call optimizer.minimize(loss, variables), which "
            f"asks all replicas. Received: {', '.join(functions)} on {replicas} replicas"
        )


def check_place(here: Strategy, variables: list[Variable]) -> None:
    """Refuse to work outside of the replicas of the variables' strategy."""
    owner = variables[0].distribute_strategy
    if owner is not None and owner is not here and here is ctx.default_mode().strategy:
        raise ContextError(
            "apply_gradients updates the variables of a strategy from its replicas; call it in the "
            f"function that is given to strategy.run. Received: variables of {owner!r}, outside of "
            "its run"
        )


def check_known(known: Sequence[Variable], variables: Sequence[Variable]) -> None:
    """Refuse variables that the optimizer has no state for."""
    ids = {id(v) for v in known}
    strangers = [v.name for v in variables if id(v) not in ids]
    if strangers:
        raise InvalidValueError(
            "The optimizer's state was made for other variables. Call "
            "optimizer.build(all_variables) before the first step, or make another optimizer. "
            f"Received: {strangers}"
        )
