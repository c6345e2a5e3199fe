"""Uneven batches in compiled functions: one program, and the results of one device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx import VariableAggregation as A, VariableSynchronization as S
from phalanx.collectives import pair_exchange
from phalanx.core import run_hooks
from phalanx.core.padding import Padded
from phalanx.execution import function as function_module, uneven as uneven_module
from phalanx.runtime.placement import replica_mesh, stacked_over

REPLICAS = 4
STRATEGIES: dict[str, Callable[[], px.Strategy]] = {
    "mirrored": lambda: px.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)]),
    "central": lambda: px.CentralStorageStrategy([f"CPU:{i}" for i in range(REPLICAS)], "CPU:0"),
}


def mirrored() -> px.Strategy:
    return STRATEGIES["mirrored"]()


def ctx() -> px.ReplicaContext:
    context = px.get_replica_context()
    assert context is not None
    return context


def parts_of(strategy: px.Strategy, whole: Any, sizes: Sequence[int]) -> Any:
    """An array in parts of these sizes, one for each replica."""
    parts = np.split(np.asarray(whole), np.cumsum(sizes)[:-1])
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(parts[c.replica_id_in_sync_group])
    )


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What Phalanx says about functions that run eagerly."""
    run_hooks.say_once.cache_clear()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("phalanx")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


@pytest.fixture
def reasons() -> Iterator[list[str]]:
    with warnings() as said:
        yield said


# -- training ------------------------------------------------------------------------------------

SPLITS = [[16, 16, 16, 16], [16, 15, 15, 15], [1, 0, 0, 0]]


def train(strategy: px.Strategy, normalizes: bool) -> tuple[list[float], list[Any]]:
    """Adam on batches of different sizes; the losses, and all copies of the parameters."""
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        w = px.Variable(jnp.asarray(rows(3)), name="w")
        scale = px.Variable(jnp.ones(3), name="scale")
        moving = px.Variable(jnp.zeros(3), aggregation=A.MEAN)
        optimizer = px.train.Optimizer(optax.adam(0.05))
        seen = px.train.Mean()

    def forward(x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ w.value())
        if normalizes:  # over all examples of all replicas
            n = ctx().all_reduce("sum", jnp.float32(x.shape[0]))
            mean = ctx().all_reduce("sum", hidden.sum(0)) / n
            variance = ctx().all_reduce("sum", ((hidden - mean) ** 2).sum(0)) / n
            hidden = (hidden - mean) / jnp.sqrt(variance + 1e-3) * scale.value()
        return hidden

    def step(x: jax.Array, total: int) -> jax.Array:
        def loss() -> jax.Array:
            per_example = ((forward(x) - x) ** 2).sum(-1)
            return px.nn.compute_average_loss(per_example, global_batch_size=total)

        value = optimizer.minimize(loss, [w, scale])
        moving.assign(0.9 * moving.value() + ctx().all_reduce("sum", x.sum(0)) / total)
        seen.update_state(x)
        return value

    @px.function
    def run(x: Any, total: int) -> Any:
        return strategy.reduce("sum", strategy.run(step, args=(x, total)), axis=None)

    losses = []
    for sizes in SPLITS * 2:
        whole = rows(sum(sizes))
        batch = parts_of(strategy, whole, sizes) if count > 1 else jnp.asarray(whole)
        losses.append(float(run(batch, sum(sizes))))
    variables = [w, scale, moving, *optimizer.variables]
    assert float(seen.result()) == pytest.approx(
        float(np.mean([x for s in SPLITS for x in rows(sum(s)).ravel()])), abs=1e-6
    )
    return losses, [[c.numpy() for c in v.values] for v in variables]


@functools.cache
def on_one_device(normalizes: bool) -> tuple[list[float], list[Any]]:
    return train(px.OneDeviceStrategy("CPU:0"), normalizes)


@pytest.mark.parametrize("normalizes", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_equals_one_device(name: str, normalizes: bool, reasons: list[str]) -> None:
    losses, values = train(STRATEGIES[name](), normalizes)
    expected_losses, expected = on_one_device(normalizes)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for copies, (one,) in zip(values, expected, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, one, rtol=2e-5, atol=2e-6)
            np.testing.assert_array_equal(copy, copies[0])
    assert reasons == []


def test_padding_is_never_seen(reasons: list[str]) -> None:
    """Not by a step with gradients and sums over replicas, nor by whoever looks at its results."""
    s = mirrored()
    shapes = ((2, 3), (1, 3), (0, 3), (2, 3))
    devices = s.extended._replica_devices
    whole = np.full((8, 3), np.nan, np.float32)
    for i, (n, _) in enumerate(shapes):
        whole[2 * i : 2 * i + n] = 10 * i + np.arange(3 * n).reshape(n, 3)
    array = jax.device_put(whole, stacked_over(devices))
    batch = px.PerReplica.from_padded(Padded(array, shapes))
    with s.scope():
        w = px.Variable(jnp.ones(3))

    @px.function
    def run(x: Any) -> Any:
        def step(x: jax.Array) -> Any:
            loss, (gradient,) = px.value_and_grad(lambda: jnp.sum(jnp.sin(x * w.value())), [w])()
            w.assign_sub(ctx().all_reduce("sum", gradient))
            return loss, x + loss, ctx().all_gather(x, axis=0), jnp.max(x, initial=0.0)

        result = s.run(step, args=(x,))
        return result, s.reduce("mean", result[1], axis=0), s.gather(result[1], axis=0)

    result, mean, joined = run(batch)
    assert reasons == []
    known = np.concatenate(batch.values)
    np.testing.assert_array_equal(result[2].values[3], known)
    assert [v.shape for v in result[1].values] == list(shapes)
    for x in jax.tree.leaves((result, mean, joined, w.numpy(), list(batch.values))):
        assert np.isfinite(x).all()
    np.testing.assert_allclose(mean, np.asarray(joined).mean(0), rtol=1e-6)
    assert joined.shape == known.shape


# -- the rules of the eager executor -----------------------------------------------------------------

STEPS: dict[str, Callable[[jax.Array, dict[str, px.Variable]], Any]] = {
    "rows": lambda x, v: (x * 2, x.shape[0], x.sum()),
    "mean": lambda x, v: ctx().all_reduce("mean", x.sum(0)),
    "count": lambda x, v: ctx().all_reduce("sum", x.shape[0]),
    "gather": lambda x, v: ctx().all_gather(x, axis=0).sum(),
    "gather twice": lambda x, v: ctx().all_gather(ctx().all_gather(x, 0)[: x.shape[0]], 0),
    "read": lambda x, v: x + v["mirrored"],
    "sum": lambda x, v: (v["sum"].assign_add(x.sum(0)), v["sum"] + 0.0)[1],
    "first": lambda x, v: (v["first"].assign(x.sum(0)), v["first"] + 0.0)[1],
    "on read": lambda x, v: (v["on read"].assign_add(jnp.float32(x.shape[0])), v["on read"] + 0.0)[1],
    "some": lambda x, v: v["on read"].assign_add(1.0) * 0 if x.shape[0] > 1 else jnp.float32(0),
    "merge": lambda x, v: ctx().merge_call(
        lambda s, y: s.reduce("sum", y, axis=0) + s.reduce("mean", y, axis=0), args=(x,)
    ),
    "merged size": lambda x, v: ctx().merge_call(lambda s: x.shape[0]),
    "closure": lambda x, v: ctx().merge_call(
        lambda s, y: s.reduce("sum", y, axis=None) * x.shape[0], args=(x.sum(),)
    ),
    "closure used": lambda x, v: (
        x + ctx().merge_call(lambda s, y: s.reduce("sum", y, axis=None) * x.shape[0], args=(x.sum(),))
    ),
    "merged size used": lambda x, v: x * ctx().merge_call(lambda s: x.shape[0]),
    "key": lambda x, v: jax.random.uniform(px.random.replica_key(3), x.shape),
    "id": lambda x, v: x + ctx().replica_id_in_sync_group,
    "branch": lambda x, v: x.max() if x.shape[0] else jnp.float32(-1),
    "cond": lambda x, v: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "gradient": lambda x, v: jax.grad(lambda y: ctx().all_reduce("sum", (y**2).sum()))(x),
    "loop": lambda x, v: jax.lax.scan(lambda c, row: (c + row, 0), jnp.zeros(3), x)[0],
    "int": lambda x, v: (x > 0).sum(0),
    "half": lambda x, v: ctx().all_reduce("sum", x.astype(jnp.bfloat16).sum(0)),
}
WHERE_EAGER = {"merged size", "closure", "merged size used", "closure used"}
"""What replicas compute once for all there depends on who calls, so there is no one program."""

splits = st.lists(st.integers(0, 3), min_size=REPLICAS, max_size=REPLICAS)


def outcome(name: str, sizes: Sequence[int], compiled: bool) -> Any:
    s = mirrored()
    with s.scope():
        variables = {
            "mirrored": px.Variable(jnp.arange(3.0)),
            "sum": px.Variable(jnp.zeros(3), aggregation=A.SUM),
            "first": px.Variable(jnp.zeros(3), aggregation=A.ONLY_FIRST_REPLICA),
            "on read": px.Variable(0.0, aggregation=A.SUM, synchronization=S.ON_READ),
        }

    def run(x: Any) -> Any:
        return s.run(lambda x: STEPS[name](x, variables), args=(x,))

    call = px.function(run) if compiled else run
    results = [call(parts_of(s, rows(sum(sizes)), sizes)) for _ in range(2)]
    components = [s.experimental_local_results(r) for r in results]
    return [r if len(r) > 1 else r * REPLICAS for r in components], [
        [c.numpy() for c in v.values] for v in variables.values()
    ]


def check_both(name: str, sizes: list[int]) -> None:
    with warnings() as said:
        compiled = outcome(name, sizes, True)
    assert len(said) == (name in WHERE_EAGER and len(set(sizes)) > 1), said
    eager = outcome(name, sizes, False)
    assert jax.tree.structure(compiled) == jax.tree.structure(eager)
    for a, b in zip(jax.tree.leaves(compiled), jax.tree.leaves(eager), strict=True):
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2 if name == "half" else 1e-5
        )


@pytest.mark.parametrize("name", STEPS)
def test_both_executors_give_the_same(name: str) -> None:
    check_both(name, [2, 1, 0, 2])


@settings(max_examples=5)
@given(st.sampled_from(sorted(STEPS)), splits)
def test_however_rows_are_divided(name: str, sizes: list[int]) -> None:
    check_both(name, sizes)


def test_one_program_for_each_way_to_divide(reasons: list[str]) -> None:
    s = mirrored()
    traced: list[tuple[int, ...]] = []

    @px.function
    def total(x: Any) -> Any:
        def step(x: jax.Array) -> jax.Array:
            traced.append(x.shape)
            return ctx().all_reduce("sum", x.sum())

        return s.run(step, args=(x,))

    for sizes in ([2, 2, 2, 2], [2, 2, 2, 1], [2, 2, 2, 1], [2, 2, 1, 2], [2, 1, 0, 0]):
        whole = rows(sum(sizes))
        got = total(parts_of(s, whole, sizes)).values[0]
        assert float(got) == pytest.approx(float(whole.sum()), rel=1e-5)
    assert total.trace_count == 4
    assert [n for n, _ in traced] == [2, 2, 1, 2, 1, 2, 1, 0]
    assert reasons == []
    text = total.lower(parts_of(s, rows(7), [2, 2, 2, 1])).as_text()
    assert text.count("all_reduce") == 1


# -- where batches come from -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "next", "loop", "loop over next"])
def test_datasets_end_with_an_uneven_batch(how: str, reasons: list[str]) -> None:
    s = mirrored()
    data = rows(29)
    dataset = px.data.Dataset.from_tensor_slices((data, np.arange(29.0, dtype=np.float32))).batch(8)
    iterator = iter(s.experimental_distribute_dataset(dataset))
    with s.scope():
        total = px.Variable(jnp.zeros(3), aggregation=A.SUM)

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        total.assign_add((x * y[:, None]).sum(0))
        return y.sum()

    @px.function
    def run(*batch: Any) -> Any:
        batch = batch or next(iterator)
        return s.reduce("sum", s.run(step, args=batch), axis=None)

    if how == "argument":
        sums = [float(run(*batch)) for batch in iterator]
    elif how == "next":
        sums = [float(run()) for _ in range(4)]
        with pytest.raises(StopIteration):
            run()
    elif how == "loop":
        sums = [float(x) for n in (3, 1) for x in px.train.loop(run, iterator, n)]
    else:
        again = [*s.experimental_distribute_dataset(dataset)]
        last = [again[-1]] * 3  # one shape, so one program
        sums = [float(x) for x in px.train.loop(run, iter([*again[:3]]), 3)]
        sums += [float(px.train.loop(run, iter(last), 3)[2])]
        total.assign_sub(2 * (data[24:] * np.arange(24, 29)[:, None]).sum(0).astype(np.float32) / 4)
    assert sums == pytest.approx([28.0, 92.0, 156.0, 130.0])
    if how != "loop over next":
        expected = (data * np.arange(29)[:, None]).sum(0)
        np.testing.assert_allclose(total.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert reasons == []


def test_results_go_on_in_the_same_program_and_in_others(reasons: list[str]) -> None:
    s = mirrored()

    @px.function
    def twice(x: Any) -> Any:
        y = s.run(lambda x: x * 2, args=(x,))
        doubled = jax.tree.map(lambda z: z + 1, y)
        return s.run(lambda y, z: y - z, args=(y, doubled)), doubled

    whole = rows(6)
    difference, doubled = twice(parts_of(s, whole, [3, 2, 1, 0]))
    again, _ = twice(doubled)
    np.testing.assert_allclose(np.concatenate(difference.values), -np.ones((6, 3)), rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(again.values), -np.ones((6, 3)), rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(doubled.values), 2 * whole + 1, rtol=1e-6)
    assert all(
        v.devices() == {d} for v, d in zip(doubled.values, s.extended._replica_devices, strict=True)
    )
    assert reasons == []


def test_dimensions_other_than_the_first_may_differ_too(reasons: list[str]) -> None:
    s = mirrored()
    parts = [np.full((i, 4 - i), i, np.int32) for i in range(4)]
    value = s.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(parts[c.replica_id_in_sync_group])
    )
    result = px.function(lambda x: s.run(lambda x: (x.T, x.sum()), args=(x,)))(value)
    assert [v.tolist() for v in result[0].values] == [p.T.tolist() for p in parts]
    assert [int(v) for v in result[1].values] == [int(p.sum()) for p in parts]
    assert reasons == []


def test_variables_may_be_made_for_an_uneven_batch(reasons: list[str]) -> None:
    s = mirrored()
    made: dict[str, px.Variable] = {}

    @px.function
    def run(x: Any) -> Any:
        def step(x: jax.Array) -> jax.Array:
            if not made:
                made["sum"] = px.Variable(0.0, aggregation=A.SUM)
                made["seen"] = px.Variable(0.0, aggregation=A.SUM, synchronization=S.ON_READ)
            made["seen"].assign_add(jnp.float32(x.shape[0]))
            made["sum"].assign_add(x.sum())
            return made["sum"] + 0.0

        with s.scope():
            return s.run(step, args=(x,))

    whole = rows(5)
    for _ in range(2):
        run(parts_of(s, whole, [2, 2, 1, 0]))
    assert float(made["sum"]) == pytest.approx(2 * float(whole.sum()), rel=1e-5)
    assert float(made["seen"]) == 10.0
    assert reasons == []


def test_what_follows_each_run_follows_once() -> None:
    s = mirrored()
    from phalanx.core.variables import traced_variables

    counted: list[int] = []

    @px.function
    def run(x: Any) -> Any:
        def step(x: jax.Array) -> jax.Array:
            traced_variables.after_each_run(counted.append)
            return ctx().all_gather(x, 0).sum()

        return s.run(step, args=(x,))

    for _ in range(2):
        run(parts_of(s, rows(6), [3, 2, 1, 0]))
    assert counted == [1, 1]


def test_gradients_may_be_taken_around_a_run(reasons: list[str]) -> None:
    s = mirrored()

    @px.function
    def gradient(w: jax.Array, x: Any) -> Any:
        def loss(w: jax.Array) -> Any:
            per = s.run(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), args=(w, x))
            return s.reduce("sum", per, axis=None)

        return jax.grad(loss)(w)

    whole, w = rows(5), jnp.asarray(rows(3)[:, 0])
    expected = jax.grad(lambda w: jnp.sum(jnp.tanh(whole @ w) ** 2))(w)
    got = gradient(w, parts_of(s, whole, [2, 2, 1, 0]))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert reasons == []


def test_sums_by_direct_exchange_are_joined_too(reasons: list[str]) -> None:
    """Which two replicas of different workers use, also for a number of rows that Python knows."""
    s = px.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x: jax.Array) -> jax.Array:
        count = jnp.float32(x.shape[0])
        return ctx().merge_call(lambda _, n: pair_exchange.total(n.local), args=(count,))

    result = px.function(lambda x: s.run(step, args=(x,)))(parts_of(s, rows(5), [4, 1]))
    assert float(result) == 5.0
    assert reasons == []


# -- jax.jit ----------------------------------------------------------------------------------------


def test_jax_jit_takes_uneven_batches_too() -> None:
    s = mirrored()
    whole = rows(5)
    value = parts_of(s, whole, [2, 2, 1, 0])
    fn = jax.jit(lambda x: s.run(lambda x: ctx().all_reduce("sum", x.sum()) + x, args=(x,)))
    np.testing.assert_allclose(np.concatenate(fn(value).values), whole + whole.sum(), rtol=1e-5)
    with pytest.raises(px.errors.InvalidArgumentError, match=r"different shapes, and .* jax\.jit"):
        jax.jit(lambda x: s.run(lambda x: ctx().merge_call(lambda _: x.shape[0]), args=(x,)))(value)


# -- what has no program ---------------------------------------------------------------------------


def merge_returns_shape(x: jax.Array) -> Any:
    return ctx().merge_call(lambda _: x.shape[0])


def branches(x: jax.Array) -> Any:
    return ctx().all_reduce("sum", x.sum()) if ctx().all_reduce("sum", x.sum()) > 0 else x.sum()


def many_writes(v: px.Variable) -> Callable[[jax.Array], Any]:
    return lambda x: v.assign(x.sum() * 0 + 2.0)


def test_functions_say_why_they_run_eagerly(reasons: list[str]) -> None:
    s = mirrored()
    with s.scope():
        v = px.Variable(0.0, name="v")
    uneven = parts_of(s, rows(5), [2, 2, 1, 0])
    strings = px.PerReplica([np.array(["a"] * n, object) for n in (1, 0, 0, 0)])
    ranks = s.experimental_distribute_values_from_function(
        lambda c: jnp.ones((1,) * (1 + c.replica_id_in_sync_group))
    )
    cases: list[tuple[str, Callable[..., Any], Any]] = [
        ("no arrays", len, strings),
        ("different ranks", jnp.sum, ranks),
        ("merge function returns depends", merge_returns_shape, uneven),
        ("of variable 'v:0' depends on the shape", many_writes(v), uneven),
        ("tracing failed with StagedValueError", branches, uneven),
        ("is captured", lambda: uneven.component(0) * 0 + jnp.sum(uneven + 0.0), None),
    ]
    for why, step, value in cases:

        def run(*args: Any, step: Any = step) -> Any:
            return s.run(step, args=args)

        reasons.clear()
        fn = px.function(run)
        fn.__name__ = f"the case of {why[:5]}"
        for _ in range(2):
            fn(*([] if value is None else [value]))
        assert len(reasons) == 1, (why, reasons)
        assert "runs eagerly" in reasons[0]
        assert why in reasons[0]


def test_a_function_has_so_many_uneven_programs(
    monkeypatch: pytest.MonkeyPatch, reasons: list[str]
) -> None:
    monkeypatch.setattr(function_module, "_MOST_UNEVEN", 2)
    s = mirrored()
    total = px.function(lambda x: s.run(lambda x: ctx().all_reduce("sum", x.shape[0]), args=(x,)))
    for first in (1, 2, 3, 4, 5, 1, 3, 5):  # two in each of the function and its run
        x = parts_of(s, rows(first), [first, 0, 0, 0])
        assert int(total(x).values[0]) == first
    assert int(total(parts_of(s, rows(4), [1, 1, 1, 1])).values[0]) == 4
    retraced, eager = reasons
    assert "was traced 5 times" in retraced
    assert "there are 2 programs for other such batches" in eager
    monkeypatch.setattr(uneven_module, "_MOST_PROGRAMS", 3)
    other = px.function(lambda x: s.run(jnp.sum, args=(x,)))
    other(parts_of(s, rows(6), [3, 2, 1, 0]))
    assert "there are 4 of them, more than 3" in reasons[2]


def test_errors_of_the_step_are_those_of_the_eager_executor(reasons: list[str]) -> None:
    s = mirrored()

    def step(x: jax.Array) -> jax.Array:
        if x.shape[0] == 0:
            raise ValueError("nothing to do")
        return x

    with pytest.raises(ValueError, match="nothing to do"):
        px.function(lambda x: s.run(step, args=(x,)))(parts_of(s, rows(5), [2, 2, 1, 0]))
    assert len(reasons) == 1


def test_uneven_values_look_like_others() -> None:
    s = mirrored()
    devices = s.extended._replica_devices
    array = jax.device_put(np.arange(8.0, dtype=np.float32), stacked_over(devices))
    value = px.PerReplica.from_padded(Padded(array, ((2,), (2,), (1,), (0,))))
    assert value.array is None
    assert value.count == REPLICAS
    assert not value.is_traced
    assert [v.tolist() for v in value.values] == [[0, 1], [2, 3], [4], []]
    assert str(value).startswith("PerReplica:{\n  0: Array([0. 1.], shape=(2,)")
    assert [v.devices() for v in value.values] == [{d} for d in devices]
    assert not any(v.committed for v in value.values)
    assert [x.shape for x in jax.tree.leaves(value)] == [(2,), (2,), (1,), (0,)]
    assert s.gather(value, axis=0).tolist() == [0, 1, 2, 3, 4]
    assert float(s.reduce("mean", value, axis=0)) == 2.0
    assert replica_mesh(devices) is replica_mesh(devices)
