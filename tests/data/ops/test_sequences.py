"""Scans, ends, buckets, random numbers and saved datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px

D = px.data.Dataset


def numbers(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.integers(0, 19))
def test_scan_and_take_while_are_pythons(values: list[int], at: int) -> None:
    dataset = D.from_tensor_slices(values)
    total, sums = 0, []
    for x in values:
        total += x
        sums.append(total)
    scanned = dataset.scan(0, lambda s, x: (s + int(x), s + int(x)))
    assert numbers(scanned) == sums
    assert numbers(scanned.skip(at)) == sums[at:]
    kept = numbers(dataset.take_while(lambda x: bool(x < 3)))
    assert kept == values[: next((i for i, x in enumerate(values) if x >= 3), len(values))]
    iterator = scanned.iterator()
    first = [next(iterator) for _ in range(min(at, len(values)))]
    assert numbers(scanned.iterator(iterator.state())) == sums[len(first) :]


def test_scan_over_nests_and_mistakes() -> None:
    dataset = D.from_tensor_slices((np.arange(3), np.arange(3) * 10))
    pairs = dataset.scan((0, 1), lambda s, e: ((s[0] + 1, s[1]), {"i": s[0], "sum": e[0] + e[1]}))
    assert [(int(e["i"]), int(e["sum"])) for e in pairs] == [(0, 0), (1, 11), (2, 22)]
    assert set(pairs.element_spec) == {"i", "sum"}
    with pytest.raises(TypeError, match="pair"):
        list(D.range(2).scan(0, lambda s, x: x))
    with pytest.raises(px.errors.DatasetFunctionError, match="element 1"):
        list(D.range(3).scan(0, lambda s, x: (s, 1 // (1 - int(x)))))
    with pytest.raises(px.errors.DatasetFunctionError, match="bool"):
        list(D.range(3).take_while(lambda x: x))


def test_random_numbers() -> None:
    fixed = D.random(seed=3).take(5)
    assert numbers(fixed) == numbers(fixed) == numbers(D.random(seed=3).take(5))
    assert all(0 <= x < 2**32 for x in numbers(fixed))
    again = D.random(seed=3, rerandomize_each_iteration=True).take(5)
    assert numbers(again) != numbers(again)
    assert D.random().cardinality() == px.data.INFINITE_CARDINALITY
    assert numbers(D.random(seed=3).take(5).batch(5).unbatch()) == numbers(fixed)


def test_buckets() -> None:
    words = [[1], [1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11]]
    dataset = D.from_generator(
        lambda: iter(map(np.int32, words)), output_signature=px.TensorSpec((None,), np.int32)
    )
    batches = [b.tolist() for b in dataset.bucket_by_sequence_length(len, [2, 4], [2, 2, 1])]
    assert batches == [[[1], [4]], [[1, 2, 3], [5, 6, 0]], [[7, 8, 9, 10]], [[11]]]
    kept = dataset.bucket_by_sequence_length(len, [2, 4], [2, 2, 1], drop_remainder=True)
    assert len(list(kept)) == 3
    wide = dataset.take(4).bucket_by_sequence_length(
        len, [2, 5], [2, 2, 1], pad_to_bucket_boundary=True, padding_values=-1
    )
    assert [b.tolist() for b in wide] == [[[1], [4]], [[1, 2, 3, -1], [5, 6, -1, -1]]]
    with pytest.raises(ValueError, match="boundary"):
        list(dataset.bucket_by_sequence_length(len, [2], [1, 1], pad_to_bucket_boundary=True))
    plain = D.range(4).bucket_by_sequence_length(lambda x: int(x) % 2, [1], [2, 2], no_padding=True)
    assert [b.tolist() for b in plain] == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="one batch size more"):
        dataset.bucket_by_sequence_length(len, [2, 4], [2, 2])


def test_a_single_element() -> None:
    assert int(D.range(7, 8).get_single_element()) == 7
    for count, what in ((0, "none"), (2, "more than one")):
        with pytest.raises(ValueError, match=what):
            D.range(count).get_single_element()


def test_saved_datasets(tmp_path: Path) -> None:
    rows = {
        "x": np.arange(12.0, dtype=np.float32).reshape(4, 3),
        "name": np.array(["a", "b", "c", "d"], object),
    }
    dataset = D.from_tensor_slices((rows, np.arange(4)))
    dataset.save(tmp_path / "whole")
    loaded = D.load(tmp_path / "whole")
    assert loaded.element_spec == dataset.element_spec
    assert len(loaded) == 4
    for (a, i), (b, j) in zip(loaded, dataset, strict=True):
        assert a["name"] == b["name"]
        np.testing.assert_array_equal(a["x"], b["x"])
        assert i == j
    D.range(6).save(str(tmp_path / "whole"))  # replaces it
    assert numbers(D.load(tmp_path / "whole").shuffle(6, seed=1)) == numbers(
        D.range(6).shuffle(6, seed=1)
    )
    assert len(list((tmp_path / "whole").iterdir())) == 2
    with pytest.raises(ValueError, match="others"):
        D.load(tmp_path / "whole", element_spec=px.TensorSpec((), np.float32))
    with pytest.raises(px.errors.NotFoundError, match="no saved dataset"):
        D.load(tmp_path / "nothing")
    (tmp_path / "whole" / "dataset.json").write_text(json.dumps({"elements": "../x", "count": 1}))
    with pytest.raises(px.errors.DataLossError, match="damaged"):
        D.load(tmp_path / "whole")


def test_iterators_begin_again() -> None:
    iterator = iter(D.range(4))
    assert [int(next(iterator)) for _ in range(2)] == [0, 1]
    iterator.initialize()
    assert numbers(iterator) == [0, 1, 2, 3]
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    distributed = iter(strategy.experimental_distribute_dataset(D.range(4).batch(2)))
    next(distributed)
    distributed.initialize()
    assert [strategy.gather(x, axis=0).tolist() for x in distributed] == [[0, 1], [2, 3]]


def test_visible_devices() -> None:
    assert px.config.get_visible_devices("CPU") == px.config.list_physical_devices("CPU")
    px.config.set_visible_devices([], "GPU")
    px.config.set_visible_devices(px.config.list_physical_devices("CPU"))
    assert px.config.get_visible_devices() == px.config.list_physical_devices("CPU")
    assert len(px.config.list_logical_devices("CPU")) >= 2
    with pytest.raises(ValueError, match="no such devices"):
        px.config.set_visible_devices([px.config.PhysicalDevice("/physical_device:GPU:9", "GPU")])
    with pytest.raises(TypeError, match="list_physical_devices"):
        px.config.set_visible_devices(["GPU:0"])
