"""What happens to the others when a worker dies, stops or does something else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.cluster.watchdog import EXIT_CODE
from tests.multi_worker import faults
from tests.processes import wait_gone

KNOWN_WITHIN = 5.0  # seconds from a death to the exception on the others


@pytest.fixture
def pair() -> Iterator[px.testing.MultiProcess]:
    with px.testing.MultiProcess(workers=2, env={"PHALANX_DEADLINE": "6"}) as cluster:
        pids = cluster.pids
        yield cluster
    assert wait_gone(pids) == []


def outcome(result: Any) -> tuple[str, str, float]:
    assert result.error is None, result.error
    return result.value


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_death_between_steps(pair: px.testing.MultiProcess, guilty: int, compiled: bool) -> None:
    run = pair.start(faults.timed, 4, compiled, "wait", guilty)
    pair.wait_for_output(guilty, "ready")
    killed = time.time()
    pair.kill(guilty)
    survivor = run.results(timeout=30.0)[1 - guilty]
    kind, text, when = outcome(survivor)
    assert kind == "WorkerLostError", text
    assert f"worker {guilty}" in text
    assert "SIGKILL" in text
    print(f"known after {when - killed:.2f} s")
    assert when - killed < KNOWN_WITHIN


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_death_before_the_strategy_is_made(pair: px.testing.MultiProcess, guilty: int) -> None:
    run = pair.start(faults.timed, 4, False, "before", guilty)
    pair.wait_for_output(guilty, "ready")
    killed = time.time()
    pair.kill(guilty)
    kind, text, when = outcome(run.results(timeout=30.0)[1 - guilty])
    assert kind == "WorkerLostError", text
    assert f"worker {guilty}" in text
    print(f"known after {when - killed:.2f} s")


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_death_while_tracing(pair: px.testing.MultiProcess, guilty: int) -> None:
    run = pair.start(faults.timed, 4, True, "trace", guilty)
    pair.wait_for_output(guilty, "ready")
    killed = time.time()
    pair.kill(guilty)
    kind, text, when = outcome(run.results(timeout=30.0)[1 - guilty])
    assert kind == "WorkerLostError", text
    print(f"known after {when - killed:.2f} s")
    assert when - killed < KNOWN_WITHIN


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_death_amid_collectives(pair: px.testing.MultiProcess, guilty: int) -> None:
    run = pair.start(faults.timed, 10**9, True)
    pair.wait_for_output(guilty, "started")
    killed = time.time()
    pair.kill(guilty)
    kind, text, when = outcome(run.results(timeout=30.0)[1 - guilty])
    assert kind == "WorkerLostError", text
    print(f"known after {when - killed:.2f} s")
    assert when - killed < KNOWN_WITHIN


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("shape", ("float32[2]", "float32[3]")),
        ("dtype", ("float32[2]", "float16[2]")),
        ("order", ("all_gather", "all_reduce")),
    ],
)
def test_different_calls_are_shown_side_by_side(
    pair: px.testing.MultiProcess, fault: str, shown: tuple[str, ...]
) -> None:
    """One worker is inside a known program, in native code, when the other comes with a new one."""
    results = pair.start(faults.as_program, 6, False, fault, guilty=1).results(timeout=60.0)
    kind, text, seconds = outcome(results[0])
    assert kind == "CollectiveMismatchError", text
    for told in (text, results[1].stdout):
        assert all(x in told for x in shown)
        assert "faults.py" in told
    print(f"{fault}: {seconds:.2f} s")


def test_an_exception_reaches_the_others(pair: px.testing.MultiProcess) -> None:
    def raising() -> Any:
        if faults.me() == 0:
            return faults.timed(4, False, "raise", 1)
        try:
            return faults.loop(4, False, "raise", 1)
        except KeyError:  # what Python does at the end of a program
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    results = pair.start(raising).results(timeout=30.0)
    kind, text, _ = outcome(results[0])
    assert kind == "WorkerFailedError"
    assert "KeyError: 'a fault of its own'" in text
    assert "misbehave" in text
    assert "a fault of its own" in results[1].stderr


def test_a_worker_that_ends_early(pair: px.testing.MultiProcess) -> None:
    results = pair.start(faults.as_program, 4, False, "early", guilty=1).results(timeout=60.0)
    kind, text, seconds = outcome(results[0])
    assert kind == "WorkerLostError"
    assert "finished while worker 0 still communicates" in text
    assert seconds < 20.0


def test_workers_that_do_nothing() -> None:
    """Frozen, or in an endless loop: the others say who is late, and end if native code holds them."""
    env = {"PHALANX_DEADLINE": "3"}
    frozen, looping = (px.testing.MultiProcess(workers=2, env=env) for _ in range(2))
    with frozen, looping:
        pids = frozen.pids + looping.pids
        first = frozen.start(faults.timed, 10**9, False)
        second = looping.start(faults.timed, 4, False, "loop", 1)
        frozen.wait_for_output(1, "started")
        frozen.stop(1)
        for cluster, run in ((frozen, first), (looping, second)):
            assert cluster.wait(lambda run=run: 0 in run.replies, 60.0)
            result = run.replies[0].outcome(0, "worker 0")
            kind, text, _ = result.value or ("", result.stderr, 0.0)
            assert kind == "DeadlineExceededError" or result.exit_code == EXIT_CODE
            assert "worker 0 waited for 3 seconds" in text
            assert "worker 1" in text
            cluster.kill(1)
    assert wait_gone(pids) == []
