"""Python numbers that change, and functions that are traced again and again."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px


class State(NamedTuple):
    """As flax has it: a number of Python to begin with."""

    step: Any
    weights: jax.Array


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_plain_numbers_are_constants() -> None:
    """Python computes with them without limits."""
    f = px.function(lambda n, x: x * (n * 60000 * 1024 / 1e9))
    results = [float(f(n, jnp.float32(1))) for n in (30, 40, 50)]
    np.testing.assert_allclose(results, [n * 60000 * 1024 / 1e9 for n in (30, 40, 50)])
    assert f.trace_count == 3
    same = px.function(lambda x, n: (n, x * (2.0 if isinstance(n, int) else 3.0)))
    assert [same(jnp.float32(1), n)[0] for n in (1, 2, 3)] == [1, 2, 3]
    assert float(same(jnp.float32(1), 3)[1]) == 2.0


def test_a_number_of_a_state_becomes_an_input_when_it_changes() -> None:
    f = px.function(lambda state: state.weights * state.step)
    results = [float(f(State(n, jnp.float32(2.0)))) for n in range(20)]
    assert results == [2.0 * n for n in range(20)]
    assert f.trace_count == 2


def test_a_state_that_counts_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])

    @px.function
    def train(state: State, x: Any) -> State:
        def step(state: State, x: jax.Array) -> State:
            gradient = px.get_replica_context().all_reduce("mean", x)
            return State(state.step + 1, state.weights - gradient * 0.1)

        return jax.tree.map(
            lambda x: strategy.experimental_local_results(x)[0],
            strategy.run(step, args=(state, x)),
            is_leaf=lambda x: isinstance(x, px.DistributedValues),
        )

    state = State(0, jnp.ones(3))
    for _ in range(10):
        state = train(state, jnp.ones(3))
    assert int(state.step) == 10
    np.testing.assert_allclose(state.weights, 0.0, atol=1e-6)
    assert train.trace_count == 2
    assert warnings_of(caplog) == []


def test_weak_types_are_those_of_python_numbers() -> None:
    f = px.function(lambda state: state.weights * state.step)
    for n in (1.5, 2.5):
        assert f(State(n, jnp.ones(2, jnp.bfloat16))).dtype == jnp.bfloat16
    for n in (1, 2):
        assert f(State(n, jnp.ones(2, jnp.int8))).dtype == jnp.int8
    assert f.trace_count == 4


def test_numbers_that_the_function_must_know_stay_constants(caplog: pytest.LogCaptureFixture) -> None:
    @px.function
    def repeat(state: State) -> jax.Array:
        x = state.weights
        for _ in range(state.step):
            x = x * 2.0
        return x

    for times in range(1, 5):
        assert float(repeat(State(times, jnp.float32(1.0)))) == 2.0**times
    assert warnings_of(caplog) == []
    for times in range(5, 10):
        assert float(repeat(State(times, jnp.float32(1.0)))) == 2.0**times
    (said,) = warnings_of(caplog)
    assert "repeat was traced 5 times" in said
    assert "state.step changed from 4 to 5" in said


def test_truths_and_large_numbers_stay_constants() -> None:
    f = px.function(lambda x, n: (x, n))
    for n in (True, False, 2**40, 2**41, "a", "b"):
        assert f(jnp.float32(1.0), n)[1] == n
    assert f.trace_count == 6


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        (lambda i: {"x": {"a": jnp.ones(i + 1)}}, "x['a'] changed from an array of float32[4] to"),
        (lambda i: {"x": [0.0] * (i + 1)}, "The structure of its arguments changed"),
        (lambda i: {"x": object()}, "x became an object of builtins.object that is not the same"),
        (lambda i: {"x": "abcdefgh"[i]}, "x changed from 'd' to 'e'"),
        (lambda i: {"x": np.zeros(2, f"i{2 ** (i % 3)}") if i < 3 else np.zeros(i)}, "float"),
    ],
    ids=["shape", "structure", "object", "text", "dtype"],
)
def test_it_says_what_changed(arguments: Any, change: str, caplog: pytest.LogCaptureFixture) -> None:
    @px.function
    def changing(x: Any) -> None:
        pass

    kept = [arguments(i) for i in range(8)]
    for each in kept:
        changing(**each)
    (said,) = warnings_of(caplog)
    assert "changing was traced 5 times in its last 5 calls" in said
    assert change in said


def test_a_few_shapes_are_nothing_to_talk_about(caplog: pytest.LogCaptureFixture) -> None:
    f = px.function(lambda x: x + 1)
    for size in (1, 2, 3, 4, 5):
        for _ in range(8):
            f(jnp.ones(size))
    assert f.trace_count == 5
    assert warnings_of(caplog) == []


def test_a_signature_makes_arrays_of_numbers() -> None:
    @px.function(input_signature=[px.TensorSpec((), jnp.float32), px.TensorSpec((), jnp.int32)])
    def f(x: Any, n: Any) -> Any:
        return x * n

    results = [f(1.5, n) for n in range(5)]
    assert [float(x) for x in results] == [1.5 * n for n in range(5)]
    assert {x.dtype for x in results} == {jnp.dtype("float32")}
    assert float(f(n=2, x=3)) == 6.0
    assert f.trace_count == 1
    for x, n in ((1.0, 1.5), (True, 1), (1.0, "2"), (1.0, jnp.ones(2, jnp.int32)), ([1.0], 1)):
        with pytest.raises(TypeError, match="input_signature"):
            f(x, n)
