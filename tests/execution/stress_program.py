"""A program that starts many steps without waiting for them; run by test_stress.py.

Usage: stress_program.py KIND REPLICAS WIDTH STEPS [unbounded]
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import phalanx as px
from phalanx.execution.throttle import THROTTLE

GIVE_UP_AFTER = 110.0
THREADS = 4
FUNCTIONS = 16


class Training:
    """Steps with two collectives, the second of which waits for the first."""

    def __init__(self, strategy: px.Strategy, width: int) -> None:
        self._strategy = strategy
        with strategy.scope():
            self._w = px.Variable(jnp.eye(width))
            self._seen = px.Variable(0, aggregation=px.VariableAggregation.SUM)
        self._x = strategy.experimental_distribute_values_from_function(
            lambda context: jnp.full((16, width), 0.1 * (context.replica_id_in_sync_group + 1))
        )
        self.step = px.function(self._step)

    def _step(self) -> Any:
        return self._strategy.run(self._replica, args=(self._x,))

    def _replica(self, x: jax.Array) -> jax.Array:
        context = px.get_replica_context()
        assert context is not None
        g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(self._w.value())
        g = context.all_reduce("mean", g)
        norm = context.all_reduce("mean", jnp.linalg.norm(g))
        self._w.assign_sub(g / (1.0 + norm))
        self._seen.assign_add(jnp.asarray(context.replica_id_in_sync_group) + 1)
        return x[0]

    def check(self, steps: int) -> None:
        """Wait for all steps, and see that none was lost."""
        n = self._strategy.num_replicas_in_sync
        assert int(self._seen) == steps * n * (n + 1) // 2
        assert bool(jnp.all(jnp.isfinite(self._w.value())))


def compiled(strategy: px.Strategy, width: int, steps: int) -> None:
    """Compiled steps, one after the other."""
    training = Training(strategy, width)
    _repeat(training.step, steps)
    training.check(steps)


def eager(strategy: px.Strategy, width: int, steps: int) -> None:
    """Collectives that are programs of their own, one after the other."""
    value = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.full((16, width), 1.0 + context.replica_id_in_sync_group)
    )

    def replica(x: jax.Array) -> jax.Array:
        context = px.get_replica_context()
        assert context is not None
        return context.all_reduce("mean", context.all_reduce("mean", x))

    def step() -> None:
        nonlocal value
        value = strategy.run(replica, args=(value,))

    _repeat(step, steps)
    for part in value.values:
        assert bool(jnp.allclose(part, (strategy.num_replicas_in_sync + 1) / 2))


def threads(strategy: px.Strategy, width: int, steps: int) -> None:
    """Several threads, each with a compiled function of its own."""
    trainings = [Training(strategy, width) for _ in range(THREADS)]
    errors: list[BaseException] = []

    def work(training: Training) -> None:
        try:
            _repeat(training.step, steps)
        except BaseException as error:
            errors.append(error)
            raise

    workers = [threading.Thread(target=work, args=(training,)) for training in trainings]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    for training in trainings:
        training.check(steps)


def rotation(strategy: px.Strategy, width: int, steps: int) -> None:
    """Many compiled functions in turn, none of which waits for another."""
    trainings = [Training(strategy, width) for _ in range(FUNCTIONS)]
    rounds = iter(trainings * (steps // FUNCTIONS))
    _repeat(lambda: next(rounds).step(), steps // FUNCTIONS * FUNCTIONS)
    for training in trainings:
        training.check(steps // FUNCTIONS)


def outside(strategy: px.Strategy, width: int, steps: int) -> None:
    """Compiled steps, and programs over the same devices that the library knows nothing of."""
    training = Training(strategy, width)
    total = jnp.zeros(())

    def step() -> None:
        nonlocal total
        for leaf in jax.tree.leaves(training.step()):
            doubled = jnp.sin(leaf) * 2.0  # on all devices
            total = total + jnp.sum(doubled)  # with a collective

    _repeat(step, steps)
    assert bool(jnp.isfinite(total))
    training.check(steps)


def results(strategy: px.Strategy, width: int, steps: int) -> None:
    """Compiled steps, and computations with what one replica returned, as a sum of losses."""
    training = Training(strategy, width)
    total = jnp.zeros(())

    def step() -> None:
        nonlocal total
        total = total + jnp.sum(strategy.experimental_local_results(training.step())[0] * 2.0)

    _repeat(step, steps)
    assert bool(jnp.isfinite(total))
    training.check(steps)


def plain_jit(strategy: px.Strategy, width: int, steps: int) -> None:
    """Pure steps, compiled by `jax.jit`, which hands them to XLA by itself."""
    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones((16, width)))
    state = x

    def replica(state: jax.Array, x: jax.Array) -> jax.Array:
        context = px.get_replica_context()
        assert context is not None
        return context.all_reduce("mean", jnp.tanh(state)) + 0.1 * x

    run = jax.jit(lambda state, x: strategy.run(replica, args=(state, x)))

    def step() -> None:
        nonlocal state
        state = run(state, x)

    _repeat(step, steps)
    assert all(bool(jnp.all(jnp.isfinite(part))) for part in state.values)


KINDS: dict[str, Callable[[px.Strategy, int, int], None]] = {
    f.__name__: f for f in (compiled, eager, threads, rotation, outside, results, plain_jit)
}


def _repeat(step: Callable[[], Any], steps: int) -> None:
    started = time.monotonic()
    for i in range(steps):
        step()
        if (i + 1) % 50 == 0:
            print(f"{i + 1} steps after {time.monotonic() - started:.1f} s", flush=True)


def main() -> None:
    kind, replicas, width, steps = sys.argv[1], *map(int, sys.argv[2:5])
    faulthandler.dump_traceback_later(GIVE_UP_AFTER, exit=True)
    if sys.argv[5:] == ["unbounded"]:
        THROTTLE._limit = sys.maxsize
    px.testing.logical_devices(replicas)
    strategy = px.MirroredStrategy()
    assert strategy.num_replicas_in_sync == replicas
    KINDS[kind](strategy, width, steps)
    print("done", flush=True)


if __name__ == "__main__":
    main()
