"""Batches: made, padded, ragged, taken apart and cut anew; windows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import phalanx as px
from phalanx.data import Ragged, RaggedSpec

D = px.data.Dataset


def lists(dataset: Any) -> list[Any]:
    return [x.tolist() for x in dataset]


def words(*rows: list[int]) -> Any:
    """Elements of different lengths, made by a function."""
    return D.from_generator(lambda: (np.array(r, np.int32) for r in rows))


def test_batches_of_nests() -> None:
    dataset = D.from_tensor_slices({"x": np.zeros((5, 2)), "s": list("abcde")}).batch(2)
    batches = list(dataset)
    assert [b["x"].shape for b in batches] == [(2, 2), (2, 2), (1, 2)]
    assert batches[2]["s"].tolist() == ["e"]
    assert dataset.element_spec["x"] == px.TensorSpec((None, 2), np.dtype(np.float64))
    dropped = D.range(5).batch(2, drop_remainder=True)
    assert dropped.element_spec.shape == (2,)
    assert lists(dropped) == [[0, 1], [2, 3]]
    assert (len(dataset), len(dropped)) == (3, 2)


def test_batches_of_mapped_scalars_and_arrays() -> None:
    assert lists(D.range(3).map(lambda x: x * 2).batch(2)) == [[0, 2], [4]]
    assert lists(D.range(3).map(lambda x: np.full(2, x)).batch(3)) == [[[0, 0], [1, 1], [2, 2]]]
    assert lists(D.range(4).batch(2).batch(2)) == [[[0, 1], [2, 3]]]


def test_different_shapes_cannot_be_stacked() -> None:
    dataset = words([1], [2, 3], [4, 5]).batch(2)
    with pytest.raises(
        px.errors.InvalidArgumentError, match=r"padded_batch.*ragged_batch.*\(1,\), \(2,\)"
    ):
        list(dataset)
    assert lists(words([1, 2], [3, 4], [5], [6]).batch(2)) == [[[1, 2], [3, 4]], [[5], [6]]]
    with pytest.raises(px.errors.InvalidTypeError, match="cannot be stacked"):
        list(D.range(2).map(lambda x: Ragged([[1], [2, 3]])).batch(2))


# -- padding --------------------------------------------------------------------------------------


def test_padding_to_the_longest_or_to_a_shape() -> None:
    dataset = words([1], [2, 3], [4])
    assert lists(dataset.padded_batch(2)) == [[[1, 0], [2, 3]], [[4]]]
    assert lists(dataset.padded_batch(2, padded_shapes=[3])) == [[[1, 0, 0], [2, 3, 0]], [[4, 0, 0]]]
    assert lists(dataset.padded_batch(2, [None], -1, drop_remainder=True)) == [[[1, -1], [2, 3]]]
    assert lists(dataset.padded_batch(3, px.TensorSpec((4,), np.int32)))[0][0] == [1, 0, 0, 0]


def test_padding_nests() -> None:
    dataset = D.from_tensor_slices({"n": [[1], [2, 3]], "s": [["a"], ["b", "c"]], "k": [5, 6]})
    batch = next(iter(dataset.padded_batch(2)))
    assert batch["n"].tolist() == [[1, 0], [2, 3]]
    assert batch["s"].tolist() == [["a", ""], ["b", "c"]]
    assert batch["k"].tolist() == [5, 6]
    shapes: Any = {"n": [3], "s": None, "k": ()}
    batch = next(iter(dataset.padded_batch(2, shapes, {"n": 9, "s": "-", "k": None})))
    assert batch["n"].tolist() == [[1, 9, 9], [2, 3, 9]]
    assert batch["s"].tolist() == [["a", "-"], ["b", "c"]]
    spec = dataset.padded_batch(2, shapes).element_spec
    assert {k: v.shape for k, v in spec.items()} == {"n": (None, 3), "s": (None, None), "k": (None,)}
    raw = D.from_tensor_slices([[b"a"], [b"b", b"c"]]).padded_batch(2)
    assert lists(raw) == [[[b"a", b""], [b"b", b"c"]]]


@pytest.mark.parametrize(
    ("shapes", "values", "match"),
    [
        ([1, 2], None, "needs 1 dimensions"),
        (["a"], None, "each a size"),
        ([2], None, "smaller"),
        (None, [1, 2], "one number"),
        (None, "x", "must fit the elements"),
    ],
)
def test_paddings_that_do_not_fit_fail_when_the_plan_is_made(
    shapes: Any, values: Any, match: str
) -> None:
    with pytest.raises((px.errors.InvalidValueError, px.errors.InvalidTypeError), match=match):
        D.from_tensor_slices(np.zeros((4, 3))).padded_batch(2, shapes, values)


def test_padding_finds_out_late_what_is_not_known_before() -> None:
    with pytest.raises(px.errors.InvalidValueError, match="larger than the shape"):
        list(words([1], [2, 3]).padded_batch(2, padded_shapes=[1]))
    with pytest.raises(px.errors.InvalidValueError, match="needs 1 dimensions"):
        list(words([1]).padded_batch(2, padded_shapes=([1], [1])))
    with pytest.raises(px.errors.InvalidValueError, match="structure of the elements"):
        D.zip((D.range(2), D.range(2))).padded_batch(2, padded_shapes=[3])


# -- ragged ---------------------------------------------------------------------------------------


def test_ragged_batches_keep_rows_as_they_are() -> None:
    dataset = D.zip((words([1], [2, 3], [4]), D.range(3))).ragged_batch(2)
    first, last = list(dataset)
    assert first[0] == Ragged([np.array([1], np.int32), np.array([2, 3], np.int32)])
    assert first[1].tolist() == [0, 1]
    assert last[0].shape == (1, 1)
    assert dataset.element_spec == (
        RaggedSpec((None, None), np.dtype(np.int32)),
        px.TensorSpec((None,), np.dtype(np.int64)),
    )
    assert [(a.tolist(), int(b)) for a, b in dataset.unbatch()] == [([1], 0), ([2, 3], 1), ([4], 2)]


def test_ragged_batches_are_ragged_even_if_rows_are_equal() -> None:
    (batch,) = D.from_tensor_slices(np.ones((2, 3))).ragged_batch(2, drop_remainder=True)
    assert isinstance(batch, Ragged)
    assert np.asarray(batch).shape == (2, 3)


# -- taking apart ---------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any),
    st.booleans(),
)
def test_rebatching_keeps_all_rows_in_order(sizes: list[int], wanted: list[int], drop: bool) -> None:
    ends = np.cumsum([0, *sizes])
    batches = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    source = D.from_generator(lambda: iter(batches), output_signature=px.TensorSpec((None,), np.int64))
    assert [int(x) for x in source.unbatch()] == list(range(ends[-1]))
    found = lists(source.rebatch(wanted, drop_remainder=drop))
    rows = [x for batch in found for x in batch]
    assert rows == list(range(len(rows)))
    assert len(rows) == ends[-1] or drop
    for i, batch in enumerate(found):
        size = wanted[i % len(wanted)]
        assert len(batch) == size or (not drop and i == len(found) - 1 and 0 < len(batch) < size)
    assert ends[-1] - len(rows) < max(wanted)
    whole = D.from_tensor_slices(np.arange(ends[-1])).batch(4).rebatch(wanted, drop_remainder=drop)
    assert lists(whole) == found
    assert whole.cardinality() == len(found)


def test_what_cannot_be_taken_apart() -> None:
    uneven = D.from_generator(lambda: iter([(np.zeros(2), np.zeros(3))])).unbatch()
    with pytest.raises(px.errors.InvalidArgumentError, match=r"\(2,\), \(3,\)\] in element 0"):
        list(uneven)
    with pytest.raises(px.errors.InvalidArgumentError, match="equal first dimensions"):
        list(D.range(3).map(lambda x: x).unbatch())


def test_how_many_rows_there_are() -> None:
    assert D.range(10).batch(3).unbatch().cardinality() == 10
    assert D.range(10).batch(3, drop_remainder=True).unbatch().cardinality() == 9
    assert D.from_tensor_slices(np.zeros((4, 3))).unbatch().cardinality() == 12
    assert D.range(2).repeat().batch(2).unbatch().cardinality() == px.data.INFINITE_CARDINALITY
    assert D.range(2).map(lambda x: [x]).unbatch().cardinality() == px.data.UNKNOWN_CARDINALITY
    uneven = D.range(2, 4).map(np.arange)
    assert len(list(uneven.unbatch())) == 5
    assert uneven.unbatch().cardinality() == px.data.UNKNOWN_CARDINALITY
    said = D.range(4).map(lambda x: [x, x], output_signature=px.TensorSpec((2,), np.int64))
    assert said.unbatch().cardinality() == 8
    assert D.range(10).batch(3).rebatch(4).cardinality() == 3
    assert D.range(10).batch(3).rebatch(4, drop_remainder=True).element_spec.shape == (4,)


# -- windows --------------------------------------------------------------------------------------


def test_windows_are_datasets() -> None:
    windows = D.range(7).window(3, shift=2)
    assert [[int(x) for x in w] for w in windows] == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6]]
    assert len(windows) == 4
    assert windows.element_spec == px.data.DatasetSpec(px.TensorSpec((), np.dtype(np.int64)))
    assert lists(windows.flat_map(lambda w: w.batch(3, drop_remainder=True))) == [
        [0, 1, 2],
        [2, 3, 4],
        [4, 5, 6],
    ]
    assert lists(D.range(9).window(2, shift=4, stride=2).flat_map(lambda w: w.batch(9))) == [
        [0, 2],
        [4, 6],
        [8],
    ]


def test_windows_over_nests_are_nests_of_datasets() -> None:
    pairs = D.from_tensor_slices({"a": np.arange(4), "b": np.arange(4) * 10})
    merged = pairs.window(2).flat_map(lambda w: D.zip((w["a"], w["b"])))
    assert [(int(a), int(b)) for a, b in merged] == [(0, 0), (1, 10), (2, 20), (3, 30)]


@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_windows_are_slices(size: int, length: int, shift: int, stride: int, drop: bool) -> None:
    windows = D.range(size).window(length, shift, stride, drop)
    slices = [list(range(size))[s : s + length * stride : stride] for s in range(0, size, shift)]
    expected = [s[:length] for s in slices if s and (len(s) >= length or not drop)]
    assert [[int(x) for x in w] for w in windows] == expected
    assert len(windows) == len(expected)
