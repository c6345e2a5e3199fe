"""A program whose steps are interrupted at random moments; run by test_whole_steps.py.

Usage: interrupt_program.py KIND REPLICAS INTERRUPTS SEED

Each interrupt is an exception that a signal handler raises. After each, all variables must be those of
one and the same step, and nothing of the step may be left in this thread.
"""

from __future__ import annotations

import collections
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px
from phalanx.core import context
from phalanx.core.variables import traced_variables, transactions
from phalanx.runtime import compat

KINDS = ("compiled", "eager", "loop", "callback", "plain", "input")


class Training:
    """Variables of every kind that count the steps, each in its own way."""

    def __init__(self, replicas: int) -> None:
        devices = [f"CPU:{i}" for i in range(replicas)]
        self.n = replicas
        self.strategy = px.MirroredStrategy(devices)
        with self.strategy.scope():
            self.summed = px.Variable(jnp.zeros(16), aggregation=px.VariableAggregation.SUM)
            self.mean = px.Variable(0.0, aggregation=px.VariableAggregation.MEAN)
            self.on_read = px.Variable(
                0.0,
                synchronization=px.VariableSynchronization.ON_READ,
                aggregation=px.VariableAggregation.SUM,
            )
            self.weights = px.Variable(jnp.zeros(8))
            self.optimizer = px.train.Optimizer(optax.sgd(1.0, momentum=0.0))
            self.metric = px.train.Mean()
        self.x = jnp.ones(16) / replicas
        dataset = px.data.Dataset.from_tensors(np.ones(16 * replicas, np.float32) / replicas)
        self.iterator = iter(self.strategy.experimental_distribute_dataset(dataset.repeat()))

    def replica(self, x: jax.Array) -> jax.Array:
        """One step of one replica."""
        self.summed.assign_add(x * 1.0)
        self.mean.assign_add(x[0] * self.n)
        self.on_read.assign_add(x[0])
        self.metric.update_state(x[:1])
        self.optimizer.apply_gradients([(-jnp.ones(8) * x[0], self.weights)])
        return x.sum()

    def run(self, x: jax.Array) -> Any:
        """One step of all replicas."""
        return self.strategy.run(self.replica, args=(x,))

    def step(self, kind: str) -> Callable[[], Any]:
        """A function that makes one step."""
        if kind == "eager":
            return lambda: self.run(self.x)
        if kind == "plain":  # updates outside of run, each a step of its own
            return lambda: self.mean.assign_add(1.0)
        if kind == "callback":
            shape = jax.ShapeDtypeStruct((16,), jnp.float32)
            callback = px.function(lambda x: self.run(jax.pure_callback(np.asarray, shape, x)))
            return lambda: callback(self.x)
        if kind == "input":  # the position of the iterator is a part of the step
            taking = px.function(lambda: self.run(next(self.iterator)))
            return lambda: self._count_input(taking)
        compiled = px.function(self.run)
        if kind == "loop":
            return lambda: px.train.loop(compiled, iter([self.x]), steps=1)
        return lambda: compiled(self.x)

    def _count_input(self, taking: Callable[[], Any]) -> Any:
        before = self.iterator.state()["index"], float(self.mean)
        try:
            return taking()
        finally:
            after = self.iterator.state()["index"], float(self.mean)
            assert after[0] - before[0] == after[1] - before[1], (before, after)

    def steps(self, kind: str) -> float:
        """How many steps were made; an error if variables disagree."""
        values = px.train.snapshot(
            {
                "mean": self.mean,
                "summed": self.summed,
                "on_read": self.on_read,
                "weights": self.weights,
                "iterations": self.optimizer.iterations,
                "metric": self.metric.variables[1],
            }
        )
        count = float(values["mean"])
        if kind != "plain":
            for name, value in values.items():
                wanted = count * self.n if name == "metric" else count
                assert np.allclose(value, wanted, rtol=1e-4), (count, values)
        copies = [float(v.read_value()) for v in self.mean.values]
        assert copies == [count] * self.n, copies
        return count


def left_behind() -> list[str]:
    """What an interrupted step has left in this thread."""
    found = []
    if context._thread.stack:
        found.append("a strategy's context")
    if traced_variables._current.stack or traced_variables._current.apart:
        found.append("a trace of Phalanx")
    if jax.config.jax_default_device is not None:
        found.append("a default device")
    if compat.is_transformation(compat.current_trace()):
        found.append("a trace of JAX")
    if transactions.current() is not None:
        found.append("a step")
    return found


def main(kind: str, replicas: int, interrupts: int, seed: int) -> None:
    """Interrupt steps, and look at the variables after each."""
    physical = px.config.list_physical_devices("CPU")[0]
    px.config.set_logical_device_configuration(
        physical, [px.config.LogicalDeviceConfiguration()] * replicas
    )
    training, randomness = Training(replicas), random.Random(seed)
    training.run(training.x)
    step = training.step(kind)
    step()
    started = time.perf_counter()
    for _ in range(10):
        step()
    duration = (time.perf_counter() - started) / 10

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    done, seen = training.steps(kind), 0
    outcomes: collections.Counter[str] = collections.Counter()
    while seen < interrupts:
        returned = 0
        if randomness.random() < 0.5:  # looking at the variables has made the next step another one
            step()
            done += 1
        try:
            try:
                delay = 1e-6 + randomness.random() * 2.5 * duration
                signal.setitimer(signal.ITIMER_REAL, delay)
                for _ in range(4):
                    step()
                    returned += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            seen += 1
        now = training.steps(kind)
        moved = now - done - returned
        outcomes["the old value" if moved == 0 else "the new value"] += 1
        assert moved in (0, 1), (done, now, returned)
        assert not left_behind(), left_behind()
        done = now
    step()
    assert training.steps(kind) == done + 1
    training.iterator.close()
    assert threading.active_count() == 1, threading.enumerate()
    print(f"{seen} interrupts: {dict(outcomes)}\ndone")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
