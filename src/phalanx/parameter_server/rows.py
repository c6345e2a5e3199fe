"""Reading rows of tables that parameter servers hold: only those rows travel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.operators import operand_of
from phalanx.core.variables import traced_variables
from phalanx.core.variables.recorded_updates import (
    APPLY,
    RemoteTable,
    TableRead,
    check_indices,
    read,
    rows_after,
)
from phalanx.core.variables.traced_variables import Substitution
from phalanx.errors import InvalidTypeError
from phalanx.runtime import compat

__all__ = ["read_rows"]


def read_rows(table: RemoteTable, indices: Any) -> jax.Array:
    """The rows of a table at some indices, in their order.

    Args:
        table: what to read from.
        indices: integers from 0 on, of any shape.

    Returns:
        An array of the shape of the indices and then of a row.
    """
    given = compat.primal_value(operand_of(indices))
    if not isinstance(given, jax.Array):
        given = np.asarray(given)
    if not jnp.issubdtype(given.dtype, jnp.integer) or not table.shape:
        raise InvalidTypeError(
            f"Rows of {table.name!r} are read at integer indices, and a scalar has none. "
            f"Received: indices of dtype {given.dtype}, for the shape {list(table.shape)}"
        )
    flat = given if given.ndim == 1 else given.reshape(-1)
    if not compat.is_tracer(flat):
        check_indices(table, np.asarray(flat))
    rows = _read(table, flat) if _can_ask(flat) else table.whole()[flat]
    return jnp.asarray(rows).reshape(*given.shape, *table.shape[1:])


def _can_ask(flat: Any) -> bool:
    program = traced_variables.program()
    if program is not None:
        return program.can_ask_for(flat)
    return not compat.is_tracer(flat) and not compat.is_staging(batching=False)


def _read(table: RemoteTable, flat: Any) -> Any:
    program = traced_variables.current()
    if program is None:
        return read(table.home, [TableRead(table, np.asarray(flat))])[0]
    if isinstance(program, Substitution):
        with traced_variables.recording(program.parent):
            rows = _read(table, flat)
        return program.tapped_rows(table, jnp.asarray(rows), flat)
    changed = {
        part: [change for variable, change in program.changes if variable is part]
        for part, _ in table.parts
    }
    if any(change.method == APPLY for changes in changed.values() for change in changes):
        return table.whole()[flat]
    rows = program.rows(table, flat)
    for part, first in table.parts:
        changes = changed[part]
        if changes:
            rows = rows_after(changes, rows, flat - first, part)
    return rows
