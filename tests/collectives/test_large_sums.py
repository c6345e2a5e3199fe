"""Large reductions on the host: the same numbers, and memory that no caller can change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.collectives import large_sums

SIZE = large_sums.LARGE_TENSOR_BYTES // 4 + 7


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_large_sums_equal_small_ones(n: int, op: str, dtype: Any) -> None:
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(n)])
    parts = [np.arange(SIZE) % 97 + i for i in range(n)]
    value = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(parts[c.replica_id_in_sync_group], dtype)
    )
    assert large_sums.is_worthwhile(value.values, jax.local_devices()[:n])

    def step(x: Any) -> Any:
        return px.get_replica_context().all_reduce(op, [x, x[:5]])  # type: ignore[union-attr]

    large, small = strategy.run(step, args=(value,))
    expected = np.sum(parts, axis=0) / (n if op == "MEAN" else 1)
    for i, (a, b) in enumerate(zip(large.values, small.values, strict=True)):
        np.testing.assert_allclose(a, expected, rtol=1e-6)
        np.testing.assert_array_equal(a[:5], b)
        assert a.dtype == b.dtype
        assert next(iter(a.devices())).id == i


def test_shared_memory_survives_donation() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = px.Variable(jnp.zeros(SIZE), aggregation=px.VariableAggregation.SUM)
    strategy.run(lambda: v.assign_add(jnp.ones(SIZE)))
    kept = v.values[1].value()

    @px.function
    def bump() -> None:
        v.assign_add(jnp.ones(SIZE))

    for _ in range(3):
        bump()
    assert {float(x) for c in v.values for x in (c.value()[0], c.value()[-1])} == {5.0}
    assert float(kept[0]) == 2.0
