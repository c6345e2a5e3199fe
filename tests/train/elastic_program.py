"""A training whose workers come and go, and who writes down what it has seen; run by test_elastic."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

EXAMPLES, BATCH = 42, 6  # 7 batches
NUMBER = int(os.environ.get("PHALANX_DOOR_NUMBER", "0"))
ORIGIN = jnp.zeros(4)  # starts JAX before the workers meet


def examples() -> tuple[np.ndarray, np.ndarray]:
    """What is learned."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 4)).astype(np.float32)
    return x, np.sin(x @ rng.normal(size=4).astype(np.float32))


def dataset() -> px.data.Dataset:
    """The examples with their numbers, in another order in each epoch."""
    x, y = examples()
    numbers = np.arange(EXAMPLES)
    return px.data.Dataset.from_tensor_slices((numbers, x, y)).shuffle(EXAMPLES, seed=1)


def wait_for(condition: Any) -> None:
    """Wait for what other processes bring about."""
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        threading.Event().wait(0.01)


class Deeds:
    """What goes wrong, and when: {"number@step": deed}, each once."""

    def __init__(self, plan: dict[str, str], folder: Path) -> None:
        self._plan, self._folder = plan, folder

    def before(self, job: Any) -> None:
        """Before a step."""
        deed = self._plan.get(f"{NUMBER}@{job.step}")
        mark = self._folder / f"{NUMBER}@{job.step}.done"
        if deed is None or mark.exists():
            return
        mark.touch()
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "notice":
            os.kill(os.getpid(), signal.SIGTERM)
        if deed == "keep":
            KEPT.append(jnp.ones(3))
        if deed == "until stop":
            wait_for(lambda: job.is_ending)


KEPT: list[Any] = []


class Lingering:
    """Input whose thread holds an array when the workers change, until JAX is asked what is alive."""

    def __init__(self) -> None:
        self._count, self._ask = itertools.count(), jax.live_arrays
        self._holds, self._asked = threading.Event(), threading.Event()
        jax.live_arrays = self._live_arrays

    def __call__(self, *example: Any) -> Any:
        """What is mapped over the examples; the fifth batch takes long."""
        if next(self._count) == 4 * BATCH:
            held = jnp.ones(5)
            self._holds.set()
            wait_for(self._asked.is_set)
            del held
        return example

    def _live_arrays(self, *args: Any) -> Any:
        wait_for(self._holds.is_set)
        alive = self._ask(*args)
        self._asked.set()
        return alive


def main(folder: Path, plan: dict[str, str], epochs: int, options: dict[str, Any]) -> None:
    """Train; the last line is the weights."""
    if NUMBER >= 3:  # a replacement: let the others form a generation without it first
        wait_for((folder / "0@9.done").exists)
    with open(folder / f"{os.getpid()}.jsonl", "a", buffering=1) as history:
        metric_wanted = options.pop("metric", False)
        deeds = Deeds(plan, folder)
        ignored = [Exception] if f"{NUMBER}@errors" in plan else []
        data = dataset()
        if f"{NUMBER}@input" in plan and "PHALANX_CARRIED" not in os.environ:
            data = data.map(Lingering())

        def train(job: Any) -> list[float]:
            strategy = job.strategy
            with strategy.scope():
                w = px.Variable(ORIGIN)
                optimizer = px.train.Optimizer(optax.adam(0.05))
                optimizer.build([w])
                metric = px.train.Sum()
            tracked = {"metric": metric} if metric_wanted else {}
            kept = job.track(w=w, optimizer=optimizer, tree={"seen": jnp.zeros(())}, **tracked)

            def replica_step(numbers: Any, x: Any, y: Any) -> Any:
                def loss() -> Any:
                    losses = (x @ (w.value() - ORIGIN) - y) ** 2
                    return px.nn.compute_average_loss(losses, global_batch_size=job.batch_size)

                metric.update_state(jnp.ones(x.shape[0]))
                _, gradients = px.value_and_grad(loss, [w])()
                optimizer.apply_gradients(zip(gradients, [w], strict=True))
                return jnp.sum(numbers)

            @px.function
            def step(tree: Any, *batch: Any) -> Any:
                parts = strategy.run(replica_step, args=batch)
                return {"seen": tree["seen"] + strategy.reduce("SUM", parts, axis=None)}

            for numbers, x, y in job.steps(data, epochs=epochs):
                mine = [int(i) for part in strategy.experimental_local_results(numbers) for i in part]
                about = [job.generation, job.workers, job.step, job.epoch, mine, time.time()]
                history.write(json.dumps(about) + "\n")
                deeds.before(job)
                with contextlib.suppress(*ignored):
                    kept.tree = step(kept.tree, numbers, x, y)
            about = [np.asarray(w.value()).tolist(), float(metric.result()), float(kept.tree["seen"])]
            history.write(json.dumps(["end", *about]) + "\n")
            return np.asarray(w.value()).tolist()

        px.train.elastic(train, batch_size=BATCH, **options)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Path(given["folder"]), given["plan"], given["epochs"], given["options"])
