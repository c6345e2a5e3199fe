"""Calling a function for several parts of the input at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import BlockCursor, Cursor
from phalanx.data.run.thread_pool import POLL_SECONDS, PendingCall, ThreadPool
from phalanx.errors import CancelledError


class MappedChunk(NamedTuple):
    """What a function made of a chunk: the results up to a failure, and the failure."""

    chunk: Chunk | None
    failure: Exception | None


class ParallelCursor(BlockCursor):
    """Applies a function to parts of its input in threads.

    The input is read by the reader's thread; only the function runs in others. Twice as many parts are
    under way as there are threads.

    Args:
        input_: what to read.
        apply: from a chunk, and the number of its first element, to an outcome of as many elements.
        threads: how many calls to make at the same time.
        ordered: whether results keep the order of the input; else the first to be ready comes first.
        largest: how many elements a part has at most; None for as many as are asked for at once.
        keeps_all: whether there is a result for each element.
    """

    def __init__(
        self,
        input_: Cursor,
        apply: Callable[[Chunk, int], MappedChunk],
        threads: int,
        ordered: bool,
        largest: int | None,
        keeps_all: bool = True,
    ) -> None:
        self.inputs = (input_,)
        self._apply, self._threads = apply, threads
        self._ordered, self._largest, self._keeps_all = ordered, largest, keeps_all
        self._pool: ThreadPool | None = None
        self._tasks: deque[PendingCall[MappedChunk]] = deque()
        self._index = 0
        self._widest = 1  # the most elements that were asked for at once
        self._ended = self._cancelled = False
        self._failure: Exception | None = None  # to be raised after all results

    def read(self, limit: int) -> Chunk | None:
        """Results, when they are ready."""
        self._widest = max(self._widest, limit)
        return super().read(limit)

    def _part(self) -> int:
        """How many elements to give to a thread: enough to be worth it, few enough to share."""
        if self._largest is None:
            return self._widest
        return max(1, min(self._largest, self._widest // (4 * self._threads)))

    def _submit(self) -> bool:
        """Have enough calls under way; whether there are any."""
        while not self._ended and len(self._tasks) < 2 * self._threads:
            try:
                chunk = self.inputs[0].read(self._part())
            except Exception as error:  # noqa: BLE001 - raised after what came before
                self._failure = error
                chunk = None
            if chunk is None:
                self._ended = True
                break
            if self._pool is None:
                self._pool = ThreadPool(self._threads, "px-map")
            self._tasks.append(self._pool.submit(self._apply, chunk, self._index))
            self._index += chunk.count
        return bool(self._tasks)

    def next_block(self, limit: int) -> Chunk | None:
        """The results of the next part."""
        while self._submit():
            chunk, failure = self._finished()
            if failure is not None:
                self._ended, self._failure = True, failure
                self._tasks.clear()
                if self._pool is not None:
                    self._pool.stop()
            if chunk is not None:
                return chunk
        if self._failure is not None:
            raise self._failure
        return None

    def _finished(self) -> MappedChunk:
        """The outcome of the next task."""
        assert self._pool is not None
        while not self._cancelled:
            waiting = [self._tasks[0]] if self._ordered else list(self._tasks)
            if self._pool.wait(waiting, POLL_SECONDS):
                done = next(task for task in waiting if task.done)
                self._tasks.remove(done)
                return done.result()
        raise CancelledError("The iterator was closed while it was read.")

    def skip(self, count: int) -> int:
        """Before the first read, the input is skipped and the function is not called."""
        if self._pool is not None or self._ended or not self._keeps_all:
            return super().skip(count)
        skipped = self.inputs[0].skip(count)
        self._index += skipped
        return skipped

    def cancel(self) -> None:
        """Wake the reader."""
        self._cancelled = True
        super().cancel()

    def close(self) -> None:
        """End the threads."""
        self._ended = True
        self._tasks.clear()
        if self._pool is not None:
            self._pool.close()
        super().close()
