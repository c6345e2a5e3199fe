"""Putting elements together into batches, and taking batches apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.core.errors import InvalidArgumentError, InvalidTypeError
from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.columns import Chunk, Column, stack
from phalanx.data.elements import map_spec
from phalanx.data.node import UNKNOWN, Cursor, Node, Run, open_plan, read_exactly


def batched_size(size: int, batch: int, drop_remainder: bool) -> int:
    """The number of batches that `size` elements make."""
    if size < 0:
        return size
    return size // batch if drop_remainder else -(-size // batch)


@dataclass(frozen=True, eq=False)
class Batch(Node):
    """`batch_size` consecutive elements stacked into one."""

    batch_size: int
    drop_remainder: bool = False
    moves = True
    groups = True

    def spec(self, *inputs: Any) -> Any:
        """A new first dimension."""
        first = self.batch_size if self.drop_remainder else None

        def grow(spec: Any) -> Any:
            if not isinstance(spec, TensorSpec):
                raise InvalidTypeError(
                    f"batch stacks arrays; ragged values and datasets cannot be stacked. Received: {spec}"
                )
            return TensorSpec((first, *spec.shape), spec.dtype)

        return map_spec(grow, inputs[0])

    def size(self, *inputs: int) -> int:
        """A part of the input's."""
        return batched_size(inputs[0], self.batch_size, self.drop_remainder)

    def open(self, run: Run) -> Cursor:
        """Read whole batches."""
        return BatchCursor(open_plan(self.inputs[0], run), self.batch_size, self.drop_remainder)


class BatchCursor(Cursor):
    """Reads many elements at once and stacks them."""

    def __init__(self, input_: Cursor, size: int, drop_remainder: bool) -> None:
        self.inputs = (input_,)
        self._size, self._drop = size, drop_remainder
        self._rest: Chunk | None = None  # the last, smaller batch
        self._position = 0

    def read(self, limit: int) -> Chunk | None:
        """Up to `limit` batches."""
        if self._rest is None:
            chunk = read_exactly(self.inputs[0], limit * self._size)
        else:
            chunk, self._rest = self._rest, None
        if chunk is None:
            return None
        full = chunk.count // self._size
        if full * self._size < chunk.count and full:
            self._rest = chunk.rows(full * self._size, chunk.count)
            chunk = chunk.rows(0, full * self._size)
        elif not full and self._drop:
            return None
        self._position += chunk.count
        return self._group(chunk, max(full, 1))

    def _group(self, chunk: Chunk, batches: int) -> Chunk:
        columns = [stack_batches(column, batches) for column in chunk.columns]
        return Chunk(columns, batches)

    def skip(self, count: int) -> int:
        """Skip the elements of whole batches."""
        if self._rest is not None:
            return super().skip(count)
        skipped = self.inputs[0].skip(count * self._size)
        self._position += skipped
        return batched_size(skipped, self._size, self._drop)


def stack_batches(column: Column, batches: int) -> Column:
    """A column of elements as a column of batches."""
    size = len(column) // batches
    if not isinstance(column, list):
        return column.reshape(batches, size, *column.shape[1:])
    stacked = [stack(column[i * size : (i + 1) * size]) for i in range(batches)]
    for batch in stacked:
        if isinstance(batch, list):
            shapes = sorted({np.shape(leaf) for leaf in batch})
            raise InvalidArgumentError(
                "batch needs elements of one shape; use padded_batch to fill them up, or ragged_batch to "
                f"keep them as they are. Received: shapes {', '.join(map(str, shapes))}"
            )
    return stack(stacked)
