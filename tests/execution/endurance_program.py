"""Many steps, after which memory, threads and descriptors are as before; run by test_whole_steps.py.

Usage: endurance_program.py STEPS
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import phalanx as px

MEGABYTE = 1 << 20


def resources() -> dict[str, int]:
    """What the process has at this moment."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "memory": resident,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "arrays": len(jax.live_arrays()),
    }


def kinds(strategy: px.Strategy) -> dict[str, tuple[Callable[[], Any], float]]:
    """Each kind of step, and how many of all steps it gets."""
    with strategy.scope():
        w = px.Variable(jnp.zeros((32, 8)))
        optimizer = px.train.Optimizer(optax.adam(1e-3))
        metric = px.train.Mean()
    rows = px.data.Dataset.from_tensor_slices(jnp.ones((64, 32)).__array__()).batch(16).repeat()
    batches = iter(strategy.experimental_distribute_dataset(rows))

    def loss(x: jax.Array) -> jax.Array:
        value = jnp.mean((x @ w.value()) ** 2)
        metric.update_state(value)
        return value

    def replica(x: jax.Array) -> jax.Array:
        value, gradient = px.value_and_grad(loss, w)(x)
        optimizer.apply_gradients([(gradient, w)])
        return value

    def step(x: Any) -> Any:
        return strategy.run(replica, args=(x,))

    compiled = px.function(step)
    x = next(batches)

    def fails() -> None:
        try:
            strategy.run(lambda: w.assign(jnp.ones(3)))
        except ValueError:
            return
        raise AssertionError

    return {
        "compiled steps": (lambda: compiled(x), 1.0),
        "compiled steps with input": (lambda: compiled(next(batches)), 0.2),
        "eager steps": (lambda: step(x), 0.05),
        "snapshots": (lambda: px.train.snapshot([w, *optimizer.variables]), 0.2),
        "failed steps": (fails, 0.05),
        "iterators": (lambda: next(iter(strategy.experimental_distribute_dataset(rows))), 0.005),
    }


def main(steps: int) -> None:
    """Run each kind of step for a while, and again, and compare what the process has."""
    physical = px.config.list_physical_devices("CPU")[0]
    px.config.set_logical_device_configuration(physical, [px.config.LogicalDeviceConfiguration()] * 2)
    for name, (step, share) in kinds(px.MirroredStrategy()).items():
        count = max(8, int(steps * share))
        for _ in range(max(4, count // 4)):  # caches fill up, and the C library keeps memory
            jax.block_until_ready(step())
        before = resources()
        for _ in range(count):
            step()
        jax.block_until_ready(step())
        after = resources()
        grown = {key: after[key] - before[key] for key in before}
        per_step = grown["memory"] / count
        print(f"{name}: {count} steps, {per_step:.1f} bytes each, {grown}", flush=True)
        assert grown["threads"] <= 0, threading.enumerate()
        assert grown["descriptors"] <= 0
        assert grown["arrays"] <= 0
        assert grown["memory"] <= 4 * MEGABYTE + 50 * count
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]))
