"""Faults of elastic jobs: workers come and go, and what counts is the same."""

from __future__ import annotations

import functools
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
    schedules = [faults.random_elastic_schedule(seed) for seed in range(500)]
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


def test_what_a_schedule_cannot_be() -> None:
    with pytest.raises(ValueError, match="least=3"):
        JobSchedule(0, 2, (), least=3)
    with pytest.raises(ValueError, match=r"kinds.*Received: raise"):
        faults.random_elastic_schedule(0, kinds=["raise"])


# -- what counts ------------------------------------------------------------------------------------


def life(worker: int, *events: tuple[Any, ...]) -> Life:
    """Triples of a moment, an event, and what is known of it."""
    first = {
        "event": "process",
        "at": 0.0,
        "pid": 1,
        "worker": worker,
        "place": worker,
        "address": None,
    }
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
    silent = survived(*makes(4.0, 2, 1, 3, 4), launcher=[ENDED])
    assert any(
        "kill of worker 1 in attempt 0 was not named" in x for x in faults.job_violations(silent)
    )


# -- real processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def laboratory() -> faults.Laboratory:
    return faults.Laboratory(programs.train_elastically, DEADLINE, {"preload": PRELOAD})


def check(verdicts: Sequence[faults.JobVerdict]) -> None:
    wrong = [f"{x}\n{x.run.schedule.code()}\n{x.run.output[-3000:]}" for x in verdicts if x.violations]
    assert not wrong, "\n\n".join(wrong)


def generations(run: faults.JobRun) -> list[dict[str, Any]]:
    return [dict(x) for x in run.history.launcher if x["event"] == "generation"]


CHOSEN = {
    "a kill in a step, and one that joins": (JobFault("kill", worker=1, step=4, after=0.002),),
    "a kill of the first, and of one that takes its state over": (
        JobFault("kill", worker=0, phase="record", step=3),
        JobFault("kill", worker=2, phase="carry"),
    ),
    "a kill before all have met": (JobFault("kill", worker=0, phase="join"),),
    "a freeze that is too long": (JobFault("freeze", worker=1, step=3, seconds=2 * DEADLINE),),
    "a notice to the one with the state, and a slow start": (
        JobFault("notice", worker=0, step=3, signal=SIGUSR1),
        JobFault("slow", worker=1, phase="join", seconds=0.5),
    ),
}


def test_some_schedules(laboratory: faults.Laboratory) -> None:
    chosen = [JobSchedule(i, 2, found, least=1) for i, found in enumerate(CHOSEN.values())]
    verdicts = list(laboratory.play_all(chosen, AT_ONCE))
    check(verdicts)
    for name, verdict in zip(CHOSEN, verdicts, strict=True):
        assert len(verdict.happened) == len(CHOSEN[name]), name
        assert len(generations(verdict.run)) > 1, name
    assert "killed by signal 9" in generations(verdicts[0].run)[1]["text"]
    assert "worker 0 wants to leave" in generations(verdicts[-1].run)[1]["text"]
    assert verdicts[0].recovery is not None


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SLOW.start, SLOW.stop, 10))
def test_many_schedules(laboratory: faults.Laboratory, first: int) -> None:
    schedules = [
        faults.random_elastic_schedule(seed, steps=programs.ELASTIC_STEPS, deadline=DEADLINE)
        for seed in range(first, first + 10)
    ]
    check(list(laboratory.play_all(schedules, AT_ONCE)))


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
    program = functools.partial(programs.train_elastically, variant="records what others do")
    broken = faults.Laboratory(program, DEADLINE, {"preload": PRELOAD})
    verdict = broken.play(JobSchedule(0, 2, CHOSEN["a kill in a step, and one that joins"], least=1))
    assert any("count too seldom" in problem for problem in verdict.violations), verdict
