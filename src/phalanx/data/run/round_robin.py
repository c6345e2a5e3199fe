"""Several cursors read in turns: by the reader itself, or ahead of it in threads.

The order is TensorFlow's. A cursor that ends gives up its turn, and its place gets the next one when
its turn comes again. Unless order does not matter, threads do not change it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import BlockCursor, Cursor
from phalanx.data.run.thread_pool import POLL_SECONDS, PendingCall, ThreadPool
from phalanx.errors import CancelledError

Opened = tuple[Cursor, Callable[[], None] | None]
"""A cursor, and what to call once something was read from it."""

_MOST_AHEAD = 256
"""How many elements of one cursor a thread reads ahead at most."""

_MOST_BYTES_AHEAD = 2**20
"""How many bytes these elements have at most, if that is more than a block."""


class _Place(BlockCursor):
    """One of the cursors that are open.

    If there is a pool, its threads read the next elements while others are used: one block first, and
    more at once as long as the cursor goes on, up to a limit.
    """

    coming: PendingCall[Chunk | None] | None = None  # what a thread reads
    passed = 0  # how many elements were skipped before their turn
    _failure: Exception | None = None
    _cancelled = False

    def __init__(self, opened: Opened, pool: ThreadPool | None, block: int) -> None:
        self._cursor, self._check = opened
        self.inputs = (self._cursor,)
        self.left = block  # how many elements of its turn are still to come
        self._pool, self._least, self._size = pool, max(block, 1), max(block, 1)

    def begin(self) -> None:
        """Let a thread read, if there is one."""
        if self.coming is None and self._pool is not None:
            self.coming = self._pool.submit(self._cursor.read, self._size)

    def next_block(self, limit: int) -> Chunk | None:
        if self._failure is not None:
            raise self._failure
        try:
            block = self._cursor.read(limit) if self._pool is None else self._awaited(self._pool)
            if self._check is not None and block is not None:
                self._check()
                self._check = None
        except Exception as error:
            self._failure = error
            raise
        return block

    def _awaited(self, pool: ThreadPool) -> Chunk | None:
        self.begin()
        assert self.coming is not None
        while not self._cancelled and not pool.wait([self.coming], POLL_SECONDS):
            pass
        if self._cancelled:
            raise CancelledError("The iterator was closed while it was read.")
        block = self.coming.result()
        if block is not None:
            most = min(_MOST_AHEAD, _MOST_BYTES_AHEAD // max(1, _size_of(block.element(0))))
            self._size = max(self._least, min(2 * self._size, most))
            self.coming = None
            self.begin()
        return block

    def take(self, count: int) -> Chunk:
        """Some of the elements at hand."""
        chunk = self.read(count)
        assert chunk is not None
        return chunk

    def skip_ahead(self, count: int) -> int:
        return self._cursor.skip(count) if self.coming is None else 0

    @property
    def is_ready(self) -> bool:
        """Whether filling would not wait for a thread."""
        return self.at_hand > 0 or self.coming is None or self.coming.done

    def cancel(self) -> None:
        self._cancelled = True
        super().cancel()


def _size_of(leaves: Sequence[Any]) -> int:
    """About how many bytes an element has."""
    texts = [leaf for leaf in leaves if isinstance(leaf, str | bytes)]
    others = [getattr(leaf, "nbytes", 64) for leaf in leaves if not isinstance(leaf, str | bytes)]
    return sum(map(len, texts)) + sum(others)


class RoundRobinCursor(Cursor):
    """Elements of several cursors in turns.

    Args:
        open_next: opens the next cursor; None if there are no more.
        inputs: what that reads.
        cycle: how many are open at a time.
        block: how many elements of each are taken in its turn; None for all of them.
        threads: how many threads read ahead; None to read when elements are asked for.
        ordered: whether to wait for a cursor whose turn it is while others have elements ready.
    """

    def __init__(
        self,
        open_next: Callable[[], Opened | None],
        inputs: Sequence[Cursor],
        cycle: int,
        block: int | None,
        threads: int | None = None,
        ordered: bool = True,
    ) -> None:
        self._open_next, self.inputs = open_next, inputs
        self._places: list[_Place | None] = [None] * cycle
        self._block = -1 if block is None else block
        self._threads, self._ordered = threads, ordered
        self._pool: ThreadPool | None = None
        self._turn = 0
        self._all_opened = False  # whether there are no more to open
        self._begun = False
        self._failure: Exception | None = None

    # -- reading

    def read(self, limit: int) -> Chunk | None:
        """Elements of the next blocks."""
        if self._failure is not None:
            raise self._failure
        parts: list[Chunk] = []
        have = 0
        try:
            if not self._begun:
                self._begin()
            while have < limit and (part := self._part(limit - have)) is not None:
                parts.append(part)
                have += part.count
        except Exception as error:
            self._failure = error
            if not parts:
                raise
        return Chunk.concat(parts) if parts else None

    def _begin(self) -> None:
        """Let threads begin to read all cursors of the first cycle."""
        self._begun = True
        if self._threads is not None:
            for i in range(self._turn, self._turn + len(self._places)):
                place = self._places[i % len(self._places)] or self._open()
                self._places[i % len(self._places)] = place
                if place is not None:
                    place.begin()

    def _part(self, limit: int) -> Chunk | None:
        """Some elements of one cursor, or of all of them in turn."""
        while (place := self._current()) is not None:
            if not place.fill(self._share(place, limit)):
                self._end(place)
                continue
            rounds = self._rounds(place, limit)
            if rounds is not None:
                return rounds
            part = place.take(limit if place.left < 0 else min(limit, place.left))
            self._use(place, part.count)
            return part
        return None

    def _share(self, place: _Place, limit: int) -> int:
        """How many of the next `limit` elements are surely from this place, if it has so many."""
        if place.left < 0:
            return limit
        rounds = limit // (len(self._in_turn()) * self._block)
        return max(min(limit, place.left), rounds * self._block)

    def _in_turn(self) -> list[_Place | None]:
        """The places that have a turn, from the current one on; None for one still to be opened."""
        places = self._places[self._turn :] + self._places[: self._turn]
        return [place for place in places if place is not None] if self._all_opened else places

    def _whole_round(self, current: _Place, limit: int) -> list[_Place]:
        """All places, if a whole round begins and is wanted; else none."""
        if self._block < 0 or current.left != self._block:
            return []
        places = self._in_turn()
        opened = [place for place in places if place is not None]
        whole = len(opened) == len(places) and limit >= len(places) * self._block
        return opened if whole else []

    def _rounds(self, current: _Place, limit: int) -> Chunk | None:
        """Whole rounds of blocks, if every place has blocks at hand."""
        places = self._whole_round(current, limit)
        if not places or limit < 2 * self._block:
            return None
        rounds = limit // (len(places) * self._block)
        for place in places:
            if not self._ordered and not place.is_ready:
                return None
            with contextlib.suppress(Exception):  # raised again when it has its turn
                place.fill(rounds * self._block)
            rounds = min(rounds, place.at_hand // self._block)
            if not rounds:
                return None
        return Chunk.in_turns([place.take(rounds * self._block) for place in places], self._block)

    # -- skipping

    def skip(self, count: int) -> int:
        """Skip in the cursors, so that what they would have to read or compute is left out.

        Most elements are skipped before their turn: whatever happens to others, a place gets its share.
        """
        if self._failure is not None:
            raise self._failure
        left = count
        while left and (place := self._current()) is not None:
            if not place.passed:
                is_sure = self._ordered or place.left < 0
                place.passed = place.skip(
                    self._share(place, left) if is_sure else min(left, place.left)
                )
            if not place.passed:
                self._end(place)
                continue
            places = self._whole_round(place, left)
            rounds = min((x.passed // self._block for x in places), default=0)
            if rounds:
                for x in places:
                    x.passed -= rounds * self._block
                left -= rounds * len(places) * self._block
            else:
                used = place.passed if place.left < 0 else min(place.passed, place.left, left)
                place.passed -= used
                left -= used
                self._use(place, used)
        return count - left

    # -- turns

    def _use(self, place: _Place, count: int) -> None:
        if place.left > 0:
            place.left -= count
            if place.left == 0:
                self._next_turn()

    def _end(self, place: _Place) -> None:
        place.close()
        self._places[self._turn] = None
        self._next_turn()

    def _next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self._places)
        place = self._places[self._turn]
        if place is not None:
            place.left = self._block

    def _current(self) -> _Place | None:
        """The place whose turn it is; None at the end."""
        for _ in self._places:
            if self._places[self._turn] is None:
                self._places[self._turn] = self._open()
            place = self._places[self._turn]
            if place is not None:
                return place if self._ordered or place.is_ready else self._readiest(place)
            self._next_turn()
        return None

    def _readiest(self, place: _Place) -> _Place:
        """Where the order does not matter, a cursor that need not be waited for."""
        assert self._pool is not None
        coming = [x.coming for x in self._places if x is not None and x.coming is not None]
        self._pool.wait(coming, POLL_SECONDS)
        for turn, other in enumerate(self._places):
            if other is not None and other.is_ready:
                self._turn = turn
                other.left = other.left or self._block
                return other
        return place

    def _open(self) -> _Place | None:
        opened = None if self._all_opened else self._open_next()
        if opened is None:
            self._all_opened = True
            return None
        if self._threads is not None and self._pool is None:
            self._pool = ThreadPool(self._threads, "px-interleave")
        place = _Place(opened, self._pool, self._block)
        if self._begun:
            place.begin()
        return place

    def cancel(self) -> None:
        """Wake the reader."""
        for place in self._places:
            if place is not None:
                place.cancel()
        super().cancel()

    def close(self) -> None:
        """Close all cursors."""
        if self._pool is not None:
            self._pool.close()
        for place in self._places:
            if place is not None:
                place.close()
        self._all_opened = True
        self._places = [None] * len(self._places)
        super().close()
