"""Elements: what users give becomes leaves, and chunks of them are moved without looking inside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import phalanx as px
from phalanx.data.plan.columns import Chunk, gather_all, read_only, stack
from phalanx.data.plan.elements import Ragged, as_leaf, flatten, merge_specs, pad_rows, spec_of


@pytest.mark.parametrize(
    ("given", "dtype", "shape"),
    [
        (1, np.int32, ()),
        (2**40, np.int64, ()),
        (1.5, np.float32, ()),
        (True, np.bool_, ()),
        (1j, np.complex64, ()),
        (np.float64(1), np.float64, ()),
        (np.array(3), np.int64, ()),
        ([1, 2], np.int32, (2,)),
        ([1, 2**40], np.int64, (2,)),
        ([1.0, 2], np.float32, (2,)),
        ([1, 2.5], np.float32, (2,)),
        ([1j], np.complex64, (1,)),
        ([True, False], np.bool_, (2,)),
        ([[1, 2], [3, 4]], np.int32, (2, 2)),
        ([(1, 2), (3, 4)], np.int32, (2, 2)),
        ([], np.float32, (0,)),
        ([[], []], np.float32, (2, 0)),
        ([np.float64(1)], np.float64, (1,)),
        ([np.zeros(2), np.ones(2)], np.float64, (2, 2)),
        (np.arange(3), np.int64, (3,)),
        (jnp.ones((2, 3)), np.float32, (2, 3)),
        ([jnp.ones(3), jnp.zeros(3)], np.float32, (2, 3)),
        (jnp.bfloat16(1), jnp.bfloat16, ()),
        ("text", np.object_, ()),
        (b"bytes", np.object_, ()),
        (["a", "bc"], np.object_, (2,)),
        (np.array(["a", "bc"]), np.object_, (2,)),
        (np.array([b"a", b"bc"]), np.object_, (2,)),
        (np.str_("x"), np.object_, ()),
    ],
)
def test_dtypes_are_those_of_tensorflow(given: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    spec = spec_of(as_leaf(given))
    assert (spec.shape, np.dtype(spec.dtype)) == (shape, np.dtype(dtype))


def test_numbers_and_strings_are_scalars() -> None:
    assert type(as_leaf(np.array(3))) is np.int64
    assert type(as_leaf(np.array("x"))) is str
    assert as_leaf(["a", b"b"]).tolist() == ["a", b"b"]


@pytest.mark.parametrize(
    "bad", [object(), [object()], np.array([1, None], object), {1, 2}, jax.random.key(0)]
)
def test_other_things_are_refused(bad: Any) -> None:
    with pytest.raises(px.errors.InvalidTypeError, match="Received"):
        as_leaf(bad)


def test_rows_of_different_lengths_are_ragged() -> None:
    rows = as_leaf([[1, 2], [3]])
    assert isinstance(rows, Ragged)
    assert rows.shape == (2, None)
    assert rows.dtype == np.int32
    assert rows.to_list() == [[1, 2], [3]]
    assert rows == Ragged([[1, 2], [3]])
    assert rows != Ragged([[1, 2], [4]])
    assert rows[:1].to_list() == [[1, 2]]
    assert spec_of(rows) == px.data.RaggedSpec((2, None), np.dtype(np.int32))
    assert jax.tree.leaves({"a": rows}) == [rows]


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([[], [1, 2]], np.int32),
        ([[1], [2.5, 3]], np.float32),
        ([[1], [2, 2**40]], np.int64),
        ([["a"], ["b", "c"]], np.object_),
        ([[], ["b", "c"]], np.object_),
        ([[], [[1, 2], [3, 4]]], np.int32),
        ([np.zeros(1), np.zeros(2)], np.float64),
        ([[], [1.0], []], np.float32),
    ],
)
def test_rows_of_nested_lists_have_one_dtype(rows: list[Any], dtype: Any) -> None:
    ragged = as_leaf(rows)
    assert ragged.dtype == dtype
    assert [len(row) for row in ragged] == [len(row) for row in rows]


def test_ragged_values_are_arrays_where_rows_are_equal() -> None:
    assert np.asarray(Ragged([[1, 2], [3, 4]])).tolist() == [[1, 2], [3, 4]]
    assert np.asarray(Ragged([[1, 2], [3, 4]]), np.float64).dtype == np.float64
    assert np.asarray(Ragged([])).shape == (0,)
    with pytest.raises(px.errors.InvalidValueError, match="pad"):
        np.asarray(Ragged([[1], [2, 3]]))


def test_rows_of_ragged_values_are_of_one_kind() -> None:
    with pytest.raises(px.errors.InvalidValueError, match="one dtype"):
        Ragged([np.zeros(1), np.zeros(1, np.int8)])
    with pytest.raises(px.errors.InvalidValueError, match="dimensions"):
        Ragged([np.zeros(1), np.zeros((1, 1))])
    with pytest.raises(px.errors.InvalidTypeError, match="arrays"):
        Ragged([Ragged([[1], [2, 3]])])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5), st.integers(3, 5)
)
def test_padding_keeps_rows_and_fills_the_rest(shapes: list[tuple[int, int]], size: int) -> None:
    rows = [np.full(shape, i + 1) for i, shape in enumerate(shapes)]
    for shape in (None, (None, -1), (size, None)):
        padded = Ragged(rows).pad(-1, shape)
        longest = [max(dims) for dims in zip(*shapes, strict=True)]
        assert padded.shape == (len(rows), size if shape == (size, None) else longest[0], longest[1])
        for i, row in enumerate(rows):
            assert (padded[i] == i + 1).sum() == row.size
            assert (padded[i, : row.shape[0], : row.shape[1]] == i + 1).all()
        assert ((padded == -1) | (padded > 0)).all()


def test_padding_does_not_cut() -> None:
    with pytest.raises(px.errors.InvalidValueError, match="larger than the shape"):
        pad_rows([np.zeros(3)], [2], 0)
    with pytest.raises(px.errors.InvalidValueError, match="as many dimensions"):
        pad_rows([np.zeros(3)], [2, 2], 0)
    assert pad_rows([], None, 0).shape == (0,)


def test_tuples_and_dictionaries_are_structure_and_lists_are_not() -> None:
    leaves, structure = flatten(({"b": [1, 2], "a": 3}, None, [4]))
    assert [np.shape(leaf) for leaf in leaves] == [(), (2,), (1,)]
    assert structure.num_leaves == 3


def test_specs_of_two_plans_are_merged() -> None:
    a, b = px.TensorSpec((3, 2), np.int32), px.TensorSpec((4, 2), np.int32)
    assert merge_specs(a, b, "x").shape == (None, 2)
    for other in (px.TensorSpec((3, 2), np.int64), px.TensorSpec((3,), np.int32)):
        with pytest.raises(px.errors.InvalidTypeError, match="concatenate: leaves must have one dtype"):
            merge_specs(a, other, "concatenate")
    with pytest.raises(px.errors.InvalidTypeError, match="one structure"):
        merge_specs(a, (a,), "concatenate")
    with pytest.raises(px.errors.InvalidTypeError, match="one kind"):
        merge_specs(a, px.data.RaggedSpec((3, 2), np.int32), "concatenate")
    with pytest.raises(px.errors.InvalidTypeError, match="one dtype"):
        merge_specs(px.data.DatasetSpec(a), px.data.DatasetSpec(px.TensorSpec((), np.int32)), "x")


# -- chunks ---------------------------------------------------------------------------------------

columns = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(columns, st.data())
def test_chunks_move_rows_like_lists(numbers: list[int], data: st.DataObject) -> None:
    chunk = Chunk((np.array(numbers), [np.arange(n) for n in numbers]), len(numbers))
    start = data.draw(st.integers(0, len(numbers)))
    stop = data.draw(st.integers(start, len(numbers)))
    indices = data.draw(st.lists(st.integers(0, len(numbers) - 1), max_size=5))

    def plain(chunk: Chunk) -> list[tuple[int, list[int]]]:
        rows = [chunk.element(i) for i in range(chunk.count)]
        return [(int(a), b.tolist()) for a, b in rows]

    whole = plain(chunk)
    assert plain(chunk.rows(start, stop)) == whole[start:stop]
    assert plain(chunk.take(np.array(indices, np.int64))) == [whole[i] for i in indices]
    parts = [chunk.rows(0, start), chunk.rows(start, len(numbers))]
    assert plain(Chunk.concat([part for part in parts if part.count])) == whole
    assert "Chunk(" in repr(chunk)


def test_consecutive_rows_are_views_and_others_are_not() -> None:
    column = np.arange(10)
    for indices, shared in [
        ([3, 4, 5], True),
        ([3], True),
        ([3, 5], False),
        ([4, 3], False),
        ([3, 3], False),
    ]:
        (found,) = gather_all([column], np.array(indices))
        assert np.asarray(found).tolist() == indices
        assert np.shares_memory(found, column) == shared


def test_stacking_keeps_what_differs_as_a_list() -> None:
    assert isinstance(stack([np.zeros(2), np.zeros(3)]), list)
    assert stack([np.zeros(2), np.ones(2)]).shape == (2, 2)  # type: ignore[union-attr]
    assert stack(["a", "bcd"]).tolist() == ["a", "bcd"]  # type: ignore[union-attr]
    assert stack([np.array(["a", "b"], object)] * 2).shape == (2, 2)  # type: ignore[union-attr]


def test_read_only_columns_protect_rows_too() -> None:
    column = np.zeros(3)
    with pytest.raises(ValueError, match="read-only"):
        read_only(column)[0] = 1  # type: ignore[index]
    (row,) = read_only([column])
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1
    column[0] = 1
