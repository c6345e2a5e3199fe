"""Batches on devices, whatever their number of rows.

Keras sees a `PlacedBatch` in place of each array of a batch. It has a shape and a dtype; and
`jax.device_put`, which Keras calls on batches, leaves it alone, because as a pytree it has no leaves. A
program gets the array behind it, whose rows divide evenly over the devices, and cuts the true rows out
of it. It is traced for their number, so nothing is masked, and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Cut:
    """Where the true rows of a batch are in an array that has more.

    Args:
        sizes: the rows of each part of the array; what follows in a part is padding.
        order: the parts in the order of the batch, if they lie in another.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class PlacedBatch:
    """An array of a batch: on devices, and perhaps padded."""

    array: Any
    cut: Cut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        if self.cut is None:
            return tuple(self.array.shape)
        return (sum(self.cut.sizes), *self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.array.dtype

    def key(self) -> tuple[Any, ...]:
        """What a program for such batches depends on."""
        return self.array.shape, str(self.array.dtype), self.cut


jax.tree_util.register_pytree_node(PlacedBatch, lambda batch: ((), batch), lambda batch, _: batch)


def part_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """How many rows each part gets: as many as the others, until there are none left.

    >>> part_sizes(10, 4), part_sizes(1, 3)
    ((3, 3, 3, 1), (1, 0, 0))
    """
    size = -(-rows // parts)
    return tuple(max(0, min(size, rows - i * size)) for i in range(parts))


def dealt_order(parts: int, workers: int) -> tuple[int, ...] | None:
    """The parts of a batch in its order, if they were dealt to workers like cards.

    >>> dealt_order(4, 2), dealt_order(4, 1)
    ((0, 2, 1, 3), None)
    """
    if workers == 1:
        return None
    each = parts // workers
    return tuple(worker * each + i for i in range(each) for worker in range(workers))


def true_rows(array: Any, cut: Cut | None) -> Any:
    """The rows of a batch, without padding and in their order.

    >>> true_rows(jnp.array([1, 2, 3, 0]), Cut((2, 1))).tolist()
    [1, 2, 3]
    >>> true_rows(jnp.array([1, 3, 2, 4]), Cut((1, 1, 1, 1), (0, 2, 1, 3))).tolist()
    [1, 2, 3, 4]
    """
    if cut is None:
        return array
    size = array.shape[0] // len(cut.sizes)
    total = sum(cut.sizes)
    if cut.order is None and all(n == size for n in cut.sizes[: total // max(size, 1)]):
        return array[:total]
    order = cut.order or range(len(cut.sizes))
    return jnp.concatenate([array[i * size : i * size + cut.sizes[i]] for i in order if cut.sizes[i]])


def flatten(batch: Any) -> tuple[list[PlacedBatch], Any]:
    """The arrays of a batch, and its structure."""
    return jax.tree.flatten(batch, is_leaf=lambda x: isinstance(x, PlacedBatch))


def key_of(batch: Any) -> tuple[Any, ...]:
    """What a program for such batches depends on."""
    leaves, structure = flatten(batch)
    return structure, tuple(leaf.key() for leaf in leaves)


def unflatten(structure: Any, arrays: Sequence[Any], cuts: Sequence[Cut | None]) -> Any:
    """A batch of true rows, for Keras's steps."""
    rows = [true_rows(x, cut) for x, cut in zip(arrays, cuts, strict=True)]
    return jax.tree.unflatten(structure, rows)


def described(batch: Any) -> Any:
    """The shapes and dtypes of a batch of true rows, which steps can be traced for."""
    leaves, structure = flatten(batch)
    return jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
