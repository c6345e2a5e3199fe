"""The rules by which input is divided: nothing is lost and nothing comes twice."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from tests.data.naive import nominal_steps

import phalanx as px
from phalanx.data.distribute.splitting import (
    batch_sizes_for_worker,
    cut,
    cut_for_worker,
    deal,
    fill,
    sizes_per_step,
)

ROWS = st.integers(0, 200)
BATCHES = st.integers(1, 20)
COUNTS = st.integers(1, 4)

Steps = list[list[list[int]]]


def batches(rows: int, size: int, drop: bool = False) -> list[list[int]]:
    """What ``range(rows).batch(size)`` gives."""
    made = [list(range(i, min(i + size, rows))) for i in range(0, rows, size)]
    return [b for b in made if len(b) == size or not drop]


def by_actual_size(data: list[list[int]], workers: int, replicas: int, worker: int) -> Steps:
    return [[b[s] for s in cut_for_worker(len(b), workers, replicas, worker)] for b in data]


def by_nominal_size(
    data: list[list[int]], size: int, workers: int, replicas: int, worker: int
) -> Steps:
    rows = list(itertools.chain(*data))
    table = sizes_per_step(size, workers, replicas, worker)
    return [[rows[s] for s in step] for step in nominal_steps(len(rows), table)]


def flat(steps: Steps) -> list[int]:
    return [row for step in steps for piece in step for row in piece]


# -- nothing lost, nothing twice -------------------------------------------------------------------


@given(ROWS, BATCHES, COUNTS, COUNTS, st.booleans())
def test_by_actual_size_every_row_comes_once(
    rows: int, size: int, workers: int, replicas: int, drop: bool
) -> None:
    data = batches(rows, size, drop)
    seen: Counter[int] = Counter()
    for worker in range(workers):
        steps = by_actual_size(data, workers, replicas, worker)
        assert len(steps) == len(data)
        assert all(len(step) == replicas for step in steps)
        seen.update(flat(steps))
    assert seen == Counter(itertools.chain(*data))


@given(ROWS, BATCHES, COUNTS, COUNTS)
def test_by_nominal_size_a_worker_keeps_all_its_rows_in_order(
    rows: int, size: int, workers: int, replicas: int
) -> None:
    seen: Counter[int] = Counter()
    for worker in range(workers):
        mine = batches(rows, size)
        steps = by_nominal_size(mine, size, workers, replicas, worker)
        assert flat(steps) == list(range(rows))
        assert not steps or any(steps[-1])
        seen.update(flat(steps))
    assert seen == Counter(dict.fromkeys(range(rows), workers))


@given(st.lists(ROWS, max_size=9), BATCHES, COUNTS, COUNTS)
def test_by_file_every_row_comes_once(files: list[int], size: int, workers: int, replicas: int) -> None:
    starts = list(itertools.accumulate(files, initial=0))
    contents = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    seen: Counter[int] = Counter()
    for worker in range(workers):
        mine = list(itertools.chain(*deal(contents, workers, worker)))
        seen.update(flat(by_nominal_size([mine], size, workers, replicas, worker)))
    assert seen == Counter(range(sum(files)))


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(21))
def test_every_small_batch_is_cut_without_gaps(rows: int) -> None:
    """All batches up to 20 rows, 4 workers and 4 replicas: datasets consist of nothing else."""
    for workers, replicas in itertools.product(range(1, 5), repeat=2):
        dealt = [cut_for_worker(rows, workers, replicas, w) for w in range(workers)]
        assert all(len(mine) == replicas for mine in dealt)
        pieces = [dealt[i % workers][i // workers] for i in range(workers * replicas)]
        assert [(p.start, p.stop) for p in pieces] == [
            (p.start, p.stop) for p in cut(rows, workers * replicas)
        ]
        ends = [0, *(p.stop for p in pieces)]
        assert [p.start for p in pieces] == ends[:-1]
        assert ends[-1] == rows


@given(ROWS, COUNTS, COUNTS)
def test_pieces_are_as_large_as_the_first_until_the_rows_run_out(
    rows: int, workers: int, replicas: int
) -> None:
    sizes = [s.stop - s.start for s in cut(rows, workers * replicas)]
    assert sum(sizes) == rows
    assert sizes == sorted(sizes, reverse=True)
    full = math.ceil(rows / (workers * replicas))
    assert [s for s in sizes if s not in (0, full)] in ([], [rows % full] if full else [])


@given(BATCHES, COUNTS, COUNTS)
def test_tables_add_up_and_are_balanced(size: int, workers: int, replicas: int) -> None:
    tables = [batch_sizes_for_worker(size, workers, replicas, w) for w in range(workers)]
    for table in tables:
        assert len(table) == workers * replicas
        assert sum(table) == size
        assert max(table) - min(table) <= 1
    for step in range(workers):
        part = slice(step * replicas, (step + 1) * replicas)
        assert sum(sum(table[part]) for table in tables) == size


@given(BATCHES, COUNTS, COUNTS, st.integers(0, 30))
def test_steps_repeat_the_table(size: int, workers: int, replicas: int, count: int) -> None:
    for worker in range(workers):
        table = batch_sizes_for_worker(size, workers, replicas, worker)
        entries = list(itertools.islice(itertools.cycle(table), count * replicas))
        steps = itertools.islice(
            itertools.cycle(sizes_per_step(size, workers, replicas, worker)), count
        )
        assert list(itertools.chain(*steps)) == entries


@given(ROWS, st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_filling_leaves_only_the_last_short(rows: int, sizes: list[int]) -> None:
    given_ = [s.stop - s.start for s in fill(rows, sizes)]
    assert sum(given_) == min(rows, sum(sizes))
    short = [i for i, (have, want) in enumerate(zip(given_, sizes, strict=True)) if have < want]
    assert all(given_[i] == 0 for i in short[1:])


# -- TensorFlow's answers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "size", "replicas", "expected"),
    [
        (10, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        (8, 4, 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (10, 5, 3, [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8], [9]]]),
        (6, 6, 4, [[[0, 1], [2, 3], [4, 5], []]]),
        (4, 1, 2, [[[0], []], [[1], []], [[2], []], [[3], []]]),
        (0, 2, 2, []),
    ],
)
def test_by_actual_size_as_tensorflow(rows: int, size: int, replicas: int, expected: Steps) -> None:
    assert by_actual_size(batches(rows, size), 1, replicas, 0) == expected


@pytest.mark.parametrize(
    ("rows", "size", "replicas", "expected"),
    [
        (10, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], []]]),
        (8, 4, 3, [[[0, 1], [2], [3]], [[4, 5], [6], [7]]]),
        (10, 5, 3, [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8], [9]]]),
        (6, 6, 4, [[[0, 1], [2, 3], [4], [5]]]),
        (7, 3, 2, [[[0, 1], [2]], [[3, 4], [5]], [[6], []]]),
        (5, 4, 4, [[[0], [1], [2], [3]], [[4], [], [], []]]),
    ],
)
def test_by_nominal_size_as_tensorflow(rows: int, size: int, replicas: int, expected: Steps) -> None:
    assert by_nominal_size(batches(rows, size), size, 1, replicas, 0) == expected


def test_pieces_are_dealt_to_workers_in_turn() -> None:
    assert [by_actual_size(batches(7, 4), 2, 2, w) for w in range(2)] == [
        [[[0], [2]], [[4], [6]]],
        [[[1], [3]], [[5], []]],
    ]


def test_partial_batches_in_the_middle() -> None:
    """``range(7).batch(3).repeat(2)``: only cutting by actual size keeps the batches apart."""
    data = batches(7, 3) * 2
    assert by_actual_size(data, 1, 2, 0)[2:4] == [[[6], []], [[0, 1], [2]]]
    assert by_nominal_size(data, 3, 1, 2, 0)[2:4] == [[[6, 0], [1]], [[2, 3], [4]]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((7, 2, 2), [(2, 2, 2, 1), (2, 1, 2, 2)]),
        ((4, 1, 3), [(2, 1, 1)]),
        ((10, 2, 3), [(2, 2, 2, 2, 1, 1), (2, 1, 1, 2, 2, 2)]),
        ((1, 2, 1), [(1, 0), (0, 1)]),
    ],
)
def test_tables_as_tensorflow(arguments: tuple[int, int, int], expected: list[tuple[int, ...]]) -> None:
    assert [batch_sizes_for_worker(*arguments, w) for w in range(arguments[1])] == expected


def test_unknown_workers_are_refused() -> None:
    with pytest.raises(px.errors.InvalidValueError, match="worker=2"):
        deal(["a"], 2, 2)
