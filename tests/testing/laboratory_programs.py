"""Programs for the fault laboratory: one is right, the others have a fault of their own."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import phalanx as px
from phalanx.testing import faults

STEPS = 10
BATCH = 12


def train(folder: str, variant: str = "", steps: int = STEPS) -> None:
    """Add up all numbers of the input, each once, and save every third step."""
    strategy = px.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = px.Variable(jnp.zeros(3), aggregation=px.VariableAggregation.SUM, name="total")
    dataset = px.data.Dataset.range(BATCH * steps).shuffle(1000, seed=3).batch(BATCH)
    data = iter(strategy.experimental_distribute_dataset(dataset))
    objects: dict[str, Any] = {"total": total}
    if variant != "position is not saved":
        objects["data"] = data
    manager = px.train.CheckpointManager(px.train.Checkpoint(**objects), f"{folder}/saved", 3)
    handler = px.experimental.PreemptionCheckpointHandler(None, manager)
    options = px.train.CheckpointOptions(enable_async=variant == "in the background")

    @px.function
    def step(x: Any) -> None:
        def add(x: Any) -> None:
            total.assign_add(jnp.stack([x.sum(), (x**2).sum(), x.max()]).astype(jnp.float32))

        strategy.run(add, args=(x,))

    for batch in data:
        handler.run(step, batch)
        faults.record(examples=batch)
        if handler.total_run_calls % 3 == 0:
            manager.save(options=options)
    manager.sync()
    faults.record(state=total)


def in_two_files(folder: str) -> None:
    """Count, with a checkpoint in two files of its own that are not written together."""
    place = Path(folder)
    done, total = 0, 0
    if (place / "position").exists():
        done = int((place / "position").read_text())
        total = json.loads((place / "total").read_text())
    for i in range(done, 6):
        total += i + 1
        faults.record(examples=[i])
        (place / "total").write_text(json.dumps(total))
        faults.point("between two files")
        (place / "position").write_text(str(i + 1))
    faults.record(state={"total": float(total)})


def leaves_a_child(folder: str) -> None:
    """End, and leave a process in a session of its own behind, without the marks of the job."""
    if os.fork() == 0:
        os.setsid()
        import resource
        import time

        limit = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
        resource.setrlimit(resource.RLIMIT_RTTIME, (limit, limit))
        os.execve("/bin/sleep", ["sleep", "20"], {"PHALANX_FAULTS": os.environ["PHALANX_FAULTS"]})
        time.sleep(0)


ELASTIC_STEPS = 16
_LATE = 12


def train_elastically(folder: str, variant: str = "", steps: int = ELASTIC_STEPS) -> None:
    """A moving sum over batches, for which their order counts, while workers come and go.

    Variants with "saves" save every third step; those with "spread" have state on one worker each,
    which is lost with it.
    """
    place = Path(folder)
    rows = BATCH * steps // 2  # in two epochs

    def train(job: px.train.ElasticContext) -> None:
        strategy = job.strategy
        with strategy.scope():
            total = px.Variable(jnp.zeros(3), aggregation=px.VariableAggregation.MEAN, name="total")
            seen = px.train.Sum()
        job.track(total=total, **({"seen": seen} if "spread" in variant else {}))

        @px.function
        def step(x: Any) -> None:
            def add(x: Any) -> None:
                mine = jnp.stack([x.sum(), (x**2).sum(), (x % 7).sum()]).astype(jnp.float32)
                found = px.get_replica_context().all_reduce("sum", mine)
                total.assign(0.9 * total.value() + found)
                seen.update_state(x.sum().astype(jnp.float32))

            strategy.run(add, args=(x,))

        for batch in job.steps(px.data.Dataset.range(rows).shuffle(rows, seed=1), epochs=2):
            if variant != "records what others do" or job.generation == 1:
                faults.record(examples=batch, epoch=job.epoch)
            if variant == "one behind":
                _fall_apart(job, place / "ahead", lambda: step(batch))
            elif "together" in variant and job.step == 7:
                _come_together(job, place)
            elif job.step == _LATE and "was killed" in job.reason and "has come" not in job.reason:
                wait_for(lambda: job.is_ending)  # because of the worker that is started in its place
            step(batch)
        state = {"total": total}
        faults.record(state={**state, "seen": seen.result()} if "spread" in variant else state)

    saving = {"checkpoint_dir": f"{folder}/saved", "save_every": 3} if "saves" in variant else {}
    px.train.elastic(train, batch_size=BATCH, **saving)


def _come_together(job: px.train.ElasticContext, place: Path) -> None:
    """In the first generation, all workers are at a point at the same time."""
    if job.generation == 1:
        (place / f"together {job.rank}").touch()
        wait_for(lambda: len(list(place.glob("together *"))) == job.workers)
        faults.point("together")


def _fall_apart(job: px.train.ElasticContext, ahead: Path, step: Callable[[], None]) -> None:
    """Worker 0 begins step 4 while worker 2 is still in step 3, and then worker 1 may be killed."""
    if job.generation > 1 or job.step not in (3, 4):
        return
    if job.step == 4:
        assert job.rank == 0
        ahead.touch()
    elif job.rank > 0:
        step()  # the step of all; what comes after it never ends on this worker
        wait_for(ahead.exists)
        if job.rank == 1:
            faults.point("ahead")
        wait_for(lambda: job.is_ending)


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what other processes bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        threading.Event().wait(0.01)


def check(verdicts: Sequence[faults.JobVerdict]) -> None:
    """What is wrong with some runs must be nothing."""
    wrong = [f"{x}\n{x.run.schedule.code()}\n{x.run.output[-3000:]}" for x in verdicts if x.violations]
    assert not wrong, "\n\n".join(wrong)
