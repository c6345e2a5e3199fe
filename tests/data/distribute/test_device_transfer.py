"""What reaches the devices: the right values, in memory that nobody else can change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import phalanx as px
from phalanx.data.distribute.device_transfer import ALIGNMENT, DeviceTransfer, narrow, owned
from phalanx.data.distribute.rebatching import BEGINNING
from phalanx.data.distribute.steps import RowsOf, Step, shapes_on_all
from phalanx.data.plan.elements import Ragged
from phalanx.runtime.placement import stacked_over

DEVICES = tuple(jax.devices()[:2])


def delivery(wraps: bool = True, to_device: bool = True) -> DeviceTransfer:
    return DeviceTransfer(DEVICES if wraps else DEVICES[:1], wraps, to_device)


def test_equal_parts_are_one_array_over_the_devices() -> None:
    value = delivery().leaf([np.ones((3, 2), np.float32), np.zeros((3, 2), np.float32)])
    assert isinstance(value, px.PerReplica)
    assert value.array.sharding == stacked_over(DEVICES)
    assert value.array.shape == (6, 2)
    assert [x.devices() for x in value.values] == [{d} for d in DEVICES]
    assert [float(x.sum()) for x in value.values] == [6.0, 0.0]


def test_unequal_parts_stay_apart() -> None:
    value = delivery().leaf([np.arange(3), np.arange(0)])
    assert value.array is None
    assert [x.shape for x in value.values] == [(3,), (0,)]
    assert [x.devices() for x in value.values] == [{d} for d in DEVICES]
    assert not any(x.committed for x in value.values)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=2),
    st.sampled_from([np.float32, np.int64, np.bool_]),
    st.booleans(),
)
def test_unequal_parts_are_padded_for_programs(shapes: Any, dtype: Any, as_rows: bool) -> None:
    parts = [(np.arange(n * m) + 1).reshape(n, m).astype(dtype) for n, m in shapes]
    given_parts: list[Any] = parts
    if as_rows:
        given_parts = [RowsOf(p, np.arange(len(p)), slice(0, len(p))) for p in parts]
    value = delivery().leaf(given_parts)
    assert [np.asarray(x).tolist() for x in value.values] == [p.tolist() for p in parts]
    if shapes[0] == shapes[1]:
        assert value.padded is None
        return
    assert value.padded.shapes == tuple(shapes)
    room = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    assert value.padded.array.shape == (2 * room[0], room[1])
    assert value.padded.array.sharding == stacked_over(DEVICES)
    assert np.asarray(value.padded.array).sum() == sum(p.astype(narrow(dtype)).sum() for p in parts)
    by_hand = px.PerReplica(value.values)
    np.testing.assert_array_equal(by_hand.padded.array, value.padded.array)


def test_parts_of_different_ranks_stay_apart() -> None:
    value = delivery().leaf([np.zeros((2, 2)), np.zeros(0)])
    assert value.padded is None
    assert [x.shape for x in value.values] == [(2, 2), (0,)]


def test_workers_without_rows_have_the_shapes_that_others_expect() -> None:
    step = Step([[np.zeros((2, 3)), np.zeros((1, 3))], [np.zeros(2), np.zeros(1)]], None, BEGINNING)
    shapes = shapes_on_all([2, step.shapes(), 1])
    assert shapes == [[(0, 3), (0, 3), (2, 3), (1, 3), (0, 3)], [(0,), (0,), (2,), (1,), (0,)]]
    assert shapes_on_all([2, 1]) is None
    nothing = Step([[np.zeros((0, 7), np.int32)], [np.array([], object)]], None, BEGINNING)
    expected = nothing.with_shapes([(0, 3), (0,)])
    assert [p[0].shape for p in expected.parts] == [(0, 3), (0,)]
    assert [p[0].dtype for p in expected.parts] == [np.int32, object]


def test_scalars_are_stacked() -> None:
    value = delivery().leaf([np.int32(4), np.int32(5)])
    assert value.array.shape == (2,)
    assert [x.shape for x in value.values] == [(), ()]
    assert [int(x) for x in value.values] == [4, 5]


def test_one_replica_gets_plain_arrays() -> None:
    value = delivery(wraps=False).leaf([np.arange(3)])
    assert isinstance(value, jax.Array)
    assert value.tolist() == [0, 1, 2]


@pytest.mark.parametrize("wraps", [True, False])
def test_nobody_can_change_what_was_delivered(wraps: bool) -> None:
    source = np.zeros(1024, np.float32)
    source = source[-source.ctypes.data % 64 // 4 :][:512]  # aligned, so that JAX would not copy it
    value = delivery(wraps).leaf([source] * (2 if wraps else 1))
    source[:] = 1.0
    first = value.values[0] if wraps else value
    assert float(first.sum()) == 0.0


def test_strings_and_ragged_rows_stay_on_the_host() -> None:
    strings = delivery().leaf([np.array([b"a", b"b"], object), np.array([], object)])
    assert [x.tolist() for x in strings.values] == [[b"a", b"b"], []]
    assert strings.values[0].dtype == object
    assert delivery().leaf(["a", "b"]).values == ("a", "b")
    ragged = delivery().leaf([Ragged([[1], [2, 3]]), Ragged([[4]])])
    assert [x.to_list() for x in ragged.values] == [[[1], [2, 3]], [[4]]]


def test_without_devices_everything_stays_on_the_host() -> None:
    source = np.arange(3)
    value = delivery(to_device=False).leaf([source, source])
    assert all(isinstance(x, np.ndarray) and x.dtype == np.int32 for x in value.values)
    source[:] = 9
    assert value.values[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.float64, np.float32),
        (np.complex128, np.complex64),
        (np.bool_, np.bool_),
        (np.uint8, np.uint8),
        (jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_dtypes_narrow_as_jax_narrows_them(given_: Any, expected: Any) -> None:
    array = np.ones(2).astype(given_)
    assert narrow(array.dtype) == expected
    assert delivery(wraps=False).leaf([array]).dtype == jax.device_put(array).dtype == expected


def test_wide_dtypes_stay_if_they_are_enabled() -> None:
    with jax.enable_x64(True):
        value = delivery().leaf([np.array([2**40]), np.array([2**41])])
        assert [int(x[0]) for x in value.values] == [2**40, 2**41]


def test_times_are_refused() -> None:
    with pytest.raises(px.errors.InvalidTypeError, match="datetime64"):
        delivery().leaf([np.zeros(2, "datetime64[s]")] * 2)


@given(
    st.lists(st.integers(0, 9), max_size=8),
    st.booleans(),
    st.sampled_from([np.float32, np.float64, np.int8]),
)
def test_rows_are_fetched_into_aligned_memory(numbers: list[int], two_dims: bool, dtype: Any) -> None:
    column = np.arange(30).reshape(10, 3).astype(dtype) if two_dims else np.arange(10).astype(dtype)
    index = np.array(numbers, np.int64)
    where = None
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True:
        where = slice(numbers[0], numbers[0] + len(numbers)) if numbers else slice(0, 0)
    rows = RowsOf(column, index, where)
    (copy,) = owned([rows], rows.shape)
    assert copy.ctypes.data % ALIGNMENT == 0
    assert copy.dtype == narrow(dtype)
    np.testing.assert_array_equal(copy, column[index].astype(copy.dtype))
    np.testing.assert_array_equal(np.asarray(rows), column[index])
