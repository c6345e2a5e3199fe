"""What all formats share: names of files, several at a time, positions, threads."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from tests.data.naive import check_reads_and_skips, in_turns

import phalanx as px
from phalanx.data.distribute.sharding import divide
from phalanx.data.files.records import frame
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.opening import open_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("source")


def write(folder: Path, sizes: list[int]) -> list[str]:
    names = []
    for number, size in enumerate(sizes):
        names.append(str(folder / f"{number}.tfrecord"))
        Path(names[-1]).write_bytes(frame([f"{number}.{i}".encode() for i in range(size)]))
    return names


def in_turn(sizes: list[int], lanes: int) -> list[bytes]:
    return in_turns([[f"{n}.{i}".encode() for i in range(size)] for n, size in enumerate(sizes)], lanes)


def input_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("px-interleave")}


# -- several files at a time -------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.integers(0, 12), max_size=7), st.integers(1, 5), st.integers(1, 20))
def test_files_are_read_in_turn(folder: Path, sizes: list[int], lanes: int, limit: int) -> None:
    names = write(folder, sizes)
    cursor = open_plan(px.data.TFRecordDataset(names, num_parallel_reads=lanes)._node, Run())
    read: list[bytes] = []
    while (chunk := cursor.read(limit)) is not None:
        assert 0 < chunk.count <= limit
        read += chunk.columns[0].tolist()
    assert cursor.read(limit) is None
    cursor.close()
    assert read == in_turn(sizes, lanes)


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 30), max_size=7),
    st.sampled_from([None, 1, 2, 3, 5]),
    st.sampled_from([100, 1000]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=6),
)
@example([20], None, 100, [(False, 1), (True, 2), (False, 3)])
@example([20, 20], 2, 100, [(False, 1), (True, 6), (False, 20)])
def test_skipping_is_reading(
    folder: Path,
    sizes: list[int],
    lanes: int | None,
    buffer_size: int,
    steps: list[tuple[bool, int]],
) -> None:
    names = write(folder, sizes)
    records = in_turn(sizes, lanes or 1)
    dataset = px.data.TFRecordDataset(names, buffer_size=buffer_size, num_parallel_reads=lanes)
    check_reads_and_skips(open_plan(dataset._node, Run()), records, steps)


def test_skipping_does_not_read_records_of_many_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = write(folder, [1000, 1000, 10, 1000])
    looked_at = []
    from phalanx.data.files import records

    original = records.records_are_right
    monkeypatch.setattr(
        records, "records_are_right", lambda *args: (looked_at.append(len(args[2])), original(*args))[1]
    )
    dataset = px.data.TFRecordDataset(names, buffer_size=100, num_parallel_reads=3)
    cursor = open_plan(dataset._node, Run())
    assert cursor.skip(3000) == 3000
    cursor.close()
    assert sum(looked_at) < 20


def test_damage_in_one_of_several_files(folder: Path) -> None:
    names = write(folder, [5, 5, 5])
    data = bytearray(Path(names[1]).read_bytes())
    data[2 * 19 + 12] ^= 1  # in the third record of the second file
    Path(names[1]).write_bytes(data)
    dataset = px.data.TFRecordDataset(names, num_parallel_reads=3)
    before = input_threads()
    for limit in (1, 4, 100):
        cursor = open_plan(dataset._node, Run())
        read: list[bytes] = []
        with pytest.raises(px.errors.DataLossError, match=r"1.tfrecord is damaged at record 2"):
            read.extend(
                r for chunk in iter(partial(cursor.read, limit), None) for r in chunk.columns[0]
            )
        assert read == in_turn([5, 5, 5], 3)[:7]
        with pytest.raises(px.errors.DataLossError, match="record 2"):
            cursor.read(limit)
        cursor.close()
    assert input_threads() <= before


def test_threads_end_with_their_cursor(folder: Path) -> None:
    names = write(folder, [5000, 5000, 5000])
    before = input_threads()
    cursor = open_plan(px.data.TFRecordDataset(names, num_parallel_reads=2)._node, Run())
    assert cursor.read(3) is not None
    assert len(input_threads() - before) == 2
    cursor.close()
    assert input_threads() <= before
    iterator = iter(px.data.TFRecordDataset(names, num_parallel_reads=px.data.AUTOTUNE))
    assert next(iterator) == b"0.0"
    assert next(iterator) == b"1.0"
    threads = input_threads() - before
    assert threads
    del iterator
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_there_are_no_more_threads_than_files(folder: Path) -> None:
    names = write(folder, [5, 5])
    before = input_threads()
    cursor = open_plan(px.data.TFRecordDataset(names, num_parallel_reads=10_000)._node, Run())
    assert cursor.read(3) is not None
    assert len(input_threads() - before) == 2
    cursor.close()


# -- positions ---------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [None, 2])
def test_iterators_continue_where_they_were(folder: Path, lanes: int | None) -> None:
    names = write(folder, [7, 3, 9])
    dataset = px.data.TFRecordDataset(names, num_parallel_reads=lanes).repeat(2).batch(4)
    everything = [batch.tolist() for batch in dataset]
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    state = iterator.state()
    rest = [batch.tolist() for batch in iterator]
    assert rest == everything[3:]
    again = px.data.TFRecordDataset(names, num_parallel_reads=lanes).repeat(2).batch(4)
    assert [batch.tolist() for batch in again.iterator(state)] == rest


# -- names -------------------------------------------------------------------------------


def test_kinds_of_names(folder: Path) -> None:
    (name,) = write(folder, [2])
    kinds: list[Any] = [
        name,
        name.encode(),
        Path(name),
        [name],
        (Path(name),),
        np.array([name]),
        np.array(name),
        np.array([name], object),
        px.data.Dataset.from_tensor_slices([name]),
        px.data.Dataset.from_tensors(name.encode()),
    ]
    for kind in kinds:
        assert list(px.data.TFRecordDataset(kind)) == [b"0.0", b"0.1"]
    assert list(px.data.TFRecordDataset([])) == []
    for wrong in (3, [3], None, px.data.Dataset.range(3)):
        with pytest.raises(px.errors.InvalidTypeError, match="name"):
            px.data.TFRecordDataset(wrong)


def test_missing_files_are_named_when_the_dataset_is_made(folder: Path) -> None:
    (name,) = write(folder, [1])
    missing = [str(folder / f"no{i}") for i in range(7)]
    with pytest.raises(px.errors.NotFoundError) as error:
        px.data.TextLineDataset([name, *missing])
    assert "7 of 8 files do not exist" in str(error.value)
    assert "no0" in str(error.value)
    assert "and 2 more" in str(error.value)
    with pytest.raises(px.errors.NotFoundError, match="no3"):
        px.data.TFRecordDataset(px.data.Dataset.from_tensor_slices([name, missing[3]]))
    with pytest.raises(px.errors.InvalidValueError, match="not a directory"):
        px.data.TFRecordDataset(folder)


def test_files_that_go_missing_later(folder: Path) -> None:
    names = write(folder, [1, 1])
    dataset = px.data.TFRecordDataset(names)
    Path(names[1]).unlink()
    read: list[bytes] = []
    with pytest.raises(px.errors.NotFoundError, match=r"1\.tfrecord"):
        read.extend(dataset)
    assert read == [b"0.0"]


def test_names_from_a_shuffled_dataset_come_in_a_new_order_each_time(folder: Path) -> None:
    names = write(folder, [2] * 8)
    shuffled = px.data.Dataset.from_tensor_slices(names).shuffle(8, seed=1)
    dataset = px.data.TFRecordDataset(shuffled)
    first, second = list(dataset), list(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == in_turn([2] * 8, 1)


def test_reading_can_be_a_function_of_names(folder: Path) -> None:
    names = write(folder, [2, 3, 1])
    dataset = px.data.Dataset.from_tensor_slices(names).interleave(
        px.data.TFRecordDataset, cycle_length=2, block_length=1
    )
    assert list(dataset) == in_turn([2, 3, 1], 2)


# -- what distribution asks --------------------------------------------------------------


def read_all(cursor: Cursor) -> list[Any]:
    read: list[Any] = []
    while (chunk := cursor.read(100)) is not None:
        read += list(chunk.columns[0])
    cursor.close()
    return read


@pytest.mark.parametrize("lanes", [None, 2])
def test_sources_can_be_given_other_files(folder: Path, lanes: int | None) -> None:
    names = write(folder, [2, 3, 1])
    node = px.data.TFRecordDataset(names, num_parallel_reads=lanes)._node
    assert node.is_file_source
    assert node.files == tuple(names)
    part = node.with_files(names[1:])
    assert part.files == tuple(names[1:])
    assert sorted(read_all(open_plan(part, Run()))) == [b"1.0", b"1.1", b"1.2", b"2.0"]
    assert read_all(open_plan(node.with_files([]), Run())) == []
    assert part.element_spec == node.element_spec


def test_names_of_a_plan_can_be_chosen_from(folder: Path) -> None:
    names = write(folder, [1] * 6)
    shuffled = px.data.Dataset.from_tensor_slices(names).shuffle(6, seed=3)
    node = px.data.TFRecordDataset(shuffled)._node
    assert node.is_file_source
    assert sorted(node.files) == sorted(names)
    parts = [node.with_files(node.files[i::2]) for i in range(2)]
    for epoch in range(3):
        run = Run(0, (epoch,))
        whole = read_all(open_plan(node, run))
        dealt = [read_all(open_plan(part, run)) for part in parts]
        assert sorted(dealt[0] + dealt[1]) == sorted(whole)
        assert [r for r in whole if r in dealt[0]] == dealt[0]


def test_listed_files_are_the_source_themselves(folder: Path) -> None:
    names = write(folder, [1, 1])
    listed = px.data.Dataset.list_files(str(folder / "[01].tfrecord"), shuffle=False)
    node = px.data.TFRecordDataset(listed)._node
    assert not node.is_file_source
    assert node.inputs[0].is_file_source
    assert sorted(node.inputs[0].files) == names
    assert read_all(open_plan(node, Run())) == [b"0.0", b"1.0"]


@pytest.mark.parametrize("kind", ["names", "parallel", "shuffled", "listed", "interleaved"])
def test_workers_share_the_files(folder: Path, kind: str) -> None:
    for old in folder.glob("*.tfrecord"):
        old.unlink()
    names = write(folder, [3, 1, 4, 2, 5])
    slices = px.data.Dataset.from_tensor_slices(names)
    listed = px.data.Dataset.list_files(str(folder / "*.tfrecord"), shuffle=False)
    dataset = {
        "names": lambda: px.data.TFRecordDataset(names),
        "parallel": lambda: px.data.TFRecordDataset(names, num_parallel_reads=2),
        "shuffled": lambda: px.data.TFRecordDataset(slices.shuffle(5, seed=1)),
        "listed": lambda: px.data.TFRecordDataset(listed),
        "interleaved": lambda: listed.interleave(px.data.TFRecordDataset, cycle_length=2),
    }[kind]()
    read: list[list[bytes]] = []
    for worker in range(2):
        node, division = divide(dataset.batch(2)._node, "AUTO", 2, worker, 1)
        assert division.policy == "FILE"
        read.append([record for batch in read_all(open_plan(node, Run())) for record in batch])
    files = [{record.split(b".")[0] for record in part} for part in read]
    assert not files[0] & files[1]
    assert sorted(read[0] + read[1]) == sorted(in_turn([3, 1, 4, 2, 5], 1))


def test_arguments(folder: Path) -> None:
    (name,) = write(folder, [1])
    with pytest.raises(px.errors.InvalidValueError, match="num_parallel_reads must be at least 1"):
        px.data.TFRecordDataset(name, num_parallel_reads=0)
    with pytest.raises(px.errors.InvalidTypeError, match="num_parallel_reads must be an int"):
        px.data.TFRecordDataset(name, num_parallel_reads="2")  # type: ignore[arg-type]
    assert px.data.TFRecordDataset(name).cardinality() == px.data.UNKNOWN_CARDINALITY
