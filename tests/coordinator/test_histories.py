"""Random faults of workers while closures run: each closure's effect counts once."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from tests.coordinator.jobs import Job

import phalanx as px
from phalanx.coordinator.dispatcher import Dispatcher

WORKERS, SERVERS, CLOSURES = 3, 2, 240


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "known to all tasks of this test")


def cut(random: Random) -> Any:
    """What stands in for `Dispatcher._receive`: some connections end before a report is read."""
    receive = Dispatcher._receive

    def receive_or_cut(self: Dispatcher, worker: int, message: Any) -> None:
        peer = self._peers[worker]
        if peer is not None and random.random() < 0.05:
            peer.connection.close(ConnectionResetError("it was cut"))
        else:
            receive(self, worker, message)

    return receive_or_cut


def run_history(seed: int) -> None:
    """Schedule closures, while workers are lost and come back, and some closures fail."""
    random = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "_receive", cut(Random(seed)))
        run(random)


def run(random: Random) -> None:
    options: dict[str, Any] = {
        "max_staleness": random.choice([None, None, 3]),
        "backup_workers": random.choice([0, 1]),
        "window": random.choice([1, 4, 32]),
    }
    with Job(WORKERS, SERVERS, **options) as job:
        counts = [job.variable(0.0) for _ in range(2 * SERVERS)]
        coordinator = job.coordinator

        @px.function
        def add(x: Any) -> Any:
            for count in counts[: 1 + len(counts) // 2]:
                count.assign_add(1.0)
            return x

        @px.function
        def fail(x: Any) -> Any:
            add(x)
            raise KeyError("on purpose")

        values: list[tuple[int, px.coordinator.RemoteValue]] = []
        raised = 0
        while len(values) < CLOSURES:
            event = random.random()
            up = [i for i in range(WORKERS) if ("worker", i) in job.tasks]
            if event < 0.06 and len(up) > 1:
                job.stop("worker", random.choice(up))
            elif event < 0.12 and len(up) < WORKERS:
                job.start("worker", random.choice([i for i in range(WORKERS) if i not in up]))
            else:
                fn = fail if random.random() < 0.01 else add
                for _ in range(random.randrange(1, 12)):
                    number = len(values)
                    try:
                        values.append((number, coordinator.schedule(fn, args=(np.int32(number),))))
                    except KeyError:
                        raised += 1
        while True:
            try:
                coordinator.join()
                break
            except KeyError:
                raised += 1
        assert coordinator.done()
        done = failed = 0
        for number, value in values:
            try:
                assert int(value.fetch()) == number
                done += 1
            except KeyError:
                failed += 1
            except px.errors.CancelledError:
                pass
        assert raised <= failed
        assert (raised > 0) == (failed > 0)
        totals = [int(c.numpy()) for c in counts]
        half = 1 + len(counts) // 2
        assert totals == [done] * half + [0] * (len(counts) - half)
        assert coordinator.report()["done"] == done


@pytest.mark.parametrize("seed", range(4))
def test_effects_count_once(seed: int) -> None:
    run_history(seed)


@pytest.mark.soak
def test_effects_count_once_for_long() -> None:
    for seed in range(100, 200):
        run_history(seed)
