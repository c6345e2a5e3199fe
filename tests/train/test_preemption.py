"""Preemption: one notice, one step on all workers, one checkpoint, and the same training after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.processes import wait_until

import phalanx as px
from phalanx.train.termination import StopAgreement

PROGRAM = str(Path(__file__).with_name("preemption_program.py"))
Config = px.experimental.TerminationConfig


@given(
    size=st.integers(1, 4),
    moves=st.lists(
        st.tuples(st.sampled_from(["step", "notice", "deliver"]), st.integers(0, 3)), max_size=60
    ),
)
def test_workers_stop_after_the_same_step(size: int, moves: list[tuple[str, int]]) -> None:
    """Whatever the order of steps, notices and messages: none makes a step more than another."""
    workers = [StopAgreement(rank, size) for rank in range(size)]
    letters: list[tuple[int, int, int]] = []  # from, to, what

    def tell(rank: int, promise: int | None) -> None:
        if promise is not None:
            letters.extend((rank, other, promise) for other in range(size) if other != rank)

    def move(kind: str, rank: int) -> None:
        worker = workers[rank % size]
        if kind == "notice":
            tell(worker.rank, worker.notice())
        elif kind == "deliver" and letters:
            sender, receiver, promise = letters.pop(rank % len(letters))
            tell(receiver, workers[receiver].told(sender, promise))
        elif kind == "step" and worker.may_begin:
            worker.begin()

    for kind, rank in moves:
        move(kind, rank)
    move("notice", 0)
    while letters:
        move("deliver", 0)
    for rank in range(size):
        while workers[rank].may_begin:
            move("step", rank)
    assert {worker.started for worker in workers} == {workers[0].last}
    assert all(worker.is_over for worker in workers)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    """Makes handlers, and closes them."""
    handlers = []

    def make(**config: Any) -> tuple[px.Variable, px.experimental.PreemptionCheckpointHandler]:
        step = px.Variable(0)
        handler = px.experimental.PreemptionCheckpointHandler(
            None, px.train.Checkpoint(step=step), str(tmp_path), Config(**config)
        )
        handlers.append(handler)
        return step, handler

    yield make
    for handler in handlers:
        handler.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_after_one_more_step(made: Any, number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    step, handler = made()
    handler.run(step.assign_add, 1)
    signal.raise_signal(number)
    handler.run(step.assign_add, 1)
    with pytest.raises(SystemExit) as ended:
        handler.run(step.assign_add, 1)
    assert ended.value.code == 143
    handler.close()
    assert signal.getsignal(number) is before

    again, other = made()
    assert (int(again), other.total_run_calls) == (2, 2)
    other.run(again.assign_add, 1)
    assert (int(again), other.total_run_calls) == (3, 3)


def test_a_watch_function_and_functions_that_save_and_end(made: Any) -> None:
    done: list[Any] = []
    noticed = [False]
    _, handler = made(
        termination_watcher_fn=lambda: noticed[0],
        save_fn=lambda *args: done.append(args),
        exit_fn=lambda: done.append("exit"),
    )
    with handler.watch_preemption_scope():
        handler.save_checkpoint_if_preempted("x")
        noticed[0] = True

        def is_over() -> bool:
            handler.save_checkpoint_if_preempted("x")
            return bool(done)

        wait_until(is_over)
    assert done == [("x",), "exit"]


def test_training_goes_on_in_the_grace_period(made: Any) -> None:
    """With a long grace period the save is not at once; with a short one it comes in time."""
    step, handler = made(grace_period=3600.0)
    handler.notify()
    for _ in range(5):
        handler.run(step.assign_add, 1)
    assert int(step) == 5
    handler.close()
    ended: list[int] = []
    step, handler = made(grace_period=0.5, exit_fn=lambda: ended.append(int(step)))
    handler.notify()

    def is_over() -> bool:
        handler.run(step.assign_add, 1)
        return bool(ended)

    wait_until(is_over)


def test_a_watch_function_that_fails_does_not_end_the_watch(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A question to a cloud may take too long. The next one may find a notice, or a signal may come."""
    asked: list[int] = []

    def watcher() -> bool:
        asked.append(1)
        if len(asked) == 1:
            raise TimeoutError("no answer")
        return True

    ended: list[int] = []
    step, handler = made(
        termination_watcher_fn=watcher, grace_period=0.01, exit_fn=lambda: ended.append(int(step))
    )

    def is_over() -> bool:
        handler.run(step.assign_add, 1)
        return bool(ended)

    wait_until(is_over)
    assert len(asked) == 2
    assert "no answer" in caplog.text


def test_the_element_that_was_taken_for_the_next_call_is_not_lost(tmp_path: Path) -> None:
    def seen(count: int) -> list[int]:
        data = iter(px.data.Dataset.range(6))
        found: list[int] = []
        handler = px.experimental.PreemptionCheckpointHandler(
            None, px.train.Checkpoint(data=data), str(tmp_path)
        )
        try:
            for x in data:
                handler.run(found.append, int(x))
                if len(found) == count:
                    handler.notify()
        except SystemExit:
            pass
        handler.close()
        return found

    assert [seen(1), seen(0)] == [[0, 1], [2, 3, 4, 5]]


def test_what_a_handler_needs(tmp_path: Path) -> None:
    handler = px.experimental.PreemptionCheckpointHandler
    with pytest.raises(TypeError, match="CheckpointManager"):
        handler(None, "x", str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint_dir"):
        handler(None, px.train.Checkpoint(v=px.Variable(0)))
    with pytest.raises(TypeError, match="TerminationConfig"):
        handler(None, px.train.Checkpoint(v=px.Variable(0)), str(tmp_path), {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="exit_fn"):
        Config(exit_fn=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grace_period"):
        Config(grace_period=-1)
    with pytest.raises(TypeError, match="grace_period"):
        Config(grace_period="1")  # type: ignore[arg-type]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PHALANX_DEADLINE": "60"}
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "noticed", ["one worker", "launcher", pytest.param("whole job", marks=pytest.mark.soak)]
)
def test_a_job_goes_on_where_it_was(noticed: str, tmp_path: Path) -> None:
    """Two real workers: every example is seen once, over a preemption and a restart."""
    steps = 8
    command = [sys.executable, "-m", "phalanx", "run", "-n", "2", "--restarts", "1", "--no-progress"]
    command += ["--terminate-grace", "60", PROGRAM, str(tmp_path), str(steps), noticed]
    ended = run(command)
    if noticed == "whole job":  # which its scheduler starts again
        assert ended.returncode == 143, ended.stdout + ended.stderr
        for rank in (0, 1):
            (tmp_path / f"seen-{rank}-0.jsonl").rename(tmp_path / f"first-{rank}")
        ended = run(command)
        for rank in (0, 1):
            (tmp_path / f"seen-{rank}-0.jsonl").rename(tmp_path / f"seen-{rank}-1.jsonl")
            (tmp_path / f"first-{rank}").rename(tmp_path / f"seen-{rank}-0.jsonl")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"total {sum(range(4 * steps)):.1f} after {steps} calls" in ended.stdout
    assert noticed == "whole job" or "143" in ended.stderr + ended.stdout
    lines = {
        (rank, restart): [
            json.loads(line)
            for line in (tmp_path / f"seen-{rank}-{restart}.jsonl").read_text().splitlines()
        ]
        for rank in (0, 1)
        for restart in (0, 1)
    }
    calls = {who: [call for call, _ in found] for who, found in lines.items()}
    assert calls[0, 0] == calls[1, 0]  # both stopped after the same step
    assert calls[0, 0] + calls[0, 1] == list(range(1, steps + 1))
    seen = sorted(x for found in lines.values() for _, mine in found for x in mine)
    assert seen == list(range(4 * steps))
