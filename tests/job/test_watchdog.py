"""The watchdog gives a process that goes on after a freeze its time."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.job import watchdog
from phalanx.job.hub.descriptions import Failure
from phalanx.job.hub.worker_table import WorkerTable
from phalanx.job.watchdog import FailureClock, Watchdog
from phalanx.runtime.deadlines import TERMINATE_GRACE


class Clock:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 0.0


class Member:
    """A worker that waits for others in a program."""

    def __init__(self) -> None:
        self.task, self.failure, self.told = "worker 0", None, False
        self.wait = SimpleNamespace(since=0.0, seconds=None, site="")
        self.status = SimpleNamespace(phase="step", pending=None, long_peer_waits=lambda now: [])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(watchdog, "time", found)
    return found


def test_a_freeze_before_the_first_look_does_not_count(clock: Clock) -> None:
    """Its thread had asked for the time, was frozen, and then heard that the job had failed."""
    member: Any = Member()
    dog = Watchdog(member, warn_after=5.0, deadline=60.0, grace=15.0)
    asked = clock.now
    clock.now += 60.0  # frozen
    member.failure = Failure("deadline", "worker 0 was away")
    assert dog._policy.decide(dog._observe(asked), asked) is None
    clock.now += 0.5
    assert dog._policy.decide(dog._observe(clock.now), clock.now) is None
    for _ in range(8):
        clock.now += 0.5
        action = dog._policy.decide(dog._observe(clock.now), clock.now)
    assert action == "end"  # it has hardly computed for four seconds, as it could have


def test_a_freeze_after_the_failure_does_not_count_either() -> None:
    since = FailureClock()
    assert since.look(True, 10.0, 0.5) == 10.0
    assert since.look(True, 10.5, 0.5) == 10.0
    assert since.look(True, 40.5, 0.5) == 39.0
    assert since.look(True, 41.0, 0.5) == 39.0


@pytest.mark.parametrize("quiet", [0.0, 10.0])
def test_a_silent_worker_is_named_when_others_come_to_their_end(quiet: float) -> None:
    member: Any = Member()
    row = {"worker": "worker 1", "state": "joined", "phase": "wait", "seconds": 10.0, "site": "a.py:3"}
    member.table = lambda **_: (WorkerTable([{**row, "behind": 0.0, "quiet": quiet}]), True)
    said = io.StringIO()
    Watchdog(member, file=said).name_silent()
    assert ("any longer for worker 1 in phase 'wait' for 10 seconds" in said.getvalue()) == bool(quiet)


@pytest.mark.parametrize("is_launched", [True, False])
def test_the_end_of_a_silent_worker_is_promised_only_where_a_launcher_is(
    is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TERMINATE_GRACE, raising=False)
    if is_launched:
        monkeypatch.setenv(TERMINATE_GRACE, "10")
    member: Any = Member()
    row = {"worker": "worker 1", "state": "joined", "phase": "wait", "seconds": 10.0, "site": "a.py:3"}
    member.table = lambda **_: (WorkerTable([{**row, "behind": 0.0, "quiet": 10.0}]), True)
    said = io.StringIO()
    Watchdog(member, deadline=60.0, file=said).name_silent()
    assert ("when nothing is heard of those for 60 seconds" in said.getvalue()) == is_launched
    assert ("without phalanx run, nothing ends them" in said.getvalue()) != is_launched
