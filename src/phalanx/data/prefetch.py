"""Reading ahead in a thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from phalanx.core.errors import AbortedError, CancelledError
from phalanx.core.interrupts import Bell, uninterrupted
from phalanx.data.checks import AUTOTUNE
from phalanx.data.columns import Chunk
from phalanx.data.node import Cursor, Run, SameElements, open_plan
from phalanx.data.threads import PATIENCE

MOST_ELEMENTS = 1024
MOST_BYTES = 64 * 2**20
"""How much a buffer of automatic size holds at most (though always two elements)."""


@dataclass(frozen=True, eq=False)
class Prefetch(SameElements):
    """The elements of the input, of which up to `buffer_size` are read ahead in a thread."""

    buffer_size: int
    probe_below = True

    def size(self, *inputs: int) -> int:
        """As many as before."""
        return inputs[0]

    def open(self, run: Run) -> Cursor:
        """Start a thread when first asked."""
        input_ = open_plan(self.input, run)
        return input_ if self.buffer_size == 0 else PrefetchCursor(input_, self.buffer_size)


class _Buffer:
    """What the thread has read and nobody has taken yet; all that the two sides know of each other."""

    def __init__(self, size: int) -> None:
        self._automatic = size == AUTOTUNE
        self._size = 2 if self._automatic else size
        # Reentrant, because a collection of garbage may close the buffer while it is in use.
        self._lock = threading.RLock()
        self._something, self._space = Bell(), Bell()  # for the reader, and for the thread
        self._chunks: deque[Chunk] = deque()
        self._held = 0
        self._wanted = 1  # the most elements that were asked for at once
        self._ended = self._closed = False
        self._failure: BaseException | None = None

    def room(self) -> int:
        """How many elements to read next; waits until it is at least one. 0 if nobody wants any.

        Not more than were ever asked for at once: nobody must wait for an element that is there until
        others are there too.
        """
        while not self._closed:
            with self._lock:
                if self._held < self._size:
                    return min(self._wanted, self._size - self._held)
            self._space.wait(1.0)
        return 0

    def expect(self, limit: int) -> None:
        self._wanted = max(self._wanted, limit)

    def put(self, chunk: Chunk) -> None:
        with self._lock:
            self._chunks.append(chunk)
            self._held += chunk.count
        self._something.ring()

    def end(self, failure: BaseException | None) -> None:
        with self._lock:
            self._ended, self._failure = True, failure
        self._something.ring()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._chunks.clear()
        self._something.ring()
        self._space.ring()

    def take(self, limit: int, thread: threading.Thread) -> Chunk | None:
        self.expect(limit)
        if not self._chunks and not self._ended:
            self._grow()
        while not self._chunks and not self._ended and not self._closed:
            if not thread.is_alive():
                raise AbortedError("The thread that prefetches is gone; was the process forked?")
            self._something.wait(1.0)
        with self._lock:
            if self._closed:
                raise CancelledError("The iterator was closed while it was read.")
            if not self._chunks:
                if self._failure is not None:
                    raise self._failure
                return None
            chunk = self._chunks.popleft()
            if chunk.count > limit:
                self._chunks.appendleft(chunk.rows(limit, chunk.count))
                chunk = chunk.rows(0, limit)
            self._held -= chunk.count
            self._last = chunk
        self._space.ring()
        return chunk

    def _grow(self) -> None:
        """Nothing is there although somebody wants it: an automatic buffer doubles."""
        if self._automatic and self._last is not None:
            each = max(1, _bytes(self._last) // self._last.count)
            most = max(2, min(MOST_ELEMENTS, MOST_BYTES // each))
            self._size = min(2 * self._size, most)

    _last: Chunk | None = None


def _bytes(chunk: Chunk) -> int:
    return sum(column.nbytes for column in chunk.columns if isinstance(column, np.ndarray))


def _read_ahead(buffer: _Buffer, cursor: Cursor) -> None:
    """The thread: reads as long as there is room."""
    failure: BaseException | None = None
    try:
        while room := buffer.room():
            chunk = cursor.read(room)
            if chunk is None:
                break
            buffer.put(chunk)
            del chunk
    except BaseException as error:  # noqa: BLE001 - the reader gets it
        failure = error
    try:
        cursor.close()
    except BaseException as error:  # noqa: BLE001 - the reader gets it
        failure = failure or error
    buffer.end(failure)


class PrefetchCursor(Cursor):
    """Reads from a buffer that a thread fills."""

    def __init__(self, input_: Cursor, size: int) -> None:
        self.inputs = (input_,)
        self._buffer = _Buffer(size)
        self._thread: threading.Thread | None = None
        self._stop = weakref.finalize(self, self._buffer.close)

    def read(self, limit: int) -> Chunk | None:
        """Elements that are ready, or the first that will be."""
        if self._thread is None:
            self._buffer.expect(limit)
            thread = threading.Thread(
                target=_read_ahead,
                args=(self._buffer, self.inputs[0]),
                name="px-prefetch",
                daemon=True,
            )
            with uninterrupted():
                thread.start()
                self._thread = thread
        return self._buffer.take(limit, self._thread)

    def skip(self, count: int) -> int:
        """Before the first read, the input is skipped."""
        return self.inputs[0].skip(count) if self._thread is None else super().skip(count)

    def cancel(self) -> None:
        """Wake the reader and the thread."""
        self._buffer.close()
        super().cancel()

    def close(self) -> None:
        """End the thread."""
        self._buffer.close()
        if self._thread is None:
            super().close()
        elif self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)
