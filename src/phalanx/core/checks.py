"""Checks of values and variables that several operations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from phalanx.core.values import DistributedValues
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


def check_variable(v: Any, what: str) -> Variable:
    """Require a variable."""
    if not isinstance(v, Variable):
        raise InvalidTypeError(f"{what} needs a px.Variable. Received: {shown(v)}")
    return v


def first_by_name(variables: Any) -> Variable:
    """The variable whose name comes first."""
    if not isinstance(variables, Sequence) or not variables:
        raise InvalidValueError(
            f"non_slot_devices needs a list of at least one variable. Received: {shown(variables)}"
        )
    return min((check_variable(v, "non_slot_devices") for v in variables), key=lambda v: v.name)


def check_numeric(value: Any, what: str) -> Any:
    """Require something that can be an array; returns it as it is."""
    if not isinstance(value, DistributedValues):
        try:
            jnp.asarray(value)
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(
                f"{what} needs numbers or arrays. Received: {shown(value)}"
            ) from error
    return value
