"""Unique elements, windows by key, other distributions of classes, what fails, and snapshots."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx.data.plan.cursors import Run
from phalanx.data.plan.opening import open_plan

D = px.data.Dataset


def numbers(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


def test_elements_are_compared_by_all_that_they_are() -> None:
    pairs = [(0, "a"), (0, "b"), (1, "a"), (0, "a"), (1, "a")]
    given = D.from_tensor_slices(
        (np.array([i for i, _ in pairs]), np.array([s for _, s in pairs], object))
    )
    assert [(int(i), s) for i, s in given.unique()] == pairs[:3]
    words = D.from_tensor_slices([[1], [1, 0], [1], [0, 1]])
    assert [x.tolist() for x in words.unique()] == [[1], [1, 0], [0, 1]]
    floats = D.from_tensor_slices(np.array([0.0, -0.0, np.nan, np.nan, 1.0], np.float32))
    assert len(list(floats.unique())) == 3
    assert len(list(D.from_tensor_slices([[1], [1, 2], [1], [1, 2]]).ragged_batch(2).unique())) == 1
    assert given.unique().element_spec == given.element_spec
    with pytest.raises(TypeError, match="datasets"):
        list(D.range(4).window(2).unique())


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=25), st.integers(1, 4))
def test_windows_have_sizes_by_key(values: list[int], step: int) -> None:
    waiting: dict[int, list[int]] = {}
    expected = []
    for x in values:
        key = x % 3
        waiting.setdefault(key, []).append(x)
        if len(waiting[key]) == step + key:
            expected.append((key, waiting.pop(key)))
    expected += [(key, waiting[key]) for key in sorted(waiting)]
    dataset = D.from_tensor_slices(np.array(values, np.int64)).group_by_window(
        lambda x: x % 3,
        lambda key, window: window.batch(99).map(lambda x: (key, x)),
        window_size_func=lambda key: step + key,
    )
    assert [(int(key), x.tolist()) for key, x in dataset] == expected


def test_windows_of_nests_and_mistakes() -> None:
    rows = D.from_tensor_slices((np.arange(6), np.arange(6) * 10))
    sums = rows.group_by_window(
        lambda x, y: x % 2, lambda key, window: window.map(lambda x, y: x + y + key).batch(3), 3
    )
    assert [x.tolist() for x in sums] == [[0, 22, 44], [12, 34, 56]]
    assert rows.group_by_window(lambda x, y: 0, lambda key, w: w, 2).element_spec == rows.element_spec
    for sizes in ({}, {"window_size": 2, "window_size_func": lambda key: 2}):
        with pytest.raises(ValueError, match="either window_size or window_size_func"):
            rows.group_by_window(lambda x, y: 0, lambda key, w: w, **sizes)
    with pytest.raises(TypeError, match=r"must return an integer.*element 1"):
        list(D.range(3).group_by_window(lambda x: 0 if x == 0 else 0.5, lambda key, w: w, 9))
    with pytest.raises(px.errors.DatasetFunctionError, match="group_by_window failed for element 2"):
        list(D.range(3).group_by_window(lambda x: 1 // (2 - int(x)), lambda key, w: w, 9))
    with pytest.raises(ValueError, match="size of a window"):
        list(D.range(3).group_by_window(lambda x: 0, lambda key, w: w, window_size_func=lambda key: 0))


def resampled(values: list[int], target: Any, initial: Any, run: Run) -> list[int]:
    """What stays, element by element."""
    random = run.generator(None, 2**32)
    counts = np.full(len(target), 10.0) if initial is None else np.array(initial, float)
    found = []
    for x in values:
        if initial is None:
            counts[x] += 1
        ratios = [t / (c / counts.sum()) if c else 0.0 for t, c in zip(target, counts, strict=True)]
        if random.random() < ratios[x] / max(ratios):
            found.append(x)
    return found


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.sampled_from([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]),
    st.sampled_from([None, [0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_resampling_is_pythons(
    values: list[int], target: list[float], initial: Any, limit: int, seed: int
) -> None:
    if initial is not None and not any(t and i for t, i in zip(target, initial, strict=True)):
        return
    dataset = D.from_tensor_slices(np.array(values, np.int64))
    node = dataset.rejection_resample(lambda x: x, target, initial)._node
    cursor, found = open_plan(node, Run(seed)), []
    while (chunk := cursor.read(limit)) is not None:
        assert (chunk.columns[0] == chunk.columns[1]).all()
        found += list(chunk.columns[0])
    assert found == resampled(values, target, initial, Run(seed))


def test_classes_come_as_wanted() -> None:
    few = D.range(4000).map(lambda x: int(x % 10 == 0))
    pairs = few.rejection_resample(lambda x: x, [0.5, 0.5], seed=3)
    classes = numbers(pairs.map(lambda number, x: number))
    assert sum(classes) > 390  # all of the rare class, but for the beginning
    assert 0.45 < np.mean(classes) < 0.55
    assert classes == numbers(pairs.map(lambda number, x: x))
    twice = pairs.map(lambda number, x: x).rejection_resample(lambda x: x, [0.9, 0.1], seed=3)
    assert 0.05 < np.mean([int(number) for number, _ in twice]) < 0.15
    for target, initial in (([-1, 2], None), ([], None), ("ab", None), ([0, 0], None), ([1], [1, 1])):
        with pytest.raises(ValueError, match="Received"):
            few.rejection_resample(lambda x: x, target, initial)
    with pytest.raises(ValueError, match="a class from 0 to 0"):
        list(few.rejection_resample(lambda x: x, [1.0]))


def test_what_is_left_out_and_what_is_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    some = D.range(6).filter(lambda x: 6 // (int(x) - 2) < 6).ignore_errors(log_warning=True)
    assert numbers(some) == [0, 1, 4, 5]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "filter failed for element 2" in caplog.text
    flat = D.range(4).flat_map(lambda x: D.range(6 // int(x))).ignore_errors()
    assert numbers(flat) == [*range(6), *range(3), *range(2)]
    assert flat.cardinality() == px.data.UNKNOWN_CARDINALITY
    with pytest.raises(TypeError, match="one dtype"):  # a mistake in the program, not in an element
        list(D.range(2).map(lambda x: x if x else x / 2).ignore_errors())
    with pytest.raises(px.errors.DatasetFunctionError):
        list(D.range(2).map(lambda x: 1 // int(x)).cache().ignore_errors())
    first_fails = D.range(3).map(lambda x: 6 // int(x)).ignore_errors()
    assert first_fails.element_spec == D.range(1).map(lambda x: 6).element_spec
    paths = [str(tmp_path / f"{i}.tfrecord") for i in range(2)]
    for path in paths:
        with px.io.TFRecordWriter(path) as writer:
            for i in range(3):
                writer.write(b"%d" % i)
    data = bytearray(Path(paths[0]).read_bytes())
    data[-5] ^= 1  # in the last record
    Path(paths[0]).write_bytes(data)
    for reads in (None, 2):
        records = px.data.TFRecordDataset(paths, num_parallel_reads=reads).ignore_errors()
        assert sorted(records) == [b"0", b"0", b"1", b"1", b"2"]
        assert list(records.skip(3)) == list(records)[3:]


def test_snapshots(tmp_path: Path) -> None:
    calls = []

    def seen(x: Any) -> Any:
        calls.append(int(x))
        return x

    def made() -> Any:
        return D.range(5).map(seen).snapshot(tmp_path / "new" / "folder")

    first = made()
    assert numbers(first) == numbers(first) == numbers(made()) == [0, 1, 2, 3, 4]
    assert calls == [0, 1, 2, 3, 4, 0]  # once more to find out what elements look like

    def read(shards: Any) -> Any:
        return shards.shuffle(3).interleave(lambda shard: shard.shuffle(5, seed=2), 2)

    mixed = D.range(5).snapshot(str(tmp_path / "new" / "folder"), reader_func=read)
    assert sorted(numbers(mixed)) == [0, 1, 2, 3, 4] != numbers(mixed)
    with pytest.raises(TypeError, match="path"):
        D.range(5).snapshot(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs datasets"):
        D.range(5).snapshot(tmp_path, reader_func=lambda shards: 3)  # type: ignore[arg-type,return-value]
