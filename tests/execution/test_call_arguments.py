"""Calls that are recognized by what the last one looked like: each gets the program that it needs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.execution.call_arguments import Call, Pattern

DEVICES = [f"CPU:{i}" for i in range(2)]


def pattern_of(*args: Any, **kwargs: Any) -> Pattern:
    call = Call.of(args, kwargs)
    assert call is not None
    pattern = Pattern.of(call, args, kwargs)
    assert pattern is not None
    return pattern


def fits(pattern: Pattern, *args: Any, **kwargs: Any) -> bool:
    """Whether a pattern knows a call; if so, it must say the same as taking the call apart does."""
    found = pattern.arrays_of(args, kwargs)
    if found is None:
        return False
    call = Call.of(args, kwargs)
    assert call is not None
    assert len(found) == len(call.arrays)
    assert all(jnp.all(a == b) for a, b in zip(found, call.arrays, strict=True))
    return True


class Named:
    """Says that it equals others of its name, and compares by something that has no truth."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Named) and other.name == self.name:
            return True
        raise ValueError("not to be compared")


def test_calls_that_need_the_same_program_fit() -> None:
    x, y = jnp.ones(3), jnp.zeros(3)
    pattern = pattern_of(x, {"a": y}, 3, "text", Named("a"), flag=True)
    assert fits(pattern, y, {"a": x}, 3, "text", Named("a"), flag=True)
    assert fits(pattern, np.ones(3, np.float32), {"a": x + 1}, 3, "text", Named("a"), flag=True)


@pytest.mark.parametrize(
    "args",
    [
        (jnp.ones(4), 3, Named("a")),
        (jnp.ones(3, jnp.int32), 3, Named("a")),
        (jnp.ones(3), 4, Named("a")),
        (jnp.ones(3), 3.0, Named("a")),
        (jnp.ones(3), jnp.int32(3), Named("a")),
        (jnp.ones(3), 3, Named("b")),
        (3, jnp.ones(3), Named("a")),
        (jnp.ones(3), 3),
        ([jnp.ones(3)], 3, Named("a")),
    ],
    ids=["shape", "dtype", "number", "kind", "array", "object", "order", "count", "nest"],
)
def test_calls_that_need_another_program_do_not_fit(args: tuple[Any, ...]) -> None:
    assert not fits(pattern_of(jnp.ones(3), 3, Named("a")), *args)


def test_numbers_without_a_type_of_their_own_are_told_apart() -> None:
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    pattern = pattern_of(weak)
    assert fits(pattern, jnp.asarray(2.0))
    assert not fits(pattern, jnp.float32(2.0))


def test_a_pattern_belongs_to_a_strategy_and_a_precision() -> None:
    strategy = px.OneDeviceStrategy("CPU:0")
    outside = pattern_of(jnp.ones(3))
    with strategy.scope():
        assert not fits(outside, jnp.ones(3))
        inside = pattern_of(jnp.ones(3))
        assert fits(inside, jnp.ones(3))
    assert not fits(inside, jnp.ones(3))
    with jax.enable_x64(True):
        assert not fits(outside, jnp.ones(3, jnp.float32))
    assert fits(outside, jnp.ones(3))


def test_values_of_replicas_fit_by_their_arrays() -> None:
    strategy = px.MirroredStrategy(DEVICES)

    def distributed(make: Callable[[Any], Any]) -> Any:
        return strategy.experimental_distribute_values_from_function(make)

    pattern = pattern_of(distributed(lambda _: jnp.ones(2)))
    assert fits(pattern, distributed(lambda _: jnp.zeros(2)))
    assert not fits(pattern, distributed(lambda _: jnp.zeros(3)))
    assert not fits(pattern, distributed(lambda _: jnp.zeros(())))
    assert not fits(pattern, jnp.ones(4))
    assert not fits(pattern, distributed(lambda _: jnp.ones(2)), flag=True)
    uneven = distributed(lambda c: jnp.zeros(1 + c.replica_id_in_sync_group))
    assert not fits(pattern, uneven)
    call = Call.of((uneven,), {})
    assert call is not None
    assert Pattern.of(call, (uneven,), {}) is None


def test_batches_fit_by_their_parts() -> None:
    strategy = px.MirroredStrategy(DEVICES)
    one = px.MirroredStrategy(DEVICES[:1])

    def distributed(strategy: px.Strategy, x: jax.Array) -> Any:
        return strategy.experimental_distribute_values_from_function(lambda _: x)

    x, y, number = (distributed(strategy, x) for x in (jnp.ones(1), jnp.zeros(1), jnp.float32(1)))
    pattern = pattern_of((x, number))
    assert fits(pattern, (y, number))
    array = jax.tree.leaves(number)[0]  # of the same type as that of `x`
    on_one = distributed(one, jnp.ones(2))
    for other in [(x,), (x, number, x), (number, x), (on_one, number), [x, number], (x, array)]:
        assert not fits(pattern, other)
    assert not fits(pattern, x, number)
    assert not fits(pattern, (x, number), (x, number))
    assert not fits(pattern_of(x, number), (x, number))
    assert fits(pattern_of(x, number), y, number)
    with strategy.scope():
        assert not fits(pattern, (x, number))


def test_values_in_a_run_fit_by_their_components() -> None:
    strategy = px.MirroredStrategy(DEVICES[:1])
    value = strategy.experimental_distribute_values_from_function(lambda _: jnp.float32(1))
    found = []

    def replica() -> None:
        found.append(fits(pattern_of(value), value))

    strategy.run(replica)
    assert found == [True]


def test_deleted_arrays_are_refused() -> None:
    x = jnp.ones(3)
    pattern = pattern_of(x)
    x.delete()
    with pytest.raises(px.PhalanxError, match="has been deleted"):
        pattern.arrays_of((x,), {})


def test_arrays_that_are_bound_to_a_device_are_free_in_programs() -> None:
    first, second = jax.devices()[:2]
    pattern = pattern_of(jax.device_put(jnp.ones(3), first))
    for device in (first, second):
        (x,) = pattern.arrays_of((jax.device_put(jnp.zeros(3), device),), {}) or ()
        assert not x.committed


def test_each_call_gets_its_own_program() -> None:
    total = px.Variable(0.0)

    @px.function
    def add(x: Any, factor: float) -> Any:
        total.assign_add(x.sum() * factor)
        return total + 0.0

    kept = []
    for size, factor in [(1, 1.0), (1, 1.0), (2, 1.0), (2, 1.0), (2, 10.0), (2, 10.0), (1, 1.0)]:
        kept.append(float(add(jnp.ones(size), factor)))
    assert kept == [1, 2, 4, 6, 26, 46, 47]
    assert add.trace_count == 3
