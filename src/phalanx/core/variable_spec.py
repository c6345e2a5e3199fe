"""What a variable is made from, and the list of those that exist."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from phalanx.core import compat, lifting
from phalanx.core.errors import InvalidValueError
from phalanx.core.operators import operand_of
from phalanx.core.showing import shown
from phalanx.core.synchronization import VariableAggregation, VariableSynchronization
from phalanx.core.values import DistributedValues

if TYPE_CHECKING:
    from phalanx.core.variables import Variable


@dataclass(frozen=True)
class VariableSpec:
    """What the user asked for, checked; strategies make a variable from it."""

    value: jax.Array
    trainable: bool
    name: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    constraint: Callable[[Any], Any] | None = None


def initial_array(initial_value: Any, dtype: Any, shape: Any, name: str) -> jax.Array:
    """The array that a variable starts with, from what the user gave."""
    value = initial_value() if callable(initial_value) else initial_value
    value = operand_of(value)
    if compat.is_staged(value):
        raise InvalidValueError(
            f"The initial value of variable {name!r} is computed by the program that is being traced, "
            "so it is not known yet. Give a function that makes it, as in "
            f"px.Variable(lambda: jnp.zeros(3)). Received: {shown(value)}"
        )
    if isinstance(value, DistributedValues):
        raise InvalidValueError(
            "The initial value of a variable must be one value, not one per replica. "
            f"Received: {shown(value)} for variable {shown(name)}"
        )
    try:
        array = jnp.asarray(value, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"The initial value of variable {name!r} is not an array or a number that has the "
            f"dtype {dtype}. Received: {shown(value)}"
        ) from error
    if shape is not None and tuple(shape) != array.shape:
        raise InvalidValueError(
            f"The initial value of variable {name!r} does not have the shape that was asked for. "
            f"Received: shape={tuple(shape)} and an initial value of shape {array.shape}"
        )
    # Weak types would let later updates change the dtype.
    return jax.lax.convert_element_type(array, array.dtype)


@dataclass(frozen=True)
class VariableReference:
    """A hashable reference to a variable; `deref` gives it back."""

    _variable: Variable

    def deref(self) -> Variable:
        """The variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableReference) and self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)


_live: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
_serial = itertools.count()


def register(variable: Variable) -> None:
    """Add a variable to the list, and to the program that makes it."""
    _live[next(_serial)] = variable
    programs = lifting.enclosing()
    if programs and not hasattr(variable, "replica_container"):
        programs[0].made.append(variable)


def live_variables() -> list[Variable]:
    """All variables that exist, in the order of their creation; views of single copies left out."""
    found = sorted(_live.items())
    return [v for _, v in found if not hasattr(v, "replica_container")]
