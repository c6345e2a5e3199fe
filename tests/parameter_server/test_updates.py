"""What updates mean on servers is what they mean for `px.Variable`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx import errors
from phalanx.core.variables.variable_spec import apply_update as apply_with_jax
from phalanx.parameter_server.requests import Update, VariableDefinition
from phalanx.parameter_server.updates import METHODS, apply_update, checked

DTYPES = ["float32", "float16", "bfloat16", "int32", "int8", "uint8", "complex64"]
DENSE = ["assign", "assign_add", "assign_sub"]
SPARSE = [m for m in METHODS if m.startswith("scatter")]


def definition(shape: tuple[int, ...], dtype: str) -> VariableDefinition:
    return VariableDefinition(0, "v", shape, dtype, 0)


def updated(method: str, old: Any, values: Any, indices: Any = None) -> np.ndarray[Any, Any]:
    """By the servers' rules, once in place and once not."""
    update = checked(Update(definition(old.shape, str(old.dtype)), method, values, indices))
    here, there = old.copy(), np.full_like(old, 7)
    apply_update(method, here, here, update.values, update.indices)
    apply_update(method, old, there, update.values, update.indices)
    np.testing.assert_array_equal(here, there)
    return here


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    numbers = st.integers(-100, 100)
    if jnp.issubdtype(dtype, np.inexact):
        numbers = numbers.map(lambda n: n / 8)  # type: ignore[assignment]
    found = draw(st.lists(numbers, min_size=count, max_size=count))
    return np.asarray(found).astype(np.dtype(dtype)).reshape(shape)


@settings(max_examples=60)
@given(st.data())
@pytest.mark.parametrize("method", DENSE)
def test_dense_updates_are_those_of_variables(method: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    old = data.draw(arrays((2, 3), dtype))
    shape = data.draw(st.sampled_from([(2, 3), (3,), (), (2, 1)])) if method != "assign" else (2, 3)
    values = data.draw(arrays(shape, dtype))
    expected = apply_with_jax(method, jnp.asarray(old), values)
    np.testing.assert_array_equal(updated(method, old, values), np.asarray(expected))


@settings(max_examples=60)
@given(st.data())
@pytest.mark.parametrize("method", SPARSE)
def test_sparse_updates_are_those_of_variables(method: str, data: st.DataObject) -> None:
    kinds = (
        [d for d in DTYPES if d != "complex64"] if method in ("scatter_min", "scatter_max") else DTYPES
    )
    dtype = data.draw(st.sampled_from(kinds))
    old = data.draw(arrays((4, 2), dtype))
    # An order of repeated indices exists for all methods but this one.
    unique = method == "scatter_update"
    indices = np.array(data.draw(st.lists(st.integers(-6, 6), max_size=5)), np.int32)
    if unique:
        _, first = np.unique(indices % 100 if len(indices) == 0 else indices % 4, return_index=True)
        indices = indices[first]
    values = data.draw(arrays((len(indices), 2), dtype))
    with np.errstate(all="ignore"):
        expected = apply_with_jax(
            method, jnp.asarray(old), px.IndexedSlices(jnp.asarray(values), jnp.asarray(indices))
        )
    found = updated(method, old, values, indices)
    # Repeated indices may be added up in a larger format before they are rounded.
    rough = {"float16": 1e-2, "bfloat16": 1e-1}.get(dtype, 1e-6)
    np.testing.assert_allclose(
        found.astype(np.complex128), np.asarray(expected).astype(np.complex128), rtol=rough, atol=rough
    )


def test_operands_take_the_dtype_of_the_variable() -> None:
    old = np.zeros(2, np.float32)
    assert updated("assign_add", old, 3).tolist() == [3.0, 3.0]
    assert updated("assign_add", old, np.float64(0.1)).dtype == np.float32
    assert updated("assign", np.zeros(2, jnp.bfloat16), [1.0, 2.0]).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("method", "values", "indices"),
    [
        ("pow", 1.0, None),
        ("assign_add", np.ones(4), None),
        ("assign_add", np.ones((1, 2, 3)), None),
        ("scatter_add", np.ones((1, 3)), None),
        ("scatter_add", np.ones((2, 3)), np.array([0])),
        ("scatter_add", np.ones((1, 3)), np.array([0.5])),
        ("scatter_add", np.ones((1, 1, 3)), np.array([[0]])),
        ("assign_add", np.ones((1, 3)), np.array([0])),
        ("apply", np.ones(3), None),
    ],
)
def test_what_makes_no_sense_is_refused(method: str, values: Any, indices: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="Received"):
        checked(Update(definition((2, 3), "float32"), method, values, indices))


def test_truth_values_have_no_difference() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="assign_sub"):
        checked(Update(definition((2,), "bool"), "assign_sub", np.array([True, False])))
    assert updated("assign_add", np.array([True, False]), np.array([True, False])).tolist() == [
        True,
        False,
    ]
