"""Variables that are captured by code which JAX stages, and caches, on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import phalanx as px

HELD: list[px.Variable] = []


def scaled(x: Any) -> Any:
    return x * HELD[0].value()


def body(carry: Any, x: Any) -> Any:
    return carry + HELD[0].value() * x, None


jitted = jax.jit(scaled)
rematerialised = jax.checkpoint(scaled)

STAGED: dict[str, tuple[Callable[[Any], Any], float]] = {
    "jit": (jitted, 1.0),
    "scan": (lambda x: jax.lax.scan(body, 0.0 * x, jnp.full(2, 0.5) * x)[0], 1.0),
    "cond": (lambda x: jax.lax.cond(x > 0, scaled, scaled, x), 1.0),
    "while": (lambda x: jax.lax.while_loop(lambda c: c < 0, scaled, scaled(x)), 1.0),
    "checkpoint": (rematerialised, 1.0),
    "gradient of jit": (lambda x: jax.grad(jitted)(x) * x, 1.0),
    "vmap": (lambda x: jax.vmap(scaled)(x * jnp.ones(3)).sum(), 3.0),
}


@pytest.fixture(autouse=True)
def variable() -> Any:
    HELD.append(px.Variable(2.0))
    yield HELD[0]
    HELD.clear()


@pytest.mark.parametrize("name", STAGED)
def test_each_trace_sees_its_own_value(name: str, variable: px.Variable) -> None:
    code, factor = STAGED[name]
    for _ in range(2):
        fn = px.function(lambda x: code(x) + 0.0)
        for value in (2.0, 3.0):
            variable.assign(value)
            assert float(fn(1.5)) == 1.5 * factor * value
        assert fn.trace_count == 1


@pytest.mark.parametrize("name", STAGED)
def test_a_write_between_is_seen(name: str, variable: px.Variable) -> None:
    code, factor = STAGED[name]

    @px.function
    def fn(x: jax.Array) -> Any:
        before = code(x)
        HELD[0].assign_add(8.0)
        return before, code(x)

    assert [float(y) for y in fn(1.5)] == [3.0 * factor, 15.0 * factor]
    assert float(variable.value()) == 10.0


@pytest.mark.parametrize("name", [name for name in STAGED if name != "while"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_flow_to_captured_variables(name: str, compiled: bool, variable: px.Variable) -> None:
    code, factor = STAGED[name]

    def both(x: jax.Array) -> Any:
        plain = px.value_and_grad(lambda: code(x), variable)()
        squared = px.value_and_grad(lambda: code(x) * HELD[0].value(), variable)()
        return plain, squared

    run = px.function(both) if compiled else both
    for value in (2.0, 3.0):
        variable.assign(value)
        (y, dy), (z, dz) = run(jnp.float32(1.5))
        unit = 1.5 * factor
        assert (float(y), float(dy)) == (unit * value, unit)
        assert (float(z), float(dz)) == (unit * value**2, 2 * unit * value)


def test_replicas_capture_their_own_copies() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        HELD[0] = px.Variable(
            1.0,
            synchronization=px.VariableSynchronization.ON_READ,
            aggregation=px.VariableAggregation.SUM,
        )

    def step() -> Any:
        context = px.get_replica_context()
        assert context is not None
        HELD[0].assign(context.replica_id_in_sync_group + 1.0)
        return jax.lax.scan(body, 0.0, jnp.ones(2))[0]

    result = px.function(lambda: strategy.run(step))()
    assert [float(x) for x in strategy.experimental_local_results(result)] == [2.0, 4.0]


def test_a_write_before_a_capture_cannot_be_repeated_eagerly(variable: px.Variable) -> None:
    count = px.Variable(0.0)

    def loss() -> Any:
        count.assign_add(1.0)
        return jitted(jnp.float32(1.0))

    with pytest.raises(RuntimeError, match="read a variable after another one had been written"):
        px.value_and_grad(loss, variable)()
    compiled = px.function(px.value_and_grad(loss, variable))
    count.assign(0.0)
    assert [float(x) for x in compiled()] == [2.0, 1.0]
    assert float(count.value()) == 1.0


def test_steps_that_capture_nothing_are_traced_once(variable: px.Variable) -> None:
    calls = []

    @px.function
    def plain(x: jax.Array) -> Any:
        calls.append(x)
        return jax.jit(lambda x, v: x * v)(x, variable.value())

    assert float(plain(2.0)) == 4.0
    assert len(calls) == 1
