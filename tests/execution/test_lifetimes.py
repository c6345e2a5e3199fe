"""Programs end with what they were made for, and keep none of it alive."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import phalanx as px
from phalanx.execution.lifetimes import Identity, KeptIdentity, Table, may_end

DEVICES = [f"CPU:{i}" for i in range(4)]


class Thing:
    """Something that can be referred to weakly."""


# -- tables ----------------------------------------------------------------------------------------


def test_entries_end_with_the_first_object_that_they_need() -> None:
    table: Table[str] = Table()
    first, second = Thing(), Thing()
    table.put("both", "x", [first, second])
    table.put("first", "y", [first])
    assert (table.get("both"), table.get("first"), len(table)) == ("x", "y", 2)
    del second
    assert (table.get("both"), table.get("first"), len(table)) == (None, "y", 1)
    del first
    assert len(table) == 0


def test_tables_and_entries_end_without_the_garbage_collector() -> None:
    value, needed = Thing(), Thing()
    table: Table[Thing] = Table()
    table.put(Identity(needed), value, [needed])
    gone = weakref.ref(value)
    gc.disable()
    try:
        del table, value
        assert gone() is None
    finally:
        gc.enable()


def test_identities_are_equal_for_one_object_only() -> None:
    a, b = Thing(), Thing()
    assert Identity(a) == Identity(a)
    assert hash(Identity(a)) == hash(Identity(a))
    assert Identity(a) != Identity(b)
    old = Identity(a)
    del a
    assert old == old  # so that the entry of a key can be removed
    assert all(Identity(Thing()) != old for _ in range(100))  # also if one gets its address
    assert may_end(b)
    assert not may_end((1, 2))
    kept = (1, [2])
    assert KeptIdentity(kept) == KeptIdentity(kept)
    assert KeptIdentity(kept) != KeptIdentity((1, [2]))


# -- strategies ------------------------------------------------------------------------------------


def model_step(x: Any) -> Any:
    return (x * 2.0).sum()


def make_scope_function() -> Callable[[px.Strategy, Any], px.Function]:
    @px.function
    def step(x: Any) -> Any:
        return px.get_strategy().run(model_step, args=(x,))

    def use(strategy: px.Strategy, x: Any) -> px.Function:
        with strategy.scope():
            step(x)
        return step

    return use


def make_replica_function() -> Callable[[px.Strategy, Any], px.Function]:
    step = px.function(model_step)

    def use(strategy: px.Strategy, x: Any) -> px.Function:
        strategy.run(step, args=(x,))
        return step

    return use


def make_argument_function() -> Callable[[px.Strategy, Any], px.Function]:
    @px.function
    def step(strategy: px.Strategy, x: Any) -> Any:
        return strategy.run(model_step, args=(x,))

    def use(strategy: px.Strategy, x: Any) -> px.Function:
        step(strategy, x)
        return step

    return use


def make_variable_function() -> Callable[[px.Strategy, Any], px.Function]:
    model: dict[str, px.Variable] = {}

    @px.function
    def step(x: Any) -> Any:
        def on_replica(x: Any) -> Any:
            return model["w"].assign_add(x.sum())  # the variable itself is a result

        return px.get_strategy().run(on_replica, args=(x,))

    def use(strategy: px.Strategy, x: Any) -> px.Function:
        with strategy.scope():
            model["w"] = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
            assert step(x) is model["w"]
            assert float(model.pop("w")) == 8.0
        return step

    return use


def make_iterator_function() -> Callable[[px.Strategy, Any], px.Function]:
    captured: list[Any] = []

    @px.function
    def step() -> Any:
        return px.get_strategy().run(model_step, args=(next(captured[0]),))

    def use(strategy: px.Strategy, x: Any) -> px.Function:
        dataset = px.data.Dataset.from_tensor_slices(jnp.ones(8)).batch(8)
        with strategy.scope():
            captured[:] = [iter(strategy.experimental_distribute_dataset(dataset))]
            step()
        captured.clear()
        return step

    return use


@pytest.mark.parametrize(
    "make",
    [
        make_scope_function,
        make_replica_function,
        make_argument_function,
        make_variable_function,
        make_iterator_function,
    ],
)
def test_programs_end_with_their_strategy(
    make: Callable[[], Callable[[px.Strategy, Any], px.Function]],
) -> None:
    use, gone = make(), []
    for _ in range(2):
        strategy = px.MirroredStrategy(DEVICES[:2])
        x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(4))
        step = use(strategy, x)
        gone.append(weakref.ref(strategy))
        del strategy, x
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert repr(step).endswith("0 programs>")
    assert all(repr(run).endswith("0 programs>") for run in step._runs.values())
    assert step.trace_count == 2  # what is gone has been traced nevertheless


def test_a_strategy_never_gets_the_program_of_one_that_is_gone() -> None:
    @px.function
    def replicas() -> int:
        return px.get_strategy().num_replicas_in_sync

    for i in range(30):  # some of them get the address of an earlier one
        count = 1 + i % 4
        strategy = px.MirroredStrategy(DEVICES[:count])
        with strategy.scope():
            assert replicas() == count
        del strategy
        gc.collect(0)


# -- variables and other objects ---------------------------------------------------------------------


def test_a_variable_that_is_replaced_is_traced_again() -> None:
    model = {"w": px.Variable(1.0)}
    step = px.function(lambda x: model["w"].assign_add(x) + 0.0)
    assert float(step(jnp.float32(2.0))) == 3.0
    model["w"] = px.Variable(10.0)
    assert float(step(jnp.float32(2.0))) == 12.0
    assert float(model["w"]) == 12.0
    assert step.trace_count == 2


def test_a_variable_that_ends_while_it_is_traced_is_used_once_more() -> None:
    given = [px.Variable(5.0)]
    step = px.function(lambda: given.pop().value() + 1.0)
    assert float(step()) == 6.0


def test_objects_among_the_arguments_are_not_kept() -> None:
    class Model:
        def __init__(self, start: float) -> None:
            self.w = px.Variable(start)

    step = px.function(lambda model, x, scale: model.w.assign_add(x * scale) + 0.0)
    for start in (1.0, 2.0):
        model = Model(start)
        for k in range(3):
            assert float(step(model, jnp.float32(1.0), 2)) == start + 2 * (k + 1)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        assert repr(step).endswith("0 programs>")
    assert step.trace_count == 2


def test_arguments_that_are_values_are_told_apart_by_value() -> None:
    step = px.function(lambda x, scale, name: x * scale)
    for scale in (2, 2, 3, 2.0, 2):
        assert float(step(jnp.float32(1.0), scale, "".join(["na", "me"]))) == scale
    assert step.trace_count == 3


def test_variables_that_a_step_does_not_use_are_not_kept_and_may_end() -> None:
    strategy = px.MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        used, other = px.train.Mean(), px.train.Mean()
    gone = weakref.ref(other.variables[0])

    @px.function
    def step() -> None:
        strategy.run(lambda: used.update_state(2.0))

    step()
    del other
    gc.collect()
    assert gone() is None
    step()
    assert step.trace_count == 1  # another worker has perhaps not collected its garbage yet
    assert float(used.result()) == 2.0
