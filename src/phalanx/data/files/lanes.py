"""Several files read at a time, each in its own thread, in an order that the threads do not change.

There are as many lanes as files are read at a time. They give one element each in turn. A lane whose
file has ended is passed over, and takes the next file when its turn comes again. This is TensorFlow's
order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phalanx.core.interrupts import uninterrupted
from phalanx.data.background import Ahead
from phalanx.data.columns import Chunk
from phalanx.data.files.source import FileReader, Names
from phalanx.data.handover import Elements
from phalanx.data.node import Cursor

_CHUNK = 256  # elements that are handed over at once
_DEPTH = 2  # chunks that may wait


class Lane:
    """An open file that is read ahead, from the first read on."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._ahead: Ahead[None] | None = None
        self._chunk: Chunk | None = None
        self._at = 0
        self.skipped = 0  # elements that were left out in the file before it was their turn

    @property
    def at_hand(self) -> int:
        """How many elements can be taken without waiting."""
        return 0 if self._chunk is None else self._chunk.count - self._at

    def fill(self) -> bool:
        """Have elements at hand; False at the end of the file."""
        if self.at_hand:
            return True
        if self._ahead is None:
            with uninterrupted():
                self._ahead = Ahead(Reading(self._reader), _DEPTH, Elements(None))
        self._chunk, self._at = self._ahead.get(), 0
        return self._chunk is not None

    def take(self, count: int) -> Chunk:
        """The next elements, of those at hand."""
        assert self._chunk is not None
        start, self._at = self._at, self._at + count
        return self._chunk.rows(start, self._at)

    def skip(self, count: int) -> bool:
        """Leave out up to `count` elements ahead of their turn; False at the end of the file."""
        if self.skipped:
            return True
        if self._ahead is None:
            self.skipped = self._reader.skip(count)
        elif self.fill():
            self.skipped = min(count, self.at_hand)
            self._at += self.skipped
        return self.skipped > 0

    def close(self, wait: bool = True) -> None:
        """Stop the thread, close the file."""
        if self._ahead is None:
            self._reader.close()
        else:
            self._ahead.stop(wait)


class Reading:
    """Reads one file to its end, and closes it."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader

    def __call__(self) -> Iterator[tuple[Chunk, None]]:
        """The elements in chunks, whose positions nobody needs."""
        try:
            while (chunk := self._reader.read(_CHUNK)) is not None:
                yield chunk, None
        finally:
            self._reader.close()

    def cancel(self) -> None:
        """Reading a file never waits for anybody."""


class InterleavedCursor(Cursor):
    """Elements of several files in turn."""

    def __init__(self, names: Names, count: int) -> None:
        self.inputs = (names.cursor,)
        self._names = names
        self._lanes: list[Lane | None] = [None] * count
        self._turn = 0

    def read(self, limit: int) -> Chunk | None:
        """The next elements, by whole rounds as far as possible."""
        parts: list[Chunk] = []
        while limit > 0:
            try:
                lane = self._lane()
                if lane is None:
                    break
                if not lane.fill():
                    self._leave(lane)
                    continue
            except Exception:
                if parts:
                    break  # the next call meets it again
                raise
            rounds = min(
                limit // len(self._lanes), *(x.at_hand if x else 0 for x in self._lanes), limit
            )
            taken = self._rounds(rounds) if rounds else self._one(lane)
            parts.append(taken)
            limit -= taken.count
        return Chunk.concat(parts) if parts else None

    def skip(self, count: int) -> int:
        """Leave out elements: most of them in the files, the last few by reading them."""
        left = count
        while left >= len(self._lanes) and (lane := self._lane()) is not None:
            # Whatever happens to the others, this lane has its turn this often.
            if not lane.skip(left // len(self._lanes)):
                self._leave(lane)
                continue
            rounds = min(x.skipped if x else 0 for x in self._lanes)
            if rounds:
                for x in self._lanes:
                    assert x is not None
                    x.skipped -= rounds
                left -= rounds * len(self._lanes)
            else:
                lane.skipped -= 1
                left -= 1
                self._advance()
        while left and (chunk := self.read(left)) is not None:
            left -= chunk.count
        return count - left

    def _lane(self) -> Lane | None:
        """The lane whose turn it is, with a file; None if all files have ended."""
        while self._lanes:
            lane = self._lanes[self._turn]
            if lane is not None:
                return lane
            reader = self._names.open_next()
            if reader is not None:
                self._lanes[self._turn] = Lane(reader)
            else:
                del self._lanes[self._turn]
                self._turn %= max(1, len(self._lanes))
        return None

    def _leave(self, lane: Lane) -> None:
        lane.close()
        self._lanes[self._turn] = None
        self._advance()

    def _advance(self) -> None:
        self._turn = (self._turn + 1) % len(self._lanes)

    def _one(self, lane: Lane) -> Chunk:
        self._advance()
        return lane.take(1)

    def _rounds(self, rounds: int) -> Chunk:
        """`rounds` elements of each lane, in turn."""
        order = self._lanes[self._turn :] + self._lanes[: self._turn]
        parts = [lane.take(rounds) for lane in order if lane is not None]
        turns = np.arange(len(parts) * rounds).reshape(len(parts), rounds).T.reshape(-1)
        return Chunk.concat(parts).take(turns)

    def close(self) -> None:
        """Stop the threads and close the files."""
        super().close()
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            if lane is not None:
                lane.close()

    def __del__(self) -> None:
        for lane in self._lanes:
            if lane is not None:
                lane.close(wait=False)
