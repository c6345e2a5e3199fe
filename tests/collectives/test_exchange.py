"""Two replicas that exchange what they have get the sum that an all-reduce gives, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from jax import lax
from jax.sharding import PartitionSpec

from phalanx.collectives import pair_exchange
from phalanx.execution.variance import differing_marks
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS, replica_mesh


def over_two(fn: Any, x: Any) -> Any:
    """`fn` on each row of `x` as a replica of its own; rows of results."""
    mesh, rows = replica_mesh(tuple(jax.local_devices()[:2])), PartitionSpec(REPLICA_AXIS)
    each = jax.shard_map(
        lambda x: fn(x[0])[None], mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    return jax.jit(each)(x)


def ring(x: jax.Array) -> Any:
    return lax.psum(x, REPLICA_AXIS)


@given(
    arrays.arrays(
        np.float32,
        st.sampled_from([(2,), (2, 1), (2, 5), (2, 2, 3), (2, 0)]),
        elements=st.integers(-(10**6), 10**6).map(lambda n: np.float32(n) / 7),
    )
)
@settings(max_examples=25, deadline=None)
def test_both_have_the_bits_of_an_all_reduce(x: np.ndarray[Any, Any]) -> None:
    got, expected = (np.asarray(over_two(fn, x)) for fn in (pair_exchange.total, ring))
    assert got.tobytes() == expected.tobytes()
    assert got[0].tobytes() == got[1].tobytes()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "int8", "int32", "uint32", "complex64", "int4"]
)
def test_all_kinds_of_numbers(dtype: str) -> None:
    x = jnp.asarray([[1, 2, 3], [4, -3, 2]]).astype(dtype)
    got, expected = (over_two(fn, x) for fn in (pair_exchange.total, ring))
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_gradients_and_vmap() -> None:
    x = jnp.asarray([[1.0, 2.0], [3.0, 5.0]])

    def gradient(total: Any) -> Any:
        return over_two(jax.grad(lambda x: jnp.sum(x * total(x**2))), x)

    np.testing.assert_allclose(gradient(pair_exchange.total), gradient(ring))
    np.testing.assert_array_equal(over_two(jax.vmap(pair_exchange.total), x), over_two(ring, x))


def test_the_analysis_knows_that_replicas_agree() -> None:
    """Else a compiled step that writes the sum to a variable would run eagerly."""

    def step(x: jax.Array) -> jax.Array:
        marked: jax.Array = compat.mark_same_on_all_replicas(pair_exchange.total(x), "w")
        return marked

    def careless(x: jax.Array) -> jax.Array:
        marked: jax.Array = compat.mark_same_on_all_replicas(x, "w")
        return marked

    x = jnp.ones((2, 3))
    for fn, marks in ((step, []), (careless, ["w"])):
        closed, _ = compat.jaxpr_and_result(lambda x, fn=fn: over_two(fn, x), x)
        assert differing_marks(closed.jaxpr) == (marks, [])


@dataclass(frozen=True)
class Device:
    process_index: int
    platform: str = "cpu"


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([Device(0), Device(1)], True),
        ([Device(0), Device(0)], False),
        ([Device(0), Device(1), Device(2)], False),
        ([Device(0), Device(0), Device(1), Device(1)], False),
        ([Device(0, "gpu"), Device(1, "gpu")], False),
    ],
)
def test_only_two_cpu_devices_of_two_processes_exchange(devices: Any, expected: bool) -> None:
    assert pair_exchange.is_worthwhile(devices) is expected
