"""What a variable holds after updates that do not count yet: for the task that has staged them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.parameter_server.buffers import BufferPool
from phalanx.parameter_server.requests import Update
from phalanx.parameter_server.updates import apply_to_all, apply_update, existing

__all__ = ["rows_after", "value_after"]

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


def rows_after(value: Array, indices: Array, updates: Sequence[Update]) -> Array:
    """Some rows of a value after updates; of a large value only those rows are looked at.

    Args:
        value: of the variable.
        indices: of rows that there are.
        updates: as for `value_after`.
    """
    changed = [existing(u.indices, u.values, len(value)) for u in updates if u.indices is not None]
    if len(changed) < len(updates):
        return value_after(value, updates, BufferPool())[indices]
    if len(updates) == 1:
        [(where, values)] = changed
        order = where.argsort()
        places = where.take(order)
        if len(places) and not (places[1:] == places[:-1]).any():  # each row is changed once
            part = value.take(places, axis=0)
            apply_to_all(updates[0].method, part, values.take(order, axis=0))
            return _read(value, indices, places, part)
    places = np.unique(np.concatenate([where for where, _ in changed]))
    part = value.take(places, axis=0)  # a small table in place of the large one
    for update, (where, values) in zip(updates, changed, strict=True):
        apply_update(update.method, part, part, values, places.searchsorted(where))
    return _read(value, indices, places, part)


def _read(value: Array, indices: Array, places: Array, part: Array) -> Array:
    """Rows of a value of which some have changed.

    Args:
        value: before.
        indices: the rows to read.
        places: the rows that have changed, in order.
        part: what they are now.
    """
    if not len(places):
        return value.take(indices, axis=0)
    found = places.searchsorted(indices)
    found[found == len(places)] = 0
    is_changed = places.take(found) == indices
    if is_changed.all():
        return part.take(found, axis=0)
    rows = value.take(indices, axis=0)
    rows[is_changed] = part.take(found[is_changed], axis=0)
    return rows
