"""A child of `data.py`: the pipelines in px.data, and training steps that take their input from one.

``python _data_phalanx.py pipelines FOLDER``, ``memory MEGABYTES``, ``overlap KIND`` (see `KINDS`) or
``write FOLDER``, which makes the file of records.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import _data_common as common
import phalanx as px
from _child import Parent, phalanx_strategy, phalanx_versions

OVERLAP_BATCH = 512
OVERLAP_HIDDEN = 160
OVERLAP_WAIT = 0.004
OVERLAP_ROWS = 20_000
OVERLAP_BATCHES = 32
"""How many batches the step alone uses in turn: more than fit into the caches, as with real input."""

KINDS = {
    "waits": (True, 1),
    "computes": (False, 1),
    "waits, crowded": (True, 2),
    "computes, crowded": (False, 2),
}
"""Whether the input waits or computes, and how many devices, and so processors, the step has."""


def settings(
    make: Callable[[int | None], px.data.Dataset], parallel: bool = False
) -> dict[str, Callable[[], Iterable[Any]]]:
    """`make` gets `num_parallel_calls`; with `parallel` there is also a setting in which that is on."""
    made: dict[str, Callable[[], Iterable[Any]]] = {
        "prefetch(AUTOTUNE)": lambda: make(None).prefetch(px.data.AUTOTUNE),
        "no prefetch": lambda: make(None),
    }
    if parallel:
        made["prefetch(AUTOTUNE), num_parallel_calls=AUTOTUNE"] = lambda: make(
            px.data.AUTOTUNE
        ).prefetch(px.data.AUTOTUNE)
    return made


def scaled(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x * common.SCALE, y


def pipelines(folder: Path) -> common.Pipelines:
    x, y = common.arrays()
    rows = px.data.Dataset.from_tensor_slices((x, y))
    few = px.data.Dataset.from_tensor_slices((x[: common.MAPPED_ROWS], y[: common.MAPPED_ROWS]))
    size = common.BATCH
    features = {
        "x": px.io.FixedLenFeature([common.WIDTH], np.float32),
        "y": px.io.FixedLenFeature([], np.int64),
    }

    def parsed(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = px.io.parse_example(records, features)
        return found["x"], found["y"]

    def records() -> px.data.Dataset:
        return px.data.TFRecordDataset(folder / common.RECORD_FILE).batch(size)

    return {
        "batch": settings(lambda _: rows.batch(size)),
        "batch, all": settings(lambda _: rows.batch(size)),
        "shuffle": settings(lambda _: rows.shuffle(common.ROWS).batch(size)),
        "small shuffle": settings(lambda _: rows.shuffle(common.SMALL_BUFFER).batch(size)),
        "cache": settings(
            lambda _: rows.cache().shuffle(common.ROWS).batch(size).repeat(common.REPEATS)
        ),
        "python map": settings(lambda n: few.map(scaled, n).batch(size), parallel=True),
        "native map": settings(lambda n: few.map(scaled, n).batch(size), parallel=True),
        "batch map": settings(lambda n: rows.batch(size).map(scaled, n), parallel=True),
        "records": settings(lambda _: records()),
        "parse": settings(lambda n: records().map(parsed, n), parallel=True),
    }


def for_memory(data: tuple[np.ndarray, np.ndarray], batch: int) -> Iterable[Any]:
    return px.data.Dataset.from_tensor_slices(data).shuffle(len(data[0])).batch(batch)


def write_records(folder: Path) -> None:
    x, y = common.arrays(common.RECORDS)
    with px.io.TFRecordWriter(folder / common.RECORD_FILE) as writer:
        for image, label in zip(x, y, strict=True):
            feature = {
                "x": px.train.Feature(float_list=px.train.FloatList(value=image)),
                "y": px.train.Feature(int64_list=px.train.Int64List(value=[int(label)])),
            }
            example = px.train.Example(features=px.train.Features(feature=feature))
            writer.write(example.SerializeToString())


# -- steps with input ------------------------------------------------------------------------------


def overlap_dataset(waits: bool) -> px.data.Dataset:
    """Endless batches that take a few milliseconds each: to wait for, or to compute."""
    x, y = common.arrays(OVERLAP_ROWS)

    def fetched(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(OVERLAP_WAIT)  # as a slow disk or a network would
        return x, y

    def normalised(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = x - x.mean(axis=1, keepdims=True)
        return x / (x.std(axis=1, keepdims=True) + np.float32(1e-6)), y

    rows = px.data.Dataset.from_tensor_slices((x, y.astype(np.int32)))
    batches = rows.shuffle(OVERLAP_ROWS, seed=1).repeat().batch(OVERLAP_BATCH)
    return batches.map(fetched if waits else normalised)


def overlap(waits: bool, devices: int) -> None:
    """Time input alone, steps alone, and both, with and without reading ahead.

    A command names what to run and how many steps; the answer has its wall-clock and processor time.
    """
    from _mlp import LEARNING_RATE, jax_loss

    if devices == 1:
        os.environ["PJRT_NPROC"] = "1"  # JAX's threads; the input has the other processors
    strategy = phalanx_strategy(devices)
    rng = np.random.default_rng(0)
    sizes = (common.WIDTH, OVERLAP_HIDDEN, OVERLAP_HIDDEN, 10)
    with strategy.scope():
        weights = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            weights.append(px.Variable(0.05 * rng.standard_normal((fan_in, fan_out), np.float32)))
            weights.append(px.Variable(jnp.zeros(fan_out)))
    loss_and_gradients = jax.value_and_grad(jax_loss(OVERLAP_BATCH))

    def replica_step(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, gradients = loss_and_gradients([w.value() for w in weights], x, y)
        gradients = px.get_replica_context().all_reduce("sum", gradients)
        for w, gradient in zip(weights, gradients, strict=True):
            w.assign_sub(LEARNING_RATE * gradient)
        return loss

    @px.function
    def train(x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(replica_step, args=(x, y)), axis=None)

    def distributed(buffer: int) -> Iterator[Any]:
        options = px.InputOptions(experimental_per_replica_buffer_size=buffer)
        return iter(strategy.experimental_distribute_dataset(overlap_dataset(waits), options))

    ahead, on_demand = distributed(1), distributed(0)
    prepared = itertools.cycle([next(ahead) for _ in range(OVERLAP_BATCHES)])

    def input_alone() -> None:
        jax.block_until_ready(next(on_demand))

    def step_alone() -> None:
        train(*next(prepared)).block_until_ready()

    def with_input(batches: Iterator[Any]) -> Callable[[], None]:
        return lambda: train(*next(batches)).block_until_ready()

    run = {
        "input": input_alone,
        "step": step_alone,
        "both, reading ahead": with_input(ahead),
        "both, on demand": with_input(on_demand),
    }
    parent = Parent(versions())
    for command in parent:
        function = run[command["what"]]
        function()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(command["steps"]):
            function()
        parent.say(wall=time.perf_counter() - wall, processor=time.process_time() - processor)


def versions() -> dict[str, str]:
    found = phalanx_versions()
    if importlib.util.find_spec("google_crc32c"):
        found["google-crc32c"] = version("google-crc32c")
    return found


def main(what: str, argument: str) -> None:
    if what == "write":
        write_records(Path(argument))
    elif what == "memory":
        common.serve_memory(versions(), int(argument), for_memory)
    elif what == "overlap":
        overlap(*KINDS[argument])
    else:
        common.serve_pipelines(versions(), pipelines(Path(argument)))


if __name__ == "__main__":
    main(*sys.argv[1:])
