"""Faults of elastic jobs: workers come and go, and what counts is the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.testing import laboratory_programs as programs

from phalanx.testing import faults
from phalanx.testing.faults import JobFault, JobHistory, JobSchedule, Life

PRELOAD = ["phalanx"]
DEADLINE = 4.0
SLOW = range(40)
WITH_CHECKPOINTS = range(40, 80)
AT_ONCE = 3
SIGUSR1 = "SIGUSR1"


@given(st.integers(0, 10**6))
def test_a_schedule_follows_from_its_seed_and_leaves_one_worker_alone(seed: int) -> None:
    schedule = faults.random_elastic_schedule(seed)
    assert schedule == faults.random_elastic_schedule(seed)
    assert JobSchedule.from_json(schedule.as_json()) == schedule
    assert eval(schedule.code(), {"faults": faults}) == schedule
    assert f"1 to {schedule.workers} workers" in str(schedule)
    hit = [fault.worker for fault in schedule.faults]
    assert len(set(hit)) == len(hit)
    assert set(range(schedule.workers)) - set(hit)


def test_all_kinds_and_phases_come() -> None:
    schedules = [faults.random_elastic_schedule(seed) for seed in range(3400)]
    found = {(fault.kind, fault.phase) for x in schedules for fault in x.faults}
    assert found == {
        (kind, phase) for kind, phases in faults.ELASTIC_FAULTS.items() for phase in phases
    }
    assert any(fault.worker >= x.workers for x in schedules for fault in x.faults)


def test_no_more_workers_leave_than_the_job_can_do_without() -> None:
    for seed in range(200):
        schedule = faults.random_elastic_schedule(seed, 3, least=2, kinds=["notice", "slow"])
        assert schedule.least == 2
        assert sum(fault.kind == "notice" for fault in schedule.faults) <= 1


def test_a_program_without_checkpoints_has_no_faults_of_them() -> None:
    schedules = [faults.random_elastic_schedule(seed, saves=False) for seed in range(1000)]
    found = {(fault.kind, fault.phase) for x in schedules for fault in x.faults}
    assert {x for x, _ in found} == {"kill", "freeze", "slow", "notice", "cut", "clock", "raise"}
    assert {phase for _, phase in found} == {"join", "carry", "input", "step", "record", "end"}
    assert faults.random_elastic_schedule(0, kinds=["full"], saves=False).faults == ()


def test_what_a_schedule_cannot_be() -> None:
    with pytest.raises(ValueError, match="least=3"):
        JobSchedule(0, 2, (), least=3)
    with pytest.raises(ValueError, match=r"kinds.*Received: explode"):
        faults.random_elastic_schedule(0, kinds=["explode"])


# -- what counts ------------------------------------------------------------------------------------


def life(worker: int, *events: tuple[Any, ...]) -> Life:
    """Triples of a moment, an event, and what is known of it."""
    first = {"event": "process", "at": 0.0, "pid": 1, "worker": worker, "address": None}
    return Life(worker, 0, (first, *({"event": name, "at": at, **about} for at, name, about in events)))


def joins(at: float, generation: int, rank: int = 0) -> tuple[Any, ...]:
    return at, "join", {"generation": generation, "rank": rank}


def makes(at: float, generation: int, number: int, *examples: int) -> list[tuple[Any, ...]]:
    about = {"epoch": 0, "examples": list(examples)}
    return [(at, "elastic step", {"generation": generation, "number": number}), (at, "record", about)]


KILL = (2.0, "fault", {"kind": "kill", "worker": 1, "attempt": 0, "seconds": 0.0})
DEAD = life(1, joins(0.5, 1, 1), *makes(1.0, 1, 0, 2), *makes(1.5, 1, 1, 4), KILL)
LOST = {"event": "lost", "at": 2.1, "text": "worker 1 was killed", "code": -9}
ENDED = {"event": "ended", "at": 9.0, "exit_code": 0}


def survived(*later: tuple[Any, ...], launcher: Sequence[Any] = (LOST, ENDED)) -> JobHistory:
    """Two workers make steps 0 and 1 of two examples each; one is killed in the second."""
    alive = life(0, joins(0.5, 1), *makes(1.0, 1, 0, 1), *makes(1.5, 1, 1, 3), joins(3.0, 2), *later)
    return JobHistory((DEAD, alive), tuple(launcher))


def test_what_the_last_generation_made_of_a_step_counts() -> None:
    again = survived(*makes(4.0, 2, 1, 3, 4))
    assert again.applied() == {(0, x): 1 for x in (1, 2, 3, 4)}
    assert faults.job_violations(again) == []
    fault = again.faults()[0]
    assert again.named(*fault) == pytest.approx(0.1)
    assert again.recovered(*fault) == pytest.approx(2.0)
    assert survived(*makes(4.0, 2, 2, 5, 6)).applied() == {(0, x): 1 for x in (1, 2, 3, 4, 5, 6)}


def test_what_is_wrong_is_found() -> None:
    undisturbed = JobHistory((life(0, joins(0.5, 1), *makes(1.0, 1, 0, 1, 2, 3, 4)),), (ENDED,))
    twice = survived(*makes(4.0, 2, 1, 3, 4), *makes(5.0, 2, 2, 4))
    assert faults.job_violations(twice, undisturbed) == ["examples count too often: 4 of epoch 0"]
    lost = survived(*makes(4.0, 2, 1, 3))
    assert faults.job_violations(lost, undisturbed) == ["examples count too seldom: 4 of epoch 0"]
    late = survived(*makes(4.0, 2, 1, 3, 4), launcher=[{**LOST, "at": 30.0}, ENDED])
    assert any("named after 28.0 seconds" in x for x in faults.job_violations(late))
    moved = JobHistory(
        (
            life(7, (0.5, "join", {"generation": 1, "rank": 1, "name": "worker 1"}), KILL),
            *survived(*makes(4.0, 2, 1, 3, 4)).lives[1:],
        ),
        (LOST, ENDED),
    )
    assert moved.named(*moved.faults()[0]) == pytest.approx(0.1)  # it was in the place of worker 1
    silent = survived(*makes(4.0, 2, 1, 3, 4), launcher=[ENDED])
    assert any(
        "kill of worker 1 in attempt 0 was not named" in x for x in faults.job_violations(silent)
    )


def test_an_exception_ends_an_elastic_job_and_must_be_named() -> None:
    raised = (4.5, "fault", {"kind": "raise", "worker": 0, "attempt": 0, "seconds": 0.0})
    failed = {"event": "failed", "at": 4.6, "text": "worker 0 raised InjectedError", "attempt": 2}
    end = {**ENDED, "exit_code": 1}
    again = makes(4.0, 2, 1, 3, 4)
    assert faults.job_violations(survived(*again, raised, launcher=[LOST, failed, end])) == []
    silent = {**failed, "text": "worker 1 ended with exit code 1"}
    found = faults.job_violations(survived(*again, raised, launcher=[LOST, silent, end]))
    assert found == [
        "the job ended with exit code 1: worker 1 ended with exit code 1",
        "the raise of worker 0 in attempt 0 was not named",
    ]
    late = faults.job_violations(survived(*again, raised, launcher=[LOST, {**failed, "at": 14.5}, end]))
    assert late == ["the raise of worker 0 in attempt 0 was named after 10.0 seconds, not 5.0"]


def test_what_is_lost_after_the_training_fails_the_job_by_right() -> None:
    """No worker does again what another has to do when all were released."""
    end = {**ENDED, "exit_code": 137}
    failed = {"event": "failed", "at": 6.2, "text": "not all that follows has been done", "attempt": 2}
    told, kill = (6.0, "released", {}), (6.1, "fault", {**KILL[2], "worker": 0})
    again = makes(4.0, 2, 1, 3, 4)
    assert faults.job_violations(survived(*again, told, kill, launcher=[LOST, failed, end])) == []
    too_early = survived(*again, kill, (6.15, "released", {}), launcher=[LOST, failed, end])
    found, *_ = faults.job_violations(too_early)
    assert "exit code 137: not all that follows" in found


def at_path(at: float, event: str, path: str, digest: int = 1) -> tuple[Any, ...]:
    return at, event, {"path": path, "digest": digest}


SAVED = (at_path(1.0, "save", "a"), at_path(1.1, "committed", "a"))
DAMAGE = (3.5, "fault", {"kind": "corrupt", "worker": 0, "attempt": 0, "seconds": 0.0, "path": "b"})


@pytest.mark.parametrize(
    ("later", "others", "words"),
    [
        ([at_path(4.0, "restored", "b")], [at_path(4.0, "restored", "b")], None),
        ([at_path(4.0, "restored", "b")], [at_path(4.0, "restored", "a")], "different checkpoints"),
        ([at_path(4.0, "restored", "a")], [], "restored a, but b was complete before"),
        ([at_path(4.0, "restored", "b", 7)], [], "not what was committed"),
        ([DAMAGE, at_path(4.0, "restored", "b")], [], "generation 2 restored b, which was damaged"),
        ([DAMAGE, at_path(4.0, "restored", "a")], [], None),
    ],
)
def test_each_generation_restores_the_newest_checkpoint(
    later: list[Any], others: list[Any], words: str | None
) -> None:
    newer = (at_path(2.0, "save", "b"), at_path(2.1, "committed", "b"))
    first = life(0, joins(0.5, 1), *SAVED, *newer, joins(3.0, 2), at_path(3.9, "restore", "b"), *later)
    second = life(1, joins(0.5, 1, 1), joins(3.0, 2, 1), *others)
    found = faults.job_violations(JobHistory((first, second), (ENDED,)))
    assert (found == []) if words is None else any(words in x for x in found), found


# -- real processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def laboratory() -> faults.Laboratory:
    return faults.Laboratory(programs.train_elastically, DEADLINE, {"preload": PRELOAD})


def that(variant: str) -> faults.Laboratory:
    """A laboratory for a variant of the program."""
    program = functools.partial(programs.train_elastically, variant=variant)
    return faults.Laboratory(program, DEADLINE, {"preload": PRELOAD})


def schedules(seeds: range, saves: bool = True) -> list[JobSchedule]:
    how: dict[str, Any] = {"steps": programs.ELASTIC_STEPS, "deadline": DEADLINE, "saves": saves}
    return [faults.random_elastic_schedule(seed, **how) for seed in seeds]


def generations(run: faults.JobRun) -> list[dict[str, Any]]:
    return [dict(x) for x in run.history.launcher if x["event"] == "generation"]


AT_THE_END = "a freeze at the end"
IN_THE_EXIT = "a notice when the program has ended"
CHOSEN = {
    "a kill in a step, and one that joins": (JobFault("kill", worker=1, step=4, after=0.002),),
    "a kill of the first, and of one that takes its state over": (
        JobFault("kill", worker=0, phase="record", step=3),
        JobFault("kill", worker=2, phase="carry"),
    ),
    "a kill before all have met": (JobFault("kill", worker=0, phase="join"),),
    "a freeze that is too long": (JobFault("freeze", worker=1, step=3, seconds=2 * DEADLINE),),
    AT_THE_END: (JobFault("freeze", worker=1, phase="end", seconds=10 * DEADLINE),),
    IN_THE_EXIT: (JobFault("notice", worker=0, phase="end", step=2),),
    "a notice to the one with the state, and a slow start": (
        JobFault("notice", worker=0, step=3, signal=SIGUSR1),
        JobFault("slow", worker=1, phase="join", seconds=0.5),
    ),
    "a worker without a network, and a clock that jumps": (
        JobFault("cut", worker=1, step=4, after=0.002),
        JobFault("clock", worker=0, step=2, seconds=86400.0 * 400),
    ),
}


def test_some_schedules(laboratory: faults.Laboratory) -> None:
    chosen = [JobSchedule(i, 2, found, least=1) for i, found in enumerate(CHOSEN.values())]
    verdicts = list(laboratory.play_all(chosen, AT_ONCE))
    programs.check(verdicts)
    for name, verdict in zip(CHOSEN, verdicts, strict=True):
        assert len(verdict.happened) == len(CHOSEN[name]), name
        killed = [x["text"] for x in verdict.run.history.launcher if x["event"] == "kills"]
        assert bool(killed) == (name == AT_THE_END), killed
        assert (len(generations(verdict.run)) > 1) == (name != IN_THE_EXIT), name
        assert verdict.run.exit_code == 0, name
    assert "killed by signal 9" in generations(verdicts[0].run)[1]["text"]
    assert "worker 0 wants to leave" in generations(verdicts[-2].run)[1]["text"]
    assert generations(verdicts[-1].run)[1]["text"] == "worker 1 had lost its connections"
    assert len(generations(verdicts[-1].run)[1]["members"]) == 2
    assert verdicts[0].recovery is not None
    (verdict,) = laboratory.play_all(
        [JobSchedule(9, 2, (JobFault("raise", worker=1, step=4),), least=1)]
    )
    programs.check([verdict])
    assert verdict.outcome == "ended by the exception"
    (failed,) = [x["text"] for x in verdict.run.history.launcher if x["event"] == "failed"]
    assert re.match(r"worker 1 \(pid \d+ on .*\) raised .*InjectedError", failed)


TOGETHER = tuple(JobFault("kill", worker=worker, phase="together") for worker in (0, 1))


def test_some_schedules_with_checkpoints() -> None:
    """Parts of the state are on one worker each, so that it comes from the newest whole checkpoint."""
    full = JobFault("full", worker=1, phase="write", step=1)
    lost = JobFault("kill", worker=1, phase="record", step=14)  # two are whole by then
    damaged = JobFault("corrupt", worker=0, phase="join", step=1)
    chosen = [
        JobSchedule(i, 2, found, least=2) for i, found in enumerate([(full, lost, damaged), TOGETHER])
    ]
    verdicts = list(that("saves, spread, together").play_all(chosen, AT_ONCE))
    programs.check(verdicts)
    for schedule, verdict in zip(chosen, verdicts, strict=True):
        history = verdict.run.history
        assert len(verdict.happened) == len(schedule.faults), verdict.run.output
        assert [len(x["members"]) for x in generations(verdict.run)] == [2, 2]
        assert [life.worker for life, _ in history.all("restored")] != []
    assert "No space left on device" in verdicts[0].run.output


@pytest.mark.soak
def test_a_state_that_none_has_is_an_error_and_not_a_new_beginning() -> None:
    schedule = JobSchedule(0, 2, TOGETHER, least=1)
    program = functools.partial(programs.train_elastically, variant="together")
    played = faults.run(program, schedule, deadline=DEADLINE, preload=PRELOAD)
    assert played.exit_code == 137  # of the last worker that was lost, also if another is in its place
    (failed,) = [x["text"] for x in played.history.launcher if x["event"] == "failed"]
    assert "The state of the training is lost" in failed
    assert all(f"worker {x} was killed by signal 9 (SIGKILL)" in failed for x in (0, 1))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SLOW.start, SLOW.stop, 10))
def test_many_schedules(laboratory: faults.Laboratory, first: int) -> None:
    programs.check(list(laboratory.play_all(schedules(range(first, first + 10), False), AT_ONCE)))


@pytest.mark.soak
@pytest.mark.parametrize("variant", ["saves", "saves, spread"])
@pytest.mark.parametrize("first", range(WITH_CHECKPOINTS.start, WITH_CHECKPOINTS.stop, 20))
def test_many_schedules_with_checkpoints(variant: str, first: int) -> None:
    programs.check(list(that(variant).play_all(schedules(range(first, first + 20)), AT_ONCE)))


def test_survivors_that_are_one_step_apart(laboratory: faults.Laboratory) -> None:
    """Worker 0 has begun step 4 and worker 2 is in step 3 when worker 1 is killed: none is repeated."""
    program = functools.partial(programs.train_elastically, variant="one behind")
    schedule = JobSchedule(0, 3, (JobFault("kill", worker=1, phase="ahead"),), least=1)
    played = faults.run(program, schedule, deadline=30.0, restarts=0, preload=PRELOAD)
    expected = laboratory.undisturbed(2).history
    assert faults.job_violations(played.history, expected, deadline=30.0) == [], played.output
    assert [(x["step"], len(x["members"])) for x in generations(played)] == [(0, 3), (4, 2)]
    first = [x["number"] for life, x in played.history.all("elastic step") if x["generation"] == 2]
    assert min(first) == 4


@pytest.mark.soak
def test_examples_without_a_record_are_found(laboratory: faults.Laboratory) -> None:
    verdict = that("records what others do").play(
        JobSchedule(0, 2, CHOSEN["a kill in a step, and one that joins"], least=1)
    )
    assert any("count too seldom" in problem for problem in verdict.violations), verdict
