"""Training over workers: the losses of one device, nothing lost, and steps that make variables."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from tests.multi_worker.rules import strategy

X = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
Y = X @ np.arange(1.0, 6.0, dtype=np.float32)
BATCH = 12


def train(
    over: px.Strategy, compiled: bool, rows: int, shard: Any = None
) -> tuple[list[float], float, float]:
    """Two epochs with Adam; the losses, the norm of the weights, and a metric."""
    dataset = px.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(BATCH)
    optimizer = px.train.Optimizer(optax.adam(0.1), shard=shard)
    made: list[px.Variable] = []
    with over.scope():
        seen = px.train.Mean()

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        if not made:
            made.append(px.Variable(lambda: jnp.zeros(5), name="weights"))
        w = made[0]

        def loss() -> jax.Array:
            return px.nn.compute_average_loss((x @ w.value() - y) ** 2, global_batch_size=BATCH)

        value, gradients = px.value_and_grad(loss, [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        seen.update_state(y)
        return value

    def run(x: Any, y: Any) -> Any:
        return over.reduce("sum", over.run(step, args=(x, y)), axis=None)

    run = px.function(run) if compiled else run
    losses = []
    for _ in range(2):
        losses += [float(run(x, y)) for x, y in over.experimental_distribute_dataset(dataset)]
    return losses, float(jnp.linalg.norm(made[0].value())), float(seen.result())


@pytest.mark.parametrize("rows", [24, 23])
def test_training_equals_one_device(cluster: px.testing.MultiProcess, rows: int) -> None:
    expected = train(px.OneDeviceStrategy("CPU:0"), True, rows)
    assert len(expected[0]) == 4
    for compiled in (False, True):
        for got in cluster.run(lambda: train(strategy(), compiled, rows)):
            np.testing.assert_allclose(got[0], expected[0], rtol=1e-4)
            assert got[1:] == pytest.approx(expected[1:], rel=1e-4)


@pytest.mark.parametrize("cluster", ["2x2"], indirect=True)
@pytest.mark.parametrize("level", ["states", "gradients", "parameters"])
def test_sharded_optimizers_equal_one_device(cluster: px.testing.MultiProcess, level: str) -> None:
    """Each worker keeps slices of its own replicas, with an uneven last batch."""
    expected = train(px.OneDeviceStrategy("CPU:0"), True, 23)
    shard = px.train.OptimizerSharding(level, threshold=0)
    for compiled in (False, True):
        for got in cluster.run(lambda: train(strategy(), compiled, 23, shard)):
            np.testing.assert_allclose(got[0], expected[0], rtol=1e-4)
            assert got[1:] == pytest.approx(expected[1:], rel=1e-4)


@pytest.mark.parametrize("cluster", ["2x2"], indirect=True)
def test_copies_of_workers_are_broadcast(cluster: px.testing.MultiProcess) -> None:
    def different() -> list[float]:
        s = strategy()
        with s.scope():
            w = px.Variable(1.0)
        for copied in w.values:
            copied.assign(float(s.cluster_resolver.task_id or 0))
        px.train.broadcast_parameters([w])
        return [float(copied) for copied in w.values]

    assert {x for values in cluster.run(different) for x in values} == {0.0}


def test_nothing_is_lost(cluster: px.testing.MultiProcess) -> None:
    """Uneven batches, and workers with different numbers of batches."""

    def epoch() -> tuple[list[int], list[int], float]:
        s = strategy()
        me = s.cluster_resolver.task_id or 0
        options = px.data.Options()
        options.experimental_distribute.auto_shard_policy = "DATA"
        shared = px.data.Dataset.range(23).shuffle(23).batch(8).with_options(options)
        own = s.distribute_datasets_from_function(
            lambda c: px.data.Dataset.range(100 * me, 100 * me + 3 * (me + 1)).batch(2)
        )
        with s.scope():
            total = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
        add = px.function(
            lambda x: s.run(lambda x: total.assign_add(x.sum().astype(jnp.float32)), args=(x,))
        )
        mine: tuple[list[int], list[int]] = ([], [])
        for found, data in zip(mine, (s.experimental_distribute_dataset(shared), own), strict=True):
            for x in data:
                add(x)
                for part in s.experimental_local_results(x):
                    found.extend(np.asarray(part).tolist())
        return (*mine, float(total))

    results = cluster.run(epoch)
    assert sorted(x for r in results for x in r[0]) == list(range(23))
    own = [100 * i + k for i in range(len(results)) for k in range(3 * (i + 1))]
    assert [r[1] for r in results] == [[x for x in own if x // 100 == i] for i in range(len(results))]
    assert [r[2] for r in results] == [sum(range(23)) + sum(own)] * len(results)


def test_a_distributed_iterator_goes_on_where_it_was(cluster: px.testing.MultiProcess) -> None:
    def broken_off() -> tuple[list[Any], list[Any]]:
        s = strategy()

        def parts(x: Any) -> list[Any]:
            return [np.asarray(p).tolist() for p in s.experimental_local_results(x)]

        dataset = px.data.Dataset.range(23).shuffle(23, seed=1).batch(6)
        iterator = iter(s.experimental_distribute_dataset(dataset))
        next(iterator)
        state = iterator.state()
        expected = [parts(x) for x in iterator]
        again = iter(s.experimental_distribute_dataset(dataset))
        again.restore(state)
        return expected, [parts(x) for x in again]

    for expected, got in cluster.run(broken_off):
        assert len(expected) == 3
        assert got == expected


def test_gradients_around_a_run_are_refused(cluster: px.testing.MultiProcess) -> None:
    """JAX would differentiate this worker's part only; inside one program it sees all of them."""

    def both_ways() -> tuple[str, float]:
        s = strategy()
        x = s.experimental_distribute_values_from_function(
            lambda c: jnp.float32(c.replica_id_in_sync_group + 1)
        )

        def loss(w: jax.Array, x: Any) -> jax.Array:
            def step(x: jax.Array) -> jax.Array:
                return w * x + px.get_replica_context().all_reduce("sum", w)  # type: ignore[union-attr]

            return s.reduce("sum", s.run(step, args=(x,)), axis=None)

        with pytest.raises(px.errors.UnsupportedError) as refused:
            jax.grad(loss)(jnp.float32(5.0), x)
        return str(refused.value), float(jax.jit(jax.grad(loss))(jnp.float32(5.0), x))

    n = cluster.run(lambda: strategy().num_replicas_in_sync)[0]
    for text, gradient in cluster.run(both_ways):
        assert "inside the function given to strategy.run" in text
        assert gradient == sum(range(1, n + 1)) + n**2


def test_garbage_on_one_worker_does_not_matter(cluster: px.testing.MultiProcess) -> None:
    """Programs are compared by what they compute, not by which variables happen to exist."""

    def with_garbage() -> float:
        s = strategy()
        kinds: dict[str, Any] = {
            "synchronization": px.VariableSynchronization.ON_READ,
            "aggregation": px.VariableAggregation.SUM,
        }
        gc.disable()
        try:
            with s.scope():
                old = px.Variable(1.0, **kinds)
                total = px.Variable(0.0, **kinds)
            cycle = [old]
            cycle.append(cycle)  # type: ignore[arg-type]
            del old, cycle
            if s.cluster_resolver.task_id == 1:
                gc.collect()
            px.function(lambda: s.run(lambda: total.assign_add(jnp.float32(1.0) * 2)))()
            return float(total)
        finally:
            gc.enable()

    n = cluster.run(lambda: strategy().num_replicas_in_sync)[0]
    assert cluster.run(with_garbage) == [2.0 * n] * len(cluster.names)


def test_workers_tell_what_they_are_doing(cluster: px.testing.MultiProcess) -> None:
    """The phases that the others see, and the number of steps."""

    def seen() -> tuple[list[str], int]:
        s = strategy()
        status = s.extended._connection.member.status  # type: ignore[attr-defined]
        phases: list[str] = []

        def note(*_: Any, **__: Any) -> None:
            phases.append(status.phase)

        def rows() -> Any:
            for i in range(3):
                note()
                yield np.full(s.num_replicas_in_sync, i, np.float32)

        def step(x: jax.Array) -> jax.Array:
            note()
            return px.get_replica_context().all_reduce("sum", x.sum())

        def compiled(event: str, *_: Any, **__: Any) -> None:
            if "backend_compile" in event:
                note()

        options = px.InputOptions(experimental_per_replica_buffer_size=0)
        data = s.distribute_datasets_from_function(
            lambda c: px.data.Dataset.from_generator(
                rows, output_signature=px.TensorSpec((None,), np.float32)
            ),
            options,
        )
        batch = next(iter(data))
        before = status.step
        run = px.function(lambda x: s.reduce("sum", s.run(step, args=(x,)), axis=None))
        jax.monitoring.register_event_duration_secs_listener(compiled)
        try:
            for _ in range(3):
                run(batch)
            s.run(step, args=(batch,))
        finally:
            jax.monitoring.unregister_event_duration_listener(compiled)
        note()
        return phases, status.step - before

    for phases, steps in cluster.run(seen):
        assert phases[0] == "input"
        assert "trace" in phases
        assert "compile" in phases
        assert phases[-1] == "step"
        assert steps == 4


def test_without_protection_a_step_returns_while_it_runs(
    cluster: px.testing.MultiProcess, tmp_path: Path
) -> None:
    """The others begin the second step only when they hear that it has returned on the first worker."""
    pipes = [tmp_path / f"{i}" for i in range(1, len(cluster.pids))]
    for pipe in pipes:
        os.mkfifo(pipe)

    def steps() -> float:
        s = strategy()
        me = s.cluster_resolver.task_id or 0
        with s.scope():
            total = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
        px.config.protect_variables(False)
        try:
            one = s.experimental_distribute_values_from_function(lambda c: np.float32(1.0))
            step = px.function(lambda x: s.run(total.assign_add, args=(x,)))
            step(one)
            if me:
                pipes[me - 1].read_text()
            step(one)
            if not me:
                for pipe in pipes:
                    pipe.write_text("returned")
            step(one)
        finally:
            px.config.protect_variables(True)
        return float(total.numpy()) / s.num_replicas_in_sync

    assert set(cluster.run(steps)) == {3.0}
