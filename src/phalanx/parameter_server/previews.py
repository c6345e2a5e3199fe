"""What a variable holds after updates that do not count yet: for the task that has staged them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.parameter_server.buffers import BufferPool
from phalanx.parameter_server.requests import Update
from phalanx.parameter_server.updates import apply_to_all, apply_update, existing

__all__ = ["Ready", "read_rows", "rows_after", "value_after"]

Array = np.ndarray[Any, Any]


def value_after(value: Array, updates: Sequence[Update], pool: BufferPool) -> Array:
    """A value after updates, as `updates.checked` returns them; the value itself stays as it is.

    Args:
        value: of the variable.
        updates: of the variable, none of them of an optimizer.
        pool: memory for the result.
    """
    new = pool.array(value.shape, value.dtype)
    for update in updates:
        apply_update(update.method, value, new, update.values, update.indices)
        value = new
    return new


class Ready(NamedTuple):
    """What a commit will make of a variable, if nothing else changes it before.

    Args:
        version: of the value that it was computed from.
        value: of the variable afterwards, or of some of its rows.
        places: the indices of those rows; None for all of it.
        lent: the bytes of the value, if they are being sent.
    """

    version: int
    value: Array
    places: Array | None = None
    lent: Sequence[Array] = ()


def rows_after(value: Array, updates: Sequence[Update]) -> tuple[Array, Array] | None:
    """The rows that updates change, in order, and what they are then; None if they change all.

    Args:
        value: of the variable.
        updates: as for `value_after`.
    """
    if len(updates) == 1 and (where := updates[0].indices) is not None and len(where):
        order = where.argsort()
        places = where.take(order)
        exist = places[0] >= 0 and places[-1] < len(value)
        if exist and not np.logical_or.reduce(places[1:] == places[:-1]):  # each row is changed once
            rows = value.take(places, axis=0)
            apply_to_all(updates[0].method, rows, updates[0].values.take(order, axis=0))
            return places, rows
    changed = [existing(u.indices, u.values, len(value)) for u in updates if u.indices is not None]
    if len(changed) < len(updates):
        return None
    places = np.unique(np.concatenate([where for where, _ in changed]))
    rows = value.take(places, axis=0)  # a small table in place of the large one
    for update, (where, values) in zip(updates, changed, strict=True):
        apply_update(update.method, rows, rows, values, places.searchsorted(where))
    return places, rows


def read_rows(indices: Array, places: Array, rows: Array, value: Callable[[Array], Array]) -> Array:
    """Rows of a value of which some are other ones.

    Args:
        indices: the rows to read.
        places: the rows that are other ones, in order.
        rows: those.
        value: checks that there are rows with such indices, and returns the value. It is not asked if
            all of them are other ones, which are there.
    """
    if not len(places):
        return value(indices).take(indices, axis=0)
    found = places.searchsorted(indices)
    is_other = places.take(found, mode="clip") == indices
    if np.logical_and.reduce(is_other):
        return rows.take(found, axis=0)
    read = value(indices).take(indices, axis=0)
    read[is_other] = rows.take(found[is_other], axis=0)
    return read
