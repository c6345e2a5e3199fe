"""Variables whose values are in other processes: reads ask for them, updates are recorded.

A step that changes such a variable does not compute its new value: other processes change it at the
same time. It records what should be done, in order, and the process that holds the value does it. What
has been recorded is applied here too when the step reads the variable, so that it sees its own writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.variables.variable_spec import apply_update
from phalanx.errors import InvalidArgumentError
from phalanx.runtime.formatting import shown

APPLY = "apply"
"""The method that gives a gradient to an optimizer."""


class Change(NamedTuple):
    """An update that was recorded.

    Args:
        method: a method of `px.Variable`, or "apply", which gives a gradient to an optimizer.
        operand: an array, or `IndexedSlices`. Rows that the variable does not have are dropped.
        optimizer: the id of the optimizer, for "apply".
    """

    method: str
    operand: Any
    optimizer: int = 0


class TableRead(NamedTuple):
    """A table to read from.

    Args:
        table: a variable, or one that consists of several.
        indices: which rows, in this order; None for all of them.
    """

    table: RemoteTable
    indices: Any = None


class RemoteTable(Protocol):
    """What rows can be read from: a variable elsewhere, or one that consists of several."""

    home: Any

    @property
    def name(self) -> str:
        """For people."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows together."""

    @property
    def dtype(self) -> Any:
        """Of the elements."""

    @property
    def parts(self) -> Sequence[tuple[Any, int]]:
        """The variables that it consists of, and the index of the first row of each."""

    def whole(self) -> Any:
        """All rows, as this code sees them."""

    def row_reads(self, indices: Any, wanted: list[Any]) -> Callable[[Sequence[Any]], Any]:
        """Add what to ask servers for; returns what makes the rows of the answers."""


class Home(Protocol):
    """Where the values of variables are, as this process sees it."""

    def pending(self, variable: Any) -> Pending:
        """What the code around this has done to a variable."""

    def commit(self, changed: Mapping[Any, Pending]) -> None:
        """Make what was recorded count, all of it or nothing."""

    def pull(self, reads: Sequence[TableRead]) -> list[Any]:
        """Read the values themselves, all of them in one round trip."""

    def preview(self, pending: Pending) -> Any:
        """What a variable would hold after changes, which are not made."""


class Pending:
    """What a step has done to a variable so far; never changes.

    Args:
        variable: the variable.
        changes: what should be done to it, in order.
        known: the value after some of the changes, and after how many, if it is known.
    """

    __slots__ = ("changes", "known", "variable")

    def __init__(
        self,
        variable: Any,
        changes: tuple[Change, ...] = (),
        known: tuple[Any, int] | None = None,
    ) -> None:
        self.variable = variable
        self.changes = changes
        self.known = known

    def plus(self, change: Change) -> Pending:
        """The same after one more change."""
        changes = (*self.changes, change)
        if change.method != "assign":
            return Pending(self.variable, changes, self.known)
        if all(before.method != APPLY for before in self.changes):
            changes = (change,)  # what was done before does not count, but for optimizers
        return Pending(self.variable, changes, (change.operand, len(changes)))

    def learn(self, value: Any) -> None:
        """The value before all changes is known."""
        if self.known is None:
            self.known = value, 0

    @property
    def unknown(self) -> int:
        """After how many changes the value is known to its server only; 0 for none."""
        done = 0 if self.known is None else self.known[1]
        return next((i for i in range(len(self.changes), done, -1) if self._is_apply(i - 1)), 0)

    def _is_apply(self, place: int) -> bool:
        return self.changes[place].method == APPLY

    def whole(self) -> Any:
        """The value after all changes."""
        count = self.unknown
        if count:
            before = Pending(self.variable, self.changes[:count])
            self.known = self.variable.home.preview(before), count
        elif self.known is None:
            self.learn(self.variable.home.pull([TableRead(self.variable)])[0])
        assert self.known is not None
        value, done = self.known
        for change in self.changes[done:]:
            value = after(change, value, self.variable)
        self.known = value, len(self.changes)
        return value


def check_indices(table: RemoteTable, indices: Any) -> None:
    """Require that a table has these rows."""
    count = table.shape[0]
    if not indices.size:
        return
    # Half of the time of `indices.min()`, which NumPy has written in Python.
    if np.minimum.reduce(indices, axis=None) < 0 or np.maximum.reduce(indices, axis=None) >= count:
        wrong = indices[(indices < 0) | (indices >= count)]
        raise InvalidArgumentError(
            f"Variable {table.name!r} has rows from 0 to {count - 1}. Received: the indices "
            f"{shown(wrong[:8].tolist())}"
        )


def read(home: Home, reads: Sequence[TableRead]) -> list[Any]:
    """What this code sees of some variables, or of rows of them, with one round trip for all.

    Tables that consist of several variables can only be read by rows.
    """
    found: list[Any] = []
    missing: list[int] = []
    for i, (table, indices) in enumerate(reads):
        states = [part.pending() for part, _ in table.parts]
        if any(state.changes and state.unknown for state in states):
            value = jnp.asarray(table.whole())
            found.append(value if indices is None else value[np.asarray(indices)])
            continue
        state = states[0] if len(states) == 1 else None
        if state is None or state.known is None:
            missing.append(i)
            found.append(states)
        else:
            value = state.whole()
            found.append(value if indices is None else value[np.asarray(indices)])
    if missing:
        for i, value in zip(missing, home.pull([reads[i] for i in missing]), strict=True):
            table, indices = reads[i]
            if indices is None:
                [state] = found[i]
                state.learn(value)
                found[i] = state.whole()
            else:
                found[i] = _with_own_writes(table, found[i], value, indices)
    return found


def _with_own_writes(table: RemoteTable, states: Sequence[Pending], rows: Any, indices: Any) -> Any:
    for (part, first), state in zip(table.parts, states, strict=True):
        if state.changes:
            rows = rows_after(state.changes, jnp.asarray(rows), jnp.asarray(indices) - first, part)
    return rows


def after(change: Change, value: Any, variable: Any) -> Any:
    """The value of a variable after a change."""
    assert change.method != APPLY, variable
    return apply_update(change.method, value, change.operand)


def rows_after(
    changes: Sequence[Change], rows: jax.Array, indices: jax.Array, variable: Any
) -> jax.Array:
    """Rows of a variable after changes of the variable.

    Args:
        changes: what was done to the variable.
        rows: what the rows were before, ``rows[i]`` for ``indices[i]``.
        indices: which rows; an index that the variable does not have leaves its row as it is.
        variable: the variable.
    """
    count, total = indices.shape[0], variable.shape[0]
    outside = (indices < 0) | (indices >= total)
    # A small table in place of the large one: each row once, in order.
    places, first, inverse = jnp.unique(
        jnp.where(outside, total, indices),
        return_index=True,
        return_inverse=True,
        size=count,
        fill_value=total,
    )
    small = rows[first]
    latest = max((i for i, change in enumerate(changes) if change.method == "assign"), default=0)
    for change in changes[latest:]:
        operand = change.operand
        assert change.method != APPLY
        if isinstance(operand, IndexedSlices):
            wanted = jnp.where(operand.indices < 0, operand.indices + total, operand.indices)
            found = jnp.searchsorted(places, wanted)
            hit = places[jnp.minimum(found, count - 1)] == wanted
            operand = IndexedSlices(operand.values, jnp.where(hit & (wanted < total), found, count))
        else:
            operand = jnp.asarray(operand)
            if operand.ndim == small.ndim and operand.shape[0] == total != 1:
                operand = operand[jnp.minimum(places, total - 1)]
        if change.method == "assign":
            small = jnp.broadcast_to(operand, small.shape).astype(small.dtype)
        else:
            small = apply_update(change.method, small, operand)
    mask = outside.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(mask, rows, small[inverse.reshape(-1)])
