"""Reading ahead in a thread."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np

from phalanx.data.plan.argument_checks import AUTOTUNE
from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import BlockCursor, Cursor, Run
from phalanx.data.plan.nodes import SameElements
from phalanx.data.plan.opening import open_plan
from phalanx.data.run.element_queue import ElementQueue
from phalanx.data.run.read_ahead import ReadAhead
from phalanx.errors import CancelledError
from phalanx.runtime.interrupts import Bell, uninterrupted

MOST_ELEMENTS = 1024
MOST_BYTES = 64 * 2**20
"""How much a buffer of automatic size holds at most (though always two elements)."""

_LOOK_SECONDS = 1.0
"""How often the thread looks whether there is room."""


@dataclass(frozen=True, eq=False)
class Prefetch(SameElements):
    """The elements of the input, of which up to `buffer_size` are read ahead in a thread."""

    buffer_size: int
    probe_below = True

    def open(self, run: Run) -> Cursor:
        """Start a thread when first asked."""
        input_ = open_plan(self.input, run)
        return input_ if self.buffer_size == 0 else PrefetchCursor(input_, self.buffer_size)


class _ChunkProducer:
    """Reads chunks as long as there is room for elements.

    The thread and the reader write numbers of their own, so there is no lock between them: a collection
    of garbage, in any thread, may cancel it.
    """

    def __init__(self, cursor: Cursor, size: int) -> None:
        self._cursor = cursor
        self._automatic = size == AUTOTUNE
        self._size = 2 if self._automatic else size
        self._wanted = 1  # the most elements that were asked for at once
        self._read = self._taken = 0
        self._element_bytes = 0  # of the elements that were taken last
        self._space = Bell()
        self._cancelled = False

    # -- the thread

    def __iter__(self) -> _ChunkProducer:
        return self

    def __next__(self) -> tuple[Chunk, None]:
        room = self._room()
        chunk = self._cursor.read(room) if room else None
        if chunk is None:
            raise StopIteration
        self._read += chunk.count
        return chunk, None

    def _room(self) -> int:
        """How many elements to read next; waits until it is at least one. 0 if none is wanted.

        Not more than were ever asked for at once: an element that is there must not wait for others
        that are not.
        """
        while not self._cancelled:
            free = self._size - (self._read - self._taken)
            if free > 0:
                return min(self._wanted, free)
            self._space.wait(_LOOK_SECONDS)
        return 0

    def close(self) -> None:
        self._cursor.close()

    # -- the reader

    def expect(self, limit: int) -> None:
        """Learn how many elements are asked for at once."""
        self._wanted = max(self._wanted, limit)

    def grow(self) -> None:
        """Nothing is there although it is wanted: an automatic buffer doubles."""
        if self._automatic and self._taken:
            most = max(2, min(MOST_ELEMENTS, MOST_BYTES // max(1, self._element_bytes)))
            self._size = min(2 * self._size, most)

    def took(self, chunk: Chunk) -> None:
        """Have room for as many elements again."""
        if self._automatic:
            arrays = (column for column in chunk.columns if isinstance(column, np.ndarray))
            self._element_bytes = sum(column.nbytes for column in arrays) // chunk.count
        self._taken += chunk.count
        self._space.ring()

    def cancel(self) -> None:
        self._cancelled = True
        self._space.ring()
        self._cursor.cancel()


class PrefetchCursor(BlockCursor):
    """Reads from a buffer that a thread fills."""

    def __init__(self, input_: Cursor, size: int) -> None:
        self.inputs = (input_,)
        self._producer = _ChunkProducer(input_, size)
        self._ahead: ReadAhead[None] | None = None
        self._cancelled = False

    def read(self, limit: int) -> Chunk | None:
        """Elements that are ready, or the first that will be."""
        self._producer.expect(limit)
        chunk = super().read(limit)
        if self._cancelled:
            raise CancelledError("The iterator was closed while it was read.")
        if chunk is not None:
            self._producer.took(chunk)
        return chunk

    def next_block(self, limit: int) -> Chunk | None:
        """What the thread has read."""
        ahead = self._ahead or self._start()
        if not ahead.queue.waiting:
            self._producer.grow()
        return ahead.get()

    def _start(self) -> ReadAhead[None]:
        with uninterrupted():
            ahead = ReadAhead(self._producer, None, ElementQueue(None), "px-prefetch")
            weakref.finalize(self, ahead.stop, False)
            self._ahead = ahead
        if self._cancelled:  # by another thread, which did not see this one
            ahead.stop(wait=False)
        return ahead

    def skip(self, count: int) -> int:
        """Before the first read, the input is skipped."""
        return self.inputs[0].skip(count) if self._ahead is None else super().skip(count)

    def cancel(self) -> None:
        """Wake the reader and the thread."""
        self._cancelled = True
        if self._ahead is None:
            super().cancel()
        else:
            self._ahead.stop(wait=False)

    def close(self) -> None:
        """End the thread."""
        self._cancelled = True
        if self._ahead is None:
            super().close()
        else:
            self._ahead.stop()
