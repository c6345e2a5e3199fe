"""Nodes that leave out, repeat and distribute elements. They never look into them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import ChainCursor, Cursor, Run, read_exactly
from phalanx.data.plan.dataset_options import Options
from phalanx.data.plan.nodes import INFINITE, SameElements
from phalanx.data.plan.opening import open_plan
from phalanx.errors import FailedPreconditionError

SHARD_HINT = -1
"""Stands for both arguments of `shard` until distribution fills in the worker's number."""


@dataclass(frozen=True, eq=False)
class Slice(SameElements):
    """Every `step`-th element, from number `start` to before number `stop`: take, skip and shard."""

    start: int = 0
    stop: int | None = None  # None for all that follow
    step: int = 1
    moves = True

    def size(self, *inputs: int) -> int:
        """As many as a slice of a list would have."""
        (size,) = inputs
        if self.stop is not None and (size == INFINITE or self.stop == 0):
            size = self.stop
        if size < 0:
            return size
        end = size if self.stop is None else min(size, self.stop)
        return max(0, -(-(end - self.start) // self.step))

    def open(self, run: Run) -> Cursor:
        """Skip and read."""
        return _SliceCursor(open_plan(self.input, run), self)


class _SliceCursor(Cursor):
    def __init__(self, input_: Cursor, node: Slice) -> None:
        self.inputs = (input_,)
        self._step = node.step
        self._before = node.start  # how many elements to leave out before the next one
        self._left = sys.maxsize if node.stop is None else node.size(INFINITE)

    def read(self, limit: int) -> Chunk | None:
        count = min(limit, self._left)
        if count == 0:
            return None
        if self._before and self.inputs[0].skip(self._before) < self._before:
            return None
        self._before = self._step - 1
        if count == 1 or self._step == 1:
            chunk = self.inputs[0].read(count)
        else:
            chunk = read_exactly(self.inputs[0], (count - 1) * self._step + 1)
            if chunk is not None:
                chunk = chunk.take(np.arange(0, chunk.count, self._step))
        if chunk is not None:
            self._left -= chunk.count
        return chunk

    def skip(self, count: int) -> int:
        count = min(count, self._left)
        if count == 0:
            return 0
        skipped = self.inputs[0].skip(self._before + (count - 1) * self._step + 1)
        done = min(count, max(0, -(-(skipped - self._before) // self._step)))
        self._before = self._step - 1
        self._left -= done
        return done


class PassedOn(SameElements):
    """Base of nodes that only say something about the elements of their input."""

    moves = True

    def open(self, run: Run) -> Cursor:
        """Nothing to do."""
        return open_plan(self.input, run)


@dataclass(frozen=True, eq=False)
class ShardHint(PassedOn):
    """A place where distribution may shard. It yields everything until it does."""


@dataclass(frozen=True, eq=False)
class Repeat(SameElements):
    """The elements `count` times over; without end if it is None or -1."""

    count: int | None
    moves = True
    probe_below = True

    def size(self, *inputs: int) -> int:
        """The product."""
        (size,) = inputs
        if size == 0 or self.count == 0:
            return 0
        if self.count is None:
            return INFINITE
        return size if size < 0 else size * self.count

    def open(self, run: Run) -> Cursor:
        """Open the input again for each pass."""
        return _RepeatCursor(self, run)


class _RepeatCursor(ChainCursor):
    def __init__(self, node: Repeat, run: Run) -> None:
        self._node, self._run = node, run
        self._pass = 0  # the next one
        self._empty = False  # whether nothing was read in the last one

    @property
    def _is_over(self) -> bool:
        count = self._node.count
        return self._empty or (count is not None and self._pass >= count)

    def open_next(self) -> Cursor | None:
        if self._is_over:
            return None
        run = self._run.in_pass(self._pass)
        self._pass, self._empty = self._pass + 1, True
        return open_plan(self._node.input, run)

    def read(self, limit: int) -> Chunk | None:
        chunk = super().read(limit)
        if chunk is not None:
            self._empty = False
        return chunk

    def skip(self, count: int) -> int:
        skipped = 0
        while skipped < count:
            skipped += self._skip_passes(count - skipped)
            cursor = self._open()
            if cursor is None:
                break
            found = cursor.skip(count - skipped)
            skipped += found
            self._empty = self._empty and not found
            if skipped < count:
                self._leave()
        return skipped

    def _skip_passes(self, count: int) -> int:
        """Whole passes cost nothing if it is known how long they are."""
        size = self._node.input.cardinality
        if size <= 0 or self._current is not None or self._is_over:
            return 0
        passes = (count - 1) // size
        if self._node.count is not None:
            passes = min(passes, self._node.count - 1 - self._pass)
        self._pass += passes
        return passes * size


@dataclass(frozen=True, eq=False)
class WithOptions(PassedOn):
    """The elements of the input, with options that say how to run and distribute it."""

    options: Options
    probe_below = True


@dataclass(frozen=True, eq=False)
class AssertCardinality(SameElements):
    """The elements of the input, of which there must be exactly `expected`."""

    expected: int
    probe_below = True

    def size(self, *inputs: int) -> int:
        """What was asserted."""
        return self.expected

    def open(self, run: Run) -> Cursor:
        """Count, and compare."""
        return _CountingCursor(open_plan(self.input, run), self.expected)


class _CountingCursor(Cursor):
    def __init__(self, input_: Cursor, expected: int) -> None:
        self.inputs = (input_,)
        self._expected = expected
        self._count = 0

    def _check(self, at_end: bool) -> None:
        too_many = 0 <= self._expected < self._count
        too_few = at_end and (self._count < self._expected or self._expected == INFINITE)
        if too_many or too_few:
            wanted = "infinitely many" if self._expected == INFINITE else self._expected
            more = "" if at_end else " or more"
            raise FailedPreconditionError(
                f"The dataset was said to have {wanted} elements. Received: {self._count}{more}"
            )

    def read(self, limit: int) -> Chunk | None:
        chunk = self.inputs[0].read(limit)
        self._count += 0 if chunk is None else chunk.count
        self._check(chunk is None)
        return chunk

    def skip(self, count: int) -> int:
        skipped = self.inputs[0].skip(count)
        self._count += skipped
        self._check(skipped < count)
        return skipped
