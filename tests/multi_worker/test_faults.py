"""What happens to the others when a worker dies, stops or does something else."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.runtime.deadlines import STUCK_EXIT_CODE
from tests.multi_worker import faults
from tests.processes import wait_gone

KNOWN_WITHIN = 5.0  # seconds from a death or a difference to the exception on the others
DEADLINE = 3

Cluster = px.testing.MultiProcess


@contextlib.contextmanager
def started_cluster(workers: int = 3, devices: int = 1, deadline: float = 20) -> Iterator[Cluster]:
    env = {"PHALANX_DEADLINE": str(deadline)}
    preload = ["phalanx", faults.__name__]
    with Cluster(workers=workers, devices=devices, env=env, preload=preload) as opened:
        pids = opened.pids
        yield opened
    assert wait_gone(pids) == [], "no process is left"


def wait_until(cluster: Cluster, run: Any, worker: int, text: str) -> None:
    """Wait until a worker has said something, and not until it has ended."""
    cluster.wait(lambda: text in cluster.stdout(worker) or worker in run.replies, 60.0)
    assert text in cluster.stdout(worker), run.replies


def outcomes(results: list[Any], guilty: int) -> list[faults.Outcome]:
    """What the others have raised; all of them still run."""
    others = [result for result in results if result.worker != guilty]
    for result in others:
        assert result.error is None, result.error
    return [result.value for result in others]


def played(fn: Callable[..., Any], *args: Any, **shape: Any) -> list[Any]:
    """What becomes of the workers of a new cluster that run a function."""
    with started_cluster(**shape) as cluster:
        return cluster.start(fn, *args).results(timeout=60.0)


def some(names: str, cases: Iterable[tuple[Any, ...]], often: Callable[..., bool]) -> Any:
    """Runs all cases with the stress tests, and else those that are wanted often."""
    soak = pytest.mark.soak
    marked = [pytest.param(*case, marks=[] if often(*case) else [soak]) for case in cases]
    return pytest.mark.parametrize(tuple(names.split()), marked)


three = some("guilty", [(0,), (1,), (2,)], lambda guilty: guilty == 1)

# -- deaths ---------------------------------------------------------------------------------------


PHASES = [
    ("before", False, 1),
    ("trace", True, 1),
    ("compile", True, 1),
    ("input", True, 1),
    ("between", False, 1),
    ("between", True, 2),
    ("step", False, 1),
    ("step", True, 1),
    ("step", True, 2),
]


@some(
    "phase compiled devices guilty",
    [(*phase, guilty) for phase in PHASES for guilty in range(3)],
    lambda *case: case[:3] == ("step", True, 1) or PHASES.index(case[:3]) % 3 == case[3],
)
def test_a_death(phase: str, compiled: bool, devices: int, guilty: int) -> None:
    with started_cluster(devices=devices) as cluster:
        run = cluster.start(faults.caught, 10**9, compiled, phase, guilty)
        wait_until(cluster, run, guilty, "ready" if phase in faults.HELD else "started")
        killed = time.time()
        cluster.kill(guilty)
        told = outcomes(run.results(timeout=30.0), guilty)
    for kind, text, when in told:
        assert kind == "WorkerLostError", text
        assert re.match(rf"worker {guilty} .*was killed by signal 9 \(SIGKILL\)", text), text
        assert ("before it joined" in text) == (phase == "before")
        if phase in ("between", "step"):  # the input is read ahead, before any program
            assert "It was at " in text
            assert "faults.py:" in text
        assert when - killed < KNOWN_WITHIN
    assert len({text for _, text, _ in told}) == 1


def test_a_death_is_named_where_steps_return_early() -> None:
    guilty = 1
    with started_cluster() as cluster:
        run = cluster.start(faults.unread, guilty)
        wait_until(cluster, run, guilty, "ready")
        killed = time.time()
        cluster.kill(guilty)
        for kind, text, when in outcomes(run.results(timeout=30.0), guilty):
            assert kind == "WorkerLostError", text
            assert re.match(rf"worker {guilty} .*was killed by signal 9 \(SIGKILL\)", text), text
            assert when - killed < KNOWN_WITHIN


@three
def test_a_death_at_the_end(guilty: int) -> None:
    """The others have done their work, and do not wait for the one that will not come."""
    with started_cluster() as cluster:
        run = cluster.start(faults.to_the_end, True, guilty)
        wait_until(cluster, run, guilty, "ready")
        killed = time.time()
        cluster.kill(guilty)
        for when in outcomes(run.results(timeout=30.0), guilty):
            assert when - killed < KNOWN_WITHIN
        assert cluster.hub.failure is not None
        assert f"worker {guilty} " in cluster.hub.failure.text


# -- differences ----------------------------------------------------------------------------------

SHOWN = {
    ("shape", False): ("all_reduce SUM of float32[2]", "all_reduce SUM of float32[3]"),
    ("dtype", False): ("of float32[2]", "of float16[2]"),
    ("order", False): ("all_gather along 0 of ", "all_reduce SUM of "),
    ("shape", True): ("compiled function <lambda> of float32[6]", "<lambda> of float32[9]"),
    ("dtype", True): ("of float32[6]", "of float16[6]"),
    ("order", True): ("all_gather along 0 of ", "compiled function <lambda> of "),
}
FAULTS = ("shape", "dtype", "order")


def check_mismatch(results: list[Any], fault: str, compiled: bool, guilty: int) -> None:
    """All workers live on, and have raised the same within seconds."""
    told = outcomes(results, guilty=-1)
    times = [when for _, _, when in told]
    for kind, text, _ in told:
        assert kind == "CollectiveMismatchError", text
        lines = text.splitlines()
        assert all(any(shown in line for line in lines) for shown in SHOWN[fault, compiled]), text
        assert any(line.startswith(f"  worker {guilty}: ") and "faults.py:" in line for line in lines)
    assert max(times) - min(times) < KNOWN_WITHIN
    assert len({text for _, text, _ in told}) == 1


@some(
    "fault workers devices",
    itertools.product(FAULTS, (2, 3), (1, 2)),
    lambda fault, workers, devices: fault == "shape" or workers == devices + 1,
)
def test_different_calls_are_shown_side_by_side(fault: str, workers: int, devices: int) -> None:
    """Others are inside a known program, in native code, when one comes with a new one."""
    guilty = workers - 1
    results = played(faults.caught, 6, False, fault, guilty, workers=workers, devices=devices)
    check_mismatch(results, fault, False, guilty)


@some(
    "fault guilty",
    itertools.product(FAULTS, (0, 1)),
    lambda fault, guilty: FAULTS.index(fault) % 2 == guilty,
)
def test_whoever_differs_is_named(fault: str, guilty: int) -> None:
    check_mismatch(played(faults.caught, 6, True, fault, guilty), fault, True, guilty)


# -- exceptions, and ends that come too early -------------------------------------------------------


@three
def test_an_exception_reaches_the_others(guilty: int) -> None:
    results = played(faults.as_program, 4, False, "raise", guilty)
    for kind, text, _ in outcomes(results, guilty):
        assert kind == "WorkerFailedError"
        assert text.startswith(f"worker {guilty} ")
        assert "KeyError: 'a fault of its own'" in text
        assert "in misbehave" in text
    assert results[guilty].exit_code == 1
    assert "a fault of its own" in results[guilty].stderr


@three
def test_an_exit_code_reaches_the_others(guilty: int) -> None:
    results = played(faults.as_program, 4, False, "exit", guilty)
    for kind, text, _ in outcomes(results, guilty):
        assert kind == "WorkerLostError"
        assert re.match(rf"worker {guilty} .*ended with exit code 3", text), text


@three
def test_a_worker_that_ends_early(guilty: int) -> None:
    begun = time.time()
    results = played(faults.as_program, 4, False, "early", guilty)
    for kind, text, when in outcomes(results, guilty):
        assert kind == "WorkerLostError"
        assert re.match(rf"worker {guilty} .*finished while worker \d still communicates, at ", text)
        assert "faults.py:" in text
        assert when - begun < 4 * KNOWN_WITHIN
    assert results[guilty].exit_code == 0


# -- workers that do nothing ------------------------------------------------------------------------


def test_workers_that_do_nothing() -> None:
    """Frozen, or in an endless loop: all others raise at the deadline, and know who is late."""
    with contextlib.ExitStack() as stack:
        frozen = [stack.enter_context(started_cluster(deadline=DEADLINE)) for _ in range(3)]
        looping = stack.enter_context(started_cluster(2, 2, deadline=DEADLINE))
        runs = []
        for guilty, cluster in enumerate(frozen):  # one by one: all compiling at once takes too long
            runs.append(cluster.start(faults.caught, 10**9, bool(guilty % 2)))
            wait_until(cluster, runs[guilty], guilty, "started")
            cluster.stop(guilty)
        stuck = looping.start(faults.caught, 4, False, "loop", 1)
        for guilty, cluster, run in (*zip(range(3), frozen, runs, strict=True), (1, looping, stuck)):
            others = [i for i in range(len(cluster.names)) if i != guilty]
            assert cluster.wait(functools.partial(all_ended, run, others), 60.0)
            told = [run.replies[i].outcome(i, cluster.names[i]) for i in others]
            assert any(result.value for result in told)
            for result in told:
                assert result.error is None, result.error
                kind, text, _ = result.value
                assert kind == "DeadlineExceededError", text
                assert re.search(rf"worker \d waited for {DEADLINE} seconds at .*faults.py:", text), (
                    text
                )
                assert re.search(rf"Late: worker {guilty} ", text), text
        for guilty, (cluster, run) in enumerate(zip(frozen, runs, strict=True)):
            cluster.cont(guilty)
            result = run.results(timeout=30.0)[guilty]
            if result.exit_code == STUCK_EXIT_CODE:  # gloo has not given its thread back
                assert "hangs in native code although the job has failed" in str(result.error)
                continue
            assert result.error is None, result.error
            assert result.value[0] == "DeadlineExceededError"
        looping.kill(1)


def test_a_program_that_never_comes_back_is_left() -> None:
    """gloo may wait forever although the job has failed. The worker goes on, with its old state."""
    with contextlib.ExitStack() as stack:  # both executors wait at the same time
        clusters = [stack.enter_context(started_cluster(2, deadline=DEADLINE)) for _ in range(2)]
        runs = [c.start(faults.left_in_native_code, bool(i), 1) for i, c in enumerate(clusters)]
        for cluster, run in zip(clusters, runs, strict=True):
            wait_until(cluster, run, 1, "ready")
            cluster.stop(1)
        for cluster, run in zip(clusters, runs, strict=True):
            assert cluster.wait(functools.partial(all_ended, run, [0]), 60.0)
            cluster.kill(1)
            kind, text, weights = outcomes(run.results(timeout=30.0), guilty=1)[0]
            assert kind == "DeadlineExceededError", text
            assert "Late: worker 1 " in text
            assert weights == [5.0, 5.0, 5.0]
            assert cluster.start(faults.me).results(timeout=30.0)[0].value == 0, "it still answers"


def test_a_call_has_a_deadline_of_its_own() -> None:
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(started_cluster(2, deadline=50)) for _ in range(2)]
        runs = [c.start(faults.impatient_call, bool(i), 1) for i, c in enumerate(clusters)]
        for cluster, run in zip(clusters, runs, strict=True):
            wait_until(cluster, run, 1, "ready")
            assert cluster.wait(functools.partial(all_ended, run, [0]), 20.0)
            cluster.kill(1)
            kind, text, _ = outcomes(run.results(timeout=30.0), guilty=1)[0]
            assert kind == "DeadlineExceededError", text
            assert "worker 0 waited for 2 seconds" in text
            assert "Late: worker 1 " in text


def test_an_interrupt_ends_the_wait_for_a_late_worker() -> None:
    with started_cluster(2) as cluster:
        run = cluster.start(faults.interrupted_wait, 1)
        wait_until(cluster, run, 1, "ready")
        wait_until(cluster, run, 0, "waits")
        assert cluster.wait(lambda: has_waited(cluster.hub.table().rows[0]), 30.0)
        os.kill(cluster.pids[0], signal.SIGINT)
        wait_until(cluster, run, 0, "left with [3.0, 3.0, 3.0]")
        os.kill(cluster.pids[1], signal.SIGUSR2)
        # The one that left has made one step less: it has left the step that the other one made.
        found = [result.value or result for result in run.results(timeout=30.0)]
        assert found == [[5.0] * 3, [7.0] * 3]


def has_waited(row: dict[str, Any]) -> bool:
    """Whether a worker is in the same wait for a moment already."""
    return row["phase"] == "wait" and row["seconds"] >= 0.5


def all_ended(run: Any, workers: list[int]) -> bool:
    return all(i in run.replies for i in workers)
