"""Optimizers under every strategy and both executors, against plain optax."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.contract.conftest import READING, STRATEGIES

import phalanx as px

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = (X @ np.arange(1.0, 5.0) + 1.0).astype(np.float32)

TRANSFORMS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(0.1, 0.0, 10))
    ),
}


@functools.cache
def reference(name: str, steps: int) -> list[np.ndarray[Any, Any]]:
    transform = TRANSFORMS[name]()
    params = [jnp.zeros(4), jnp.zeros(())]
    state = transform.init(params)
    for _ in range(steps):
        grads = jax.grad(lambda p: jnp.sum((X @ p[0] + p[1] - Y) ** 2) / len(X))(params)
        updates, state = transform.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return [np.asarray(p) for p in params]


THOROUGH = ("mirrored_3", "central_storage_3", "auto_parallel_4")
# Gradients are combined as the strategy says, then used as the transformation says: each strategy has
# the longest chain, and three have all transformations.
CASES = [
    pytest.param(*case, marks=[] if case[1] == "clipped" or case[0] in THOROUGH else [pytest.mark.soak])
    for case in itertools.product(READING, TRANSFORMS)
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("strategy_name", "name"), CASES)
def test_training_equals_optax(strategy_name: str, name: str, compiled: bool) -> None:
    strategy = STRATEGIES[strategy_name]()
    with strategy.scope():
        w = px.Variable(jnp.zeros(4))
        b = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
        optimizer = px.train.Optimizer(TRANSFORMS[name]())
    xs = np.array_split(X, strategy.num_replicas_in_sync)
    ys = np.array_split(Y, strategy.num_replicas_in_sync)
    batch = strategy.experimental_distribute_values_from_function(
        lambda c: (
            jnp.asarray(xs[c.replica_id_in_sync_group]),
            jnp.asarray(ys[c.replica_id_in_sync_group]),
        )
    )

    def step(x: jax.Array, y: jax.Array) -> Any:
        return optimizer.minimize(lambda: jnp.sum((x @ w.value() + b - y) ** 2) / len(X), [w, b])

    def train(x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(step, args=(x, y)), axis=None)

    run = px.function(train) if compiled else train
    losses = [float(run(*batch)) for _ in range(4)]
    expected = reference(name, 4)
    for got, want in ((w, expected[0]), (b, expected[1])):
        for copy in got.values:
            np.testing.assert_allclose(copy.numpy(), want, rtol=1e-4, atol=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert int(optimizer.iterations) == 4
    if compiled:
        assert run.trace_count == 2  # once more, after the state was made


def two() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def rid() -> jax.Array:
    context = px.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group + 1.0


@pytest.mark.parametrize(("aggregate", "expected"), [("sum", 7.0), ("mean", 8.5)])
def test_aggregation(aggregate: str, expected: float) -> None:
    s = two()
    with s.scope():
        w = px.Variable(10.0)
    optimizer = px.train.Optimizer(optax.sgd(1.0), aggregate=aggregate)
    s.run(lambda: optimizer.apply_gradients([(rid(), w)]))
    assert [float(c) for c in w.values] == [expected] * 2


def test_gradients_that_are_already_combined() -> None:
    s = two()
    with s.scope():
        w = px.Variable(10.0)
    optimizer = px.train.Optimizer(optax.sgd(1.0), aggregate=None)

    def step(reduce: bool) -> None:
        context = px.get_replica_context()
        assert context is not None
        optimizer.apply_gradients([(context.all_reduce("sum", rid()) if reduce else rid(), w)])

    s.run(step, args=(True,))
    assert float(w) == 7.0
    with pytest.raises(px.errors.DivergenceError):
        s.run(step, args=(False,))
    assert float(w) == 7.0
    assert int(optimizer.iterations) == 1


def test_missing_gradients_are_skipped() -> None:
    s = two()
    with s.scope():
        w, u = px.Variable(10.0), px.Variable(5.0)
    optimizer = px.train.Optimizer(optax.adam(1.0))
    optimizer.build([w, u])
    s.run(lambda: optimizer.apply_gradients([(rid(), w), (None, u)]))
    assert float(w) == pytest.approx(9.0)
    assert float(u) == 5.0
    with pytest.raises(ValueError, match="no gradient"):
        s.run(lambda: optimizer.apply_gradients([(None, u)]))


def test_sparse_gradients_are_summed() -> None:
    s = two()
    with s.scope():
        e = px.Variable(jnp.zeros((3, 1)))
    optimizer = px.train.Optimizer(optax.sgd(1.0))
    ids = s.experimental_distribute_values_from_function(
        lambda c: [jnp.array([0]), jnp.array([2, 2])][c.replica_id_in_sync_group]
    )

    def step(ids: jax.Array) -> None:
        rows = px.IndexedSlices(jnp.ones((ids.shape[0], 1)), ids)
        optimizer.apply_gradients([(rows, e)])

    s.run(step, args=(ids,))
    assert [c.numpy().tolist() for c in e.values] == [[[-1.0], [0.0], [-2.0]]] * 2


def test_the_pure_way() -> None:
    s = two()
    optimizer = px.train.Optimizer(optax.adam(0.1))
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    x = s.experimental_distribute_values_from_function(
        lambda c: jnp.ones(3) * (c.replica_id_in_sync_group + 1)
    )

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        def replica(params: Any, state: Any, x: Any) -> Any:
            grads = jax.grad(lambda p: jnp.sum(p["w"] * x))(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return s.run(replica, args=(params, state, x))

    new, _ = step(params, state, x)
    expected = optax.apply_updates(
        params, optax.adam(0.1).update({"w": jnp.full(3, 3.0)}, state, params)[0]
    )
    for copy in new["w"].values:
        np.testing.assert_allclose(copy, expected["w"], rtol=1e-6)


def test_mistakes() -> None:
    s = two()
    with s.scope():
        w = px.Variable(1.0)
        late = px.Variable(1.0)
    outside = px.Variable(1.0)
    with pytest.raises(TypeError, match="optax"):
        px.train.Optimizer(0.1)
    with pytest.raises(ValueError, match="aggregate"):
        px.train.Optimizer(optax.sgd(1.0), aggregate="max")
    optimizer = px.train.Optimizer(optax.sgd(1.0))
    with pytest.raises(RuntimeError, match="no state"):
        _ = optimizer.variables
    with s.scope(), pytest.raises(RuntimeError, match=r"Strategy\.run"):
        optimizer.apply_gradients([(1.0, w)])
    with pytest.raises(AssertionError, match="scope"):
        s.run(lambda: optimizer.apply_gradients([(rid(), outside)]))
    with pytest.raises(ValueError, match="twice"):
        s.run(lambda: optimizer.apply_gradients([(rid(), w), (rid(), w)]))
    s.run(lambda: optimizer.apply_gradients([(rid(), w)]))
    with pytest.raises(ValueError, match="build"):
        s.run(lambda: optimizer.apply_gradients([(rid(), late)]))
    assert len(optimizer.variables) == 1


def test_state_starts_from_present_values() -> None:

    seen = []
    transform = optax.GradientTransformation(
        lambda params: seen.append(float(params[0])) or optax.EmptyState(),
        lambda grads, state, params=None: (grads, state),
    )
    s = two()
    with s.scope():
        w = px.Variable(1.0)
    w.assign(42.0)
    optimizer = px.train.Optimizer(transform)
    px.function(lambda: s.run(lambda: optimizer.apply_gradients([(rid(), w)])))()
    assert seen == [42.0]
    assert float(w) == 45.0
