"""What a variable holds after updates that do not count yet: for the task that has staged them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.parameter_server.buffers import BufferPool
from phalanx.parameter_server.requests import Update
from phalanx.parameter_server.updates import apply_update, existing

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
    places = _unique(np.concatenate([where for where, _ in changed]))
    if not len(places):
        return value[indices]
    part = value[places]  # a small table in place of the large one
    for update, (where, values) in zip(updates, changed, strict=True):
        apply_update(update.method, part, part, values, np.searchsorted(places, where))
    found = np.minimum(np.searchsorted(places, indices), len(places) - 1)
    is_changed = places[found] == indices
    if is_changed.all():
        return part[found]
    rows = value[indices]
    rows[is_changed] = part[found[is_changed]]
    return rows


def _unique(indices: Array) -> Array:
    """Each index once, in order; quicker than `np.unique`."""
    ordered = np.sort(indices)
    is_first = np.empty(len(ordered), bool)
    is_first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]
