"""Cursors: open positions in a plan, and the run that they belong to.

A cursor answers `read(limit)` with a chunk of at least one and at most `limit` elements, or None at the
end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
    """

    seed: int = 0
    passes: tuple[int, ...] = (0,)
    branch: tuple[int, ...] = ()
    deterministic: bool = True
    on_row_numbers: bool = False

    def in_pass(self, number: int) -> Run:
        """The run of one pass of a `repeat`."""
        return dataclasses.replace(self, passes=(*self.passes, number))

    def in_branch(self, index: int) -> Run:
        """The run of one of several inputs."""
        return dataclasses.replace(self, branch=(*self.branch, index))

    def first_pass(self) -> Run:
        """The same run as if it were the first: what is cached must not depend on when it was read."""
        return dataclasses.replace(self, passes=(0,))

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
