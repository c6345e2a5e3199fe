"""`px.function`: when it traces, what it lifts, and what it refuses."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx import VariableAggregation as A, VariableSynchronization as S
from phalanx.core import run_hooks


def two() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def ctx() -> px.ReplicaContext:
    context = px.get_replica_context()
    assert context is not None
    return context


def per_replica(strategy: px.Strategy, make: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(make(c.replica_id_in_sync_group))
    )


def test_state_is_read_and_written_by_every_call() -> None:
    v = px.Variable(1.0)

    @px.function
    def double() -> Any:
        v.assign(v * 2)
        return v + 0.0

    assert [float(double()) for _ in range(3)] == [2.0, 4.0, 8.0]
    v.assign(100.0)
    assert float(double()) == 200.0
    assert double.trace_count == 1


def test_writes_are_seen_in_python_order() -> None:
    a, b = px.Variable(1.0), px.Variable(10.0)

    @px.function
    def f() -> Any:
        a.assign(b)
        b.assign_add(a)
        first = a + b
        a.assign(0.0)
        return first, a + b

    first, second = f()
    assert (float(first), float(second)) == (30.0, 20.0)
    assert (float(a), float(b)) == (0.0, 20.0)


def test_when_it_traces_again() -> None:
    traced = []

    @px.function
    def f(x: Any, scale: float = 1.0, *, flag: bool = False) -> Any:
        traced.append(1)
        return x * scale if not flag else -x

    f(jnp.ones(3))
    f(np.ones(3, np.float32))
    assert len(traced) == 1
    f(jnp.ones(4))
    f(jnp.ones(3, jnp.int32))
    f(jnp.ones(3), 2.0)
    f(jnp.ones(3), scale=3.0)
    f(jnp.ones(3), flag=True)
    assert len(traced) == f.trace_count == 6
    f(jnp.zeros(4))
    f(jnp.ones(3), 2.0)
    assert f.trace_count == 6
    with two().scope():
        f(jnp.ones(3))
    assert f.trace_count == 7
    with jax.enable_x64(True):
        f(jnp.ones(3))
    assert f.trace_count == 8


def test_python_values_are_constants_and_results_keep_their_structure() -> None:
    v = px.Variable(1.0)

    @px.function
    def f(x: Any, name: str) -> Any:
        return {"n": name, "x": (x + 1, None, 3), "v": v}

    result = f(jnp.float32(1.0), "hello")
    assert result["n"] == "hello"
    assert float(result["x"][0]) == 2.0
    assert result["x"][1:] == (None, 3)
    assert result["v"] is v


def test_arrays_that_were_handed_out_stay_valid() -> None:
    s = two()
    with s.scope():
        v = px.Variable(jnp.zeros(1000))
    plain = px.Variable(jnp.zeros(1000))
    source = jnp.ones(1000)
    captured = px.Variable(source)

    @px.function
    def step() -> None:
        for x in (v, plain, captured):
            x.assign_add(jnp.ones(1000))

    kept: list[tuple[Any, float]] = [(source, 1.0)]
    for i in range(4):
        kept += [(v.read_value(), float(i)), (plain.value(), float(i)), (v.values[1].value(), float(i))]
        step()
        step_result = v.assign_add(jnp.zeros(1000))
        kept.append((step_result, i + 1.0))
    for x, expected in kept:
        np.testing.assert_array_equal(np.asarray(x), expected)


def test_errors_while_tracing_change_nothing() -> None:
    s = two()
    with s.scope():
        v = px.Variable(1.0, aggregation=A.SUM)

    @px.function
    def f(fail: bool) -> None:
        def step() -> None:
            v.assign_add(jnp.float32(1.0))
            if fail:
                raise KeyError("boom")

        s.run(step)

    with pytest.raises(KeyError, match="boom"):
        f(True)
    assert [float(c) for c in v.values] == [1.0, 1.0]
    assert not px.has_strategy()
    f(False)
    assert float(v) == 3.0


def test_branching_on_traced_values_names_the_line_and_two_ways_out() -> None:
    s = two()

    @px.function
    def f() -> Any:
        def step() -> int:
            if ctx().replica_id_in_sync_group == 0:  # not known yet
                return 1
            return 2

        return s.run(step)

    with pytest.raises(px.errors.StagedValueError, match=r"jnp\.where or jax\.lax\.cond") as caught:
        f()
    assert "test_function.py" in str(caught.value)
    assert "in step" in str(caught.value)
    assert "eagerly" in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_methods_have_programs_and_variables_of_their_own() -> None:
    class Counter:
        def __init__(self) -> None:
            self.n: px.Variable | None = None

        @px.function
        def bump(self, by: Any) -> Any:
            if self.n is None:
                self.n = px.Variable(lambda: jnp.zeros(()))
            return self.n.assign_add(by) + 0.0

    a, b = Counter(), Counter()
    assert [float(a.bump(jnp.float32(2.0))) for _ in range(3)] == [2.0, 4.0, 6.0]
    assert float(b.bump(jnp.float32(5.0))) == 5.0
    assert float(a.n) == 6.0  # type: ignore[arg-type]


def test_variables_are_made_once_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="every call"):
        px.function(lambda: px.Variable(1.0) + 0.0)()
    kept: list[px.Variable] = []

    @px.function
    def later(make: bool) -> Any:
        if make:
            kept.append(px.Variable(1.0))
        return jnp.ones(())

    later(False)
    with pytest.raises(ValueError, match="first call"):
        later(True)
    with pytest.raises(ValueError, match="lambda"):
        px.function(lambda: px.Variable(jnp.zeros(3)) + 0.0)()


def test_nested_functions_become_part_of_the_program() -> None:
    v = px.Variable(0.0)

    @px.function
    def inner(x: Any) -> Any:
        return v.assign_add(x) + 0.0

    @px.function
    def outer(x: Any) -> Any:
        return inner(x) + inner(x)

    assert float(outer(jnp.float32(1.0))) == 3.0
    assert float(v) == 2.0
    assert inner.trace_count == 0


def test_a_compiled_step_given_to_run() -> None:
    s = two()
    with s.scope():
        v = px.Variable(0.0, aggregation=A.SUM)

    @px.function
    def step(x: Any) -> Any:
        v.assign_add(x)
        return ctx().all_reduce("sum", x)

    x = per_replica(s, lambda i: i + 1.0)
    for _ in range(3):
        result = s.run(step, args=(x,))
    assert [float(r) for r in result.values] == [3.0, 3.0]
    assert float(v) == 9.0
    assert step.trace_count == 1


def test_collectives_inside_control_flow() -> None:
    s = two()

    @px.function
    def f(x: Any) -> Any:
        def step(x: jax.Array) -> Any:
            chosen = jax.lax.cond(
                jnp.sum(ctx().all_reduce("sum", x)) > 0,
                lambda y: ctx().all_reduce("sum", y),
                lambda y: y,
                x,
            )
            looped = jax.lax.scan(lambda c, _: (ctx().all_reduce("mean", c) + 1, None), x, length=3)
            jitted = jax.jit(lambda y: ctx().all_gather(y, axis=0))(x)
            return chosen, looped[0], jitted

        return s.run(step, args=(x,))

    chosen, looped, jitted = f(per_replica(s, lambda i: [i + 1.0]))
    assert [c.tolist() for c in chosen.values] == [[3.0], [3.0]]
    assert [c.tolist() for c in looped.values] == [[4.5], [4.5]]
    assert [c.tolist() for c in jitted.values] == [[1.0, 2.0]] * 2


def test_variables_cannot_be_written_inside_control_flow() -> None:
    v = px.Variable(0.0)

    @px.function
    def f() -> Any:
        return jax.lax.scan(lambda c, _: (v.assign_add(c) + 0.0, None), jnp.float32(1.0), length=2)

    with pytest.raises(RuntimeError, match="assign it outside"):
        f()
    assert float(v) == 0.0


def test_plain_jit_takes_pure_steps_of_distributed_pytrees() -> None:
    s = two()
    x = per_replica(s, lambda i: [1.0 + i, 2.0])
    with s.scope():
        w = px.Variable([1.0, 1.0])
        state = {"w": w.assign([2.0, 3.0])}

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        def replica(state: Any, x: Any) -> Any:
            g = ctx().all_reduce("sum", x)
            return {"w": state["w"] - 0.1 * g}, jnp.sum(x)

        return s.run(replica, args=(state, x))

    new, loss = step(state, x)
    assert [round(float(v), 5) for v in new["w"].values[0]] == [1.7, 2.6]
    assert float(s.reduce("sum", loss, axis=None)) == 7.0
    with pytest.raises(RuntimeError, match=r"px\.function"):
        jax.jit(lambda: s.run(lambda: w + 1.0))()
    with pytest.raises(RuntimeError, match=r"px\.function"):
        jax.jit(lambda y: s.run(w.assign_add, args=(y,)))(jnp.ones(2))


def test_unproven_writes_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    run_hooks.say_once.cache_clear()
    s = two()
    with s.scope():
        v = px.Variable(0.0)

    @px.function
    def agree(x: Any) -> None:
        s.run(lambda x: v.assign(jnp.max(x)), args=(x,))

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        agree(per_replica(s, lambda i: [5.0, float(i)]))
        assert float(v) == 5.0
        with pytest.raises(px.errors.DivergenceError):
            agree(per_replica(s, lambda i: [5.0 + i, 0.0]))
    assert float(v) == 5.0
    assert "Variable:0" in caplog.text


def test_what_replicas_agree_on_is_proven(caplog: pytest.LogCaptureFixture) -> None:
    s = two()
    with s.scope():
        v, w = px.Variable(jnp.zeros(3)), px.Variable(jnp.ones(3))
        n = px.Variable(0)

    @px.function
    def step(x: Any, lr: Any) -> None:
        def replica(x: jax.Array) -> None:
            g = jax.grad(lambda p: jnp.sum(jax.nn.relu(p * x)) ** 2)(w.value())
            g = ctx().all_reduce("mean", g)
            clipped = jax.jit(lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g)))(g)
            looped = jax.lax.fori_loop(0, 3, lambda i, c: c * 0.9, clipped)
            v.assign(0.9 * v + looped)
            w.assign_sub(lr * v)
            n.assign_add(1)

        s.run(replica, args=(x,))

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        for i in range(2):
            step(per_replica(s, lambda r, i=i: jnp.arange(3.0) + r + i), jnp.float32(0.1))
    assert caplog.messages == []
    assert int(n) == 2
    assert step.trace_count == 1


def test_looking_inside() -> None:
    s = two()
    with s.scope():
        v = px.Variable(jnp.zeros(64), aggregation=A.SUM)

    @px.function
    def step(x: Any) -> None:
        s.run(v.assign_add, args=(x,))

    x = per_replica(s, lambda i: np.ones(64, np.float32))
    lowered = step.lower(x)
    assert lowered.as_text().count("stablehlo.all_reduce") == 1
    assert step.cost(x)["flops"] > 0
    assert float(v[0]) == 0.0  # nothing ran
    assert step.__name__ == "step"


def test_input_signatures() -> None:
    @px.function(input_signature=[px.TensorSpec((None, 2), jnp.float32)])
    def f(x: Any) -> Any:
        return x.sum()

    assert float(f(jnp.ones((3, 2)))) == 6.0
    for bad in (jnp.ones((3, 3)), jnp.ones(2), jnp.ones((3, 2), jnp.int32), "text"):
        with pytest.raises(TypeError, match="input_signature"):
            f(bad)
    with pytest.raises(TypeError):
        f()
    with pytest.raises(TypeError, match="callable"):
        px.function(3)


def test_one_device_programs_run_there() -> None:
    s = px.OneDeviceStrategy("CPU:3")
    with s.scope():
        v = px.Variable(jnp.ones(2))

    @px.function
    def f(x: Any) -> Any:
        return s.run(lambda x: v.assign_add(x) * 2, args=(x,))

    assert next(iter(f(jnp.ones(2)).devices())).id == 3
    assert next(iter(v.value().devices())).id == 3


def test_random_keys() -> None:
    for strategy in (two(), px.MirroredStrategy([f"CPU:{i}" for i in range(4)])):

        def draw() -> Any:
            return jax.random.normal(px.random.replica_key(7), (2,))

        eager, compiled = strategy.run(draw), px.function(lambda s=strategy: s.run(draw))()
        for a, b in zip(eager.values, compiled.values, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        assert len({float(x[0]) for x in eager.values}) == strategy.num_replicas_in_sync
        np.testing.assert_allclose(eager.values[0], draw(), rtol=1e-6)
    with two().scope(), pytest.raises(RuntimeError):
        px.random.replica_key(0)
    with pytest.raises(TypeError, match="seed"):
        px.random.replica_key("seed")


def test_variables_of_keys() -> None:
    s = two()
    with s.scope():
        key = px.Variable(jax.random.key(0), aggregation=A.ONLY_FIRST_REPLICA)
    assert "key" in repr(key)
    value = per_replica(s, jax.random.key)
    assert "key" in repr(value)
    result = s.run(lambda: jax.random.normal(key.value()))
    assert float(result.values[0]) == float(result.values[1])


@pytest.mark.parametrize("wrap", [px.function, jax.jit])
def test_captured_scalars_become_arguments_of_a_run(wrap: Any) -> None:
    s = px.MirroredStrategy(["CPU:0", "CPU:1"])
    numbers = s.experimental_distribute_values_from_function(
        lambda c: np.float32(c.replica_id_in_sync_group + 1)
    )
    result = wrap(lambda: s.run(lambda x: 2 * x, args=(numbers,)))()
    assert [float(x) for x in s.experimental_local_results(result)] == [2.0, 4.0]
    assert [float(x) for x in numbers.values] == [1.0, 2.0], "no tracer stays"


def test_captured_distributed_values_are_each_replicas_own() -> None:
    s = two()
    value = per_replica(s, lambda i: 10.0 * i)
    rows = per_replica(s, lambda i: [1.0 * i, 2.0])
    with s.scope():
        v = px.Variable(0.0)
    for wrap in (px.function, jax.jit):
        for captured in (value, rows):
            result = wrap(lambda c=captured: s.run(lambda: (c + 1.0, jnp.multiply(c, 2.0))))()
            for i in range(2):
                own = np.asarray(captured.values[i])
                np.testing.assert_array_equal(result[0].values[i], own + 1.0)
                np.testing.assert_array_equal(result[1].values[i], own * 2.0)
    with pytest.raises(px.errors.DivergenceError):
        px.function(lambda: s.run(lambda: v.assign(value + 1.0)))()


def test_a_compiled_function_inside_an_eager_step_means_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_hooks.say_once.cache_clear()
    s = two()
    with s.scope():
        local = px.Variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM)

    @px.function
    def inner() -> Any:
        local.assign_add(ctx().replica_id_in_sync_group + 1.0)
        return ctx().all_reduce("sum", ctx().replica_id_in_sync_group + 1.0), px.random.replica_key(0)

    def outer() -> Any:  # not compiled itself
        return inner()

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        total, keys = s.run(outer)
    assert [float(x) for x in total.values] == [3.0, 3.0]
    assert [float(c) for c in local.values] == [1.0, 2.0]
    assert not np.array_equal(*(jax.random.key_data(k) for k in keys.values))
    assert "around strategy.run" in caplog.text


def test_unhashable_arguments_are_told_apart() -> None:
    class Config:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, scale: float) -> None:
            self.scale = scale

    f = px.function(lambda config, x: x * config.scale)
    assert [float(f(Config(float(i)), jnp.float32(1.0))) for i in range(6)] == [0, 1, 2, 3, 4, 5]


def test_collectives_under_conditions_that_differ_are_refused() -> None:
    s = two()

    def branch(x: Any) -> Any:
        return jax.lax.cond(x[0] > 1, lambda y: ctx().all_reduce("sum", y), lambda y: y, x)

    def loop(x: Any) -> Any:
        return jax.lax.while_loop(lambda y: y[0] < 3, lambda y: ctx().all_reduce("mean", y) + 1, x)

    for step in (branch, loop):
        with pytest.raises(ValueError, match="wait for others"):
            px.function(lambda x, step=step: s.run(step, args=(x,)))(
                per_replica(s, lambda i: [i + 1.0])
            )


def test_instances_are_freed() -> None:
    import gc
    import weakref

    class Model:
        @px.function
        def call(self, x: Any) -> Any:
            return x + 1

    model = Model()
    model.call(jnp.ones(2))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert "Model.call" in repr(Model.call) or "call" in repr(Model.call)


def test_numpy_values_are_put_on_devices() -> None:
    s = two()
    value = s.experimental_distribute_values_from_function(
        lambda c: np.full(3, c.replica_id_in_sync_group, np.float32)
    )
    f = px.function(lambda x: s.run(lambda x: x * 2, args=(x,)))
    assert [x.tolist() for x in f(value).values] == [[0.0] * 3, [2.0] * 3]
    assert f.trace_count == 1


def test_printing_variables_while_tracing() -> None:
    v = px.Variable(1.0, name="v")
    shown = []
    px.function(lambda: shown.append(repr(v)))()
    assert shown == ["<px.Variable 'v:0' shape=() dtype=float32, numpy=<traced>>"]


def test_arrays_that_are_divided_over_devices_stay_divided() -> None:
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    result = px.function(lambda x: x * 2)(jax.device_put(jnp.arange(8.0), divided))
    assert result.sharding == divided
    np.testing.assert_array_equal(result + 1, np.arange(8.0) * 2 + 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_variables_have_arrays_of_their_own(replicas: int) -> None:
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        v = px.Variable(jnp.ones(3))
    double = px.function(lambda: strategy.run(lambda: v.assign(v.value() * 2)))
    double()
    clone = copy.deepcopy(v)
    double()
    np.testing.assert_array_equal(clone.numpy(), [2.0, 2.0, 2.0])
    np.testing.assert_array_equal(v.numpy(), [4.0, 4.0, 4.0])


def test_arrays_that_were_read_are_not_kept() -> None:
    v = px.Variable(jnp.zeros(1000))
    step = px.function(lambda: (v.assign_add(jnp.ones(1000)), None)[1])

    def kept() -> int:
        gc.collect()
        return sum(x.shape == (1000,) for x in jax.live_arrays())

    step()
    step()
    before = kept()
    v.numpy()
    for _ in range(3):
        step()
    assert kept() <= before


def test_a_function_without_results_runs_if_it_does_something() -> None:
    called: list[int] = []

    @px.function
    def tell(x: Any) -> int:
        jax.debug.callback(lambda x: called.append(int(x)), x)
        return 3

    nothing = px.function(lambda: 3)
    for i in range(4):
        assert tell(jnp.int32(i)) == nothing() == 3
        jax.effects_barrier()
    assert called == [0, 1, 2, 3]
