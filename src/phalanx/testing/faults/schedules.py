"""What goes wrong in a job, and when: values that follow from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["KINDS", "Fault", "Schedule", "random_schedule"]

KINDS = (
    "kill",  # SIGKILL, and a new process after a while
    "freeze",  # SIGSTOP, and SIGCONT after a while
    "isolate",  # its connections end while it is frozen: it is believed lost, and goes on
    "cut",  # its connections end
    "delay",  # messages from and to it wait for a while
    "lose_answers",  # it gets messages, its own do not arrive, and then the connections end
    "deliver_late",  # its connections end; what was on its way to it arrives a while later
)
"""What can go wrong with a task."""


@dataclass(frozen=True, order=True)
class Fault:
    """One thing that goes wrong."""

    wave: int  # the part of the program in which it happens
    after: float  # seconds after the beginning of the wave
    kind: str  # one of `KINDS`
    task: str  # with which task
    seconds: float  # how long it lasts


@dataclass(frozen=True)
class Schedule:
    """The faults of one run of a program, in their order."""

    seed: int  # what they follow from
    faults: tuple[Fault, ...]  # all of them

    def of(self, wave: int) -> list[Fault]:
        """The faults of one wave."""
        return [fault for fault in self.faults if fault.wave == wave]

    def __str__(self) -> str:
        lines = [
            f"  wave {f.wave} + {f.after:.3f} s: {f.kind} {f.task} for {f.seconds:.3f} s"
            for f in self.faults
        ]
        return "\n".join([f"The fault schedule of seed {self.seed}:", *lines])


def random_schedule(
    seed: int,
    tasks: Mapping[str, Sequence[str]],
    waves: int,
    *,
    most: int = 5,
    latest: float = 0.05,
    longest: float = 0.3,
) -> Schedule:
    """A schedule that follows from a seed.

    Args:
        seed: any number.
        tasks: the tasks, and which kinds of faults each may have.
        waves: how many parts the program has.
        most: how many faults there are at most, and at least two.
        latest: seconds after the beginning of a wave in which a fault may begin.
        longest: seconds that a fault may last.

    >>> schedule = random_schedule(7, {"worker 0": ["kill"], "ps 0": ["cut"]}, waves=2)
    >>> schedule == random_schedule(7, {"worker 0": ["kill"], "ps 0": ["cut"]}, waves=2)
    True
    """
    rng = random.Random(f"faults {seed}")
    faults = []
    for _ in range(rng.randint(2, most)):
        task = rng.choice(sorted(tasks))
        kind = rng.choice(sorted(tasks[task]))
        moment = rng.random() ** 2 * latest
        faults.append(Fault(rng.randrange(waves), moment, kind, task, rng.random() * longest))
    return Schedule(seed, tuple(sorted(faults)))
