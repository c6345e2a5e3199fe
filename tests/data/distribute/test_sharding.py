"""Which part of a dataset each worker reads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.distribute.test_distributed_dataset import flat, vals, with_policy
from tests.data.workers import Worker, separately, together

import phalanx as px
from phalanx.data.distribute.sharding import divide, file_sources, nominal_batch

Dataset = px.data.Dataset


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[str]]:
    def write(*sizes: int) -> list[str]:
        """Files of lines that count on from one file to the next."""
        names, line = [], 0
        for i, size in enumerate(sizes):
            path = tmp_path / f"part-{i}.txt"
            path.write_text("".join(f"{line + j}\n" for j in range(size)))
            names.append(str(path))
            line += size
        return names

    return write


def numbers(names: Any) -> Any:
    return px.data.TextLineDataset(names).map(lambda line: np.int32(int(line)))


def read(dataset: Any, workers: int = 2, replicas: int = 1) -> list[Any]:
    found = separately(workers, replicas, lambda s: vals(s.experimental_distribute_dataset(dataset)))
    return [[step[0] for step in steps] for steps in found] if replicas == 1 else found


# -- the four policies, as TensorFlow's documentation shows them --------------------------------------


def test_data(files: Callable[..., list[str]]) -> None:
    dataset = with_policy(numbers(files(8)).batch(4), "DATA")
    assert read(dataset) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("policy", ["FILE", "AUTO"])
def test_file(files: Callable[..., list[str]], policy: str) -> None:
    dataset = with_policy(numbers(files(4, 4)).batch(4), policy)
    assert read(dataset) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_auto_without_files() -> None:
    assert read(Dataset.range(8).batch(4)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_off(files: Callable[..., list[str]]) -> None:
    dataset = with_policy(numbers(files(8)).batch(4), "OFF")
    assert read(dataset) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2


# -- files --------------------------------------------------------------------------------------------


def test_a_worker_opens_its_own_files_only(files: Callable[..., list[str]]) -> None:
    names = files(2, 2, 2)
    dataset = numbers(names).batch(2)
    node, division = divide(dataset._node, "FILE", 2, 1, 1)
    assert division.files == (names[1],)
    assert [source.files for source in file_sources(node)] == [(names[1],)]
    assert file_sources(dataset._node)[0].files == tuple(names)  # the plan itself is not changed
    dist = Worker(2, 1, 1).experimental_distribute_dataset(dataset)
    Path(names[0]).unlink()
    assert vals(dist) == [[[2]], [[3]]]


def test_workers_with_more_rows_go_on_while_others_are_empty(files: Callable[..., list[str]]) -> None:
    dataset = numbers(files(4, 2, 4)).batch(4)
    found = together(2, 1, lambda s: vals(s.experimental_distribute_dataset(dataset)))
    assert found == [
        [[[0, 1]], [[2, 3]], [[6, 7]], [[8, 9]]],
        [[[4, 5]], [[]], [[]], [[]]],
    ]


def test_a_worker_whose_files_are_empty(files: Callable[..., list[str]]) -> None:
    dataset = numbers(files(4, 0)).batch(2)
    found = together(2, 1, lambda s: vals(s.experimental_distribute_dataset(dataset)))
    assert found == [[[[0]], [[1]], [[2]], [[3]]], [[[]]] * 4]


def test_two_files_side_by_side_are_dealt_alike(files: Callable[..., list[str]]) -> None:
    names = files(2, 2, 2, 2)
    pairs = Dataset.zip((numbers(names), numbers(names).map(lambda x: x * 10)))
    dataset = with_policy(pairs.batch(4), "FILE")

    def sums(strategy: Worker) -> list[Any]:
        elements = strategy.experimental_distribute_dataset(dataset)
        return [
            [(a + b).tolist() for a, b in zip(x.values, y.values, strict=True)] for x, y in elements
        ]

    assert separately(2, 1, sums) == [[[[0, 11]], [[44, 55]]], [[[22, 33]], [[66, 77]]]]


def test_names_of_files_are_dealt(files: Callable[..., list[str]]) -> None:
    names = files(2, 2, 2, 2)
    folder = Path(names[0]).parent
    listed = Dataset.list_files(str(folder / "*.txt"), shuffle=False)
    dataset = listed.interleave(numbers, cycle_length=2).batch(4)
    found = separately(2, 1, lambda s: flat(vals(s.experimental_distribute_dataset(dataset))))
    assert sorted(found[0]) == [0, 1, 4, 5]
    assert sorted(found[1]) == [2, 3, 6, 7]


def test_too_few_files(files: Callable[..., list[str]], caplog: pytest.LogCaptureFixture) -> None:
    names = files(3, 3)
    dataset = numbers(names).batch(6)
    with caplog.at_level(logging.WARNING, "phalanx"):
        assert sorted(flat(read(dataset, workers=3))) == list(range(6))
    assert "2 files for 3 workers" in caplog.text
    assert names[1] in caplog.text
    text = Worker(3, 0, 1).experimental_distribute_dataset(dataset).describe()
    assert "because there are 2 files for 3 workers" in text
    for worker in range(3):
        with pytest.raises(px.errors.InvalidArgumentError, match="part-1"):
            Worker(3, worker, 1).experimental_distribute_dataset(with_policy(dataset, "FILE"))


def test_no_files() -> None:
    dataset = with_policy(Dataset.range(4).batch(2), "FILE")
    with pytest.raises(px.errors.NotFoundError, match="no files"):
        Worker(2, 0, 1).experimental_distribute_dataset(dataset)
    assert read(dataset, workers=1, replicas=2) == [[[[0], [1]], [[2], [3]]]]


def test_describing_files(files: Callable[..., list[str]]) -> None:
    names = files(2, 2, 2)
    text = Worker(2, 0, 1).experimental_distribute_dataset(numbers(names).batch(4)).describe()
    assert f"worker 0: {names[0]}, {names[2]}" in text
    assert f"worker 1: {names[1]}" in text
    assert "worker 1, replica 0: 0 to 1" in text


def test_audit_of_files(files: Callable[..., list[str]]) -> None:
    dist = Worker(3, 1, 2).experimental_distribute_dataset(numbers(files(5, 1, 3, 2)).batch(4))
    report = px.data.audit(dist)
    assert report.ok
    assert [sum(share) for share in report.shares] == [7, 1, 3]


# -- hints --------------------------------------------------------------------------------------------

HINT = px.data.experimental.SHARD_HINT


def test_a_hint_marks_where_to_shard() -> None:
    dataset = with_policy(Dataset.range(8).shard(HINT, HINT).batch(4), "HINT")
    assert read(dataset) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert read(dataset, workers=1, replicas=2) == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]


def test_without_a_mark_nothing_is_sharded() -> None:
    assert read(with_policy(Dataset.range(4).batch(2), "HINT")) == [[[0], [1], [2], [3]]] * 2


# -- the size of batches ------------------------------------------------------------------------------


def batched() -> Any:
    return Dataset.range(10).batch(4)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (batched, 4),
        (lambda: batched().filter(lambda x: x[0] >= 0), 4),
        (lambda: batched().take(9), 4),
        (lambda: batched().skip(1), 4),
        (lambda: batched().shuffle(3), 4),
        (lambda: batched().cache(), 4),
        (lambda: batched().repeat(2), 4),
        (lambda: batched().prefetch(1), 4),
        (lambda: batched().shard(2, 0), 4),
        (lambda: Dataset.range(10).padded_batch(4), 4),
        (lambda: batched().unbatch().batch(3), 3),
        (lambda: Dataset.range(4).batch(4).concatenate(Dataset.range(6).batch(4)), 4),
        (lambda: Dataset.range(4).batch(4).concatenate(Dataset.range(6).batch(6)), None),
        (lambda: Dataset.from_tensors(np.arange(4)).repeat(2), 4),
        (lambda: Dataset.range(12).batch(4, drop_remainder=True).map(lambda x: x + 1), 4),
        (lambda: batched().map(lambda x: x + 1), None),
        (lambda: Dataset.range(12).batch(4, drop_remainder=True).map(lambda x: x[:2]), None),
        (lambda: Dataset.range(2).flat_map(lambda i: batched()), None),
        (lambda: Dataset.zip((batched(), Dataset.range(4).batch(2))), None),
    ],
)
def test_nominal_batch_sizes_as_tensorflow(dataset: Callable[[], Any], expected: Any) -> None:
    found = dataset()
    assert nominal_batch(found._node) == expected
    list(found)
    assert nominal_batch(found._node) == expected, "it changed when the dataset had been read"


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (batched, [[8, 9], []]),
        (lambda: batched().map(lambda x: x + 0), [[8], [9]]),
    ],
)
def test_batches_of_unknown_size_are_cut_by_their_own(
    dataset: Callable[[], Any], expected: Any
) -> None:
    (steps,) = read(with_policy(dataset(), "OFF"), workers=1, replicas=2)
    assert steps[-1] == expected


def test_batches_of_unknown_size_with_rows_of_their_own() -> None:
    """Each batch is cut for all replicas, and a worker's replicas take the next pieces in each step."""
    dataset = with_policy(Dataset.range(8).batch(4).map(lambda x: x + 0), "OFF")
    assert read(dataset, workers=2, replicas=1) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2


def test_unknown_workers() -> None:
    with pytest.raises(px.errors.InvalidValueError, match="worker=2"):
        Worker(2, 2, 1).experimental_distribute_dataset(batched())
