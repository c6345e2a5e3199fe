"""`RemoteVariable`: a variable that a parameter server holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.shard_slices import ShardSlices
from phalanx.core.structure import map_nest
from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables import traced_variables, transactions
from phalanx.core.variables.distributed_variables import AggregatingVariable
from phalanx.core.variables.recorded_updates import APPLY, Change, Pending, after
from phalanx.core.variables.traced_variables import UNKNOWN
from phalanx.core.variables.variable import create_variable
from phalanx.core.variables.variable_spec import VariableSpec, register
from phalanx.errors import UnsupportedError
from phalanx.parameter_server.home import ServersHome
from phalanx.parameter_server.requests import Read, VariableDefinition
from phalanx.parameter_server.rows import read_rows
from phalanx.runtime.formatting import shown
from phalanx.runtime.pickling import OnePerProcess

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy

__all__ = ["RemoteVariable"]

Join = Callable[[Sequence[np.ndarray[Any, Any]]], Any]


class RemoteVariable(OnePerProcess, AggregatingVariable):
    """A variable whose value is on a parameter server.

    `px.ParameterServerStrategy` makes it. Reading asks the server; updates are recorded and made by the
    server when the step has ended, or at once outside of steps. Pickled, it is a reference: every
    process of the job that unpickles it has the same variable.

    Args:
        definition: what the server knows it by.
        spec: what the user asked for; of the value only shape and dtype count.
        strategy: which made it.
    """

    home: ServersHome
    is_owner = True  # of the value on the server

    def __init__(self, definition: VariableDefinition, spec: VariableSpec, strategy: Strategy) -> None:
        like: Any = jax.ShapeDtypeStruct(spec.value.shape, spec.value.dtype)
        self.definition = definition
        self.home = strategy.extended.home  # type: ignore[attr-defined]
        self._spec = dataclasses.replace(spec, value=like)
        self._strategy = strategy
        self._device = strategy.extended._replica_devices[0]  # where this process computes updates
        register(self)

    @property
    def device(self) -> str:
        """The task that holds the value, as a device string."""
        return f"/job:ps/replica:0/task:{self.definition.server}/device:CPU:0"

    @property
    def parts(self) -> Sequence[tuple[RemoteVariable, int]]:
        """The variable itself, whose first row is row 0."""
        return ((self, 0),)

    def recipe(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What makes the variable in another process that unpickles it."""
        return RemoteVariable, (self.definition, self._spec, self._strategy)

    def __copy__(self) -> RemoteVariable:
        raise UnsupportedError(
            "A shallow copy of a variable on a parameter server would be the same variable. Use "
            f"copy.deepcopy, which makes another one. Received: {shown(self.name)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._check_access(f"copy.deepcopy of {self.name!r}")
        spec = self._spec
        with ctx.push(ctx.Mode(self.distribute_strategy)), ctx.colocation(self):
            clone = create_variable(
                self.numpy(),
                spec.trainable,
                name=spec.name,
                synchronization=spec.synchronization,
                aggregation=spec.aggregation,
                constraint=spec.constraint,
            )
        memo[id(self)] = clone
        return clone

    # -- reading ---------------------------------------------------------------------------------

    def pending(self) -> Any:
        """What the code around this has done to the variable so far."""
        step = transactions.current()
        return self.home.pending(self) if step is None else step.held(self)

    def _committed(self) -> Pending:
        return self.home.pending(self)

    def _held(self) -> Any:
        held = super()._held()
        if isinstance(held, Pending):
            return jnp.asarray(held.whole())
        if held is UNKNOWN:
            program = traced_variables.program()
            assert program is not None
            return program.preview(self)
        return held

    def present(self) -> jax.Array:
        """The value, also while a program is being traced that does not know the variable."""
        with jax.ensure_compile_time_eval():
            return jnp.asarray(self.home.pending(self).whole())

    def whole(self) -> jax.Array:
        """The value, as this code sees it."""
        value: jax.Array = self._held()
        return value

    def row_reads(self, indices: Any, wanted: list[Read]) -> Join:
        """Add what to ask servers for; returns what makes the rows of the answers."""
        place = len(wanted)
        wanted.append(Read(self.definition, None if indices is None else np.asarray(indices)))
        return lambda answers: answers[place]

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """Some rows of the value; only those travel.

        Args:
            indices: integers from 0 on, of any shape.
            name: accepted for ported code.
        """
        del name
        self._check_access(f"Variable.sparse_read of {self.name!r}")
        return read_rows(self, indices)

    # -- writing ---------------------------------------------------------------------------------

    def _write(self, method: str, operand: Any) -> None:
        operand = map_nest(
            lambda x: x.component(0) if isinstance(x, Mirrored | PerReplica) else x, operand
        )
        self.record(Change(method, _typed(operand, self.dtype)))

    def apply_gradient(self, gradient: Any, optimizer: int) -> None:
        """Let an optimizer on the server make a step.

        Args:
            gradient: an array, or `IndexedSlices`.
            optimizer: its id.
        """
        self.record(Change(APPLY, _typed(gradient, self.dtype), optimizer))

    def record(self, change: Change) -> None:
        """Remember an update that the server is to make, as a part of the current step."""
        program = traced_variables.current()
        if program is not None:
            program.record(self, change, self._after(change))
        else:
            self.record_now(change)

    def record_now(self, change: Change) -> None:
        """Remember an update as a part of the eager step around this code."""
        traced_variables.check_known(self, jax.tree.leaves(change.operand))
        step = transactions.current()
        if step is None:
            transactions.atomically(self.record_now, change)
        else:
            step.set(self, step.held(self).plus(change))

    def _after(self, change: Change) -> Callable[[Any], Any]:
        if change.method == APPLY:
            return lambda held: UNKNOWN
        if change.method == "assign":
            return lambda held: jnp.asarray(change.operand)
        return lambda held: UNKNOWN if held is UNKNOWN else after(change, held, self)


def _typed(operand: Any, dtype: Any) -> Any:
    """An operand in the dtype of the variable; what is on the host stays there."""
    if isinstance(operand, ShardSlices):
        return ShardSlices(_typed(operand.values, dtype), operand.whole, operand.shard)
    if isinstance(operand, IndexedSlices):
        return IndexedSlices(_typed(operand.values, dtype), operand.indices)
    if isinstance(operand, jax.Array):
        return operand if operand.dtype == dtype else operand.astype(dtype)
    return np.asarray(operand, dtype)
