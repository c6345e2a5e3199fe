"""What tasks ask of parameter servers: which variables to hold, read and change.

Everything here is a plain value. Who computes it and how it travels is the business of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = [
    "Commit",
    "ManagedServers",
    "OptimizerDefinition",
    "PipelinedServers",
    "Read",
    "Servers",
    "Settled",
    "Token",
    "Update",
    "VariableDefinition",
]


class Token(NamedTuple):
    """What an attempt to change variables is known by.

    Servers apply the updates of a closure once, whichever of its attempts they come from.

    Args:
        closure: the number of the closure; never used for another one.
        attempt: how often it has been tried before.
    """

    closure: int
    attempt: int = 0


@dataclass(frozen=True)
class VariableDefinition:
    """A variable, or a shard of one, as a parameter server holds it.

    Args:
        id: known to all tasks of the job; given by the coordinator, never used again.
        name: for people.
        shape: of the value.
        dtype: of the value, as NumPy names it; also JAX's own, such as bfloat16.
        server: the index of the ps task that holds it.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    server: int

    @property
    def nbytes(self) -> int:
        """How large the value is."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class OptimizerDefinition:
    """An optax transformation that servers apply, to one variable at a time.

    Args:
        id: known to all tasks of the job.
        transform: the transformation, pickled by cloudpickle.
        rate: which leaf of its state is the learning rate, and what it is from now on; None as long as
            it was not set.
    """

    id: int
    transform: bytes
    rate: tuple[int, float] | None = None


class Read(NamedTuple):
    """A variable to read, or some of its rows.

    Args:
        variable: the variable.
        rows: which rows, in this order; None for the whole value.
    """

    variable: VariableDefinition
    rows: np.ndarray[Any, Any] | None = None


class Update(NamedTuple):
    """A change of one variable.

    Args:
        variable: the variable.
        method: a method of `px.Variable` (assign, assign_add, scatter_sub, …), or "apply", which gives
            a gradient to an optimizer.
        values: the operand, or the rows of a sparse one.
        indices: the indices of those rows; None if the operand is dense.
        optimizer: the id of the optimizer, for "apply".
    """

    variable: VariableDefinition
    method: str
    values: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any] | None = None
    optimizer: int = 0


class Commit(NamedTuple):
    """What became of the updates of a closure.

    Args:
        applied: whether they count, by this attempt. If not, another attempt has been or will be made.
        error: why a server could not do it, for pushes that are awaited later; others raise it.
    """

    applied: bool
    error: Exception | None = None


class Settled(NamedTuple):
    """What became of an attempt whose worker is lost.

    Args:
        committed: whether its updates count. If not, they never will.
        value: what the closure returned, if it is committed.
    """

    committed: bool
    value: bytes = b""


class Servers(Protocol):
    """All parameter servers of a job, as one task sees them. For one thread at a time."""

    @property
    def runs(self) -> frozenset[str]:
        """The run that they serve, and those from whose checkpoints it goes on."""

    def create(self, definition: VariableDefinition, value: np.ndarray[Any, Any]) -> None:
        """Let its server hold a variable; if it does already, nothing happens."""

    def define_optimizer(self, definition: OptimizerDefinition) -> None:
        """Tell all servers of an optimizer."""

    def free(self, server: int, variables: Sequence[int], optimizers: Sequence[int] = ()) -> None:
        """Let a server hold variables no more, and forget optimizers, soon."""

    def drop_known(self, variable: int) -> None:
        """A variable was freed: its value is not needed any more."""

    def end(self, without: Collection[int] = ()) -> None:
        """End the run: servers forget everything, but for those that are known to be gone."""

    def close(self) -> None:
        """End the connections."""

    def pull(self, reads: Sequence[Read]) -> list[np.ndarray[Any, Any]]:
        """Read variables, with one round trip to all servers concerned at the same time.

        The arrays must not be changed: unchanged variables may be given again. Large ones are aligned
        so that JAX takes them without a copy.
        """

    def preview(self, updates: Sequence[Update]) -> list[np.ndarray[Any, Any]]:
        """What variables would hold after updates, which are not made.

        Each variable once, in the order of their first updates.
        """

    def push(self, token: Token, updates: Sequence[Update], value: bytes = b"") -> Commit:
        """Make all updates, or none, once for all attempts of the token's closure.

        Args:
            token: the closure, and the attempt.
            updates: in the order in which they are made.
            value: what the closure returns, kept by a server until the coordinator has it.
        """

    def settle(self, tokens: Sequence[Token]) -> dict[Token, Settled]:
        """Find out, and decide, what became of attempts whose worker is lost.

        From then on these attempts change nothing any more.
        """


class PipelinedServers(Servers, Protocol):
    """Servers whose answers to pushes may be awaited later. Workers use these."""

    def push_later(
        self,
        token: Token,
        updates: Sequence[Update],
        value: bytes,
        then: Callable[[Commit], None],
        hold: bool = False,
    ) -> None:
        """As `push`, but return at once; `collect` calls `then`. Later pulls see the updates.

        Args:
            token: the closure, and the attempt.
            updates: in the order in which they are made; none for a closure that only reads.
            value: what the closure returns.
            then: called when it is known whether the updates, and what the closure has read, count.
            hold: whether a pull follows soon, with which the updates can be sent.
        """

    def collect(self, wait: bool = False) -> None:
        """Call `then` of the pushes that are done; if `wait`, of all of them."""

    @property
    def is_ahead(self) -> bool:
        """Whether something was read of which it is not known yet whether it counts.

        A closure that only reads is then pushed too, without updates.
        """


class ManagedServers(PipelinedServers, Protocol):
    """What the coordinator needs besides."""

    def forget(self, below: int) -> None:
        """Closures with smaller numbers are done: no task asks for them, or tries them, again."""

    def status(self) -> list[dict[str, Any]]:
        """What each server holds and has done."""
