"""Many steps per call equal many calls."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px


def trainer(strategy: px.Strategy) -> tuple[px.Variable, Any]:
    with strategy.scope():
        w = px.Variable(jnp.zeros(3))
        seen = px.train.Sum()
        optimizer = px.train.Optimizer(optax.adam(0.1))

    def replica(x: Any, y: Any) -> Any:
        seen.update_state(jnp.ones(x.shape[0]))
        return optimizer.minimize(lambda: jnp.sum((x @ w.value() - y) ** 2), [w])

    @px.function
    def step(x: Any, y: Any) -> Any:
        losses = strategy.run(replica, args=(x, y))
        return strategy.reduce("sum", losses, axis=None), losses

    return w, step


def batches(strategy: px.Strategy, sizes: list[int]) -> Any:
    rng = np.random.default_rng(0)
    for size in sizes:
        x = rng.normal(size=(size, 3)).astype(np.float32)
        parts = np.array_split(x, strategy.num_replicas_in_sync)
        yield strategy.experimental_distribute_values_from_function(
            lambda c, p=parts: (
                jnp.asarray(p[c.replica_id_in_sync_group]),
                jnp.asarray(p[c.replica_id_in_sync_group].sum(axis=1)),
            )
        )


@pytest.mark.parametrize("sizes", [[4] * 5, [4, 4, 6, 4], [4, 4, 3]])
@pytest.mark.parametrize("n", [1, 2])
def test_a_loop_equals_its_steps(n: int, sizes: list[int]) -> None:
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(n)])
    w, step = trainer(strategy)
    expected = [step(*b) for b in batches(strategy, sizes)]
    w2, step2 = trainer(strategy)
    results = px.train.loop(step2, batches(strategy, sizes), steps=len(sizes))
    assert len(results) == len(sizes)
    for (loss, per_replica), (loss2, per_replica2) in zip(expected, results, strict=True):
        np.testing.assert_allclose(loss, loss2, rtol=1e-5)
        pairs = zip(
            strategy.experimental_local_results(per_replica),
            strategy.experimental_local_results(per_replica2),
            strict=True,
        )
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), w2.numpy(), rtol=1e-5)
    assert float(results[-1][0]) == pytest.approx(float(expected[-1][0]), rel=1e-5)


def test_early_ends_and_mistakes() -> None:
    step = px.function(lambda x: x + 1)
    results = px.train.loop(step, iter([jnp.float32(1.0)]), steps=5)
    assert [float(x) for x in results[:]] == [2.0]
    assert len(px.train.loop(step, iter([]), steps=5)) == 0
    with pytest.raises(IndexError):
        results[1]
    with pytest.raises(TypeError, match=r"px\.function"):
        px.train.loop(lambda x: x, iter([]), 1)  # type: ignore[arg-type]
    for bad in (0, 1.5, True):
        with pytest.raises(ValueError, match="steps"):
            px.train.loop(step, iter([]), bad)  # type: ignore[arg-type]


def test_steps_without_arrays() -> None:
    total = px.Variable(0)
    step = px.function(lambda text: total.assign_add(len(text)) + 0)
    results = px.train.loop(step, iter(["ab", "ab", "ab"]), steps=3)
    assert [int(x) for x in results] == [2, 4, 6]
    assert int(total) == 6
    results = px.train.loop(step, iter([np.str_("abc"), np.array(["abc"])]), steps=2)
    assert [int(x) for x in results] == [9, 10]
