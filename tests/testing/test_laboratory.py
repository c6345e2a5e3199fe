"""The fault laboratory: schedules are values, checkers find what is wrong, and shrinking keeps it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.testing import laboratory_programs as programs

import phalanx as px
from phalanx.testing import faults
from phalanx.testing.faults import JobFault, JobHistory, JobSchedule, Life

PRELOAD = ["phalanx"]
DEADLINE = 4.0
QUICK = range(20)
SLOW = range(20, 220)
AT_ONCE = 4


# -- schedules are values ---------------------------------------------------------------------------


@given(st.integers(0, 10**6))
def test_a_schedule_follows_from_its_seed_and_can_be_written_down(seed: int) -> None:
    schedule = faults.random_job_schedule(seed)
    assert schedule == faults.random_job_schedule(seed)
    assert JobSchedule.from_json(schedule.as_json()) == schedule
    assert eval(schedule.code(), {"faults": faults}) == schedule
    assert f"seed {seed}" in str(schedule)
    assert 2 <= schedule.workers <= 4
    for fault in schedule.faults:
        assert fault.phase in faults.JOB_FAULTS[fault.kind]
        assert fault.attempt <= schedule.attempts(3.0)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5))
def test_short_programs_have_schedules_too(seed: int, steps: int, most: int) -> None:
    schedule = faults.random_job_schedule(seed, steps=steps, most=most)
    assert all(fault.step < max(3, steps) for fault in schedule.faults)
    elastic = faults.random_elastic_schedule(seed, steps=steps, most=most)
    assert all(fault.step < max(3, steps) for fault in elastic.faults)


def test_all_kinds_and_phases_come() -> None:
    schedules = [faults.random_job_schedule(seed) for seed in range(1000)]
    found = {(fault.kind, fault.phase) for x in schedules for fault in x.faults}
    assert found == {(kind, phase) for kind, phases in faults.JOB_FAULTS.items() for phase in phases}


def test_faults_happen_where_the_program_comes_to() -> None:
    """That is found out in the undisturbed run, so that `phalanx chaos` knows it."""
    events = [(1.0, "step", {"step": 0}), (2.0, "fault", {"step": 1})]
    events += [(3.0 + i, "between files", {"step": i}) for i in range(3)]
    phases = JobHistory((life(0, 0, *events), life(1, 0, *events[:3]))).phases()
    assert phases == {"between files": 3, "step": 1}
    for schedule, more in (
        (faults.random_job_schedule, set()),
        (faults.random_elastic_schedule, {"join", "carry"}),
    ):
        found = [x for seed in range(1000) for x in schedule(seed, phases=phases).faults]
        assert {x.phase for x in found} == {"step", "between files", *more}
        assert {x.step for x in found if x.phase == "step"} == {0}
        mine = [x for x in found if x.phase == "between files"]
        assert {x.kind for x in mine} == {"kill", "freeze", "raise", "slow"}
        assert {x.step for x in mine} >= {0, 1}
        assert max(x.step for x in mine) <= 2
        with pytest.raises(ValueError, match=r"faults\.point.*Received: full, in a .* to step"):
            schedule(0, kinds=["full"], phases={"step": 3})
    saves = {"save": 2, "write": 2, "commit": 2, "start": 1}
    found = [x for seed in range(100) for x in faults.random_job_schedule(seed, phases=saves).faults]
    assert {"corrupt", "truncate", "full"} <= {x.kind for x in found}
    assert {x.phase for x in found} == {"save", "write", "commit", "start", "restore"}


def test_what_a_schedule_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"kind.*Received: 'explode'"):
        JobFault("explode")
    with pytest.raises(ValueError, match="SIGTERM or SIGUSR1"):
        JobFault("notice", signal="SIGHUP")
    with pytest.raises(ValueError, match="count from 0"):
        JobFault("kill", step=-1)
    with pytest.raises(ValueError, match="2 workers"):
        JobSchedule(0, 2, (JobFault("kill", worker=2),))
    with pytest.raises(ValueError, match="kinds"):
        faults.random_job_schedule(0, kinds=["explode"])


# -- shrinking --------------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
def test_a_smaller_schedule_still_fails(seed: int) -> None:
    schedule = faults.random_job_schedule(seed, most=5)
    kind = schedule.faults[-1].kind

    def fails(x: JobSchedule) -> bool:
        return any(fault.kind == kind for fault in x.faults)

    smallest = faults.shrink(schedule, fails, most=1000)
    assert fails(smallest)
    (fault,) = smallest.faults
    assert (fault.step, fault.worker, fault.after, smallest.workers) == (0, 0, 0.0, 1)


def test_faults_move_to_earlier_attempts_with_those_that_are_left_out() -> None:
    late = JobFault("raise", attempt=1, step=2)
    schedule = JobSchedule(0, 1, (JobFault("kill"), late))
    asked: list[JobSchedule] = []
    faults.shrink(schedule, lambda x: bool(asked.append(x)), most=2)
    assert asked[0].faults == (JobFault("raise", attempt=0, step=2),)
    assert asked[1].faults == (JobFault("kill"),)


# -- checkers can fail ------------------------------------------------------------------------------


def life(worker: int, attempt: int, *events: tuple[Any, ...]) -> Life:
    """A life from triples: a moment, an event, and what is known of it."""
    at = events[0][0] if events else 9.0
    first = {"event": "process", "at": at, "pid": 1, "worker": worker, "address": None}
    told = [{"event": name, "at": at, **about} for at, name, about in events]
    return Life(worker, attempt, (first, *told))


def ended(exit_code: int = 0, **about: Any) -> dict[str, Any]:
    return {"event": "ended", "at": 99.0, "exit_code": exit_code, **about}


def applied(at: float, *examples: int, **about: Any) -> tuple[Any, ...]:
    return at, "record", {"epoch": 0, "examples": list(examples), **about}


def at_path(at: float, event: str, path: str, digest: int = 1) -> tuple[Any, ...]:
    return at, event, {"path": path, "digest": digest} if event != "save" else {"path": path}


KILL = {"kind": "kill", "worker": 0, "attempt": 0, "seconds": 0.0}
NAMED = {"event": "failed", "at": 5.1, "attempt": 0, "text": "worker 0 was killed", "exit_code": 137}


def restarted(*later: tuple[Any, ...], launcher: Sequence[Any] = (NAMED, ended())) -> JobHistory:
    """A worker that saves after two examples, applies a third, is killed, and comes back."""
    before = life(
        0,
        0,
        applied(1.0, 1, 2),
        at_path(2.0, "save", "a"),
        at_path(3.0, "committed", "a"),
        applied(4.0, 3),
        (5.0, "fault", KILL),
    )
    return JobHistory((before, life(0, 1, *later)), tuple(launcher))


GOOD = restarted(
    at_path(6.0, "restore", "a"), at_path(6.5, "restored", "a"), applied(7.0, 3), applied(8.0, 4)
)


def test_what_was_applied_after_the_checkpoint_does_not_count() -> None:
    assert GOOD.applied() == {(0, x): 1 for x in (1, 2, 3, 4)}
    assert faults.job_violations(GOOD) == []
    assert GOOD.named(GOOD.lives[0], GOOD.faults()[0][1]) == pytest.approx(0.1)
    assert GOOD.recovered(GOOD.lives[0], GOOD.faults()[0][1]) == pytest.approx(2.0)
    assert [json.loads(line)["event"] for line in GOOD.lines().splitlines()][-1] == "ended"


UNDISTURBED = JobHistory((life(0, 0, applied(1.0, 1, 2, 3, 4)),), (ended(),))
STATE = {"w": {"shape": [1], "checksum": 5, "sums": [2.0, 2.0, 2.0]}}
OTHER = {"w": {"shape": [1], "checksum": 6, "sums": [2.1, 2.1, 2.1]}}


@pytest.mark.parametrize(
    ("history", "undisturbed", "words"),
    [
        (restarted(applied(7.0, 3)), None, "attempt 1 restored nothing, but a was"),
        (
            restarted(at_path(6.0, "restore", "a"), at_path(6.5, "restored", "a"), applied(7.0, 2)),
            None,
            "count too often: 2 of epoch 0",
        ),
        (
            restarted(at_path(6.0, "restore", "a"), at_path(6.5, "restored", "a"), applied(7.0, 4)),
            UNDISTURBED,
            "count too seldom: 3 of epoch 0",
        ),
        (restarted(applied(7.0, 3), launcher=[NAMED, ended(3)]), None, "exit code 3: worker 0 was"),
        (restarted(applied(7.0, 3), launcher=[NAMED]), None, "did not come to its end"),
        (restarted(applied(7.0, 3), launcher=[ended()]), None, "kill of worker 0 .* not named"),
        (
            restarted(applied(7.0, 3), launcher=[{**NAMED, "at": 50.0}, ended()]),
            None,
            "named after 45.0 seconds",
        ),
        (
            restarted(applied(7.0, 3), launcher=[NAMED, {**NAMED, "text": " "}, ended()]),
            None,
            "without a word",
        ),
        (
            restarted(at_path(6.0, "restore", "old"), at_path(6.5, "restored", "old")),
            None,
            "restored old, but a was complete",
        ),
        (
            restarted(at_path(6.0, "restore", "a"), at_path(6.5, "restored", "a", 2)),
            None,
            "not what was committed",
        ),
        (
            restarted(
                (5.5, "fault", {**KILL, "kind": "corrupt", "path": "a"}),
                at_path(6.0, "restore", "a"),
                at_path(6.5, "restored", "a"),
            ),
            None,
            "which was damaged",
        ),
        (
            JobHistory(
                (
                    life(0, 0, at_path(1.0, "restored", "a")),
                    life(1, 0, at_path(1.0, "restored", "a", 2)),
                ),
                (ended(),),
            ),
            None,
            "restored different checkpoints",
        ),
        (JobHistory((), (ended(checkpoints={"a": "too short"}),)), None, "a is not whole: too short"),
        (
            restarted(at_path(6.0, "restored", "a"), launcher=[NAMED, ended(checkpoints={})]),
            UNDISTURBED,
            "a was complete, and is gone at the end",
        ),
        (JobHistory((), (ended(orphans=[7]),)), None, "process 7 is left"),
        (JobHistory((), (ended(listening=["h:1"]),)), None, "listens at h:1"),
        (JobHistory((), (ended(left=["x.partial"]),)), None, "x.partial is left"),
        (
            JobHistory((life(0, 0, applied(1.0, 1, state=OTHER)),), (ended(),)),
            JobHistory((life(0, 0, applied(1.0, 1, state=STATE)),), (ended(),)),
            "final state of worker 0 differs",
        ),
        (
            JobHistory((life(0, 0, applied(1.0, 1)),), (ended(),)),
            JobHistory((life(0, 0, applied(1.0, 1, state=STATE)),), (ended(),)),
            "no worker has told its final state",
        ),
    ],
)
def test_each_checker_can_fail(history: JobHistory, undisturbed: JobHistory | None, words: str) -> None:
    found = faults.job_violations(history, undisturbed)
    assert any(re.search(words, problem) for problem in found), found


def at_once(named: int, kind: str = "raise") -> JobHistory:
    """Two workers fail within a fifth of a second, and the job is told of one of them."""
    faults_of = [
        life(i, 0, (5.0 + i / 5, "fault", {**KILL, "worker": i, "kind": kind})) for i in (0, 1)
    ]
    text = f"worker {named} raised an error"
    return JobHistory(
        (*faults_of, life(0, 1), life(1, 1)), ({**NAMED, "at": 5.5, "text": text}, ended())
    )


def test_one_of_two_exceptions_at_once_is_named() -> None:
    assert not [x for x in faults.job_violations(at_once(named=0)) if "named" in x]
    assert not [x for x in faults.job_violations(at_once(named=1)) if "named" in x]
    assert [x for x in faults.job_violations(at_once(named=2)) if "named" in x]
    assert [x for x in faults.job_violations(at_once(named=1, kind="kill")) if "named" in x]


def test_a_worker_that_takes_long_at_its_end_is_waited_for() -> None:
    """It is heard of, so that none needs to name it; one that is silent must be named."""

    def violations(kind: str) -> list[str]:
        late = {**KILL, "kind": kind, "phase": "end", "seconds": 8.0}
        lives = (life(0, 0, (5.0, "fault", late)), life(1, 0, (6.0, "fault", {**KILL, "worker": 1})))
        told = {**NAMED, "at": 6.1, "text": "worker 1 was killed"}
        history = JobHistory((*lives, life(0, 1), life(1, 1)), (told, ended()))
        return [x for x in faults.job_violations(history) if "named" in x]

    assert violations("slow") == []
    assert violations("freeze") == ["the freeze of worker 0 in attempt 0 was not named"]


def test_a_checkpoint_that_was_removed_is_not_lost() -> None:
    """By its manager, or by the program, which removes it also if nothing goes wrong."""
    end = [NAMED, ended(checkpoints={})]
    back = at_path(6.0, "restore", "a"), at_path(6.5, "restored", "a"), applied(7.0, 3), applied(8.0, 4)
    by_manager = restarted(*back, (9.0, "removed", {"path": "a"}), launcher=end)
    assert faults.job_violations(by_manager, UNDISTURBED) == []
    undisturbed = JobHistory(
        (life(0, 0, applied(1.0, 1, 2, 3, 4), at_path(2.0, "committed", "b")),),
        (ended(checkpoints={}),),
    )
    assert faults.job_violations(restarted(*back, launcher=end), undisturbed) == []


def test_a_damaged_checkpoint_may_have_been_written_anew() -> None:
    """A process that is killed after it has given a checkpoint its name tells nobody of it."""
    damage = (6.0, "fault", {**KILL, "kind": "corrupt", "path": "a"})
    back = (at_path(9.0, "restore", "a"), at_path(9.5, "restored", "a"), applied(9.6, 3, 4))

    def violations(*middle: tuple[float, str, dict[str, Any]]) -> list[str]:
        first = restarted(applied(5.2, 3)).lives[:1]
        lives = (*first, life(0, 1, *middle), life(0, 2, *back))
        return list(faults.job_violations(JobHistory(lives, (NAMED, ended()))))

    damaged = "attempt 2 restored a, which was damaged"
    assert damaged not in violations(damage, at_path(7.0, "save", "a"), (7.1, "fault", KILL))
    assert damaged in violations(damage, (7.1, "fault", KILL))
    assert damaged in violations(damage, at_path(7.0, "save", "a"), at_path(8.0, "save", "b"))
    assert damaged in violations(at_path(5.5, "save", "a"), damage)


# -- real processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def laboratory() -> faults.Laboratory:
    return faults.Laboratory(programs.train, DEADLINE, {"preload": PRELOAD})


def schedules(seeds: range, workers: int | None = None, most: int = 3) -> list[JobSchedule]:
    return [
        faults.random_job_schedule(seed, workers, steps=programs.STEPS, most=most, deadline=DEADLINE)
        for seed in seeds
    ]


def test_some_schedules(laboratory: faults.Laboratory) -> None:
    chosen = [
        schedule
        for seeds, workers in ((QUICK[:15], 2), (QUICK[15:19], 3), (QUICK[19:], 4))
        for schedule in schedules(seeds, workers, most=1)
    ]
    verdicts = list(laboratory.play_all(chosen, AT_ONCE))
    programs.check(verdicts)
    assert sum(len(verdict.happened) for verdict in verdicts) >= 0.8 * len(verdicts)
    assert sum(verdict.run.history.attempts - 1 for verdict in verdicts) >= len(verdicts) // 2


def test_a_worker_that_is_frozen_at_its_end_is_ended_and_named(laboratory: faults.Laboratory) -> None:
    """Before it has told the others that it comes to its end, and after that."""
    chosen = [
        JobSchedule(i, 2, (JobFault("freeze", worker=1, phase="end", step=i, seconds=10 * DEADLINE),))
        for i in range(2)
    ]
    verdicts = list(laboratory.play_all(chosen, AT_ONCE))
    programs.check(verdicts)
    for verdict in verdicts:
        assert verdict.run.history.attempts == 2
        (killed,) = [x["text"] for x in verdict.run.history.launcher if x["event"] == "kills"]
        assert killed.startswith("worker 1: Nothing has been heard of worker 1 (pid ")
        assert "for 5 seconds" in killed


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SLOW.start, SLOW.stop, 20))
def test_many_schedules(laboratory: faults.Laboratory, first: int) -> None:
    programs.check(list(laboratory.play_all(schedules(range(first, first + 20)), AT_ONCE)))


def test_a_position_that_is_not_saved_is_found() -> None:
    program = functools.partial(programs.train, variant="position is not saved")
    broken = faults.Laboratory(program, DEADLINE, {"preload": PRELOAD})
    verdict = broken.play(JobSchedule(0, 2, (JobFault("kill", worker=1, step=8),)))
    assert any("count too often" in problem for problem in verdict.violations), verdict
    assert any("final state" in problem for problem in verdict.violations), verdict


def test_a_checkpoint_that_is_not_atomic_is_found_and_its_schedule_shrinks() -> None:
    broken = faults.Laboratory(programs.in_two_files, DEADLINE, {"preload": PRELOAD})
    harmless = JobFault("kill", phase="record", step=4)
    deadly = JobFault("kill", phase="between two files", step=1, attempt=1)
    verdict = broken.play(JobSchedule(0, 1, (harmless, deadly)))
    assert any("final state" in problem for problem in verdict.violations), verdict
    smallest = broken.shrink(verdict.run.schedule, most=4)
    assert smallest.run.schedule.faults == (JobFault("kill", phase="between two files", step=1),)


def test_a_process_that_is_left_is_found() -> None:
    played = faults.run(programs.leaves_a_child, JobSchedule(0, 1), preload=PRELOAD)
    (problem,) = faults.job_violations(played.history)
    assert "is left" in problem


def test_programs_that_cannot_be_played(tmp_path: Any) -> None:
    with pytest.raises(px.errors.NotFoundError, match="no such file"):
        faults.run(str(tmp_path / "train.py"), JobSchedule())
    with pytest.raises(ValueError, match="which program"):
        faults.run([], JobSchedule())
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    broken = faults.Laboratory(str(script), DEADLINE, {"preload": PRELOAD})
    with pytest.raises(px.errors.FailedPreconditionError, match="exit code 3"):
        broken.play(JobSchedule(0, 1))
