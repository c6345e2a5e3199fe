"""When a job is over, and how it is ended."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given, strategies as st

from phalanx.job.launch.exit_policy import ElasticExitPolicy, EndReason, ExitPolicy, Patience
from phalanx.job.launch.worker_process import shell_code

INT, TERM, KILL = int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGKILL)
PATIENCE = Patience(peers=3, interrupt=5, terminate=10, kill=5)


def signals_until_over(ending: ExitPolicy, now: float) -> list[tuple[float, int]]:
    """What the processes get if none of them ever ends."""
    sent = []
    while not ending.over(now):
        if signum := ending.signal(now):
            sent.append((now, signum))
        assert ending.deadline is not None
        now = max(now, ending.deadline)
    return sent


def test_all_succeed() -> None:
    ending = ExitPolicy([True, True], PATIENCE)
    ending.exited(0, 0, now=1.0)
    assert not ending.over(1.0)
    assert ending.signal(1.0) == 0
    ending.exited(1, 0, now=2.0)
    assert ending.over(2.0)
    assert ending.exit_code == 0


def test_the_first_failure_decides_and_the_others_get_time() -> None:
    ending = ExitPolicy([True] * 3, PATIENCE)
    ending.exited(2, 7, now=0.0)
    ending.exited(1, 9, now=0.5)
    assert signals_until_over(ending, 0.5) == [(3.5, TERM), (13.5, KILL)]
    ending.exited(0, -KILL, now=14.0)
    assert ending.exit_code == 7
    assert ending.first_failure == 2
    assert ending.by_itself == [False, True, True]


def test_each_process_has_restarts_of_its_own() -> None:
    ending = ExitPolicy([True, False], PATIENCE, restarts=[1, 2])
    for count in (1, 2):
        ending.exited(1, 7, now=0.0)
        assert ending.goes_on(1)
        assert ending.restarted == [0, count]
    ending.exited(1, 7, now=1.0)
    assert not ending.goes_on(1)
    assert ending.reason is EndReason.FAILURE
    ending.exited(0, 8, now=1.0)  # which is not started again: the job ends
    assert ending.over(1.0)
    assert ending.exit_code == 7


def test_who_has_succeeded_is_not_started_again() -> None:
    ending = ExitPolicy([True, False], PATIENCE, restarts=[3, 3])
    ending.exited(1, 0, now=0.0)
    assert not ending.goes_on(1)
    ending.exited(0, 0, now=1.0)
    assert (ending.over(1.0), ending.exit_code, ending.restarted) == (True, 0, [0, 0])


def test_the_job_goes_on_as_long_as_one_of_the_expendable_is_left() -> None:
    ending = ExitPolicy([True, False, False], PATIENCE, expendable=[False, True, True])
    ending.exited(2, 9, now=0.0)
    assert ending.reason is None
    ending.exited(0, 0, now=1.0)
    assert ending.signal(1.0) == TERM
    ending.exited(1, -TERM, now=2.0)
    assert ending.exit_code == 0
    ending = ExitPolicy([True, False, False], PATIENCE, expendable=[False, True, True])
    ending.exited(2, 9, now=0.0)
    ending.exited(1, 4, now=0.0)
    assert ending.reason is EndReason.FAILURE
    assert ending.first_failure == 1


def test_those_who_are_left_have_time_to_finish() -> None:
    ending = ExitPolicy([True, False], Patience(finish=60, kill=5))
    ending.exited(0, 0, now=0.0)
    assert signals_until_over(ending, 0.0) == [(0.0, TERM), (60.0, KILL)]


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (-9, 137), (-6, 134), (255, 255)])
def test_codes_as_a_shell_has_them(code: int, expected: int) -> None:
    ending = ExitPolicy([True], PATIENCE)
    ending.exited(0, code, now=0.0)
    assert ending.exit_code == expected


def test_ctrl_c_becomes_stronger_with_time() -> None:
    ending = ExitPolicy([True], PATIENCE)
    ending.interrupt(INT, now=1.0)
    assert signals_until_over(ending, 1.0) == [(1.0, INT), (6.0, TERM), (16.0, KILL)]
    assert ending.exit_code == 130


def test_ctrl_c_again_is_stronger_at_once() -> None:
    ending = ExitPolicy([True], PATIENCE)
    sent = []
    for now in (1.0, 1.1, 1.2):
        ending.interrupt(INT, now)
        sent.append(ending.signal(now))
    assert sent == [INT, TERM, KILL]


def test_other_signals_begin_with_sigterm() -> None:
    ending = ExitPolicy([True], PATIENCE)
    ending.interrupt(int(signal.SIGHUP), now=0.0)
    assert signals_until_over(ending, 0.0) == [(0.0, TERM), (10.0, KILL)]
    assert ending.exit_code == 129


def test_processes_that_end_well_after_ctrl_c_have_succeeded() -> None:
    ending = ExitPolicy([True, True], PATIENCE)
    ending.interrupt(INT, now=0.0)
    ending.exited(0, 0, now=0.1)
    ending.exited(1, 0, now=0.2)
    assert ending.exit_code == 0


def test_a_failure_before_ctrl_c_keeps_its_code() -> None:
    ending = ExitPolicy([True, True], PATIENCE)
    ending.exited(0, 4, now=0.0)
    ending.interrupt(INT, now=1.0)
    assert ending.signal(1.0) == INT
    ending.exited(1, -INT, now=1.1)
    assert ending.exit_code == 4


def test_timeouts() -> None:
    ending = ExitPolicy([True, True], PATIENCE)
    ending.exited(0, 0, now=1.0)
    ending.timeout(now=5.0)
    assert signals_until_over(ending, 5.0) == [(5.0, TERM), (15.0, KILL)]
    assert ending.exit_code == 124


def test_servers_are_ended_when_the_workers_are_done() -> None:
    ending = ExitPolicy([True, False], PATIENCE)
    ending.exited(0, 0, now=1.0)
    assert not ending.over(1.0)
    assert ending.signal(1.0) == TERM
    ending.exited(1, -TERM, now=1.1)
    assert ending.over(1.1)
    assert ending.exit_code == 0


def test_servers_that_fail_fail_the_job() -> None:
    ending = ExitPolicy([True, False], PATIENCE)
    ending.exited(1, 3, now=0.5)
    ending.exited(0, 0, now=1.0)
    assert ending.exit_code == 3


def test_hurrying_the_end_of_servers_is_no_failure() -> None:
    ending = ExitPolicy([True, False], PATIENCE)
    ending.exited(0, 0, now=1.0)
    assert ending.signal(1.0) == TERM
    ending.interrupt(INT, now=1.1)
    assert ending.signal(1.1) == KILL
    ending.exited(1, -KILL, now=1.2)
    assert ending.exit_code == 0


EVENTS = st.one_of(
    st.tuples(st.just("exit"), st.integers(0, 2), st.sampled_from([0, 0, 1, 3, -9])),
    st.tuples(st.just("interrupt"), st.just(0), st.sampled_from([INT, TERM])),
    st.tuples(st.just("timeout"), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.just(0), st.integers(0, 12)),
)


@given(st.lists(EVENTS, max_size=12), st.lists(st.booleans(), min_size=3, max_size=3))
def test_whatever_happens(events: list[tuple[str, int, int]], essential: list[bool]) -> None:
    ending = ExitPolicy(essential, PATIENCE)
    now, sent = 0.0, []
    for kind, index, value in events:
        now += 0.5
        if kind == "exit" and ending.codes[index] is None:
            ending.exited(index, value, now)
        elif kind == "interrupt":
            ending.interrupt(value, now)
        elif kind == "timeout":
            ending.timeout(now)
        elif kind == "wait":
            now += value
        sent.append(ending.signal(now))
    if ending.reason is not None:  # then it ends, even if no process ever does
        sent += [signum for _, signum in signals_until_over(ending, now)]
    strength = [(INT, TERM, KILL).index(s) for s in sent if s]
    restarted = ending.reason is EndReason.INTERRUPT
    assert restarted or strength == sorted(set(strength))
    assert (ending.exit_code == 0) == ending.succeeded
    if all(code == 0 for code in ending.codes):
        assert ending.exit_code == 0
    if ending.first_failure is not None:
        code = ending.codes[ending.first_failure]
        assert code
        assert ending.exit_code == shell_code(code)


@pytest.mark.parametrize("replaced", [None, 1, 0])
def test_a_job_that_cannot_go_on_has_the_code_of_the_last_worker_that_was_lost(
    replaced: int | None,
) -> None:
    """Whatever becomes of the one that is started in its place."""
    ending = ElasticExitPolicy(2)
    ending.starts(0)
    ending.starts(1)
    ending.exited(1, -9, 1.0)
    if replaced is not None:
        ending.starts(1)
    ending.fail(2.0)
    if replaced is not None:
        ending.exited(1, replaced, 3.0)
    ending.exited(0, 1, 3.0)
    assert (ending.first_failure, ending.exit_code, ending.succeeded) == (1, 137, False)


def test_a_job_of_which_a_worker_was_lost_after_the_training_has_its_code() -> None:
    """Also if others succeed, and another one is lost later, which was not let in any more."""
    ending = ElasticExitPolicy(3)
    for place in range(3):
        ending.starts(place)
    ending.exited(1, -9, 1.0)
    ending.misses(-9)
    ending.exited(2, 143, 2.0)
    ending.exited(0, 0, 3.0)
    assert (ending.reason, ending.exit_code, ending.succeeded) == (None, 137, False)


def test_a_job_for_which_too_few_workers_came_fails_without_one_to_blame() -> None:
    ending = ElasticExitPolicy(2)
    ending.starts(0)
    ending.fail(2.0)
    ending.exited(0, -15, 3.0)
    assert (ending.first_failure, ending.exit_code) == (None, 1)
