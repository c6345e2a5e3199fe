"""The processes of an elastic job: which worker is where, and which one is ended."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from phalanx.job.hub.descriptions import Task
from phalanx.job.launch import elastic_launcher
from phalanx.job.launch.launcher import Job


class Recorder:
    """Stands for the door, the group of processes and what shows them."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.said: list[str] = []

    def started(self, worker: int, name: str) -> None:
        """A process was started."""

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
