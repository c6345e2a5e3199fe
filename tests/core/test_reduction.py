"""Reduction rules against NumPy, for random shapes, partitions and operations."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx.core.reduction import (
    ReduceOp,
    as_axes,
    as_operand,
    as_reduce_op,
    check_gather_axis,
    divide,
    mean_dtype,
)

STRATEGIES = {n: px.MirroredStrategy([f"CPU:{i}" for i in range(n)]) for n in (1, 2, 3, 4)}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.sampled_from(["SUM", "MEAN"]),
    st.integers(1, 3),
    st.sampled_from([np.float32, np.int32]),
)
def test_reduce_over_the_batch_equals_numpy(sizes: list[int], op: str, width: int, dtype: Any) -> None:
    whole = np.arange(sum(sizes) * width).reshape(-1, width).astype(dtype)
    bounds = np.cumsum([0, *sizes])
    strategy = STRATEGIES[len(sizes)]
    value = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(
            whole[bounds[c.replica_id_in_sync_group] : bounds[c.replica_id_in_sync_group + 1]]
        )
    )
    got = np.asarray(strategy.reduce(op, value, axis=0))
    if op == "SUM":
        np.testing.assert_allclose(got, whole.sum(0))
    elif sum(sizes) == 0:
        assert np.isnan(got).all()
    else:
        np.testing.assert_allclose(got, whole.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(strategy.gather(value, axis=0), whole)


@pytest.mark.parametrize("given_op", ["sum", "SUM", "Sum", ReduceOp.SUM])
def test_names_of_operations(given_op: Any) -> None:
    assert as_reduce_op(given_op) is ReduceOp.SUM


def test_what_is_no_operation() -> None:
    with pytest.raises(ValueError, match="'MAX'"):
        as_reduce_op("MAX")
    for bad in (None, 1, px.VariableAggregation.SUM):
        with pytest.raises(TypeError):
            as_reduce_op(bad)
        with pytest.raises(AssertionError):
            as_reduce_op(bad)


@pytest.mark.parametrize(("axis", "dims"), [(0, (0,)), ([0, 1], (0, 1)), ((-1,), (-1,)), (None, None)])
def test_axes(axis: Any, dims: Any) -> None:
    axes = as_axes(axis)
    assert (axes and axes.dims) == dims


@pytest.mark.parametrize("axis", ["0", 1.0, True, (0, "1")])
def test_what_is_no_axis(axis: Any) -> None:
    with pytest.raises(TypeError, match="axis"):
        as_axes(axis)


def test_axes_must_exist_and_differ() -> None:
    axes = as_axes((0, -2))
    assert axes is not None
    assert axes.normalized(3) == (0, 1)
    with pytest.raises(ValueError, match="twice"):
        axes.normalized(2)
    with pytest.raises(ValueError, match="out of range"):
        axes.normalized(1)


def test_means_of_integers_are_floats_and_nothing_over_nothing_is_nan() -> None:
    assert mean_dtype(jnp.int8) == jnp.float32
    assert mean_dtype(jnp.bfloat16) == jnp.bfloat16
    assert float(divide(jnp.int32(3), 2)) == 1.5
    assert np.isnan(divide(jnp.float32(0), 0))


@pytest.mark.parametrize("bad", ["text", None, object(), [1, "a"]])
def test_what_cannot_be_reduced(bad: Any) -> None:
    with pytest.raises(TypeError):
        as_operand(bad)


def test_booleans_are_not_numbers() -> None:
    with pytest.raises(px.errors.InvalidArgumentError, match="Cast"):
        as_operand(jnp.array([True]))


def test_gather_axes() -> None:
    assert check_gather_axis(-1, [2, 2], "gather") == 1
    for axis, ndims in ((0, [0, 0]), (2, [1, 1]), (0, [1, 2])):
        with pytest.raises(px.errors.InvalidArgumentError):
            check_gather_axis(axis, ndims, "gather")
    with pytest.raises(TypeError):
        check_gather_axis("0", [1], "gather")


def test_conversion_from_aggregations() -> None:
    from_aggregation = ReduceOp.from_variable_aggregation
    assert from_aggregation(px.VariableAggregation.MEAN) is ReduceOp.MEAN
    for other in (px.VariableAggregation.NONE, px.VariableAggregation.ONLY_FIRST_REPLICA):
        with pytest.raises(ValueError, match="Only"):
            from_aggregation(other)
