"""Cursors that are read in turns."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings, strategies as st
from tests.data.naive import check_reads_and_skips, in_turns

import phalanx as px
from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import Cursor
from phalanx.data.plan.opening import CountingCursor
from phalanx.data.run.round_robin import Opened, RoundRobinCursor
from phalanx.data.run.thread_pool import ThreadPool


class Numbers(CountingCursor):
    """Counts what was read."""

    was_read = 0

    def read(self, limit: int) -> Chunk | None:
        chunk = super().read(limit)
        self.was_read += 0 if chunk is None else chunk.count
        return chunk


def numbers(sizes: list[int]) -> list[range]:
    return [range(1000 * i, 1000 * i + size) for i, size in enumerate(sizes)]


def open_cursor(
    sizes: list[int], cycle: int, block: int | None, threads: int | None, ordered: bool = True
) -> tuple[RoundRobinCursor, list[Numbers]]:
    opened: list[Numbers] = []

    def open_next() -> Opened | None:
        if len(opened) == len(sizes):
            return None
        opened.append(Numbers(numbers(sizes)[len(opened)]))
        return opened[-1], None

    return RoundRobinCursor(open_next, (), cycle, block, threads, ordered), opened


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 30), max_size=7),
    cycle=st.integers(1, 5),
    block=st.sampled_from([None, 1, 2, 5]),
    threads=st.sampled_from([None, None, 2]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=6),
)
@example([9, 2, 9, 9], 3, 2, None, [(True, 3), (False, 1), (True, 20), (False, 2), (True, 9)])
def test_skipping_is_reading(
    sizes: list[int],
    cycle: int,
    block: int | None,
    threads: int | None,
    steps: list[tuple[bool, int]],
) -> None:
    expected = in_turns(numbers(sizes), cycle, block)
    cursor, _ = open_cursor(sizes, cycle, block, threads)
    at = check_reads_and_skips(cursor, expected, [*steps, (False, 1000)])
    assert at == len(expected)


@pytest.mark.parametrize("threads", [None, 2])
def test_what_is_skipped_is_not_read(threads: int | None) -> None:
    cursor, opened = open_cursor([300, 300, 300], 3, 2, threads)
    assert cursor.skip(600) == 600
    assert sum(each.was_read for each in opened) == 0
    chunk = cursor.read(2)
    assert chunk is not None
    assert chunk.columns[0].tolist() == [200, 201]
    cursor.close()


@given(
    st.lists(st.integers(0, 20), max_size=6), st.integers(1, 4), st.integers(0, 9), st.integers(0, 50)
)
def test_in_any_order_nothing_is_lost(sizes: list[int], cycle: int, first: int, skipped: int) -> None:
    everything = [n for each in numbers(sizes) for n in each]
    cursor, _ = open_cursor(sizes, cycle, 3, 2, ordered=False)
    found: list[int] = []
    if first and (chunk := cursor.read(first)) is not None:
        found += chunk.columns[0].tolist()
    passed = cursor.skip(skipped)
    assert passed == min(skipped, len(everything) - len(found))
    while (chunk := cursor.read(7)) is not None:
        found += chunk.columns[0].tolist()
    cursor.close()
    assert len(set(found)) == len(found) == len(everything) - passed


class Failing(Cursor):
    """Has two elements, and then fails."""

    def __init__(self) -> None:
        self._left = CountingCursor(range(2))

    def read(self, limit: int) -> Chunk | None:
        chunk = self._left.read(limit)
        if chunk is None:
            raise px.errors.DataLossError("damaged")
        return chunk


@pytest.mark.parametrize("threads", [None, 2])
def test_a_failure_comes_after_what_is_before_it(threads: int | None) -> None:
    cursors = iter([Failing(), Numbers(range(1000, 1009))])

    def open_next() -> Opened | None:
        found = next(cursors, None)
        return None if found is None else (found, None)

    cursor = RoundRobinCursor(open_next, (), 2, 1, threads)
    chunk = cursor.read(100)
    assert chunk is not None
    assert chunk.columns[0].tolist() == [0, 1000, 1, 1001]
    for _ in range(2):
        with pytest.raises(px.errors.DataLossError, match="damaged"):
            cursor.read(1)
    cursor.close()


def test_threads_that_are_gone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.data.run.thread_pool._work", lambda tasks, pool: None)
    pool = ThreadPool(1, "px-test")
    task = pool.submit(int)
    with pytest.raises(px.errors.AbortedError, match="forked"):
        pool.wait([task], 0.01)
    pool.close()
