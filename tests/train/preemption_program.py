"""A training of two workers that is preempted and started again; run by test_preemption."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import phalanx as px


class Notice(logging.Handler):
    """Waits until the handler says that there is a notice."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Look at a message."""
        if "notice" in record.getMessage():
            self.seen.set()


def tell_launcher(number: int) -> None:
    """Send the launcher a signal, and wait until this worker has heard of it."""
    notice, log = Notice(), logging.getLogger("phalanx")
    log.addHandler(notice)
    os.kill(os.getppid(), number)
    assert notice.seen.wait(60.0)
    log.removeHandler(notice)


def main(folder: str, steps: int, noticed: str) -> None:
    """Train; when `noticed` says so, get a notice in the middle."""
    strategy = px.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id or 0
    with strategy.scope():
        total = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
    dataset = px.data.Dataset.range(4 * steps).shuffle(100, seed=3).batch(4)
    data = iter(strategy.experimental_distribute_dataset(dataset))
    checkpoint = px.train.Checkpoint(total=total, data=data)
    handler = px.experimental.PreemptionCheckpointHandler(None, checkpoint, folder)
    log = Path(folder, f"seen-{rank}-{os.environ['PHALANX_RESTART']}.jsonl")
    lines = []

    @px.function
    def step(x: Any) -> Any:
        def add(x: Any) -> None:
            total.assign_add(x.sum().astype(jnp.float32))

        return strategy.run(add, args=(x,))

    for batch in data:  # an element that was taken for a call that is not made counts as not taken
        handler.run(step, batch)
        mine = [int(v) for part in strategy.experimental_local_results(batch) for v in part]
        lines.append(json.dumps([handler.total_run_calls, mine]))
        log.write_text("\n".join(lines))
        if handler.total_run_calls == 3 and os.environ["PHALANX_RESTART"] == "0":
            if noticed == "one worker" and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            elif noticed == "launcher" and rank == 0:
                tell_launcher(signal.SIGUSR1)
            elif noticed == "whole job" and rank == 0:
                tell_launcher(signal.SIGTERM)
    if rank == 0:
        print("total", float(total), "after", handler.total_run_calls, "calls", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
