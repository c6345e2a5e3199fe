"""The kinds of cursors that most others are."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from tests.data.naive import check_reads_and_skips

from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import BlockCursor, ChainCursor, Cursor
from phalanx.data.plan.opening import CountingCursor

STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=8)


class Blocks(BlockCursor):
    """Numbers in blocks of given sizes; skips by whole numbers of four."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = list(sizes)
        self._next = 0

    def next_block(self, limit: int) -> Chunk | None:
        if not self._sizes:
            return None
        size = self._sizes.pop(0)
        start, self._next = self._next, self._next + size
        return Chunk([np.arange(start, self._next)], size)

    def skip_ahead(self, count: int) -> int:
        skipped = 0
        while self._sizes and self._sizes[0] == 4 and skipped + 4 <= count:
            self._next += self._sizes.pop(0)
            skipped += 4
        return skipped


class Chain(ChainCursor):
    """Counting cursors of given sizes, one after the other."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = list(sizes)
        self.opened: list[Cursor] = []

    def open_next(self) -> Cursor | None:
        if not self._sizes:
            return None
        self.opened.append(CountingCursor(range(self._sizes.pop(0))))
        return self.opened[-1]


@given(st.lists(st.integers(1, 9), max_size=6), STEPS)
def test_blocks_are_handed_out_in_parts(sizes: list[int], steps: list[tuple[bool, int]]) -> None:
    check_reads_and_skips(Blocks(sizes), list(range(sum(sizes))), steps)


def test_a_block_that_is_used_up_is_let_go() -> None:
    cursor = Blocks([3, 3])
    assert cursor.fill(1)
    assert cursor.at_hand == 3
    cursor.read(2)
    assert cursor.at_hand == 1
    cursor.read(5)
    assert cursor.at_hand == 0
    assert cursor._block is None


@given(st.lists(st.integers(0, 9), max_size=6), STEPS)
def test_cursors_are_read_one_after_the_other(sizes: list[int], steps: list[tuple[bool, int]]) -> None:
    check_reads_and_skips(Chain(sizes), [i for size in sizes for i in range(size)], steps)


def test_a_cursor_is_opened_when_its_turn_comes() -> None:
    cursor = Chain([2, 2])
    cursor.read(2)
    assert len(cursor.opened) == 1
    cursor.read(2)
    assert len(cursor.opened) == 2
