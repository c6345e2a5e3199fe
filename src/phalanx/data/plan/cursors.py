"""Cursors: open positions in a plan, and the run that they belong to.

A cursor answers `read(limit)` with a chunk of at least one and at most `limit` elements, or None at the
end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.data.plan.columns import Chunk
from phalanx.errors import DataLossError


@dataclass(frozen=True)
class Run:
    """One run of a plan: what all randomness and all choices of a run come from.

    Args:
        seed: the root seed, for everything random that has no seed of its own.
        passes: which iteration of the dataset this is, then which pass of each `repeat` on the way.
        branch: which way was taken where a node has several inputs.
        deterministic: whether parallel nodes keep the order unless told otherwise.
        on_row_numbers: whether what is read are row numbers, which cost nothing to read.
        on_failure: what to call with the error of an element that is left out; None to raise it.
    """

    seed: int = 0
    passes: tuple[int, ...] = (0,)
    branch: tuple[int, ...] = ()
    deterministic: bool = True
    on_row_numbers: bool = False
    on_failure: Callable[[Exception], None] | None = None

    def in_pass(self, number: int) -> Run:
        """The run of one pass of a `repeat`."""
        return dataclasses.replace(self, passes=(*self.passes, number))

    def in_branch(self, index: int) -> Run:
        """The run of one of several inputs."""
        return dataclasses.replace(self, branch=(*self.branch, index))

    def first_pass(self) -> Run:
        """The same run as if it were the first: what is cached must not depend on when it was read."""
        return dataclasses.replace(self, passes=(0,), on_failure=None)

    def generator(self, seed: int | None, depth: int, each_pass: bool = True) -> np.random.Generator:
        """A random generator for one node of the plan.

        Args:
            seed: the node's own seed, or None to use the root seed.
            depth: tells nodes of one branch apart: how many random nodes are below.
            each_pass: whether each pass has an order of its own.
        """
        passes = self.passes if each_pass else ()
        own = (0, self.seed) if seed is None else (1, seed)
        words = (*own, depth, len(passes), *passes, *self.branch)
        return np.random.default_rng([word % 2**64 for word in words])


class Cursor:
    """An open position in a plan.

    Subclasses put the cursors they read from into `inputs`, and are read by one thread at a time.
    """

    inputs: Sequence[Cursor] = ()

    def read(self, limit: int) -> Chunk | None:
        """The next elements, at least one and at most `limit`; None at the end, and from then on."""
        raise NotImplementedError

    def skip(self, count: int) -> int:
        """Leave out up to `count` elements; how many there were."""
        skipped = 0
        while skipped < count and (chunk := self.read(min(count - skipped, 1024))) is not None:
            skipped += chunk.count
        return skipped

    def cancel(self) -> None:
        """Wake the thread that waits in this cursor; may be called by any thread."""
        for cursor in self.inputs:
            cursor.cancel()

    def close(self) -> None:
        """Give back threads and files. Safe to call twice; nothing can be read afterwards."""
        for cursor in self.inputs:
            cursor.close()


class BlockCursor(Cursor):
    """Base of cursors that read blocks of a size of their own, and hand out parts of them."""

    _block: Chunk | None = None  # the last one, unless it is used up
    _at = 0  # how many of its elements are gone

    def next_block(self, limit: int) -> Chunk | None:
        """The next elements, at least one, also if they are more than `limit`; None at the end."""
        raise NotImplementedError

    def skip_ahead(self, count: int) -> int:
        """Leave out up to `count` elements behind the block without reading them; how many it did."""
        return 0

    @property
    def at_hand(self) -> int:
        """How many elements can be handed out without reading another block."""
        return 0 if self._block is None else self._block.count - self._at

    def fill(self, limit: int) -> bool:
        """Have elements at hand; False at the end."""
        if self._block is None:
            self._block, self._at = self.next_block(limit), 0
        return self._block is not None

    def read(self, limit: int) -> Chunk | None:
        """Elements of one block."""
        block, start = self._block, self._at
        if block is None:
            block, start = self.next_block(limit), 0
            if block is None:
                return None
        self._at = start + limit
        self._block = block if self._at < block.count else None
        return block.rows(start, self._at)

    def skip(self, count: int) -> int:
        """Leave out elements as cheaply as possible."""
        skipped = min(count, self.at_hand)
        if skipped:
            self.read(skipped)
        if skipped < count:
            skipped += self.skip_ahead(count - skipped)
        return skipped + super().skip(count - skipped)


class ChainCursor(Cursor):
    """Base of cursors that read others one after the other, each opened when its turn comes."""

    _current: Cursor | None = None

    def open_next(self) -> Cursor | None:
        """Open the next one; None if there are no more."""
        raise NotImplementedError

    def _open(self) -> Cursor | None:
        if self._current is None:
            self._current = self.open_next()
        return self._current

    def _leave(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None

    def read(self, limit: int) -> Chunk | None:
        """The next elements, of one of them."""
        while (cursor := self._open()) is not None:
            chunk = cursor.read(limit)
            if chunk is not None:
                return chunk
            self._leave()
        return None

    def skip(self, count: int) -> int:
        """Leave out elements as cheaply as each of them can."""
        skipped = 0
        while skipped < count and (cursor := self._open()) is not None:
            skipped += cursor.skip(count - skipped)
            if skipped < count:
                self._leave()
        return skipped

    def cancel(self) -> None:
        """Wake the thread that waits in one of them."""
        super().cancel()
        if self._current is not None:
            self._current.cancel()

    def close(self) -> None:
        """Give back what is open."""
        super().close()
        self._leave()


def read_exactly(cursor: Cursor, count: int, held: Chunk | None = None) -> Chunk | None:
    """`count` elements in one chunk, fewer only at the end; None if there are none left.

    Damaged data is an end too: what comes before it is given first. It is raised by the next read,
    because sources raise it again and again. So a reader that stops at an end must read once more.

    Args:
        cursor: what to read.
        count: how many elements are wanted.
        held: elements that were read before, which come first.
    """
    chunks = [] if held is None else [held]
    have = 0 if held is None else held.count
    try:
        while have < count and (chunk := cursor.read(count - have)) is not None:
            chunks.append(chunk)
            have += chunk.count
    except DataLossError:
        if not chunks:
            raise
    return Chunk.concat(chunks) if chunks else None
