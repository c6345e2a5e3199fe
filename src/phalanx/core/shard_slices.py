"""Sparse updates of tables in several shards, and which rows are whose."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.indexed_slices import IndexedSlices

__all__ = ["Shard", "ShardSlices", "split_rows"]

Array = np.ndarray[Any, Any]


class Shard(NamedTuple):
    """A shard of a table.

    Args:
        ends: where each shard of the table ends.
        number: which of them it is.
    """

    ends: tuple[int, ...]
    number: int

    @property
    def first(self) -> int:
        """Its first row, in the table."""
        return self.ends[self.number - 1] if self.number else 0


@jax.tree_util.register_pytree_node_class
class ShardSlices(IndexedSlices):
    """Slices of a whole table, of which a shard is to have its part.

    All shards share the arrays: a program computes them once, and who sends them divides them once.

    Args:
        values: for rows of the table.
        whole: the indices of those rows, in the table.
        shard: whose part it is.
    """

    __slots__ = ("shard", "whole")

    def __init__(self, values: Any, whole: Any, shard: Shard) -> None:
        self.values, self.whole, self.shard = values, whole, shard
        self.dense_shape = None

    @property
    def indices(self) -> Any:
        """The indices in the shard; those of other rows are larger than any that it has."""
        ends, i = self.shard
        use: Any = jnp if isinstance(self.whole, jax.Array) else np
        mine = use.where(self.whole < 0, self.whole + ends[-1], self.whole) - self.shard.first
        return use.where(mine < 0, ends[i] - self.shard.first, mine)

    def shares_with(self, other: ShardSlices) -> bool:
        """Whether another shard of the same table is to have its part of the same slices."""
        is_same = self.values is other.values and self.whole is other.whole
        return is_same and self.shard.ends == other.shard.ends

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        """The arrays, for JAX."""
        return (self.values, self.whole), self.shard

    @classmethod
    def tree_unflatten(cls, shard: Any, children: Sequence[Any]) -> ShardSlices:
        """The slices with new arrays, for JAX."""
        return cls(children[0], children[1], shard)


class ShardRows(NamedTuple):
    """The part of some indices that belongs to one shard.

    Args:
        mine: which of the indices; None for all of them.
        rows: what they are in the shard, as 64-bit integers.
    """

    mine: Array | None
    rows: Array


def split_rows(indices: Array, ends: tuple[int, ...]) -> Sequence[ShardRows]:
    """Divide indices of rows of a table among its shards; those of rows that do not exist are left out.

    A step mostly updates the rows that it has read, so the last answers are remembered.

    Args:
        indices: negative ones count from the end.
        ends: where each shard ends.

    >>> [part.rows.tolist() for part in split_rows(np.array([4, 0, -1, 7]), (3, 6))]
    [[0], [1, 2]]
    """
    recent = _recent.get(ends)
    if recent is None:
        recent = _recent[ends] = deque(maxlen=_MOST_RECENT)
        if len(_recent) > _MOST_TABLES:
            _recent.popitem(last=False)
    for known, parts in tuple(recent):
        if known is indices:
            return parts
    found = next((parts for known, parts in tuple(recent) if _are_equal(known, indices)), None)
    memory: Any = indices.base
    is_fixed = isinstance(memory, bytes)  # as that of constants of programs is: nothing changes it
    if found is None or is_fixed:
        found = found or _split(indices, ends)
        recent.appendleft((indices if is_fixed else indices.copy(), found))
    return found


def _are_equal(known: Array, indices: Array) -> bool:
    return len(known) == len(indices) and bool(np.logical_and.reduce(known == indices))


_MOST_RECENT = 4
_MOST_TABLES = 256
_recent: OrderedDict[tuple[int, ...], deque[tuple[Array, Sequence[ShardRows]]]] = OrderedDict()


def _split(indices: Array, ends: tuple[int, ...]) -> Sequence[ShardRows]:
    if indices.dtype.kind == "u":
        indices = np.minimum(indices, ends[-1])
    indices = indices.astype(np.int64)
    if len(indices) and np.minimum.reduce(indices) < 0:
        indices = np.where(indices < 0, indices + ends[-1], indices)
    parts, first = [], 0
    for end in ends:
        rows = indices - first
        mine = (rows.view(np.uint64) < end - first).nonzero()[0]  # negative ones are large then
        parts.append(
            ShardRows(None, rows) if len(mine) == len(rows) else ShardRows(mine, rows.take(mine))
        )
        first = end
    return parts
