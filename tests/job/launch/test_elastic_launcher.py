"""The processes of an elastic job: which worker is where, and which one is ended."""

from __future__ import annotations

import signal
from contextlib import closing
from typing import Any

import pytest

from phalanx.job.hub.descriptions import Task
from phalanx.job.launch import elastic_launcher
from phalanx.job.launch.launcher import Job


class Recorder:
    """Stands for the door, the group of processes and what shows them."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.said: list[str] = []
        self.notices = 0

    def started(self, worker: int, name: str) -> None:
        """A process was started."""

    def all_leave(self) -> None:
        self.notices += 1

    def kill(self, place: int) -> bool:
        self.killed.append(place)
        return True

    def kills(self, task: Task, why: str) -> None:
        self.said.append(f"{task}: {why}")


def test_a_worker_is_not_ended_that_is_in_the_place_of_one_that_is_gone() -> None:
    """The door asks for the end of a worker; it is gone before, and another one has its place."""
    recorder: Any = Recorder()
    tasks = [Task("worker", 0, "127.0.0.1:2")]
    with closing(elastic_launcher._Workers(Job([], tasks, "job"), tasks, "token", recorder)) as workers:
        workers.open(recorder, lambda job: None)
        workers.command(0)
        workers.command(0)
        workers.end(0, "it is silent")
        workers.attend(recorder)
        assert (recorder.killed, recorder.said) == ([], [])
        workers.end(1, "it is silent")
        workers.attend(recorder)
        assert (recorder.killed, recorder.said) == ([0], ["worker 0: it is silent"])


@pytest.mark.parametrize("reason", ["interrupt", "timeout", "failure"])
def test_the_end_of_a_job_is_a_notice_to_all_unless_it_has_failed(reason: str) -> None:
    """The door would wait for others, which are not started any more."""
    recorder: Any = Recorder()
    tasks = [Task("worker", 0, "127.0.0.1:2")]
    with closing(elastic_launcher._Workers(Job([], tasks, "job"), tasks, "token", recorder)) as workers:
        workers.open(recorder, lambda job: None)
        workers.attend(recorder)
        assert recorder.notices == 0
        if reason == "interrupt":
            workers.ending.interrupt(signal.SIGTERM, 1.0)
        elif reason == "timeout":
            workers.ending.timeout(1.0)
        else:
            workers.ending.fail(1.0)
        workers.attend(recorder)
        workers.attend(recorder)
        assert recorder.notices == (reason != "failure")
