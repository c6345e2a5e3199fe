"""Saves and restores a state with one library; a child of `checkpoint.py`.

Commands: {"do": "save" | "restore" | "call" | "step" | "all" | "held" | "copy"}.
Answers: {"seconds": …}.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from _child import Parent, phalanx_versions

ARRAYS = 16
STEPS = 5  # before and after an asynchronous save
TIMES = 3  # that a step beside a save is measured in a round, of which the median counts


def values(megabytes: int) -> list[Any]:
    rng = np.random.default_rng(0)
    size = megabytes * 1_000_000 // 4 // ARRAYS
    return [rng.standard_normal(size, np.float32) for _ in range(ARRAYS)]


def flushed(folder: str) -> None:
    """Wait until the disk has the files, for libraries that do not."""
    for where, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(where, name), "rb") as file:
                os.fsync(file.fileno())


def with_phalanx(path: str, megabytes: int) -> tuple[dict[str, str], dict[str, Callable[[], float]]]:
    import jax
    import jax.numpy as jnp

    import phalanx as px

    variables = [px.Variable(x) for x in values(megabytes)]
    checkpoint = px.train.Checkpoint(v=variables)

    @px.function
    def step() -> None:
        for v in variables:
            v.assign(v * 0.999 + 0.001)

    def wait() -> None:
        jax.block_until_ready([v.value() for v in variables])

    def stepped() -> float:
        begun = time.perf_counter()
        step()
        jax.block_until_ready(variables[0].value())
        return time.perf_counter() - begun

    def usual() -> float:
        os.sync()  # what others have written is on its way to the disk, and takes a processor
        return statistics.median(stepped() for _ in range(STEPS))

    def save_and_step() -> tuple[float, float, float]:
        """How long the call of `save` takes, how much longer than others the step after it, and all."""
        before = usual()
        wait()
        begun = time.perf_counter()
        checkpoint.write(path, px.train.CheckpointOptions(enable_async=True))
        call = time.perf_counter() - begun
        delays = [stepped() - before]
        while checkpoint.is_saving:
            delays.append(stepped() - before)
        checkpoint.sync()
        return call, max(0.0, delays[0]), max(0.0, sum(delays))

    def hold_and_step() -> float:
        """How much longer a step takes if what the variables held before is only kept."""
        before = usual()
        kept = [v.value() for v in variables]
        after = stepped()
        del kept
        return max(0.0, after - before)

    def copy() -> float:
        wait()
        begun = time.perf_counter()
        jax.block_until_ready([jnp.copy(v.value()) for v in variables])
        return time.perf_counter() - begun

    def several(fn: Callable[[], float]) -> Callable[[], float]:
        return lambda: statistics.median(fn() for _ in range(TIMES))

    work = {
        "save": timed(lambda: checkpoint.write(path)),
        "restore": timed(lambda: (checkpoint.restore(path), wait())),
        "call": several(lambda: save_and_step()[0]),
        "step": several(lambda: save_and_step()[1]),
        "all": several(lambda: save_and_step()[2]),
        "held": several(hold_and_step),
        "copy": several(copy),
    }
    return phalanx_versions(), work


def with_orbax(path: str, megabytes: int) -> tuple[dict[str, str], dict[str, Callable[[], float]]]:
    from importlib.metadata import version

    import jax
    import orbax.checkpoint as ocp

    tree = {str(i): jax.device_put(x) for i, x in enumerate(values(megabytes))}
    checkpointer = ocp.StandardCheckpointer()

    def save() -> None:
        checkpointer.save(path, tree, force=True)
        checkpointer.wait_until_finished()
        flushed(path)

    work = {
        "save": timed(save),
        "restore": timed(lambda: jax.block_until_ready(checkpointer.restore(path, tree))),
    }
    return {"Orbax": version("orbax-checkpoint"), "JAX": version("jax")}, work


def with_tensorflow(path: str, megabytes: int) -> tuple[dict[str, str], dict[str, Callable[[], float]]]:
    import tensorflow as tf

    variables = [tf.Variable(x) for x in values(megabytes)]
    checkpoint = tf.train.Checkpoint(v=variables)

    def save() -> None:
        os.makedirs(path, exist_ok=True)
        checkpoint.write(f"{path}/x")
        flushed(path)

    work = {
        "save": timed(save),
        "restore": timed(lambda: checkpoint.read(f"{path}/x").assert_consumed()),
    }
    return {"TensorFlow": tf.__version__}, work


def timed(fn: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        begun = time.perf_counter()
        fn()
        return time.perf_counter() - begun

    return run


def main(library: str, folder: str, megabytes: int) -> None:
    path = os.path.join(folder, library)
    make = {"phalanx": with_phalanx, "orbax": with_orbax, "tensorflow": with_tensorflow}[library]
    versions, work = make(path, megabytes)
    parent = Parent(versions)
    for command in parent:
        parent.say(seconds=work[command["do"]]())
    shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
