"""What a variable is made from, and the list of those that exist."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.operators import operand_of
from phalanx.core.options import VariableAggregation, VariableSynchronization
from phalanx.core.values import DistributedValues
from phalanx.core.variables import traced_variables
from phalanx.errors import InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown

if TYPE_CHECKING:
    from phalanx.core.variables.variable import Variable


@dataclass(frozen=True)
class VariableSpec:
    """What the user asked for, checked; strategies make a variable from it."""

    value: jax.Array
    trainable: bool
    name: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    constraint: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class InitialValue:
    """What the user gave as an initial value, not looked at yet.

    Args:
        given: an array, a number, a nested list, or a function that makes one.
        dtype: of the value, if it was given.
        shape: of the value, if it was given.
        name: of the variable.
    """

    given: Any
    dtype: Any
    shape: Any
    name: str

    def array(self) -> jax.Array:
        """The value."""
        return initial_array(self.given, self.dtype, self.shape, self.name)


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
    programs = traced_variables.enclosing()
    if programs and not hasattr(variable, "replica_container"):
        programs[0].made.append(variable)


def live_variables() -> list[Variable]:
    """All variables that exist, in the order of their creation; views of single copies left out."""
    found = sorted(_live.items())
    return [v for _, v in found if not hasattr(v, "replica_container")]


# -- new = update(old, operand) ---------------------------------

Update = Callable[[jax.Array, Any], jax.Array]

_UPDATES: dict[str, Update] = {
    "assign": lambda old, new: new,
    "assign_add": lambda old, x: old + x,
    "assign_sub": lambda old, x: old - x,
    "scatter_add": lambda old, s: old.at[s.indices].add(s.values),
    "scatter_sub": lambda old, s: old.at[s.indices].add(-s.values),
    "scatter_mul": lambda old, s: old.at[s.indices].multiply(s.values),
    "scatter_div": lambda old, s: old.at[s.indices].divide(s.values),
    "scatter_min": lambda old, s: old.at[s.indices].min(s.values),
    "scatter_max": lambda old, s: old.at[s.indices].max(s.values),
    "scatter_update": lambda old, s: old.at[s.indices].set(s.values),
}


def _compiled(update: Update) -> Update:
    # One small program in place of several operations, each of which costs a dispatch.
    return jax.jit(lambda old, x: update(old, x).astype(old.dtype), inline=True)


_COMPILED = {method: _compiled(update) for method, update in _UPDATES.items()}


def apply_update(method: str, old: jax.Array, operand: Any) -> jax.Array:
    """The value after an update; never changes the dtype.

    Writing is not differentiable: inside `jax.grad` the value is written, not its derivative.
    """
    old, operand = compat.primal_value(old), compat.primal_value(operand)
    with compat.without_differentiation():
        if isinstance(operand, IndexedSlices):
            return _COMPILED[method](old, IndexedSlices(operand.values, operand.indices))
        if not isinstance(operand, jax.Array) or operand.dtype != old.dtype:
            operand = jnp.asarray(operand, old.dtype)
        return operand if method == "assign" else _COMPILED[method](old, operand)


def fitting_shape(value: Any, dtype: Any, name: str, method: str) -> tuple[int, ...]:
    """The shape of a value that fits a variable's dtype; an error if it does not fit.

    Python and NumPy values convert within their kind (and integers to floats); arrays of JAX must
    promote to the variable's dtype.
    """
    if isinstance(value, jax.Array):
        shape, given = value.shape, value.dtype
        fits = given == dtype or jnp.promote_types(given, dtype) == dtype
    else:
        try:
            host = np.asarray(value)
        except (TypeError, ValueError):
            host = np.asarray(None)
        if host.dtype.kind in "USO":
            raise InvalidValueError(
                f"Variable.{method} of {shown(name)} needs an array or a number. "
                f"Received: {shown(value)}"
            )
        shape, given = host.shape, host.dtype
        fits = _kind_order(given) <= _kind_order(dtype)
    if not fits:
        raise InvalidValueError(
            f"Variable {name!r} has the dtype {dtype}; the value would lose information. Convert it "
            f"first with .astype('{dtype}'). Received: a value of dtype {given} for {method}"
        )
    return tuple(shape)


def _kind_order(dtype: Any) -> int:
    for order, kind in enumerate((jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)):
        if jnp.issubdtype(dtype, kind):
            return order
    return 4


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a value of one shape can be added to a value of another without changing its shape."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
