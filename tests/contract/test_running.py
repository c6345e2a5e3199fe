"""What `Strategy.run` promises."""

from __future__ import annotations

import collections
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import phalanx as px
from tests.contract.conftest import World


def rid() -> Any:
    context = px.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def test_every_replica_runs_once_with_its_own_id(world: World) -> None:
    ids = world.local(world.run(lambda: jnp.asarray(rid()) * 10))
    assert [int(x) for x in ids] == [10 * i for i in range(world.n)]


def test_the_replica_context_is_there_and_gone_again(world: World) -> None:
    def step() -> list[bool]:
        context = px.get_replica_context()
        assert context is not None
        return [
            context.strategy is world.strategy,
            px.get_strategy() is world.strategy,
            px.in_cross_replica_context(),
            context.num_replicas_in_sync == world.n,
        ]

    assert world.run(step) == [True, True, False, True]
    assert not px.has_strategy()


def test_arguments_arrive_as_components_at_any_depth(world: World) -> None:
    value = world.values(lambda i: [float(i), 1.0])

    def step(nest: dict[str, Any], plain: str) -> Any:
        assert plain == "text"
        return nest["a"][0].sum()

    results = world.local(world.run(step, {"a": [value]}, "text"))
    assert [float(x) for x in results] == [i + 1.0 for i in range(world.n)]


def test_results_keep_their_structure(world: World) -> None:
    Point = collections.namedtuple("Point", "x y")

    def step() -> Any:
        return {"p": Point(jnp.asarray(rid()) + 1, 7), "l": [None, "s"], "t": (jnp.float32(2.0),)}

    result = world.run(step)
    assert isinstance(result["p"], Point)
    assert result["p"].y == 7
    assert result["l"] == [None, "s"]
    assert [int(x) for x in world.local(result["p"].x)] == [i + 1 for i in range(world.n)]
    assert [float(x) for x in world.local(result["t"][0])] == [2.0] * world.n


def test_computation_happens_on_the_replicas_device(world: World) -> None:
    if world.strategy is px.get_strategy():
        expected = [jax.local_devices()[0]]
    else:
        names = world.strategy.extended.worker_devices
        expected = [jax.local_devices()[int(name.rsplit(":")[-1])] for name in names[: world.n]]
    results = world.strategy.experimental_local_results(world.run(lambda: jnp.ones(3) * 2))
    assert [next(iter(x.devices())) for x in results] == expected


def test_results_of_replicas_can_be_combined_by_hand(world: World) -> None:
    parts = world.local(world.run(lambda: jnp.asarray(rid()) + 1.0))
    assert float(sum(parts)) == sum(i + 1.0 for i in range(world.n))


def test_an_array_from_anywhere_can_be_used_on_every_replica(world: World) -> None:
    total = world.strategy.reduce("sum", world.values(lambda i: [1.0]), axis=0)
    committed = jax.device_put(jnp.float32(2.0), jax.local_devices()[0])
    results = world.local(world.run(lambda c: total * 3.0 + c, committed))
    assert [float(x) for x in results] == [3.0 * world.n + 2.0] * world.n


def test_an_exception_of_any_replica_reaches_the_caller(eager: World) -> None:
    for guilty in range(eager.n):

        def step(guilty: int = guilty) -> None:
            if int(rid()) == guilty:
                raise KeyError("boom")

        with pytest.raises(KeyError, match="boom") as caught:
            eager.run(step)
        if eager.strategy is not px.get_strategy():
            assert any(f"replica {guilty} " in note for note in caught.value.__notes__)
        assert not px.has_strategy()


def test_merge_call_runs_once_for_all_and_answers_each(world: World) -> None:
    calls = []

    def merge(strategy: px.Strategy, x: Any) -> Any:
        calls.append((px.in_cross_replica_context(), strategy is world.strategy))
        return sum(strategy.experimental_local_results(x))

    def step() -> Any:
        context = px.get_replica_context()
        assert context is not None
        return context.merge_call(merge, args=(jnp.asarray(rid()) + 1.0,)) + jnp.asarray(rid())

    results = [float(x) for x in world.local(world.run(step))]
    total = sum(i + 1.0 for i in range(world.n))
    assert results == [total + i for i in range(world.n)]
    assert calls == [(True, True)]


def test_replicas_take_turns_in_order(eager: World) -> None:
    log: list[str] = []

    def step() -> None:
        i = int(rid())
        context = px.get_replica_context()
        assert context is not None
        log.append(f"a{i}")
        context.merge_call(lambda strategy: log.append("m"))
        log.append(f"b{i}")
        context.merge_call(lambda strategy: log.append("n"))
        log.append(f"c{i}")

    eager.run(step)
    every = range(eager.n)
    expected = [
        *(f"a{i}" for i in every),
        "m",
        *(f"b{i}" for i in every),
        "n",
        *(f"c{i}" for i in every),
    ]
    assert log == expected


def test_no_thread_is_left_behind(eager: World) -> None:
    before = set(threading.enumerate())

    def step(fail: bool) -> None:
        context = px.get_replica_context()
        assert context is not None
        context.merge_call(lambda strategy: None)
        if fail and int(rid()) == eager.n - 1:
            raise ValueError("late failure")
        context.merge_call(lambda strategy: None)

    eager.run(step, False)
    with pytest.raises(ValueError, match="late failure"):
        eager.run(step, True)
    assert set(threading.enumerate()) == before


def test_a_run_inside_a_merge_function(world: World) -> None:
    def merge(strategy: px.Strategy, x: Any) -> Any:
        return strategy.run(lambda y: y * 2.0, args=(x,))

    def step() -> Any:
        context = px.get_replica_context()
        assert context is not None
        return context.merge_call(merge, args=(jnp.asarray(rid()) + 1.0,))

    results = [float(x) for x in world.local(world.run(step))]
    assert results == [2.0 * (i + 1) for i in range(world.n)]


def test_calls_that_need_all_replicas_are_refused_on_a_replica(named: World) -> None:
    strategy = named.strategy
    for call in (
        lambda: strategy.run(lambda: 1),
        lambda: strategy.reduce("sum", 1.0, axis=None),
        lambda: strategy.gather(jnp.ones(1), axis=0),
        lambda: strategy.scope().__enter__(),
        lambda: strategy.extended.call_for_each_replica(lambda: 1),
        lambda: strategy.extended.reduce_to("sum", 1.0, "CPU:0"),
    ):
        with pytest.raises(px.errors.ContextError):
            named.run(call)
    assert not px.has_strategy()


def test_thread_local_settings_reach_every_replica(world: World) -> None:
    def step() -> Any:
        context = px.get_replica_context()
        assert context is not None
        context.merge_call(lambda strategy: None)
        return jnp.zeros(1).dtype.name

    with jax.enable_x64(True):
        names = world.local(world.run(step))
    assert set(names) == {"float64"}


def test_the_gradient_of_a_run(world: World) -> None:
    x = world.values(lambda i: float(i + 1))

    def loss(w: jax.Array) -> jax.Array:
        def step(x: jax.Array) -> jax.Array:
            context = px.get_replica_context()
            assert context is not None
            return w * x + context.all_reduce("sum", w)

        return world.strategy.reduce("sum", world.run(step, x), axis=None)

    expected = sum(i + 1.0 for i in range(world.n)) + world.n**2
    assert float(jax.grad(loss)(jnp.float32(5.0))) == expected
