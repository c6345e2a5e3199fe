"""Several files read at a time, each in its own thread, in an order that the threads do not change.

There are as many slots as files are read at a time. They give one element each in turn. A slot whose
file has ended is passed over, and takes the next file when its turn comes again. This is TensorFlow's
order.
"""

from __future__ import annotations

from phalanx.data.files.file_reader import FileQueue, FileReader
from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import Cursor
from phalanx.data.run.element_queue import ElementQueue
from phalanx.data.run.read_ahead import ReadAhead
from phalanx.runtime.interrupts import uninterrupted

_CHUNK = 256  # elements that are handed over at once
_DEPTH = 2  # chunks that may wait


class FileSlot:
    """An open file that is read ahead, from the first read on."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._ahead: ReadAhead[None] | None = None
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
                self._ahead = ReadAhead(_FileProducer(self._reader), _DEPTH, ElementQueue(None))
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


class _FileProducer:
    """Reads one file to its end."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self.close = reader.close

    def __iter__(self) -> _FileProducer:
        return self

    def __next__(self) -> tuple[Chunk, None]:
        """Some elements; their position is not needed."""
        chunk = self._reader.read(_CHUNK)
        if chunk is None:
            raise StopIteration
        return chunk, None

    def cancel(self) -> None:
        """Reading a file never waits for another thread."""


class InterleavedCursor(Cursor):
    """Elements of several files in turn."""

    def __init__(self, files: FileQueue, count: int) -> None:
        self.inputs = files.inputs
        self._files = files
        self._slots: list[FileSlot | None] = [None] * count
        self._turn = 0

    def read(self, limit: int) -> Chunk | None:
        """The next elements, by whole rounds as far as possible."""
        parts: list[Chunk] = []
        while limit > 0:
            try:
                slot = self._slot()
                if slot is None:
                    break
                if not slot.fill():
                    self._leave(slot)
                    continue
            except Exception:
                if parts:
                    break  # the next call meets it again
                raise
            rounds = min(
                limit // len(self._slots), *(x.at_hand if x else 0 for x in self._slots), limit
            )
            taken = self._rounds(rounds) if rounds else self._one(slot)
            parts.append(taken)
            limit -= taken.count
        return Chunk.concat(parts) if parts else None

    def skip(self, count: int) -> int:
        """Leave out elements: most of them in the files, the last few by reading them."""
        left = count
        while left >= len(self._slots) and (slot := self._slot()) is not None:
            # Whatever happens to the others, this slot has its turn this often.
            if not slot.skip(left // len(self._slots)):
                self._leave(slot)
                continue
            rounds = min(x.skipped if x else 0 for x in self._slots)
            if rounds:
                for x in self._slots:
                    assert x is not None
                    x.skipped -= rounds
                left -= rounds * len(self._slots)
            else:
                slot.skipped -= 1
                left -= 1
                self._advance()
        while left and (chunk := self.read(left)) is not None:
            left -= chunk.count
        return count - left

    def _slot(self) -> FileSlot | None:
        """The slot whose turn it is, with a file; None if all files have ended."""
        while self._slots:
            slot = self._slots[self._turn]
            if slot is not None:
                return slot
            reader = self._files.open_next()
            if reader is not None:
                self._slots[self._turn] = FileSlot(reader)
            else:
                del self._slots[self._turn]
                self._turn %= max(1, len(self._slots))
        return None

    def _leave(self, slot: FileSlot) -> None:
        slot.close()
        self._slots[self._turn] = None
        self._advance()

    def _advance(self) -> None:
        self._turn = (self._turn + 1) % len(self._slots)

    def _one(self, slot: FileSlot) -> Chunk:
        self._advance()
        return slot.take(1)

    def _rounds(self, rounds: int) -> Chunk:
        """`rounds` elements of each slot, in turn."""
        order = self._slots[self._turn :] + self._slots[: self._turn]
        return Chunk.in_turns([slot.take(rounds) for slot in order if slot is not None])

    def close(self) -> None:
        """Stop the threads and close the files."""
        super().close()
        slots, self._slots = self._slots, []
        for slot in slots:
            if slot is not None:
                slot.close()

    def __del__(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.close(wait=False)
