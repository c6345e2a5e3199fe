"""A worker of the benchmark of elastic training: trains, writes down when steps end, and dies once.

``python _elastic_child.py phalanx|torch FOLDER``. The last worker kills itself after a number of steps.
"""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import sys
import time
from pathlib import Path

SIZES = (784, 512, 512, 10)
BATCH, DIES_AFTER, STEPS = 96, 20, 30
TORCH_SECONDS = 60.0  # for which ranks wait for each other, so that a start that hangs is tried again


def note(folder: Path, what: str, step: int) -> None:
    """Write down that something has happened now."""
    with open(folder / f"{os.getpid()}.times", "a") as file:
        file.write(f"{time.time()} {what} {step}\n")


def die_once(folder: Path, rank: int, workers: int, step: int) -> None:
    """Kill this process, if it is the last worker and none has died yet."""
    mark = folder / "died"
    if rank == workers - 1 and step == DIES_AFTER and not mark.exists():
        mark.touch()
        note(folder, "death", step)
        os.kill(os.getpid(), signal.SIGKILL)


def phalanx(folder: Path) -> None:
    """Train by `px.train.elastic`; with a checkpoint after each step if the environment asks for it."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import phalanx as px

    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, SIZES[0])).astype(np.float32)
    y = rng.integers(0, SIZES[-1], size=BATCH * STEPS)
    dataset = px.data.Dataset.from_tensor_slices((x, y))
    shapes = list(itertools.pairwise(SIZES))

    def train(job: px.train.ElasticContext) -> None:
        strategy = job.strategy
        with strategy.scope():
            layers = [px.Variable(rng.normal(size=s).astype(np.float32) / 30) for s in shapes]
            optimizer = px.train.Optimizer(optax.adam(0.001))
            optimizer.build(layers)
        job.track(layers=layers, optimizer=optimizer)

        def replica_step(x: jax.Array, y: jax.Array) -> None:
            def loss() -> jax.Array:
                h = x
                for layer in layers[:-1]:
                    h = jnp.tanh(h @ layer.value())
                logits = h @ layers[-1].value()
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
                return px.nn.compute_average_loss(losses, global_batch_size=BATCH)

            _, gradients = px.value_and_grad(loss, layers)()
            optimizer.apply_gradients(zip(gradients, layers, strict=True))

        @px.function
        def step(x: jax.Array, y: jax.Array) -> None:
            strategy.run(replica_step, args=(x, y))

        for x_part, y_part in job.steps(dataset):
            die_once(folder, job.rank, job.workers, job.step)
            step(x_part, y_part)
            np.asarray(layers[0].value())
            note(folder, "step", job.step)

    saving = (
        {"checkpoint_dir": str(folder / "ckpt"), "save_every": 1} if os.environ.get("SAVES") else {}
    )
    px.train.elastic(train, batch_size=BATCH, **saving)


def torch(folder: Path) -> None:
    """Train by DistributedDataParallel over gloo, with a checkpoint after each step."""
    import torch as t
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TORCH_SECONDS))
    rank, workers = dist.get_rank(), dist.get_world_size()
    t.manual_seed(0)
    t.set_num_threads(1)
    layers: list[t.nn.Module] = []
    for before, after in itertools.pairwise(SIZES):
        layers += [t.nn.Linear(before, after, bias=False), t.nn.Tanh()]
    model = DistributedDataParallel(t.nn.Sequential(*layers[:-1]))
    optimizer = t.optim.Adam(model.parameters(), 0.001)
    path = folder / "state.pt"
    begun = 0
    if path.exists():
        state = t.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begun = state["step"]
    x, y = t.randn(BATCH * STEPS, SIZES[0]), t.randint(0, SIZES[-1], (BATCH * STEPS,))
    share = BATCH // workers
    for step in range(begun, STEPS):
        die_once(folder, rank, workers, step)
        rows = slice(step * BATCH + rank * share, step * BATCH + (rank + 1) * share)
        optimizer.zero_grad()
        t.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        note(folder, "step", step)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            t.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    {"phalanx": phalanx, "torch": torch}[sys.argv[1]](Path(sys.argv[2]))
