"""optax on servers does what optax does."""

from __future__ import annotations

from typing import Any

import cloudpickle
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from phalanx import errors
from phalanx.parameter_server.requests import OptimizerDefinition, Token, Update
from phalanx.parameter_server.store import Store
from tests.parameter_server.running import variable

TRANSFORMS = {
    "sgd": optax.sgd(0.5),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.01),
    "adagrad": optax.adagrad(0.1),
    "chain": optax.chain(optax.clip(0.5), optax.scale_by_rms(), optax.scale(-0.1)),
}


def defined(transform: Any, id: int = 1) -> OptimizerDefinition:
    return OptimizerDefinition(id, cloudpickle.dumps(transform))


def store_with(transform: Any, value: Any) -> Store:
    store = Store()
    store.define_optimizer(defined(transform))
    store.create(variable(0, value.shape, str(value.dtype)), value.copy())
    return store


def apply(store: Store, gradient: Any, indices: Any = None) -> None:
    store.apply([Update(store.held(0).definition, "apply", gradient, indices, 1)])


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_gradients(name: str, dtype: str) -> None:
    transform = TRANSFORMS[name]
    rng = np.random.default_rng(0)
    value = rng.normal(size=(3, 4)).astype(dtype)
    expected, state = jnp.asarray(value), transform.init(jnp.asarray(value))
    store = store_with(transform, value)
    for _ in range(4):
        gradient = rng.normal(size=(3, 4)).astype(dtype)
        updates, state = transform.update(jnp.asarray(gradient), state, expected)
        expected = optax.apply_updates(expected, updates)
        apply(store, gradient)
        found = store.held(0).value
        assert found.dtype == expected.dtype
        rough = 1e-6 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(found.astype(np.float32), np.float32(expected), rough, rough)


@settings(max_examples=20)
@given(st.lists(st.integers(-6, 7), min_size=1, max_size=12), st.sampled_from(sorted(TRANSFORMS)))
def test_sparse_gradients_are_dense_ones_of_their_rows(indices: list[int], name: str) -> None:
    """Each touched row sees what a variable of that row alone would see."""
    transform = TRANSFORMS[name]
    rng = np.random.default_rng(1)
    value = rng.normal(size=(6, 2)).astype(np.float32)
    gradient = rng.normal(size=(len(indices), 2)).astype(np.float32)
    store = store_with(transform, value)
    apply(store, gradient, np.array(indices))
    dense = np.zeros_like(value)
    exist = [i for i in indices if -6 <= i < 6]
    np.add.at(dense, exist, gradient[[-6 <= i < 6 for i in indices]])
    updates, _ = transform.update(jnp.asarray(dense), transform.init(jnp.asarray(value)), value)
    expected = np.array(optax.apply_updates(value, updates))
    untouched = sorted(set(range(6)) - {i % 6 for i in exist})
    expected[untouched] = value[untouched]
    np.testing.assert_allclose(store.held(0).value, expected, 1e-5, 1e-6)


def test_slots_of_rows_stay_beside_them() -> None:
    value = np.zeros((1000, 2), np.float32)
    store = store_with(optax.adam(0.1), value)
    rows = np.array([1, 5])
    for _ in range(3):
        apply(store, np.ones((2, 2), np.float32), rows)
    slots = store.held(0).slots[1]
    moments = [x for x in slots.leaves if x.shape == value.shape]
    assert len(moments) == 2
    for moment in moments:
        assert sorted(set(np.nonzero(moment)[0])) == [1, 5]
    assert [int(x) for x in slots.leaves if x.shape == ()] == [3]
    assert store.status()["bytes"] == 3 * value.nbytes + 4
    lone = store_with(optax.adam(0.1), np.zeros((2, 2), np.float32))
    for _ in range(3):
        apply(lone, np.ones((2, 2), np.float32))
    np.testing.assert_allclose(store.held(0).value[rows], lone.held(0).value, 1e-6)


def test_values_that_are_read_stay_as_they_are() -> None:
    store = store_with(optax.adam(0.1), np.zeros((4, 2), np.float32))
    for indices in (np.array([0]), None, np.array([0])):
        lent = store.held(0).lend()
        before = bytes(lent)
        apply(store, np.ones((4, 2) if indices is None else (1, 2), np.float32), indices)
        assert bytes(lent) == before
        assert bytes(store.held(0).lend()) != before


def test_two_optimizers_have_slots_of_their_own() -> None:
    store = store_with(optax.adam(0.1), np.zeros(2, np.float32))
    store.define_optimizer(defined(optax.sgd(1.0), 2))
    definition = store.held(0).definition
    store.push(Token(0), [Update(definition, "apply", np.ones(2), None, n) for n in (1, 2)])
    assert set(store.held(0).slots) == {1, 2}
    np.testing.assert_allclose(store.held(0).value, [-1.1, -1.1], 1e-5)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="optax transformation"):
        Store().define_optimizer(defined("adam"))
    with pytest.raises(errors.InvalidArgumentError, match="unpickle"):
        Store().define_optimizer(OptimizerDefinition(1, b"nonsense"))
