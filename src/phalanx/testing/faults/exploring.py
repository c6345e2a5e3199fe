"""Plays many schedules, judges what happened, and makes a schedule that fails smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import FailedPreconditionError
from phalanx.testing.faults import elastic_history
from phalanx.testing.faults.job_checkers import job_violations
from phalanx.testing.faults.job_history import JobHistory
from phalanx.testing.faults.jobs import JobSchedule
from phalanx.testing.faults.playing import JobRun, Program, run

__all__ = ["JobVerdict", "Laboratory", "shrink"]


@dataclass(frozen=True)
class JobVerdict:
    """A schedule that was played, and what is wrong with its history.

    Args:
        run: what was played.
        violations: what is wrong; empty if all is well.
    """

    run: JobRun
    violations: tuple[str, ...] = ()

    @property
    def happened(self) -> list[str]:
        """The kinds of the faults that have happened."""
        return [str(event["kind"]) for _, event in self.run.history.faults()]

    @property
    def detection(self) -> float | None:
        """Seconds from a fault to the word that names its worker; the longest of all faults."""
        history = self.run.history
        named = [
            history.named(life, fault)
            for life, fault in history.faults()
            if history.has_ended_attempt(life, fault)
        ]
        return max((x for x in named if x is not None), default=None)

    @property
    def recovery(self) -> float | None:
        """Seconds from a fault to the next step of all workers; the longest of all faults."""
        history = self.run.history
        recovered = [
            history.recovered(life, fault)
            for life, fault in history.faults()
            if history.has_ended_attempt(life, fault)
        ]
        return max((x for x in recovered if x is not None), default=None)

    @property
    def outcome(self) -> str:
        """In a few words: what became of the job."""
        if self.violations:
            return "wrong"
        if not self.happened:
            return "no fault was reached"
        if self.run.exit_code:
            is_after = elastic_history.has_lost_released(self.run.history)
            return "lost a worker after the training" if is_after else "ended by the exception"
        restarts = self.run.history.attempts - 1
        return f"right after {restarts} restart{'s' * (restarts != 1)}" if restarts else "went on"

    def __str__(self) -> str:
        words = [str(self.run.schedule), *(f"- {problem}" for problem in self.violations)]
        return "\n".join(words)


@dataclass
class Laboratory:
    """A program, how it is played, and what it does undisturbed.

    Args:
        program: see `run`.
        deadline: for how many seconds workers wait for each other.
        options: more arguments of `run`.

    Examples:
        >>> from phalanx.testing import faults
        >>> laboratory = faults.Laboratory("train.py", deadline=10.0)
        >>> verdict = laboratory.play(faults.random_job_schedule(1))  # doctest: +SKIP
    """

    program: Program
    deadline: float = 3.0
    options: Mapping[str, Any] = field(default_factory=dict)
    _undisturbed: dict[int, JobRun] = field(default_factory=dict, repr=False)

    def undisturbed(self, workers: int) -> JobRun:
        """The job without faults, which is played once for each number of workers."""
        if workers not in self._undisturbed:
            played = self._run(JobSchedule(0, workers))
            if wrong := job_violations(played.history, deadline=self.deadline):
                raise FailedPreconditionError(
                    "The program does not come to a good end without faults:\n"
                    + "\n".join([*wrong, played.output[-4000:]])
                )
            if found := [event["path"] for _, event in played.history.all("restored")]:
                raise FailedPreconditionError(
                    "The program has restored a checkpoint of an earlier run. Let it keep its "
                    "checkpoints in the folder that {folder} stands for in its arguments, or in the "
                    f"current one. Received: {found[0]}"
                )
            self._undisturbed[workers] = played
        return self._undisturbed[workers]

    def play(self, schedule: JobSchedule) -> JobVerdict:
        """Play a schedule, and judge what happened."""
        expected = self.undisturbed(schedule.workers).history
        played = self._run(schedule)
        return JobVerdict(played, tuple(self.judge(played.history, expected)))

    def judge(self, history: JobHistory, expected: JobHistory) -> list[str]:
        """What is wrong with a history, in comparison with that of the undisturbed job."""
        return job_violations(history, expected, deadline=self.deadline)

    def play_all(self, schedules: Iterable[JobSchedule], at_once: int = 1) -> Iterator[JobVerdict]:
        """Play schedules, some of them at the same time; their verdicts in order."""
        chosen: Sequence[JobSchedule] = list(schedules)
        for workers in sorted({schedule.workers for schedule in chosen}):
            self.undisturbed(workers)
        if at_once <= 1:
            yield from map(self.play, chosen)
            return
        with ThreadPoolExecutor(at_once) as pool:
            yield from pool.map(self.play, chosen)

    def shrink(
        self, schedule: JobSchedule, most: int = 20, tried: Callable[[JobVerdict], None] | None = None
    ) -> JobVerdict:
        """The smallest schedule that was found to fail as well, and what is wrong with it.

        Args:
            schedule: one that fails.
            most: how many jobs may be played for it.
            tried: called with each verdict.
        """
        failed: list[JobVerdict] = []

        def fails(candidate: JobSchedule) -> bool:
            verdict = self.play(candidate)
            if tried is not None:
                tried(verdict)
            if verdict.violations:
                failed.append(verdict)
            return bool(verdict.violations)

        smallest = shrink(schedule, fails, self.deadline, most)
        for verdict in reversed(failed):
            if verdict.run.schedule == smallest:
                return verdict
        return self.play(schedule)

    def _run(self, schedule: JobSchedule) -> JobRun:
        return run(self.program, schedule, deadline=self.deadline, **self.options)


def shrink(
    schedule: JobSchedule,
    fails: Callable[[JobSchedule], bool],
    deadline: float = 3.0,
    most: int = 50,
) -> JobSchedule:
    """The smallest schedule that still fails, as far as it was found.

    Args:
        schedule: one that fails.
        fails: whether a schedule fails.
        deadline: for how many seconds workers wait for each other.
        most: how often `fails` may be asked.

    Examples:
        >>> from phalanx.testing import faults
        >>> schedule = faults.random_job_schedule(4, workers=4, most=5)
        >>> smallest = faults.shrink(schedule, lambda x: len(x.faults) > 0)
        >>> smallest.workers, len(smallest.faults), smallest.faults[0].step
        (1, 1, 0)
    """
    asked = 0
    seen = {schedule}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in schedule.simpler(deadline):
            if candidate in seen:
                continue
            if asked >= most:
                return schedule
            seen.add(candidate)
            asked += 1
            if fails(candidate):
                schedule, is_smaller = candidate, True
                break
    return schedule
