"""What TensorFlow 2.21 was seen to do, where a reader may expect something else."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px

context = px.get_replica_context


@pytest.fixture
def strategy() -> px.Strategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def variable(strategy: px.Strategy) -> px.Variable:
    with strategy.scope():
        return px.Variable(5.0)


def values(strategy: px.Strategy, fn: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda c: fn(c.replica_id_in_sync_group)
    )


class TestValuesFromFunction:
    def test_a_variable_is_itself(self, strategy: px.Strategy, variable: px.Variable) -> None:
        assert values(strategy, lambda _: variable) is variable
        nest = values(strategy, lambda i: {"v": variable, "i": i})
        assert nest["v"] is variable
        assert nest["i"].values == (0, 1)

    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("numbers", [(0, 1), (0.5, 1.5), (True, False), (1, 2.5), (1j, 2.0)])
    def test_numbers_go_into_functions(
        self, strategy: px.Strategy, numbers: tuple[Any, Any], inside: bool
    ) -> None:
        def make() -> Any:
            return values(strategy, lambda i: numbers[i])

        def run(x: Any = None) -> Any:
            x = make() if inside else x
            return strategy.run(lambda x: (x, jnp.bfloat16(2) * x), args=(x,))

        eager = strategy.run(lambda x: jnp.bfloat16(2) * x, args=(make(),))
        given, doubled = px.function(run)(*([] if inside else [make()]))
        assert [x.item() for x in given.values] == list(numbers)
        same_kind = len({type(x) for x in numbers}) == 1
        for mine, wanted in zip(doubled.values, eager.values, strict=True):
            assert complex(mine) == complex(wanted)
            assert mine.dtype == wanted.dtype or not same_kind

    def test_numbers_that_change_need_no_new_program(self, strategy: px.Strategy) -> None:
        add = px.function(lambda x: strategy.run(lambda x: x + 1, args=(x,)))
        for n in range(5):
            result = add(values(strategy, lambda i, n=n: n + i))
            assert [int(x) for x in result.values] == [n + 1, n + 2]
        assert add.trace_count == 1

    @pytest.mark.parametrize("compiled", [False, True])
    def test_on_a_replica(self, strategy: px.Strategy, compiled: bool) -> None:
        def step(x: Any) -> Any:
            mine = values(strategy, lambda i: jnp.float32(10 * i) + x)
            assert isinstance(mine, px.PerReplica)
            return mine + context().replica_id_in_sync_group

        def run() -> Any:
            return strategy.run(step, args=(values(strategy, lambda i: jnp.float32(i + 1)),))

        result = (px.function(run) if compiled else run)()
        assert [float(x) for x in result.values] == [1.0, 13.0]

    def test_what_it_gives_on_a_replica_may_be_returned(self, strategy: px.Strategy) -> None:
        def step() -> Any:
            return values(strategy, lambda i: jnp.float32(i) + 0)

        nested = strategy.run(step)
        assert [[float(x) for x in y.values] for y in nested.values] == [[0.0, 1.0], [0.0, 1.0]]
        own = px.function(lambda: strategy.run(step))()  # in a program each has its own
        assert [float(x) for x in own.values] == [0.0, 1.0]


class TestUpdate:
    def test_it_returns_mirrored_values(self, strategy: px.Strategy, variable: px.Variable) -> None:
        result = strategy.extended.update(variable, lambda v: v.assign_add(1.0))
        assert isinstance(result, px.Mirrored)
        variable.assign(0.0)
        assert [float(x) for x in result.values] == [6.0, 6.0]
        assert strategy.extended.update(variable, lambda v: (v.assign_add(1.0), 3))[1] == 3
        assert strategy.extended.update(variable, lambda v: None) is None
        parts = strategy.extended.update(variable, lambda v: v.assign_add(1.0), group=False)
        assert [float(x) for x in parts] == [2.0, 2.0]

    def test_in_a_program(self, strategy: px.Strategy, variable: px.Variable) -> None:
        @px.function
        def update() -> Any:
            return strategy.extended.update(variable, lambda v: v.assign_add(1.0))

        assert float(update()) == 6.0


class TestReduceTo:
    def test_the_mean_of_a_mirrored_value_is_that_value(
        self, strategy: px.Strategy, variable: px.Variable
    ) -> None:
        ones = strategy.run(lambda: jnp.ones(()) + 0)
        mirrored = strategy.extended.reduce_to("sum", ones, variable)
        for destinations in ("CPU:1", variable):
            assert strategy.extended.reduce_to("mean", mirrored, destinations) is mirrored
            assert strategy.extended.reduce_to("mean", variable, destinations) is variable
        assert float(strategy.reduce("mean", mirrored, axis=None)) == 2.0
        with pytest.raises(AssertionError, match="no sum over"):
            strategy.extended.reduce_to("sum", mirrored, "CPU:0")

    @pytest.mark.parametrize("axis", [None, 0])
    def test_strings_have_no_sum(self, strategy: px.Strategy, axis: Any) -> None:
        words = values(strategy, lambda i: np.array(["a", "b"]))
        for kind in (px.errors.InvalidArgumentError, TypeError, AttributeError):
            with pytest.raises(kind, match="Only arrays and numbers"):
                strategy.reduce("sum", words, axis=axis)
            with pytest.raises(kind, match="Only arrays and numbers"):
                strategy.run(lambda x: context().all_reduce("sum", x), args=(words,))


def test_gradients_are_applied_on_replicas(strategy: px.Strategy, variable: px.Variable) -> None:
    optimizer = px.train.Optimizer(optax.sgd(1.0))
    for kind in (px.errors.ContextError, AttributeError):
        with strategy.scope(), pytest.raises(kind, match=r"given to Strategy\.run"):
            optimizer.apply_gradients([(jnp.float32(1.0), variable)])


def test_matrices_begin_on_a_line_of_their_own(strategy: px.Strategy) -> None:
    value = values(strategy, lambda i: jnp.array([[1.0, 2.0], [3.0, 4.0]]) + i)
    assert str(value) == (
        "PerReplica:{\n"
        "  0: Array(\n[[1. 2.]\n [3. 4.]], shape=(2, 2), dtype=float32),\n"
        "  1: Array(\n[[2. 3.]\n [4. 5.]], shape=(2, 2), dtype=float32)\n"
        "}"
    )
    assert repr(value) == (
        "PerReplica:{\n"
        "  0: <Array: shape=(2, 2), dtype=float32, numpy=\n"
        "array([[1., 2.],\n       [3., 4.]], dtype=float32)>,\n"
        "  1: <Array: shape=(2, 2), dtype=float32, numpy=\n"
        "array([[2., 3.],\n       [4., 5.]], dtype=float32)>\n"
        "}"
    )
    with strategy.scope():
        matrix = px.Variable(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    assert repr(matrix).splitlines()[1:3] == [
        "  0: <px.Variable 'Variable:0' shape=(2, 2) dtype=float32, numpy=",
        "array([[1., 2.],",
    ]
