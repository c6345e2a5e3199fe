"""What the door of an elastic job orders, and the limits within which workers may come and go."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import InvalidValueError

__all__ = [
    "Again",
    "Begin",
    "End",
    "Fail",
    "Generation",
    "Order",
    "Release",
    "Spawn",
    "Stop",
    "WorkerLimits",
]


@dataclass(frozen=True)
class WorkerLimits:
    """How many workers a job has, and how long it waits.

    Args:
        minimum: with fewer workers no step is made.
        maximum: more are not let in.
        replacements: how many workers are started in place of lost ones, in total, or of those that
            leave although no more are there than `minimum`.
        patience: seconds to wait for workers while there are fewer than `minimum`.
        stopping: seconds for a worker of which nothing is heard to say where it stands, after another
            has said so.
        deadline: seconds for a worker that is heard of to do so; not less than `stopping` count.
        gathering: seconds for which one that waits at the door waits for others that are being started,
            so that all come in together.
    """

    minimum: int
    maximum: int
    replacements: int = 0
    patience: float = 300.0
    stopping: float = 30.0
    deadline: float = 600.0
    gathering: float = 3.0

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise InvalidValueError(
                "An elastic job has at least one worker, and a maximum that is not less. "
                f"Received: {self.minimum}:{self.maximum}"
            )

    @property
    def longest(self) -> float:
        """The seconds of `deadline` that count."""
        return max(self.stopping, self.deadline)


@dataclass(frozen=True)
class Generation:
    """Workers that train together.

    Args:
        number: counts generations, from 1.
        members: the workers, by rank.
        step: how many steps their state has seen.
        source: the rank of one that has this state in memory; None if none has, and it comes from a
            checkpoint or is the beginning.
        holders: the ranks of all that have it.
        reason: why there is a new generation.
    """

    number: int
    members: tuple[int, ...]
    step: int
    source: int | None = None
    holders: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Begin:
    """A generation begins."""

    generation: Generation


@dataclass(frozen=True)
class Stop:
    """The members shall stop after a step that they agree on, and save a checkpoint if they can."""

    members: tuple[int, ...]
    save: bool


@dataclass(frozen=True)
class Again:
    """A worker that has come to its end is needed once more: another one has not, or was lost."""

    worker: int


@dataclass(frozen=True)
class Release:
    """A worker may end: "finished" with the others, "left" as it wanted, or "late" to be let in."""

    worker: int
    why: str


@dataclass(frozen=True)
class Spawn:
    """Start so many workers."""

    count: int


@dataclass(frozen=True)
class End:
    """Kill a worker that does not say where it stands, and say why."""

    worker: int
    why: str


@dataclass(frozen=True)
class Fail:
    """The job cannot go on."""

    text: str


Order = Begin | Stop | Again | Release | Spawn | End | Fail
