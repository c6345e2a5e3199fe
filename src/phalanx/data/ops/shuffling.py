"""Shuffling with a buffer, without a loop over elements.

The buffer is filled with the first elements. Then each step draws a slot: the element in it leaves, and
the next one of the input takes its place. At the end the buffer is emptied in random order. So the
element that leaves in step t is the one that was put last into the slot drawn in step t: a question of
"previous occurrences", answered for many steps at once by sorting.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.data.plan.columns import Chunk, Column, Indices
from phalanx.data.plan.cursors import Cursor, Run, read_exactly
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, PlanNode, SameElements
from phalanx.data.plan.opening import open_plan, row_numbers
from phalanx.errors import DataLossError, InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Shuffle(SameElements):
    """The elements in random order, drawn from a buffer of `buffer_size` elements."""

    buffer_size: int
    seed: int | None = None
    reshuffle_each_iteration: bool = True
    moves = True
    probe_below = True

    def open(self, run: Run) -> Cursor:
        """Shuffle the input."""
        rng = run.generator(self.seed, shuffles_in(self.input), self.reshuffle_each_iteration)
        size = UNKNOWN if run.on_row_numbers else self.input.cardinality
        return _ShuffleCursor(open_plan(self.input, run), self.buffer_size, rng, size)


def shuffles_in(node: PlanNode) -> int:
    """How many shuffles are on the way down from a node; the same however the plan is run."""
    count = 0
    while node.inputs and not node.starts_anew:
        count += isinstance(node, Shuffle)
        node = node.inputs[0]
    return count


def previous_occurrence(slots: Indices) -> Indices:
    """For each position the last earlier position with the same slot, or -1.

    Examples:
        >>> previous_occurrence(np.array([5, 3, 5, 5, 3])).tolist()
        [-1, -1, 0, 2, 1]
    """
    order = np.argsort(slots, kind="stable")
    same = slots[order[1:]] == slots[order[:-1]]
    previous = np.full(len(slots), -1)
    previous[order[1:][same]] = order[:-1][same]
    return previous


class _ShuffleCursor(Cursor):
    def __init__(
        self, input_: Cursor, size: int, rng: np.random.Generator, input_size: int = UNKNOWN
    ) -> None:
        self.inputs = (input_,)
        self._size, self._rng, self._input_size = size, rng, input_size
        self._buffer: Chunk | None = None  # written to, so never handed out
        self._order: Indices | range | None = None  # what is left to leave, once the input has ended
        self._damage: DataLossError | None = None

    def _fill(self) -> None:
        chunks, have = [], 0
        while have < self._size and (chunk := self._coming(self._size - have)) is not None:
            chunks.append(chunk)
            have += chunk.count
        if not chunks:
            self._order = range(0)
            return
        if have < self._size:
            self._buffer = Chunk.concat(chunks)
            self._draw_order()
        else:
            self._buffer = _own(chunks)

    def _coming(self, limit: int) -> Chunk | None:
        """The next elements of the input. Damage ends it, and is raised when the buffer is empty."""
        try:
            return self.inputs[0].read(limit)
        except DataLossError as error:
            self._damage = error
            return None

    def _draw_order(self) -> None:
        """Decide in which order the elements of the buffer leave."""
        assert self._buffer is not None
        numbers, *others = self._buffer.columns
        if others or isinstance(numbers, list) or numbers.dtype.kind != "i" or numbers.ndim > 1:
            self._order = self._rng.permutation(self._buffer.count)
        else:  # the same order, without another number for each row
            shuffled = numbers.copy()
            self._rng.shuffle(shuffled)
            self._buffer = Chunk([shuffled], self._buffer.count)
            self._order = range(self._buffer.count)

    def read(self, limit: int) -> Chunk | None:
        if self._buffer is None and self._order is None:
            self._fill()
        if self._order is None:
            chunk = self._exchange(limit)
            if chunk is not None:
                return chunk
            self._draw_order()
        assert self._order is not None
        leaving, self._order = self._order[:limit], self._order[limit:]
        if not len(leaving):
            self._buffer = None
            if self._damage is not None:
                raise self._damage
            return None
        assert self._buffer is not None
        if isinstance(leaving, range):
            return self._buffer.rows(leaving.start, leaving.stop)
        return self._buffer.take(leaving)

    def _exchange(self, limit: int) -> Chunk | None:
        """Let elements of the input in, and as many out."""
        coming = self._coming(limit)
        if coming is None:
            return None
        assert self._buffer is not None
        # Doubles are drawn one by one, so the order does not depend on how many are asked for at once.
        slots = (self._rng.random(coming.count) * self._size).astype(np.int64)
        previous = previous_occurrence(slots)
        last = np.ones(len(slots), bool)
        last[previous[previous >= 0]] = False
        columns = [
            _swap(held, new, slots, previous, last)
            for held, new in zip(self._buffer.columns, coming.columns, strict=True)
        ]
        self._buffer = Chunk([held for held, _ in columns], self._size)
        return Chunk([leaving for _, leaving in columns], coming.count)

    def skip(self, count: int) -> int:
        """Before the first read: shuffle positions only, and read just what is in the buffer then."""
        if self._buffer is not None or self._order is not None or self._input_size == UNKNOWN:
            return super().skip(count)
        size = sys.maxsize if self._input_size == INFINITE else self._input_size
        shadow = _ShuffleCursor(row_numbers(size).open(Run()), self._size, self._rng)
        skipped = shadow.skip(count)
        self._order = shadow._order
        if shadow._buffer is None:
            return skipped
        wanted = np.asarray(shadow._buffer.columns[0])
        if self._order is not None:
            wanted = wanted[np.asarray(self._order, np.int64)]
            self._order = range(len(wanted))
        if len(wanted):
            self._buffer = _own([self._fetch(wanted)])
        return skipped

    def _fetch(self, wanted: Indices) -> Chunk:
        """The elements at some positions of the input, in their order; all others are skipped.

        The element that was put into the buffer last is among them, so the input is read up to there.
        """
        order = np.argsort(wanted)
        ordered = wanted[order]
        chunks, position = [], 0
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
            self.inputs[0].skip(int(run[0]) - position)
            chunk = read_exactly(self.inputs[0], len(run))
            if chunk is None or chunk.count < len(run):
                self.inputs[0].read(1)  # fails if the input is damaged
                raise InvalidArgumentError(
                    "The dataset ended before the position to go on from: it has changed, or has fewer "
                    f"elements than its cardinality of {self._input_size}."
                )
            chunks.append(chunk)
            position = int(run[-1]) + 1
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return Chunk.concat(chunks).take(places)


def _own(chunks: list[Chunk]) -> Chunk:
    """The elements of chunks in columns of their own."""
    if len(chunks) > 1:
        return Chunk.concat(chunks)
    return Chunk([column.copy() for column in chunks[0].columns], chunks[0].count)


def _swap(
    held: Column, new: Column, slots: Indices, previous: Indices, last: NDArray[np.bool_]
) -> tuple[Column, Column]:
    """The held column with new elements in its slots, and the column of those that leave."""
    if not isinstance(held, list) and not isinstance(new, list) and held.shape[1:] == new.shape[1:]:
        leaving = held.take(slots, axis=0)
        known = previous >= 0
        leaving[known] = new[previous[known]]
        held[slots[last]] = new[last]
        return held, leaving
    held = held if isinstance(held, list) else list(held)
    out = [
        new[p] if p >= 0 else held[s] for s, p in zip(slots.tolist(), previous.tolist(), strict=True)
    ]
    for t in np.flatnonzero(last).tolist():
        held[slots[t]] = new[t]
    return held, out
