"""Training that survives its own sabotage.

    phalanx run -n 2 --restarts 3 examples/sabotage.py --checkpoints /tmp/sabotage --sabotage
    phalanx chaos -n 2 --schedules 10 examples/sabotage.py --checkpoints {folder}

In the first form the program kills a worker in its 8th step, asks for its own preemption in the 14th,
and damages its newest checkpoint before the last restart. It still ends with the model of a run
without faults, and has seen every example once in each epoch. In the second form `phalanx chaos`
chooses what goes wrong.

Four things make it so: the input's position is in the checkpoint, a `PreemptionCheckpointHandler` saves
when a notice comes, `restore_or_initialize` passes over damaged checkpoints, and the launcher starts
the workers again. The calls of `faults.record` are for the laboratory, and do nothing elsewhere.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px
from phalanx.testing import faults

ROWS, BATCH, EPOCHS = 96, 12, 3


def data() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 3.0, 0.5], np.float32) + 0.25
    return np.arange(ROWS), x, y.astype(np.float32)


def sabotage(step: int, rank: int, folder: Path) -> None:
    """What real clusters do, once each."""
    attempt = int(os.environ.get("PHALANX_RESTART", "0"))
    if (attempt, step, rank) == (0, 8, 1):
        os.kill(os.getpid(), signal.SIGKILL)  # a machine is gone
    if (attempt, step, rank) == (1, 14, 0):
        os.kill(os.getpid(), signal.SIGTERM)  # another one will be taken away
    if (attempt, step, rank) == (2, 20, 0):
        newest = px.train.latest_checkpoint(str(folder))
        assert newest is not None
        os.truncate(Path(newest, "arrays-00000"), 10)  # a disk forgets
        raise RuntimeError("a bug that comes now and then")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", required=True, help="a folder that all workers see")
    parser.add_argument("--sabotage", action="store_true", help="let things go wrong")
    options = parser.parse_args()
    folder = Path(options.checkpoints)

    strategy = px.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id or 0
    with strategy.scope():
        w = px.Variable(jnp.zeros(4), name="w")
        b = px.Variable(0.0, name="b")
        optimizer = px.train.Optimizer(optax.adam(0.1))
        optimizer.build([w, b])
    dataset = px.data.Dataset.from_tensor_slices(data()).shuffle(ROWS, seed=1).batch(BATCH)
    batches = iter(strategy.experimental_distribute_dataset(dataset.repeat(EPOCHS)))
    checkpoint = px.train.Checkpoint(w=w, b=b, optimizer=optimizer, batches=batches)
    manager = px.train.CheckpointManager(checkpoint, str(folder), max_to_keep=3)
    handler = px.experimental.PreemptionCheckpointHandler(None, manager)  # restores

    @px.function
    def step(x: Any, y: Any) -> Any:
        def on_replica(x: jax.Array, y: jax.Array) -> jax.Array:
            def loss() -> jax.Array:
                errors = (x @ w.value() + b.value() - y) ** 2
                return px.nn.compute_average_loss(errors, global_batch_size=BATCH)

            value, gradients = px.value_and_grad(loss, [w, b])()
            optimizer.apply_gradients(zip(gradients, [w, b], strict=True))
            return value

        return strategy.reduce("sum", strategy.run(on_replica, args=(x, y)), axis=None)

    loss = float("nan")
    for number, x, y in batches:
        loss = float(handler.run(step, x, y))
        done = handler.total_run_calls
        faults.record(examples=number, epoch=(done - 1) // (ROWS // BATCH))
        if done % 4 == 0:
            manager.save()
        if options.sabotage:
            sabotage(done, rank, folder)
    faults.record(state={"w": w, "b": b})
    if rank == 0:
        found = " ".join(f"{v:.4f}" for v in [*w.numpy(), float(b)])
        print(f"{handler.total_run_calls} steps, loss {loss:.6f}, model {found}")


if __name__ == "__main__":
    main()
