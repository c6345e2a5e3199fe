"""Batches in micro batches, and sequences in slices: which rows each has, and what its loss counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = ["REDUCTIONS", "CutBatch", "cut_batch", "sizes"]

REDUCTIONS = ("mean", "sum")


def sizes(rows: int, parts: int) -> tuple[int, ...]:
    """The sizes of micro batches: equal, but for the last ones, which may be smaller or empty.

    >>> sizes(10, 4), sizes(2, 3)
    ((3, 3, 3, 1), (1, 1, 0))
    """
    size = -(-rows // parts)
    return tuple(max(0, min(size, rows - i * size)) for i in range(parts))


@dataclass(frozen=True)
class CutBatch:
    """A batch and how it is cut.

    Args:
        args: nests of arrays, with the examples along the first dim and sequences along the second.
        rows: of each micro batch.
        lengths: of each slice of a sequence; empty if sequences are whole.
        reduction: what the loss of a micro batch is: the mean of its examples' losses, or their sum.
    """

    args: tuple[Any, ...]
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    reduction: str

    def is_empty(self, micro: int) -> bool:
        """Whether a micro batch has no rows."""
        return not self.rows[micro]

    def weight(self, micro: int) -> float:
        """How much the loss of a micro batch counts in that of the batch."""
        return 1.0 if self.reduction == "sum" else self.rows[micro] / sum(self.rows)

    def share(self, part: int) -> float:
        """How much the loss of a slice counts in that of its micro batch."""
        if self.reduction == "sum" or not self.lengths:
            return 1.0
        return self.lengths[part] / sum(self.lengths)

    def taken(self, numbers: Sequence[int], micro: int, part: int) -> tuple[Any, ...]:
        """Some arguments of one slice of a micro batch."""
        first = sum(self.rows[:micro])
        here = slice(first, first + self.rows[micro])
        if not self.lengths:
            return tuple(jax.tree.map(lambda x: x[here], self.args[i]) for i in numbers)
        start = sum(self.lengths[:part])
        there = slice(start, start + self.lengths[part])
        return tuple(jax.tree.map(lambda x: x[here, there], self.args[i]) for i in numbers)


def cut_batch(args: Sequence[Any], micro_batches: int, slices: int, reduction: str) -> CutBatch:
    """Cut a batch.

    >>> cut_batch([np.ones((5, 2)), np.ones(5)], 2, 1, "mean").rows
    (3, 2)
    """
    leaves = [(i, x) for i, arg in enumerate(args) for x in jax.tree.leaves(arg)]
    if not leaves:
        raise InvalidValueError(f"A pipeline needs a batch of arrays. Received: {shown(tuple(args))}")
    dims = 2 if slices > 1 else 1
    for i, x in leaves:
        if np.ndim(x) < dims:
            raise InvalidValueError(
                "Examples are along the first dim of each array of a batch"
                + (", and sequences, which are cut, along the second. " if slices > 1 else ". ")
                + f"Received: an array of shape {np.shape(x)} in argument {i}"
            )
    shapes = sorted({np.shape(x)[:dims] for _, x in leaves})
    if len(shapes) > 1:
        raise InvalidValueError(
            "All arrays of a batch must have the same number of examples"
            + (" and positions. " if slices > 1 else ". ")
            + f"Received: arrays with {' and '.join(map(str, shapes))}"
        )
    count = shapes[0][0]
    if not count:
        raise InvalidValueError("A batch must have at least one example. Received: a batch of 0 rows")
    if slices > 1 and shapes[0][1] < slices:
        raise InvalidValueError(
            f"Sequences of {shapes[0][1]} positions cannot be cut into {slices} slices. "
            f"Received: slices={slices}"
        )
    length = shapes[0][1] if slices > 1 else 0
    base, more = divmod(length, slices)
    lengths = tuple(base + (i < more) for i in range(slices)) if slices > 1 else ()
    return CutBatch(tuple(args), sizes(count, micro_batches), lengths, reduction)
