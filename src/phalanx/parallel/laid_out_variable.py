"""Variables that are laid out over devices: each device holds its part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from phalanx.core import context as ctx
from phalanx.core.operators import operand_of
from phalanx.core.regions import Region
from phalanx.core.values import DistributedValues
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_parts import (
    HeldParts,
    Read,
    array_of,
    array_parts,
    array_regions,
    held_parts,
    take_parts,
    wanted_regions,
)
from phalanx.core.variables.variable_spec import InitialValue, VariableSpec
from phalanx.parallel.spanning import placed, whole_value
from phalanx.parallel.storing import made_in_parts
from phalanx.runtime import compat

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy

__all__ = ["LaidOutVariable", "initial_parts", "initial_shape"]


class LaidOutVariable(Variable):
    """A variable with one value, of which each device holds its part."""

    _keeps_layout = True

    def __init__(self, spec: VariableSpec, strategy: Strategy, sharding: NamedSharding) -> None:
        self._sharding = sharding
        self._set_up(spec, strategy, None)

    @property
    def sharding(self) -> NamedSharding:
        """Which device holds which part."""
        return self._sharding

    def _check_access(self, what: str) -> None:
        assert self._strategy is not None
        ctx.require_same_strategy(self._strategy, what)

    def _store(self, new: jax.Array) -> None:
        if compat.is_tracer(new):
            new = jax.lax.with_sharding_constraint(new, self._sharding)
        else:
            new = placed(new, self._sharding)
        self._set(new)

    @property
    def spans_workers(self) -> bool:
        """Whether other processes have parts of it."""
        return not self._sharding.is_fully_addressable

    def numpy(self) -> np.ndarray[Any, Any]:
        """The value as a NumPy array; all workers that have a part of it must ask for it."""
        return np.asarray(whole_value(self.read_value()))


@held_parts.register
def _(variable: LaidOutVariable) -> HeldParts:
    return array_parts(variable._held())


@wanted_regions.register
def _(variable: LaidOutVariable) -> list[Region]:
    return array_regions(variable.shape, variable.sharding)


@take_parts.register
def _(variable: LaidOutVariable, read: Read) -> None:
    variable._set(array_of(variable.shape, variable.dtype, variable.sharding, read))


def initial_shape(initial: InitialValue) -> tuple[Any, InitialValue]:
    """The shape of an initial value, and what to make it from; a function is traced, not called."""
    given = initial.given
    if not callable(given):
        given = operand_of(given)
        if isinstance(given, DistributedValues | jax.Array) or compat.is_staged(given):
            return initial.array(), initial
        host = np.asarray(given)
        if host.dtype.kind in "USO":
            return initial.array(), initial  # which says what is wrong
        dtype = host.dtype if initial.dtype is None else initial.dtype
        host = host.astype(jax.dtypes.canonicalize_dtype(dtype))
        return host, InitialValue(host, None, initial.shape, initial.name)
    return _traced(initial)


def _traced(initial: InitialValue) -> tuple[Any, InitialValue]:
    try:
        closed, _ = compat.jaxpr_and_result(lambda: jnp.asarray(initial.given(), dtype=initial.dtype))
    except jax.errors.ConcretizationTypeError:  # it looks at what it computes
        value = np.asarray(initial.array())
        return value, InitialValue(value, None, None, initial.name)
    shape = closed.out_avals[0]

    def make() -> Any:
        return compat.eval_jaxpr(closed, ())[0]

    return shape, InitialValue(make, initial.dtype, initial.shape, initial.name)


def initial_parts(initial: InitialValue, sharding: NamedSharding, in_parts: bool = True) -> jax.Array:
    """An initial value, of which each device makes or gets its own part only.

    Args:
        initial: the value, or the function that makes it.
        sharding: which device gets which part.
        in_parts: whether a function is one program that makes the parts; if not, it makes the whole.
    """
    if callable(initial.given):
        make = initial.given

        def typed() -> jax.Array:
            value = jnp.asarray(make())
            return jax.lax.convert_element_type(value, value.dtype)  # which is never weak

        made: jax.Array = made_in_parts(typed, sharding) if in_parts else placed(typed(), sharding)
        return made
    value = initial.array() if isinstance(initial.given, jax.Array) else initial.given
    found: jax.Array = placed(value, sharding)
    return found
