"""Preemption: one notice, one step on all workers, one checkpoint, and the same training after it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.processes import wait_until

import phalanx as px
from phalanx.train import preemption
from phalanx.train.checkpoints import manager, saving
from phalanx.train.termination import LoopPace, Notices, StopAgreement, training_seconds

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


SECONDS = st.floats(0.0, 1e4)


@given(grace=SECONDS, save=SECONDS, longer=SECONDS, two_steps=SECONDS)
def test_training_leaves_time_for_two_steps_and_two_saves(
    grace: float, save: float, longer: float, two_steps: float
) -> None:
    seconds = training_seconds(grace, save, two_steps)
    assert 0.0 <= seconds <= grace
    assert seconds == 0.0 or seconds + 2 * save + two_steps <= grace + 1e-6
    assert training_seconds(grace, save + longer, two_steps) <= seconds
    assert training_seconds(grace, save, two_steps + longer) <= seconds
    assert training_seconds(grace, None, two_steps) <= training_seconds(grace, 0.0, two_steps)
    assert training_seconds(None, save, two_steps) == 0.0


@given(
    periods=st.lists(st.floats(0.1, 10.0), min_size=6, max_size=40),
    noticed=st.integers(2, 5),
    into=st.floats(0.0, 0.99),
    save=st.floats(0.0, 5.0),
    is_told_by_thread=st.booleans(),
)
def test_the_checkpoint_is_complete_within_the_grace_period(
    periods: list[float], noticed: int, into: float, save: float, is_told_by_thread: bool
) -> None:
    """Steps of any lengths, which are not longer later on: the save ends in time, if it can."""
    known = periods[: noticed + 1]
    later = [min(period, *known[1:]) for period in periods[noticed + 1 :]] + [min(known[1:])] * 1000
    pace, agreement, now = LoopPace(), StopAgreement(0, 1), 0.0
    grace = 30.0 + 4 * save + 2 * max(periods)
    notices = Notices(grace)
    notice = ended = 0.0
    for number, period in enumerate(known + later):
        pace.begin(now)
        if notices.is_noted and notices.seconds_left(now, save, pace.two_steps(now)) <= 0:
            agreement.notice()
        if agreement.is_over:
            ended = now + save
            break
        agreement.begin()
        if number == noticed:
            notice = now + into * period
            notices.note(notice)
        left = notices.seconds_left(now, save, pace.two_steps(now)) if notices.is_noted else period
        if is_told_by_thread and left < period:
            agreement.notice()
        now += period
    assert notice < ended <= notice + grace


def test_the_first_step_counts_as_long_as_it_is_the_only_one() -> None:
    pace = LoopPace()
    assert pace.two_steps(5.0) == 0.0
    pace.begin(5.0)
    assert pace.two_steps(8.0) == 6.0
    pace.begin(65.0)
    assert pace.two_steps(65.0) == 120.0
    pace.begin(66.0)
    assert pace.two_steps(66.0) == 2.0


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


def test_a_notice_after_the_job_has_failed_is_no_error_of_its_own(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training is told of the failure; the thread that would tell the others just ends."""
    _, handler = made()
    asked = threading.Event()

    def announce() -> None:
        asked.set()
        raise px.errors.WorkerLostError("worker 1 died")

    monkeypatch.setattr(handler._stop, "announce", announce)
    signal.raise_signal(signal.SIGTERM)
    assert asked.wait(60)
    wait_until(lambda: all(x.name != "phalanx-preemption" for x in threading.enumerate()))


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


class Clock:
    """Stands in for the clock of handlers and managers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in (preemption, manager):
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now))


class SlowState:
    """A state that takes so many seconds to save."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def state(self) -> int:
        self._clock.now += self._seconds
        return 0

    def restore(self, state: int) -> None:
        """There is nothing to restore."""


@pytest.mark.parametrize(("gap", "save"), [(2.6, 0.0), (0.1, 2.0), (0.1, 4.0), (1.0, 1.0)])
@pytest.mark.parametrize("limit", ["grace_period", "launcher"])
def test_what_is_between_steps_and_saves_is_measured(
    gap: float,
    save: float,
    limit: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The checkpoint is there ten seconds after the notice, or one less if a launcher ends the rest."""
    clock = Clock(monkeypatch)
    if limit == "launcher":
        monkeypatch.setenv("PHALANX_TERMINATE_GRACE", "10")
    objects = px.train.Checkpoint(slow=SlowState(clock, save))
    saver = px.train.CheckpointManager(objects, str(tmp_path), max_to_keep=2)
    ended: list[float] = []
    config = Config(
        grace_period=10.0 if limit == "grace_period" else 30.0,
        exit_fn=lambda: ended.append(clock.now),
    )
    handler = px.experimental.PreemptionCheckpointHandler(None, saver, termination_config=config)
    try:
        for number in range(400):
            handler.run(lambda: None)
            if number == 2:
                saver.save()
                assert saver.save_seconds == pytest.approx(save)
            if number == 5:
                noticed = clock.now
                signal.raise_signal(signal.SIGTERM)
                if limit == "launcher":
                    wait_until(lambda: "--terminate-grace 30" in caplog.text)
            clock.now += gap
            if ended:
                break
    finally:
        handler.close()
    assert 0.0 < ended[0] - noticed <= (10.0 if limit == "grace_period" else 9.0)


def test_other_notices_than_sigterm_have_the_whole_grace_period(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher kills nothing after them. SIGTERM that comes later counts from then on."""
    clock = Clock(monkeypatch)
    monkeypatch.setenv("PHALANX_TERMINATE_GRACE", "10")
    ended: list[float] = []
    step, handler = made(grace_period=100.0, exit_fn=lambda: ended.append(clock.now))
    signal.raise_signal(signal.SIGUSR1)
    for _ in range(40):
        handler.run(step.assign_add, 1)
        clock.now += 1.0
    assert not ended
    signal.raise_signal(signal.SIGTERM)
    for _ in range(8):
        handler.run(step.assign_add, 1)
        clock.now += 1.0
    assert 140.0 < ended[0] <= 149.0


def test_a_save_in_the_background_is_measured_until_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    goes_on = threading.Event()
    perform = saving._perform

    def wait_first(order: saving.Order) -> None:
        assert goes_on.wait(60)
        perform(order)

    monkeypatch.setattr(saving, "_perform", wait_first)
    saver = px.train.CheckpointManager(px.train.Checkpoint(v=px.Variable(0)), str(tmp_path), 1)
    saver.save(options=px.train.CheckpointOptions(enable_async=True))
    assert saver.save_seconds is None
    clock.now += 7.0
    goes_on.set()
    saver.sync()
    assert saver.save_seconds == 7.0


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


@pytest.mark.parametrize("failing", ["the save before", "its callback", "the last save"])
def test_what_fails_once_does_not_cost_the_last_checkpoint(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, errors = os.fsync, []

    def full_once(descriptor: int) -> None:
        if errors:
            raise errors.pop()
        fsync(descriptor)

    def upload() -> None:
        if failing == "its callback":
            raise RuntimeError("no answer")

    monkeypatch.setattr(os, "fsync", full_once)
    step, ended = px.Variable(0), []
    saver = px.train.CheckpointManager(px.train.Checkpoint(step=step), str(tmp_path), 3)
    config = Config(exit_fn=lambda: ended.append(int(step)))
    handler = px.experimental.PreemptionCheckpointHandler(None, saver, termination_config=config)
    options = px.train.CheckpointOptions(experimental_write_callbacks=[upload], enable_async=True)
    try:
        handler.run(step.assign_add, 1)
        if failing == "the save before":
            errors.append(OSError(errno.ENOSPC, "No space left on device"))
        saver.save(options=options)
        wait_until(lambda: not saver.checkpoint.is_saving)
        handler.notify()
        handler.run(step.assign_add, 1)
        if failing == "the last save":
            errors.append(OSError(errno.ENOSPC, "No space left on device"))
        handler.run(step.assign_add, 1)
    finally:
        handler.close()
    assert (ended, errors) == ([2], [])
    assert px.train.load_variable(saver.latest_checkpoint, "step") == 2


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
