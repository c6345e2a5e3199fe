"""optax on a parameter server: one variable at a time, its slots beside it.

A sparse gradient changes only its rows: of the variable, and of the slots that have its shape (such as
moments). Slots of other shapes (such as counts) change as a whole. Rows of the same index are summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np

from phalanx.errors import InvalidArgumentError
from phalanx.parameter_server.requests import OptimizerDefinition
from phalanx.parameter_server.updates import existing_rows
from phalanx.runtime.formatting import shown

__all__ = ["ServerOptimizer", "Slots"]

Array = np.ndarray[Any, Any]

_FEWEST_ROWS = 8  # a program per power of two from here on


@dataclass(eq=False)
class Slots:
    """What an optimizer keeps beside a variable: the leaves of its state."""

    leaves: list[Any]
    structure: Any

    def copied(self) -> Slots:
        """The same, of which nothing is shared."""
        return Slots([x.copy() for x in self.leaves], self.structure)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(int(x.nbytes) for x in self.leaves)


class ServerOptimizer:
    """Applies gradients to variables by an optax transformation, compiled for the CPU.

    Args:
        definition: has the transformation.
    """

    def __init__(self, definition: OptimizerDefinition) -> None:
        self.definition = definition
        try:
            self._transform = cloudpickle.loads(definition.transform)
        except Exception as error:  # whatever the user's classes do
            raise InvalidArgumentError(
                "A parameter server cannot unpickle an optimizer. Its functions must be importable "
                f"there, or be defined in the program. Received: {type(error).__name__}: {error}"
            ) from error
        if not callable(getattr(self._transform, "update", None)):
            raise InvalidArgumentError(
                f"An optimizer must be an optax transformation. Received: {shown(self._transform)}"
            )
        self._init = jax.jit(self._transform.init)
        self._step = jax.jit(self._update)

    def slots(self, value: Array) -> Slots:
        """The slots that a variable begins with."""
        with jax.default_device(_cpu()):
            leaves, structure = jax.tree.flatten(self._init(value))
        return Slots([np.asarray(x) for x in leaves], structure)

    def set_rate(self, definition: OptimizerDefinition) -> bool:
        """Take the learning rate of a definition, if it has one; returns whether it is another one."""
        if definition.rate in (None, self.definition.rate):
            return False
        self.definition = dataclasses.replace(self.definition, rate=definition.rate)
        return True

    def apply(
        self,
        value: Array,
        slots: dict[int, Slots],
        gradient: Array,
        indices: Array | None,
        room: Callable[[], Array],
    ) -> Array:
        """The value after a step, and the slots changed to those after it.

        Args:
            value: of the variable; it stays as it is, unless `room` gives it.
            slots: of the variable, by optimizer; made at the first step.
            gradient: dense, or rows.
            indices: of the rows.
            room: gives the memory for a value of which only rows change.
        """
        own = slots.get(self.definition.id)
        if own is None:
            own = slots[self.definition.id] = self.slots(value)
        if self.definition.rate is not None:
            leaf, rate = self.definition.rate
            if not 0 <= leaf < len(own.leaves):
                raise InvalidArgumentError(f"The optimizer has no such leaf. Received: {leaf}")
            own.leaves[leaf] = np.full_like(own.leaves[leaf], rate)
        if indices is None:
            new, own.leaves = self._call(value, own, own.leaves, gradient)
            return new
        return self._apply_rows(value, own, gradient, indices, room())

    def _apply_rows(
        self, value: Array, own: Slots, gradient: Array, indices: Array, out: Array
    ) -> Array:
        if out is not value:
            np.copyto(out, value)
        rows, gradient = _summed(gradient, indices, len(value))
        count = len(rows)
        padded = np.zeros(max(_FEWEST_ROWS, 1 << (count - 1).bit_length()), rows.dtype)
        padded[:count] = rows
        gradient = np.concatenate(
            [gradient, np.zeros((len(padded) - count, *value.shape[1:]), value.dtype)]
        )
        sparse = [x.shape == value.shape for x in own.leaves]
        parts = [x[padded] if is_row else x for x, is_row in zip(own.leaves, sparse, strict=True)]
        new, parts = self._call(out[padded], own, parts, gradient)
        out[rows] = new[:count]
        for i, is_row in enumerate(sparse):
            if is_row:
                own.leaves[i] = _writable(own.leaves[i])
                own.leaves[i][rows] = parts[i][:count]
            else:
                own.leaves[i] = parts[i]
        return out

    def _call(
        self, value: Array, own: Slots, leaves: list[Any], gradient: Array
    ) -> tuple[Array, list[Any]]:
        with jax.default_device(_cpu()):
            state = jax.tree.unflatten(own.structure, leaves)
            new, state = self._step(value, state, gradient)
            return np.asarray(new), [np.asarray(x) for x in jax.tree.leaves(state)]

    def _update(self, value: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = self._transform.update(gradient, state, value)
        return (value + updates).astype(jnp.asarray(value).dtype), state


def _summed(gradient: Array, indices: Array, count: int) -> tuple[Array, Array]:
    """The rows that exist, each once, and the sums of their gradients."""
    indices, exist = existing_rows(indices, count)
    if exist is not None:
        gradient = gradient[exist]
    rows, where = np.unique(indices, return_inverse=True)
    if len(rows) == len(indices):
        sums = np.empty_like(gradient)
        sums[where] = gradient
        return rows, sums
    sums = np.zeros((len(rows), *gradient.shape[1:]), gradient.dtype)
    np.add.at(sums, where, gradient)
    return rows, sums


def _writable(leaf: Array) -> Array:
    return leaf if leaf.flags.writeable else leaf.copy()


def _cpu() -> jax.Device:
    return jax.devices("cpu")[0]
