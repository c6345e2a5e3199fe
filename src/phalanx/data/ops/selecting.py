"""Nodes that leave out, repeat and distribute elements. They never look into them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import Cursor, Run, read_exactly
from phalanx.data.plan.dataset_options import Options
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, SameElements
from phalanx.data.plan.opening import open_plan
from phalanx.errors import FailedPreconditionError


@dataclass(frozen=True, eq=False)
class Take(SameElements):
    """The first `count` elements; all of them if it is -1."""

    count: int
    moves = True

    def size(self, *inputs: int) -> int:
        """At most `count`."""
        (size,) = inputs
        if self.count == 0:
            return 0
        if self.count < 0 or size == UNKNOWN:
            return size
        return self.count if size == INFINITE else min(size, self.count)

    def open(self, run: Run) -> Cursor:
        """Read until `count`."""
        return _TakeCursor(open_plan(self.input, run), self.count)


class _TakeCursor(Cursor):
    def __init__(self, input_: Cursor, count: int) -> None:
        self.inputs = (input_,)
        self._left = count

    def read(self, limit: int) -> Chunk | None:
        if self._left < 0:
            return self.inputs[0].read(limit)
        if self._left == 0:
            return None
        chunk = self.inputs[0].read(min(limit, self._left))
        if chunk is not None:
            self._left -= chunk.count
        return chunk

    def skip(self, count: int) -> int:
        if self._left < 0:
            return self.inputs[0].skip(count)
        skipped = self.inputs[0].skip(min(count, self._left))
        self._left -= skipped
        return skipped


@dataclass(frozen=True, eq=False)
class Skip(SameElements):
    """All but the first `count` elements; none if it is -1."""

    count: int
    moves = True

    def size(self, *inputs: int) -> int:
        """What is left."""
        (size,) = inputs
        if self.count < 0:
            return 0
        return size if size < 0 else max(0, size - self.count)

    def open(self, run: Run) -> Cursor:
        """Skip when first asked."""
        if self.count < 0:
            return _TakeCursor(open_plan(self.input, run), 0)
        return _SkipCursor(open_plan(self.input, run), self.count)


class _SkipCursor(Cursor):
    def __init__(self, input_: Cursor, count: int) -> None:
        self.inputs = (input_,)
        self._pending = count

    def _start(self) -> None:
        if self._pending:
            self.inputs[0].skip(self._pending)
            self._pending = 0

    def read(self, limit: int) -> Chunk | None:
        self._start()
        return self.inputs[0].read(limit)

    def skip(self, count: int) -> int:
        self._start()
        return self.inputs[0].skip(count)


SHARD_HINT = -1
"""Stands for both arguments of `shard` until distribution fills in the worker's number."""


@dataclass(frozen=True, eq=False)
class Shard(SameElements):
    """Every `num_shards`-th element, beginning with number `index`.

    With `SHARD_HINT` for both it is a place where distribution may shard, and yields everything until
    it does.
    """

    num_shards: int
    index: int
    moves = True

    @property
    def is_hint(self) -> bool:
        """Whether this is only a place to shard at."""
        return self.num_shards == SHARD_HINT

    def size(self, *inputs: int) -> int:
        """About one part of `num_shards`."""
        (size,) = inputs
        if size < 0 or self.is_hint:
            return size
        return (size - self.index + self.num_shards - 1) // self.num_shards

    def open(self, run: Run) -> Cursor:
        """Read all, pass on some."""
        input_ = open_plan(self.input, run)
        return input_ if self.is_hint else _ShardCursor(input_, self.num_shards, self.index)


class _ShardCursor(Cursor):
    def __init__(self, input_: Cursor, step: int, index: int) -> None:
        self.inputs = (input_,)
        self._step = step
        self._before = index  # how many elements to leave out before the next one

    def read(self, limit: int) -> Chunk | None:
        if self._before and self.inputs[0].skip(self._before) < self._before:
            return None
        self._before = self._step - 1
        if limit == 1:
            return self.inputs[0].read(1)
        chunk = read_exactly(self.inputs[0], (limit - 1) * self._step + 1)
        if chunk is None:
            return None
        return chunk.take(np.arange(0, chunk.count, self._step))

    def skip(self, count: int) -> int:
        if count == 0:
            return 0
        wanted = self._before + (count - 1) * self._step + 1
        skipped = self.inputs[0].skip(wanted)
        done = max(0, (skipped - self._before + self._step - 1) // self._step)
        self._before = self._step - 1
        return min(done, count)


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


class _RepeatCursor(Cursor):
    def __init__(self, node: Repeat, run: Run) -> None:
        self._node, self._run = node, run
        self._pass = 0
        self._fresh = True  # nothing was read in this pass
        self._ended = node.count == 0

    def _open(self) -> Cursor:
        if not self.inputs:
            self.inputs = (open_plan(self._node.input, self._run.in_pass(self._pass)),)
            self._fresh = True
        return self.inputs[0]

    def _next_pass(self) -> bool:
        """Go on to the next pass, if there is one."""
        self.inputs[0].close()
        self.inputs = ()
        self._pass += 1
        count = self._node.count
        self._ended = self._fresh or (count is not None and self._pass >= count)
        return not self._ended

    def read(self, limit: int) -> Chunk | None:
        if self._ended:
            return None
        while (chunk := self._open().read(limit)) is None:
            if not self._next_pass():
                return None
        self._fresh = False
        return chunk

    def skip(self, count: int) -> int:
        skipped = 0
        while skipped < count and not self._ended:
            skipped += self._skip_passes(count - skipped)
            found = self._open().skip(count - skipped)
            skipped += found
            self._fresh = self._fresh and not found
            if skipped < count and not self._next_pass():
                break
        return skipped

    def _skip_passes(self, count: int) -> int:
        """Whole passes cost nothing if it is known how long they are."""
        size = self._node.input.cardinality
        if size <= 0 or self.inputs:
            return 0
        passes = (count - 1) // size if count else 0
        if self._node.count is not None:
            passes = min(passes, self._node.count - 1 - self._pass)
        self._pass += passes
        return passes * size


@dataclass(frozen=True, eq=False)
class WithOptions(SameElements):
    """The elements of the input, with options that say how to run and distribute it."""

    options: Options
    moves = True
    probe_below = True

    def size(self, *inputs: int) -> int:
        """As many as before."""
        return inputs[0]

    def open(self, run: Run) -> Cursor:
        """Nothing to do."""
        return open_plan(self.input, run)


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
