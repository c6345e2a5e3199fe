"""Scopes and contexts: nesting, threads, and every refusal."""

from __future__ import annotations

import copy
import threading
from typing import Any

import jax.numpy as jnp
import pytest

import phalanx as px


def two() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def test_a_scope_can_be_entered_again() -> None:
    s = two()
    scope = s.scope()
    with scope as entered, scope, s.scope():
        assert entered is s
        assert px.get_strategy() is s
    assert not px.has_strategy()


def test_other_scopes_do_not_nest_and_the_outer_one_survives() -> None:
    a, b = two(), two()
    with a.scope():
        with pytest.raises(RuntimeError, match="different strategies"), b.scope():
            pass
        with pytest.raises(RuntimeError, match="must not be nested"), px.DefaultStrategy().scope():
            pass
        assert px.get_strategy() is a
        for call in (
            lambda: b.run(lambda: 1),
            lambda: b.reduce("sum", 1.0, axis=None),
            lambda: b.gather(jnp.ones(1), axis=0),
            lambda: b.extended.broadcast_to(jnp.ones(1), "CPU:0"),
        ):
            with pytest.raises(px.errors.StrategyMismatchError):
                call()
    assert not px.has_strategy()


def test_scopes_are_left_in_reverse_order() -> None:
    s = two()
    outer, inner = s.scope(), s.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="reverse order"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert not px.has_strategy()


def test_threads_start_outside() -> None:
    seen: list[bool] = []
    with two().scope():
        thread = threading.Thread(target=lambda: seen.append(px.has_strategy()))
        thread.start()
        thread.join(timeout=10)
    assert seen == [False]


def test_setting_a_strategy() -> None:
    a, b = two(), two()
    px.experimental_set_strategy(a)
    assert px.get_strategy() is a
    assert px.in_cross_replica_context()
    px.experimental_set_strategy(b)
    assert px.get_strategy() is b
    with b.scope(), pytest.raises(RuntimeError, match="inside"):
        px.experimental_set_strategy(a)
    assert px.get_strategy() is b
    px.experimental_set_strategy(None)
    assert not px.has_strategy()
    with pytest.raises(TypeError, match="Received"):
        px.experimental_set_strategy("mirrored")  # type: ignore[arg-type]


def test_kept_replica_contexts_are_refused() -> None:
    s = two()
    kept = s.run(px.get_replica_context).values[0]
    for call in (lambda: kept.merge_call(lambda s: 1), lambda: kept.all_reduce("sum", 1.0)):
        with pytest.raises(RuntimeError):
            call()
        with s.scope(), pytest.raises(RuntimeError, match=r"Strategy\.run"):
            call()
        with pytest.raises(RuntimeError):
            s.run(call)


def test_the_default_context() -> None:
    context = px.get_replica_context()
    assert context is not None
    assert context.replica_id_in_sync_group == 0
    assert type(context.replica_id_in_sync_group) is int
    assert context.merge_call(lambda s, x: x + 1, args=(1,)) == 2
    inside = px.get_strategy().run(px.get_replica_context)
    assert inside.replica_id_in_sync_group.dtype == jnp.int32
    with pytest.raises(RuntimeError):
        _ = px.get_strategy().extended.worker_devices


def test_replica_ids_are_checked() -> None:
    for good in (0, None, jnp.int32(1)):
        px.ReplicaContext(two(), good)
    for bad in ("0", 1.5, True, jnp.ones(2), object()):
        with pytest.raises(ValueError, match="Received"):
            px.ReplicaContext(two(), bad)


def test_devices_of_a_replica() -> None:
    result = two().run(lambda: px.get_replica_context().devices)  # type: ignore[union-attr]
    assert [d[0] for d in two().experimental_local_results(result)] == ["CPU:0", "CPU:1"]


def test_strategies_are_copied_deeply_only() -> None:
    s = px.OneDeviceStrategy("CPU:0")
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.copy(s)
    c = copy.deepcopy(s)
    assert type(c) is px.OneDeviceStrategy
    assert c.extended._container_strategy() is c
    assert s.extended._container_strategy() is s


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"fn": 3}, TypeError),
        ({"fn": lambda x: x, "args": 3}, ValueError),
        ({"fn": lambda x: x, "args": jnp.ones(2)}, ValueError),
        ({"fn": lambda: 1, "kwargs": [1]}, ValueError),
        ({"fn": lambda: 1, "options": {"a": 1}}, TypeError),
    ],
)
def test_bad_runs(kwargs: dict[str, Any], error: type[Exception]) -> None:
    for strategy in (two(), px.OneDeviceStrategy("CPU:0"), px.get_strategy()):
        with pytest.raises(error, match="Received"):
            strategy.run(**kwargs)


def test_old_spellings() -> None:
    s = two()
    assert s.experimental_run_v2(lambda x: x, args=(1,)) == 1
    assert s.experimental_run(lambda: 5) == 5
    assert s.experimental_run(lambda x: x, iter([7])) == 7
    assert s.unwrap(3) == (3,)
    assert s.cluster_resolver is None
    s.configure(task_type="worker")
    assert s.update_config_proto("proto") == "proto"
    s.group(s.run(lambda: jnp.ones(2)))
    steps = s.extended.experimental_run_steps_on_iterator(lambda c, x: x * 2, iter([1, 2]), 2)
    assert steps.last_step_outputs == 4


def test_colocation() -> None:
    s, other = two(), two()
    with s.scope():
        v = px.Variable(1.0)
        with s.extended.colocate_vars_with(v):
            w = px.Variable(2.0)
        assert [c.device for c in w.values] == [c.device for c in v.values]
    with pytest.raises(RuntimeError, match="scope"):
        s.extended.colocate_vars_with(v)
    with other.scope(), pytest.raises(ValueError, match="same strategy"):
        other.extended.colocate_vars_with(v)
