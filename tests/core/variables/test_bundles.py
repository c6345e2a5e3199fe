"""What programs give to several variables at once, until other code looks at one of them."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import phalanx as px
from phalanx.core.variables.bundles import Bundle, Holder

DEVICES = [f"CPU:{i}" for i in range(2)]


def holders(count: int) -> list[Any]:
    made = [Holder() for _ in range(count)]
    for holder in made:
        holder._value, holder._wrap = None, lambda x: x
    return made


def arrays(*numbers: float) -> list[jax.Array]:
    return [jnp.float32(x) for x in numbers]


def test_a_bundle_is_whole_until_a_variable_is_looked_at() -> None:
    a, b = holders(2)
    bundle = Bundle([a, b])
    assert not bundle.is_whole
    bundle.give(arrays(1, 2))
    assert bundle.is_whole
    bundle.give(arrays(3, 4))
    assert bundle.is_whole
    assert float(a._value) == 3
    assert not bundle.is_whole
    assert bundle.arrays[0] is None  # the variable alone has it now
    assert a._exclusive
    a._committed()
    assert not a._exclusive
    bundle.give(arrays(5, 6))
    assert bundle.is_whole
    assert [float(x._value) for x in (a, b)] == [5, 6]


def test_a_variable_that_is_written_leaves_its_bundle() -> None:
    a, b = holders(2)
    bundle = Bundle([a, b])
    bundle.give(arrays(1, 2))
    a._value = "other"
    assert not bundle.is_whole
    assert bundle.arrays[0] is None
    assert (a._value, float(b._value)) == ("other", 2)


def test_a_variable_is_in_one_bundle() -> None:
    a, b, c = holders(3)
    first, second = Bundle([a, b]), Bundle([b, c])
    first.give(arrays(1, 2))
    second.give(arrays(3, 4))
    assert (first.is_whole, second.is_whole) == (False, True)
    assert first.arrays[1] is None
    first.give(arrays(5, 6))
    assert (first.is_whole, second.is_whole) == (True, False)
    assert [float(x._value) for x in (a, b, c)] == [5, 6, 4]


def test_a_bundle_keeps_nothing_of_a_variable_that_has_ended() -> None:
    a, b = holders(2)
    bundle = Bundle([a, b])
    given = arrays(1, 2)
    gone = weakref.ref(given[1])
    bundle.give(given)
    del given, b
    assert not bundle.is_whole
    assert gone() is None
    bundle.give(arrays(3, 4))
    assert not bundle.is_whole
    assert bundle.arrays[1] is None
    assert float(a._value) == 3


def test_bundles_end_without_the_garbage_collector() -> None:
    (a,) = holders(1)
    bundle = Bundle([a])
    bundle.give(arrays(1))
    gone = weakref.ref(bundle)
    gc.disable()
    try:
        del bundle
        assert gone() is not None  # the variable's array is there
        assert float(a._value) == 1
        assert gone() is None
    finally:
        gc.enable()


# -- in programs -------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2])
def strategy(request: pytest.FixtureRequest) -> px.Strategy:
    if request.param == 1:
        return px.OneDeviceStrategy("CPU:0")
    return px.MirroredStrategy(DEVICES)


def test_whatever_happens_between_two_runs_counts(strategy: px.Strategy) -> None:
    with strategy.scope():
        v = px.Variable(0.0, aggregation=px.VariableAggregation.MEAN)
        w = px.Variable(0.0, aggregation=px.VariableAggregation.MEAN)
    alone = px.Variable(0.0)

    @px.function
    def both() -> None:
        strategy.run(lambda: (v.assign_add(1.0), w.assign_add(10.0)))
        alone.assign_add(100.0)

    @px.function
    def one() -> Any:
        strategy.run(lambda: w.assign_add(1000.0))
        return v + 0.0

    def write() -> None:
        w.assign(w * 2.0)
        alone.assign_sub(1.0)

    happens: list[Callable[[], Any]] = [both, both, v.numpy, both, one, one, both, write, both, both]
    for each in happens:
        each()
    assert (float(v), float(w), float(alone)) == (6.0, 4100.0, 599.0)
    assert float(one()) == 6.0
    assert (both.trace_count, one.trace_count) == (1, 1)


def test_what_was_read_stays_as_it_was(strategy: px.Strategy) -> None:
    with strategy.scope():
        v = px.Variable([1.0, 2.0])

    @px.function
    def double() -> None:
        strategy.run(lambda: v.assign_add(v))

    kept = []
    for _ in range(4):
        double()
        kept.append(v.read_value())
        double()
    assert [float(x[0]) for x in kept] == [2, 8, 32, 128]


def test_a_program_ends_with_a_variable_that_it_writes() -> None:
    made = {"v": px.Variable(1.0), "w": px.Variable(2.0)}

    @px.function
    def step() -> None:
        for x in made.values():
            x.assign_add(1.0)

    step()
    step()
    del made["w"]
    gc.collect()
    step()
    assert float(made["v"]) == 4.0
    assert step.trace_count == 2


def test_a_copy_of_a_variable_takes_nothing_from_it() -> None:
    v = px.Variable(1.0)
    step = px.function(lambda: v.assign_add(1.0))
    step()
    step()
    shallow, deep = copy.copy(v), copy.deepcopy(v)
    step()
    assert (float(shallow), float(deep), float(v)) == (3.0, 3.0, 4.0)
