"""The state as a pure state machine, in every order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phalanx import errors
from phalanx.job.hub.descriptions import Failure, Task
from phalanx.job.hub.job_state import JobState
from phalanx.job.hub.program_order import CODE, UNKNOWN
from phalanx.job.hub.stack_requests import SILENT_PATIENCE, STACK_PATIENCE
from phalanx.net.framing import Limits, Message, encode


def tasks(count):
    return [Task("worker", i, f"host{i}:2222") for i in range(count)]


def join(rank, **about):
    common = {"pid": 100 + rank, "host": f"h{rank}", "phalanx": "1", "jax": "2", "cluster": "c"}
    return {"type": "join", "task_type": "worker", "task_id": rank, **common, **about}


class Job:
    """The state of a job with peers 0, 1, … for the ranks, and everything that they were sent."""

    def __init__(self, count, joined=None, **about):
        self.state = JobState(tasks(count))
        self.now = 0.0
        self.inbox = {peer: [] for peer in range(100)}
        for rank in range(count if joined is None else joined):
            self.say(rank, join(rank, **about))

    def take(self, out):
        for peer, message in out:
            self.inbox[peer].append(message)
        return out

    def say(self, peer, message):
        return self.take(self.state.handle(peer, message, self.now))

    def got(self, peer, kind):
        return [m for m in self.inbox[peer] if m["type"] == kind]

    def failures(self, peer):
        return [m["text"] for m in self.got(peer, "failure")]


# -- joining ---------------------------------------------------------------------------------------


def test_all_are_told_when_all_have_joined():
    job = Job(3, joined=2)
    assert not job.state.is_ready
    assert [str(t) for t in job.state.missing()] == ["worker 2"]
    assert job.got(0, "ready") == []
    job.say(2, join(2))
    for peer in range(3):
        (ready,) = job.got(peer, "ready")
        assert [m["worker"] for m in ready["members"]] == ["worker 0", "worker 1", "worker 2"]
        (welcome,) = job.got(peer, "welcome")
        assert welcome == {"type": "welcome", "rank": peer, "size": 3, "name": f"worker {peer}"}
    assert [m["missing"] for m in job.got(0, "joined")] == [
        ["worker 1", "worker 2"],
        ["worker 2"],
        [],
    ]


def test_two_processes_with_one_task_fail_while_the_job_starts():
    job = Job(3, joined=2)
    job.say(50, join(1, pid=999))
    for peer in (0, 1, 50):
        (text,) = job.failures(peer)
        assert "Two processes are worker 1: pid 101 on h1, and pid 999 on h1" in text
    assert isinstance(job.state.failure.error(), errors.DuplicateTaskError)


def test_a_stray_process_does_not_harm_a_job_that_runs():
    job = Job(2)
    job.say(50, join(1, pid=999))
    assert len(job.failures(50)) == 1
    assert job.state.failure is None


def test_a_task_that_is_not_in_the_job():
    job = Job(2, joined=1)
    job.say(50, join(7))
    (text,) = job.failures(0)
    assert "worker 7 (pid 107 on h7) is not in this job, which has worker 0, worker 1" in text


@pytest.mark.parametrize(
    ("about", "error", "words"),
    [
        (
            {"jax": "0.9"},
            errors.VersionMismatchError,
            "versions of jax: worker 0 (pid 100 on h0) has 2",
        ),
        ({"phalanx": "0"}, errors.VersionMismatchError, "different versions of phalanx"),
        ({"cluster": "other"}, errors.ClusterEnvironmentError, "describe the cluster differently"),
    ],
)
def test_workers_must_be_alike(about, error, words):
    job = Job(3, joined=1)
    job.say(1, join(1, **about))
    assert [words in text for peer in (0, 1) for text in job.failures(peer)] == [True, True]
    assert isinstance(job.state.failure.error(), error)
    job.say(2, join(2))
    assert len(job.failures(2)) == 1, "who comes later is told too"


def test_a_worker_that_joins_with_a_problem_never_makes_the_job_ready():
    job = Job(2, joined=1)
    job.say(1, join(1, problem=Failure("cluster", "Port 1 is in use.", "worker 1").as_dict()))
    assert job.failures(0) == job.failures(1) == ["Port 1 is in use."]
    assert job.got(0, "ready") == job.got(1, "ready") == []


def test_another_python_is_no_failure():
    job = Job(1)
    assert job.state.failure is None
    job = Job(2, joined=1, python="3.11")
    job.say(1, join(1, python="3.12"))
    assert job.state.failure is None


def test_the_deadline_of_the_start_names_the_missing():
    job = Job(3, joined=2)
    job.say(0, {"type": "deadline", "site": "the start", "seconds": 60})
    for peer in (0, 1):
        job.say(peer, {"type": "stack", "request": 1, "text": "?"})
    job.now = STACK_PATIENCE + 1
    job.take(job.state.tick(job.now))
    (text,) = job.failures(1)
    assert "1 of 3 workers did not join within 60 seconds. Missing: worker 2 (host2:2222)" in text
    assert isinstance(job.state.failure.error(), errors.DeadlineExceededError)


# -- ends ------------------------------------------------------------------------------------------


def test_a_member_that_dies_is_named_to_the_others():
    job = Job(3)
    job.say(1, {"type": "status", "phase": "input", "step": 3, "sequence": 9, "site": "train.py:7"})
    job.take(job.state.lost(1, 1.0))
    expected = (
        "worker 1 (pid 101 on h1) died: its connection closed without a goodbye while in phase "
        "'input'. It was at train.py:7."
    )
    assert job.failures(0) == job.failures(2) == [expected]
    assert job.failures(1) == []
    assert isinstance(job.state.failure.error(), errors.WorkerLostError)


def test_the_launcher_knows_the_cause():
    job = Job(2)
    job.take(job.state.lost(1, 1.0, "was killed by signal 9 (SIGKILL)"))
    assert "worker 1 (pid 101 on h1) was killed by signal 9 (SIGKILL)" in job.failures(0)[0]


def test_leaving_is_no_failure():
    job = Job(2)
    job.say(1, {"type": "leave", "request": 5})
    assert job.got(1, "heard") == [{"type": "heard", "request": 5}]
    job.take(job.state.lost(1, 1.0))
    assert job.state.failure is None
    assert not job.state.is_over
    job.say(0, {"type": "leave"})
    assert job.state.is_over


def test_a_program_that_never_joins_fails_nobody():
    job = Job(2, joined=0)
    for task in tasks(2):
        job.take(job.state.exited(task, 0, 0.0))
    assert job.state.failure is None
    assert job.state.is_over


@pytest.mark.parametrize("order", ["join first", "exit first"])
def test_one_that_ends_without_joining_fails_those_that_wait(order):
    job = Job(2, joined=0)
    steps = [lambda: job.say(0, join(0)), lambda: job.take(job.state.exited(tasks(2)[1], 0, 0.0))]
    for step in steps if order == "join first" else steps[::-1]:
        step()
    assert job.failures(0) == ["worker 1 ended with exit code 0 before it joined the others."]


def test_an_exit_code_after_leaving_is_a_failure():
    job = Job(2)
    job.say(1, {"type": "leave"})
    job.take(job.state.exited(tasks(2)[1], 3, 0.0))
    assert job.failures(0) == ["worker 1 (pid 101 on h1) ended with exit code 3."]


def test_the_first_failure_counts():
    job = Job(3)
    job.say(1, {"type": "fail", "kind": "raised", "text": "boom", "request": 8})
    assert job.got(1, "heard") == [{"type": "heard", "request": 8}]
    job.take(job.state.lost(1, 1.0))
    job.say(2, {"type": "fail", "kind": "raised", "text": "an echo"})
    assert job.failures(0) == job.failures(2) == ["boom"]


# -- exchanges and signatures ----------------------------------------------------------------------


def test_an_exchange_waits_for_all_and_goes_on_without_those_who_left():
    job = Job(3)
    job.say(0, {"type": "post", "name": "a", "value": 1})
    job.say(2, {"type": "post", "name": "a", "value": [3]})
    assert job.got(0, "exchanged") == []
    job.say(1, {"type": "leave"})
    assert job.got(0, "exchanged") == [{"type": "exchanged", "name": "a", "values": [1, None, [3]]}]


def sign(sequence, digest, site="train.py:1"):
    details = {"operation": "all_reduce", "arrays": [f"float32[{digest}]"], "site": site}
    return {"type": "sign", "sequence": sequence, "digest": digest, "details": details}


def test_all_agree():
    job = Job(2)
    job.say(0, sign(1, "2"))
    assert job.got(0, "agreed") == []
    job.say(1, sign(1, "2"))
    assert job.got(0, "agreed") == job.got(1, "agreed") == [{"type": "agreed", "sequence": 1}]


def test_other_shapes_are_a_mismatch_that_shows_both():
    job = Job(3)
    job.say(0, sign(4, "2", "train.py:10 in step"))
    job.say(1, sign(4, "3", "train.py:12 in step"))
    texts = [job.failures(peer) for peer in range(3)]
    assert texts[0] == texts[1] == texts[2]
    assert "different programs at number 4" in texts[0][0]
    assert "worker 0: all_reduce of float32[2] at train.py:10 in step" in texts[0][0]
    assert "worker 1: all_reduce of float32[3] at train.py:12 in step" in texts[0][0]
    assert isinstance(job.state.failure.error(), errors.CollectiveMismatchError)


@pytest.mark.parametrize("how", ["status", "sign"])
@pytest.mark.parametrize("late", [True, False])
def test_a_new_program_where_another_ran_a_known_one(how, late):
    job = Job(2)
    passing = sign(8, "2") if how == "sign" else {"type": "status", "phase": "step", "sequence": 7}
    steps = [lambda: job.say(0, sign(7, "3")), lambda: job.say(1, passing)]
    for step in steps if late else steps[::-1]:
        step()
    assert job.got(1, "ran?") == [{"type": "ran?", "sequence": 7}]
    assert job.state.failure is None
    job.say(1, {"type": "ran", "sequence": 7, "details": {"operation": "psum", "site": "b.py:2"}})
    (text,) = job.failures(0)
    assert "worker 0: all_reduce of float32[3]" in text
    assert "worker 1: psum at b.py:2" in text


def test_a_member_that_cannot_say_what_it_ran():
    job = Job(2)
    job.say(1, {"type": "status", "sequence": 7})
    job.say(0, sign(7, "3"))
    job.take(job.state.tick(STACK_PATIENCE - 0.1))
    assert job.state.failure is None
    job.take(job.state.tick(STACK_PATIENCE))
    assert "worker 1: a program that it knew" in job.failures(0)[0]


def test_known_programs_in_another_order():
    job = Job(2)
    for peer, codes in (
        (0, "a" * CODE + UNKNOWN + "c" * CODE),
        (1, "a" * CODE + "b" * CODE + "d" * CODE),
    ):
        message = {"type": "status", "phase": "step", "sequence": 42, "first": 40, "codes": codes}
        job.say(peer, message)
    assert job.state.failure is None
    for peer in (0, 1):
        assert job.got(peer, "ran?") == [{"type": "ran?", "sequence": 42}]
        job.say(peer, {"type": "ran", "sequence": 42, "details": {"operation": f"op{peer}"}})
    (text,) = job.failures(1)
    assert "different programs at number 42" in text
    assert "worker 0: op0\n  worker 1: op1" in text


def test_a_new_program_when_another_has_finished():
    job = Job(2)
    job.say(1, {"type": "leave"})
    job.say(0, sign(7, "3"))
    assert "worker 1: nothing more: it has finished" in job.failures(0)[0]


def test_a_broken_connection_is_explained_by_who_left():
    job = Job(2)
    job.say(0, {"type": "broken", "site": "train.py:3"})
    assert job.state.failure is None
    job.say(1, {"type": "leave"})
    job.say(0, {"type": "broken", "site": "train.py:3"})
    (text,) = job.failures(0)
    assert "worker 1 (pid 101 on h1) finished while worker 0 still communicates, at train.py:3" in text


@pytest.mark.parametrize("further", ["status", "sign"])
def test_one_that_runs_more_programs_than_the_others_is_told_at_once(further):
    job = Job(3)
    for rank in (0, 1):
        job.say(rank, {"type": "post", "name": "meet goodbye", "value": None, "last": 7})
    job.say(2, {"type": "status", "sequence": 7, "site": "train.py:3"})
    assert job.state.failure is None
    if further == "status":
        job.say(2, {"type": "status", "sequence": 8, "site": "train.py:4"})
    else:
        job.say(2, {**sign(8, "digest"), "details": {"site": "train.py:4"}})
    for peer in range(3):
        (text,) = job.failures(peer)
        assert text.startswith("worker 0 (pid 100 on h0) and worker 1 (pid 101 on h1) finished while ")
        assert "worker 2 still communicates, at train.py:4." in text


def test_a_death_is_said_to_be_where_the_last_new_program_was():
    job = Job(2)
    job.say(1, {**sign(1, "digest"), "details": {"site": "train.py:4"}})
    job.take(job.state.lost(1, 1.0))
    assert "It was at train.py:4." in job.failures(0)[0]


# -- the table and stacks --------------------------------------------------------------------------


def test_who_is_behind_and_for_how_long():
    job = Job(3)
    job.now = 10.0
    job.say(0, {"type": "status", "phase": "wait", "step": 5, "sequence": 6, "site": "a.py:1"})
    job.say(1, {"type": "status", "phase": "wait", "step": 5, "sequence": 6, "site": "a.py:1"})
    job.say(2, {"type": "status", "phase": "input", "step": 4, "sequence": 5, "site": "b.py:9"})
    job.now = 12.0
    job.say(0, {"type": "status", "phase": "wait", "step": 6, "sequence": 7, "site": "a.py:1"})
    rows = {row["worker"]: row for row in job.state.rows(14.0)}
    assert [rows[f"worker {i}"]["behind"] for i in range(3)] == [0.0, 2.0, 4.0]
    assert rows["worker 2"]["phase"] == "input"
    assert rows["worker 2"]["step"] == 4
    assert rows["worker 2"]["site"] == "b.py:9"
    assert rows["worker 2"]["quiet"] == 4.0


def test_who_misses_an_exchange_is_behind():
    job = Job(2)
    job.now = 3.0
    job.say(0, {"type": "post", "name": "a", "value": 1})
    assert [row["behind"] for row in job.state.rows(8.0)] == [0.0, 5.0]


def test_only_one_asker_shows_the_table():
    job = Job(2)
    job.say(0, {"type": "table", "request": 0, "every": 30})
    assert not job.got(0, "table").pop()["first"], "there is nobody to wait for"
    job.inbox[0].clear()
    job.say(0, {"type": "status", "phase": "wait", "sequence": 6})
    job.now = 1.0
    job.say(60, {"type": "table", "request": 1})
    for peer in (0, 1):
        job.say(peer, {"type": "table", "request": 1, "every": 30})
    assert [job.got(p, "table")[0]["first"] for p in (0, 1)] == [True, False]
    job.now = 32.0
    job.say(1, {"type": "table", "request": 2, "every": 30})
    assert job.got(1, "table")[1]["first"]


def test_stacks_of_all_for_an_observer():
    job = Job(2)
    job.say(60, {"type": "stacks", "request": 9, "patience": 5})
    (question,) = job.got(0, "stack?")
    job.say(0, {"type": "stack", "request": question["request"], "text": "main"})
    assert job.got(60, "stacks") == []
    job.now = 5.0
    job.take(job.state.tick(job.now))
    (answer,) = job.got(60, "stacks")
    assert answer["request"] == 9
    assert answer["stacks"] == {"worker 0": "main", "worker 1": "It did not answer in time."}


def test_the_deadline_names_the_one_that_is_silent():
    """Others may look late too: the newest that was heard of them is some programs old."""
    job = Job(3)
    for rank, sequence in ((0, 9), (1, 8), (2, 8)):
        job.say(rank, {"type": "status", "sequence": sequence, "site": "train.py:3"})
    job.now = 10.0
    for rank in (0, 1):
        job.say(rank, {"type": "status", "sequence": 9 - rank, "site": "train.py:3"})
    job.say(0, {"type": "deadline", "site": "train.py:3", "seconds": 5})
    job.now += STACK_PATIENCE
    job.take(job.state.tick(job.now))
    assert "Late: worker 2 (pid 102 on h2), " in job.failures(0)[0]
    assert "worker 1" not in job.failures(0)[0].splitlines()[0]


def test_one_that_froze_in_the_same_program_is_named_alone():
    """All have begun it, so none is behind; the stacks of the others are not waited for."""
    job = Job(3)
    for second in (1.0, 10.0):
        job.now = second
        for rank in range(3 if second < 2.0 else 2):
            job.say(rank, {"type": "status", "phase": "wait", "sequence": 2, "site": "a.py:1"})
    job.now = 11.0
    job.say(0, {"type": "deadline", "site": "a.py:1", "seconds": 10})
    job.take(job.state.tick(11.0 + SILENT_PATIENCE))
    (text,) = job.failures(0)
    assert "Late: worker 2 (pid 102 on h2), " in text
    assert "worker 1" not in text.splitlines()[0]


def test_a_deadline_ends_the_job_with_the_stack_of_the_late_one():
    job = Job(3)
    job.now = 1.0
    for peer in (0, 1):
        job.say(peer, {"type": "status", "phase": "wait", "sequence": 2, "site": "a.py:1"})
    job.say(2, {"type": "status", "phase": "input", "sequence": 1, "site": "b.py:9"})
    job.now = 11.0
    job.say(0, {"type": "deadline", "site": "a.py:1", "seconds": 10})
    assert [len(job.got(peer, "stack?")) for peer in range(3)] == [0, 0, 1]
    job.say(1, {"type": "deadline", "site": "a.py:1", "seconds": 10})
    assert [len(job.got(peer, "stack?")) for peer in range(3)] == [0, 0, 1], "one question is enough"
    job.say(2, {"type": "stack", "request": 2, "text": 'File "load.py", line 3'})
    (text,) = job.failures(1)
    assert "worker 0 waited for 10 seconds at a.py:1" in text
    assert "worker 2 (pid 102 on h2), 10 seconds behind, in phase 'input' at b.py:9" in text
    assert 'worker 2:\nFile "load.py", line 3' in text
    assert job.state.failure.task == "worker 2"


def test_workers_of_an_elastic_job_keep_their_names():
    """A generation numbers its workers anew, but people know them by their places."""
    state = JobState([Task("worker", 0, "h:1", "worker 2"), Task("worker", 1, "h:2", "worker 3")])
    job = {"type": "join", "task_type": "worker"}
    (_, welcome), *_ = state.handle(0, {**job, "task_id": 0}, 0.0)
    assert (welcome["rank"], welcome["name"]) == (0, "worker 2")
    state.handle(1, {**job, "task_id": 1}, 0.0)
    assert [row["worker"] for row in state.rows(0.0)] == ["worker 2", "worker 3"]
    ((_, failure),) = [x for x in state.lost(1, 1.0) if x[1]["type"] == "failure"]
    assert failure["text"].startswith("worker 3 ")


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_one_is_named_at_the_deadline_without_its_stack(is_frozen):
    job = Job(2)
    for second in (1.0, 10.0):
        job.now = second
        job.say(0, {"type": "status", "phase": "wait", "sequence": 2, "site": "a.py:1"})
        if second < 2.0 or not is_frozen:
            job.say(1, {"type": "status", "phase": "step", "sequence": 1, "site": "b.py:9"})
    job.now = 11.0
    job.say(0, {"type": "deadline", "site": "a.py:1", "seconds": 10})
    assert job.failures(0) == []
    job.take(job.state.tick(11.0 + SILENT_PATIENCE))
    assert len(job.failures(0)) == is_frozen
    job.take(job.state.tick(11.0 + STACK_PATIENCE))
    (text,) = job.failures(0)
    assert "Late: worker 1 (pid 101 on h1)" in text
    assert ("silent for 10 seconds" in text) == is_frozen


# -- frozen members at the end ---------------------------------------------------------------------


def given_up(job, seconds, *heard, step=0.5):
    """Who is given up while time passes, in which some members are heard of."""
    found = []
    for _ in range(round(seconds / step)):
        job.now += step
        for rank in heard:
            job.say(rank, {"type": "status", "phase": "step"})
        found += [(x.task, x.why) for x in job.state.abandoned(job.now)]
    return found


def test_a_silent_member_is_given_up_when_all_others_have_come_to_their_end():
    job = Job(3)
    job.say(2, {"type": "status", "phase": "step", "site": "train.py:7"})
    job.say(0, {"type": "end", "patience": 4.0})
    assert given_up(job, 60, 0, 1) == []  # worker 1 trains
    job.say(1, {"type": "end", "patience": 6.0})
    job.say(1, {"type": "leave"})
    assert given_up(job, 60, 2) == []  # worker 2 is heard of, however long it takes
    assert given_up(job, 5.5, 0) == []
    ((task, why),) = given_up(job, 0.5, 0)
    assert task == Task("worker", 2, "host2:2222")
    assert "Nothing has been heard of worker 2 (pid 102 on h2) for 6 seconds" in why
    assert "It was at train.py:7." in why
    assert len(given_up(job, 1, 0)) == 2  # as long as it is so
    assert given_up(job, 60, 2) == []


def test_a_member_that_freezes_after_it_has_come_to_its_end_is_given_up() -> None:
    job = Job(2)
    for rank in (0, 1):
        job.say(rank, {"type": "end", "patience": 8.0})
    assert given_up(job, 60, 0, 1) == []  # they may wait for each other at a door
    job.say(0, {"type": "leave"})
    assert given_up(job, 7.5) == []
    assert [str(task) for task, _ in given_up(job, 0.5)] == ["worker 1"]


def test_time_in_which_the_hub_did_not_run_does_not_count_against_members():
    job = Job(2)
    job.say(0, {"type": "end", "patience": 5.0})
    assert given_up(job, 2) == []
    assert given_up(job, 3600, step=3600) == []  # the machine slept, and this is a look after it
    assert [str(task) for task, _ in given_up(job, 2, 0)] == ["worker 1"]


def test_members_that_have_not_come_yet_are_not_given_up():
    job = Job(3, joined=2)
    job.say(0, {"type": "end", "patience": 1.0})
    assert given_up(job, 60) == []


def test_a_job_without_a_member_at_its_end_gives_none_up():
    assert given_up(Job(2), 3600) == []


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "end"},
        {"type": "end", "patience": "long"},
        {"type": "nonsense"},
        {"type": "join"},
        {"type": "join", "task_type": "worker", "task_id": "x"},
        {"type": "sign"},
        {"type": "sign", "sequence": None, "digest": "a"},
        {"type": "status", "sequence": []},
        {"type": "stack", "request": {}},
        {"type": []},
    ],
)
def test_nonsense_is_refused(message):
    job = Job(2)
    with pytest.raises(errors.InvalidValueError):
        job.say(0, message)


KINDS = [
    "join",
    "status",
    "post",
    "sign",
    "ran",
    "fail",
    "broken",
    "deadline",
    "stack",
    "leave",
    "knock",
    "table",
    "stacks",
    "tunnel",
]
FIELDS = [
    "task_type",
    "task_id",
    "pid",
    "host",
    "cluster",
    "devices",
    "problem",
    "phase",
    "step",
    "sequence",
    "site",
    "doing",
    "place",
    "seconds",
    "waits",
    "codes",
    "first",
    "name",
    "value",
    "last",
    "operations",
    "digest",
    "details",
    "kind",
    "text",
    "request",
    "what",
    "ranks",
    "every",
    "patience",
    "channel",
    "number",
    "blocks",
]
GARBAGE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.sampled_from([2**63, 10**99, -1])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), GARBAGE)), max_size=5
    )
)
def test_a_member_that_sends_garbage_harms_nobody(said):
    """What it sends is taken, or refused by name; the others are answered as before."""
    job = Job(3)
    refused = False
    for kind, fields in said:
        try:
            out = job.say(2, {**fields, "type": kind})
        except errors.InvalidValueError:
            refused = True
            job.take(job.state.lost(2, job.now, "sent garbage"))
            break
        for _, message in out:
            encode(Message(message), Limits())
        job.now += 1.0
        encode(Message({"rows": job.state.rows(job.now)}), Limits())
        job.take(job.state.tick(job.now))
    if refused and job.state.failure is not None:
        assert len(job.failures(0)) == 1
    job.say(0, {"type": "table", "request": 77})
    assert job.got(0, "table")[-1]["request"] == 77
    if job.state.failure is None:
        job.say(0, {"type": "post", "name": "still here", "value": 0})
        job.say(1, {"type": "post", "name": "still here", "value": 1})
        job.say(2, {"type": "post", "name": "still here", "value": 2})
        (answer,) = [m for m in job.got(0, "exchanged") if m["name"] == "still here"]
        assert answer["values"][:2] == [0, 1]


def test_tasks_must_be_given_once():
    with pytest.raises(errors.InvalidValueError):
        JobState([Task("worker", 0), Task("worker", 0)])
    with pytest.raises(errors.InvalidValueError):
        JobState([])


# -- in any order ----------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Members do what members do, in any order; nothing is lost and nothing comes twice."""

    @initialize(count=st.integers(1, 4))
    def begin(self, count):
        self.job = Job(count, joined=0)
        self.count = count
        self.state = dict.fromkeys(range(count), "absent")
        self.ever_joined = set()
        self.posts = {}
        self.posted = {}
        self.complete = set()
        self.questions = {}
        self.numbers = 0

    def there(self, rank):
        return self.state[rank] == "joined"

    @rule(data=st.data())
    def comes(self, data):
        rank = data.draw(st.integers(0, self.count - 1))
        if self.state[rank] == "absent":
            self.state[rank] = "joined"
            self.ever_joined.add(rank)
            self.job.say(rank, join(rank))

    @rule(data=st.data())
    def goes(self, data):
        rank = data.draw(st.integers(0, self.count - 1))
        if self.there(rank):
            self.state[rank] = "left"
            self.job.say(rank, {"type": "leave", "request": 0})
            self.job.take(self.job.state.lost(rank, self.job.now))

    @rule(data=st.data())
    def dies(self, data):
        rank = data.draw(st.integers(0, self.count - 1))
        if self.there(rank):
            self.state[rank] = "dead"
            self.job.take(self.job.state.lost(rank, self.job.now))

    @rule(data=st.data(), name=st.sampled_from("ab"))
    def posts_a_value(self, data, name):
        rank = data.draw(st.integers(0, self.count - 1))
        if self.there(rank) and rank not in self.posts.get(name, {}) and name not in self.complete:
            self.posts.setdefault(name, {})[rank] = f"{name}{rank}"
            self.job.say(rank, {"type": "post", "name": name, "value": f"{name}{rank}"})

    @rule(data=st.data(), seconds=st.floats(0, 3))
    def asks(self, data, seconds):
        rank = data.draw(st.integers(0, self.count - 1))
        kind = data.draw(st.sampled_from(["table", "stacks"]))
        self.job.now += seconds
        if self.there(rank):
            self.numbers += 1
            self.questions[rank, self.numbers] = kind
            self.job.say(rank, {"type": kind, "request": self.numbers, "patience": 5})

    @rule(data=st.data())
    def answers(self, data):
        rank = data.draw(st.integers(0, self.count - 1))
        asked = self.job.got(rank, "stack?")
        if self.there(rank) and asked:
            number = data.draw(st.sampled_from(asked))["request"]
            self.job.say(rank, {"type": "stack", "request": number, "text": "stack"})

    @rule(data=st.data())
    def fails(self, data):
        rank = data.draw(st.integers(0, self.count - 1))
        if self.there(rank):
            self.job.say(rank, {"type": "fail", "kind": "raised", "text": f"by {rank}"})

    @rule()
    def time_passes(self):
        self.job.now += STACK_PATIENCE + 1
        self.job.take(self.job.state.tick(self.job.now))

    @invariant()
    def every_live_member_knows_the_failure_once(self):
        failure = self.job.state.failure
        for rank in range(self.count):
            told = self.job.failures(rank)
            if failure is None:
                assert told == []
            elif self.there(rank):
                assert told == [failure.text]
            else:
                assert len(told) <= 1

    @invariant()
    def death_is_a_failure_and_leaving_is_none(self):
        if "dead" in self.state.values():
            assert self.job.state.failure is not None

    @invariant()
    def exchanges_are_complete_if_all_that_live_have_posted(self):
        for name, posts in self.posts.items():
            everyone = all(r in posts or s in ("left", "dead") for r, s in self.state.items())
            if everyone and name not in self.complete:
                self.complete.add(name)
                self.posted[name] = {r for r in range(self.count) if self.there(r)}
            values = [posts.get(rank) for rank in range(self.count)]
            for rank in range(self.count):
                got = [m["values"] for m in self.job.got(rank, "exchanged") if m["name"] == name]
                assert got == ([values] if rank in self.posted.get(name, ()) else [])

    @precondition(lambda self: self.questions)
    @rule()
    def every_question_is_answered(self):
        self.time_passes()
        for (rank, number), kind in list(self.questions.items()):
            answers = [m for m in self.job.got(rank, kind) if m["request"] == number]
            assert len(answers) == 1 or not self.there(rank)
        self.questions.clear()


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@settings(max_examples=150, deadline=None)
@given(data=st.data(), count=st.integers(2, 4))
def test_programs_run_if_and_only_if_all_bring_the_same_in_the_same_order(data, count):
    """Each member runs a list of programs; it signs those that it meets for the first time."""
    common = data.draw(st.lists(st.sampled_from("pqr"), min_size=1, max_size=6))
    lists = [list(common) for _ in range(count)]
    if data.draw(st.booleans()):
        odd = data.draw(st.integers(0, count - 1))
        at = data.draw(st.integers(0, len(common) - 1))
        lists[odd][at] = data.draw(st.sampled_from("pqr"))
    job = Job(count)
    at, waiting, known = [0] * count, [False] * count, [set() for _ in range(count)]

    def free(rank):
        agreed = {m["sequence"] for m in job.got(rank, "agreed")}
        return not waiting[rank] or at[rank] in agreed

    while True:
        able = [r for r in range(count) if at[r] < len(common) and free(r)]
        if not able or job.state.failure is not None:
            break
        rank = data.draw(st.sampled_from(able))
        if waiting[rank]:
            waiting[rank] = False
            status = {"type": "status", "phase": "step", "sequence": at[rank]}
            job.say(rank, {**status, "first": at[rank], "codes": lists[rank][at[rank] - 1] * CODE})
            continue
        program = lists[rank][at[rank]]
        at[rank] += 1
        if program in known[rank]:
            status = {"type": "status", "phase": "step", "sequence": at[rank]}
            job.say(rank, {**status, "first": at[rank], "codes": program * CODE})
        else:
            known[rank].add(program)
            waiting[rank] = True
            job.say(rank, sign(at[rank], program))
    for _ in range(2):
        job.now += STACK_PATIENCE + 1
        job.take(job.state.tick(job.now))
    same = all(programs == lists[0] for programs in lists)
    if same:
        assert job.state.failure is None
        assert at == [len(common)] * count
    else:
        assert isinstance(job.state.failure.error(), errors.CollectiveMismatchError)


def test_a_failure_survives_the_journey():
    failure = Failure("raised", "boom", "worker 1")
    assert Failure.from_dict(failure.as_dict()) == failure
    assert isinstance(Failure("strange", "text").error(), errors.UnknownError)


# -- who waits for whom -----------------------------------------------------------------------------


def report(job, peer, phase="step", sequence=0, seconds=0.0, waits=(), **more):
    status = {"type": "status", "phase": phase, "sequence": sequence, "seconds": seconds, **more}
    return job.say(peer, {**status, "waits": list(waits)} if waits else status)


def wait_for(*ranks, seconds, blocks=True, channel="0,1,2", number=5):
    about = {"what": "all_reduce", "site": "c.py:7", "channel": channel, "number": number}
    return {"ranks": list(ranks), "seconds": seconds, "blocks": blocks, **about}


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_workers_that_wait_for_each_other_in_different_calls(first, blocks):
    """In either order of their reports; only if nothing else can go on in the meantime."""
    job = Job(3)
    job.now = 10.0
    reports = [
        lambda: report(job, 0, seconds=3.0, waits=[wait_for(1, seconds=3.0, blocks=blocks)]),
        lambda: report(job, 1, "wait", 4, 3.0, doing="step of float32[2]", site="t.py:1"),
    ]
    reports[first]()
    assert job.state.failure is None
    reports[1 - first]()
    if not blocks:
        assert job.state.failure is None
        return
    assert isinstance(job.state.failure.error(), errors.CollectiveMismatchError)
    assert "worker 0 waits for worker 1 in all_reduce at c.py:7" in job.state.failure.text
    assert "worker 1 waits for worker 0, worker 2 in step of float32[2] at t.py:1" in (
        job.state.failure.text
    )


def test_a_wait_that_has_only_begun_proves_nothing():
    job = Job(2)
    job.now = 10.0
    report(job, 0, seconds=1.0, waits=[wait_for(1, seconds=1.0)])
    report(job, 1, "wait", 4, 1.0)
    assert job.state.failure is None


@pytest.mark.parametrize(("made", "fails"), [({"0,1,2": 4}, True), ({"0,1,2": 5}, False), ({}, True)])
def test_one_that_ends_before_an_operation_that_others_wait_for(made, fails):
    job = Job(3)
    job.say(1, {"type": "post", "name": "goodbye", "value": None, "last": 0, "operations": made})
    report(job, 0, waits=[wait_for(1, seconds=0.3, number=5)])
    if not fails:
        assert job.state.failure is None, "what it sent is still on its way"
        return
    assert isinstance(job.state.failure.error(), errors.WorkerLostError)
    assert "finished while worker 0 still communicates, at c.py:7" in job.state.failure.text


def test_all_wait_for_their_input():
    job = Job(2)
    job.now = 10.0
    for peer in (0, 1):
        report(job, peer, "input", 3, 8.0, place=f"data.py:{peer}")
    assert [row["behind"] for row in job.state.rows(10.0)] == [8.0, 8.0]
    job.say(0, {"type": "post", "name": "input#4", "value": None})
    assert [row["behind"] for row in job.state.rows(11.0)] == [0.0, 9.0], "who waits for the other"
