"""Cross-device operations: algorithms, fall-backs, and the programs they compile to."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.collectives import cross_device_ops, device_programs
from phalanx.collectives.packing import Packing
from phalanx.runtime.placement import replicated_over

ALGORITHMS = {
    "default": lambda: None,
    "one_device": px.ReductionToOneDevice,
    "one_other_device": lambda: px.ReductionToOneDevice(reduce_to_device="CPU:3"),
    "hierarchical": px.HierarchicalCopyAllReduce,
    "hierarchical_unpacked": lambda: px.HierarchicalCopyAllReduce(num_packs=0),
    "nccl": lambda: px.NcclAllReduce(num_packs=2),
}


def per_replica(strategy: px.Strategy, make: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda c: make(c.replica_id_in_sync_group)
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_the_same_results(name: str) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ALGORITHMS[name]())
    value = per_replica(strategy, lambda i: jnp.float32(i + 1))
    assert float(strategy.reduce("sum", value, axis=None)) == 3.0
    rows = per_replica(strategy, lambda i: jnp.array([float(i)]))
    assert strategy.gather(rows, axis=0).tolist() == [0.0, 1.0]

    def step() -> Any:
        context = px.get_replica_context()
        assert context is not None
        i = context.replica_id_in_sync_group
        return context.all_reduce("mean", [i + 1.0, jnp.full((2, 2), i), jnp.full(3, i + 0.5)])

    for a, b, c in strategy.experimental_local_results(strategy.run(step)):
        assert float(a) == 1.5
        np.testing.assert_allclose(b, 0.5)
        np.testing.assert_allclose(c, 1.0)


def test_the_accumulation_function_is_used_everywhere() -> None:
    calls = []

    def accumulate(xs: list[jax.Array]) -> jax.Array:
        calls.append(len(xs))
        return sum(xs[1:], start=xs[0]) + 100.0

    ops = px.ReductionToOneDevice(accumulation_fn=accumulate)
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    value = per_replica(strategy, lambda i: jnp.float32(i + 1))
    assert float(strategy.reduce("sum", value, axis=None)) == 103.0
    assert float(strategy.reduce("mean", value, axis=None)) == 51.5
    assert calls == [2, 2]


def test_the_base_class_does_nothing_itself() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    value = per_replica(strategy, jnp.float32)
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        px.CrossDeviceOps().reduce("sum", value, "CPU:0")
    with pytest.raises(NotImplementedError, match="batch_reduce_implementation"):
        px.CrossDeviceOps().batch_reduce("sum", [(value, "CPU:0")])


def test_a_plain_array_is_only_moved() -> None:
    x = jnp.float32(2.0)
    result = px.ReductionToOneDevice().reduce(px.ReduceOp.SUM, x, "CPU:2")
    assert isinstance(result, jax.Array)
    assert float(result) == 2.0
    assert next(iter(result.devices())).id == 2


def test_nccl_falls_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    cross_device_ops._say_no_nccl.cache_clear()
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=px.NcclAllReduce())

    def step() -> Any:
        return px.get_replica_context().all_reduce("sum", jnp.ones(2))  # type: ignore[union-attr]

    with caplog.at_level(logging.INFO, logger="phalanx"):
        strategy.run(step)
        strategy.run(step)
    assert sum("NCCL" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("cls", [px.NcclAllReduce, px.HierarchicalCopyAllReduce])
def test_negative_packs(cls: Any) -> None:
    with pytest.raises(ValueError, match="-1"):
        cls(num_packs=-1)


@pytest.mark.parametrize("destination", [None, ["CPU:0", "CPU:1"], 3, {}])
def test_what_is_no_destination(destination: Any) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    value = per_replica(strategy, jnp.float32)
    for error in (AssertionError, TypeError, AttributeError):
        with pytest.raises(error):
            strategy.extended.reduce_to("sum", value, destination)
        with pytest.raises(error):
            strategy.extended.broadcast_to(jnp.float32(1.0), destination)


def test_pairs_must_be_pairs() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(TypeError, match="pairs"):
        strategy.extended.batch_reduce_to("sum", [1.0])  # type: ignore[list-item]


def test_mixed_dtypes_reduce_together() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    pairs = [
        (per_replica(strategy, lambda i: jnp.float32(i + 1)), "CPU:0"),
        (per_replica(strategy, lambda i: jnp.int32(i + 1)), "CPU:1"),
        (per_replica(strategy, lambda i: jnp.bfloat16(i + 1)), "CPU:0"),
    ]
    results = strategy.extended.batch_reduce_to("sum", pairs)
    assert [float(x) for x in results] == [3.0, 3.0, 3.0]
    assert [str(x.dtype) for x in results] == ["float32", "int32", "bfloat16"]


@pytest.mark.parametrize(
    ("packing", "count"), [(Packing(), 2), (Packing(num_packs=0), 5), (Packing(num_packs=1), 1)]
)
def test_small_tensors_share_an_all_reduce(packing: Packing, count: int) -> None:
    devices = tuple(jax.local_devices()[:2])
    shapes = [(10,), (3, 3), (), (7,), (200, 200)]
    arguments = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=replicated_over(devices)) for s in shapes
    ]
    program: Any = device_programs._all_reduce_program(px.ReduceOp.SUM, devices, packing)
    assert program.lower(arguments).as_text().count("stablehlo.all_reduce") == count


def test_two_strategies_of_different_size_share_a_process() -> None:
    for n in (4, 2, 3):
        strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(n)])
        result = strategy.run(lambda: px.get_replica_context().all_reduce("sum", jnp.ones(2)))  # type: ignore[union-attr]
        assert [x.tolist() for x in result.values] == [[n, n]] * n
