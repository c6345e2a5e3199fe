"""Who trains in an elastic job, as a pure state machine: events in, orders out.

The life of a job is a row of *generations*. In each, the same workers train together. A generation ends
when one of them is lost, or at a step that all agree on, because a worker waits at the door or wants to
leave. When all who were in it and live have said at which step they stand, the next one begins: at the
largest step whose state a survivor has.

There are no sockets, threads or clocks in here: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from phalanx.errors import InvalidValueError

__all__ = [
    "Again",
    "Begin",
    "ElasticMembership",
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
        replacements: how many workers are started in place of lost ones, in total.
        patience: seconds to wait for workers while there are fewer than `minimum`.
        stopping: seconds for a worker to say where it stands after another has said so.
        gathering: seconds for which one that waits at the door waits for others that are being started,
            so that all come in together.
    """

    minimum: int
    maximum: int
    replacements: int = 0
    patience: float = 300.0
    stopping: float = 30.0
    gathering: float = 3.0

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise InvalidValueError(
                "An elastic job has at least one worker, and a maximum that is not less. "
                f"Received: {self.minimum}:{self.maximum}"
            )


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


# -- orders ----------------------------------------------------------------------------------------


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
    """A worker that has come to its end is needed once more: another one has not."""

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
    """Kill a worker that does not say where it stands."""

    worker: int


@dataclass(frozen=True)
class Fail:
    """The job cannot go on."""

    text: str


Order = Begin | Stop | Again | Release | Spawn | End | Fail


# -- the state -------------------------------------------------------------------------------------


_LATE = "workers have waited for each other too long, but none is lost"


class _Is(Enum):
    COMING = "is being started"
    WAITING = "waits at the door"
    RUNNING = "trains"
    FINISHED = "has come to its end"


@dataclass
class _Worker:
    number: int
    name: str
    place: _Is = _Is.COMING
    since: float = 0.0  # when it came to the door
    order: tuple[int, int] = (1, 0)  # in which workers get their ranks: those of before come first
    generation: int = 0  # the last one that it was in
    step: int = 0
    holds: bool = False  # whether it has the state of that step
    recoverable: bool = False  # whether it can restore a checkpoint
    wants_to_leave: bool = False


class ElasticMembership:
    """The workers of one job.

    Args:
        limits: how many there may be.
        size: how many are wanted at first; as many as possible if None.

    Examples:
        >>> job = ElasticMembership(WorkerLimits(1, 2))
        >>> for worker in (0, 1):
        ...     _ = job.started(worker, f"worker {worker}", now=0.0)
        >>> job.arrived(0, now=1.0)
        []
        >>> [order] = job.arrived(1, now=1.5)
        >>> order.generation.members, order.generation.step
        ((0, 1), 0)
        >>> job.gone(0, "was killed", now=9.0)
        []
        >>> [order] = job.stopped(1, step=7, holds=True, now=9.1)
        >>> order.generation.members, order.generation.step, order.generation.source
        ((1,), 7, 0)
        >>> order.generation.reason
        'worker 0 was killed'
    """

    def __init__(self, limits: WorkerLimits, size: int | None = None) -> None:
        self.limits = limits
        self._target = limits.maximum if size is None else size
        self._workers: dict[int, _Worker] = {}
        self._generation: Generation | None = None
        self._replacements = limits.replacements
        self._progress = 0  # the largest step that a worker has told of
        self._news: list[str] = []  # what has happened since the generation began
        self._asked: Stop | None = None
        self._stopping_since: float | None = None
        self._short_since: float | None = None
        self._begun = 0.0
        self.is_over = False
        """Whether the job has succeeded or failed."""
        self.failure: str | None = None
        """Why the job has failed."""

    @property
    def generation(self) -> Generation | None:
        """The newest generation."""
        return self._generation

    @property
    def target(self) -> int:
        """How many workers are wanted."""
        return self._target

    @property
    def alive(self) -> list[int]:
        """The workers that were started and have not ended."""
        return list(self._workers)

    def describe(self) -> list[tuple[str, str]]:
        """The name of each worker, and what it does."""
        return [
            (w.name, f"{w.place.value}, and is about to leave" if w.wants_to_leave else w.place.value)
            for w in self._workers.values()
        ]

    # -- events ----------------------------------------------------------------------------------

    def started(self, worker: int, name: str, now: float) -> list[Order]:
        """The process of a worker has been started; no number is used twice."""
        if not self._workers and self._generation is None:
            self._begun = now
        self._workers[worker] = _Worker(worker, name)
        return []

    def arrived(self, worker: int, now: float, recoverable: bool = False) -> list[Order]:
        """A worker waits at the door for the first time."""
        found = self._workers.get(worker)
        if found is None or found.place is not _Is.COMING:
            return []
        found.place, found.order, found.recoverable = _Is.WAITING, (1, worker), recoverable
        found.since = now
        if self._generation is not None:
            self._news.append(f"{found.name} has come")
        return self._settle(now)

    def stopped(self, worker: int, step: int, holds: bool, now: float) -> list[Order]:
        """A member has left its generation, and waits at the door with the state of a step."""
        found = self._workers.get(worker)
        if found is None or found.place not in (_Is.RUNNING, _Is.FINISHED):
            return []
        found.place, found.step, found.holds = _Is.WAITING, step, holds
        self._progress = max(self._progress, step)
        if self._stopping_since is None:
            self._stopping_since = now
        return self._settle(now)

    def finished(self, worker: int, step: int, now: float) -> list[Order]:
        """A member has come to the end of the training, and waits for the others."""
        found = self._workers.get(worker)
        if found is None or found.place is not _Is.RUNNING:
            return []
        found.place, found.step = _Is.FINISHED, step
        self._progress = max(self._progress, step)
        return self._settle(now)

    def made(self, worker: int, step: int, now: float) -> list[Order]:
        """A member has made steps: there is a state to lose."""
        if worker in self._workers:
            self._progress = max(self._progress, step)
        return []

    def reconnected(self, worker: int) -> None:
        """The process of a worker is there again, whose connection to the door had closed."""
        found = self._workers.get(worker)
        if found is not None and found.generation:
            self._news.append(f"{found.name} had lost its connections")

    def leaves(self, worker: int, now: float) -> list[Order]:
        """A worker wants to leave after the next common step, as its machine will be taken away."""
        found = self._workers.get(worker)
        if found is None or found.wants_to_leave:
            return []
        found.wants_to_leave = True
        self._target = max(1, self._target - 1)
        self._news.append(f"{found.name} wants to leave")
        return self._settle(now)

    def gone(self, worker: int, how: str, now: float, replace: bool = True) -> list[Order]:
        """The process of a worker has ended; `how` says it in words, as "was killed"."""
        found = self._workers.pop(worker, None)
        if found is None:
            return []
        if found.generation or found.place is _Is.COMING:
            self._news.append(f"{found.name} {how}")
        if found.wants_to_leave:
            replace = False
        elif not replace:
            self._target = max(1, self._target - 1)
        orders = self._settle(now)
        missing = self._target - sum(not w.wants_to_leave for w in self._workers.values())
        if replace and missing > 0 and self._replacements > 0 and not self.is_over:
            self._replacements -= 1
            orders.append(Spawn(1))
        return [*orders, *self._give_up_if_empty(orders)]

    def resize(self, size: int, now: float) -> list[Order]:
        """As many workers are wanted from now on: more are started, or the last ones leave."""
        if not self.limits.minimum <= size <= self.limits.maximum:
            raise InvalidValueError(
                f"This job has {self.limits.minimum} to {self.limits.maximum} workers. Received: {size}"
            )
        staying = [w for w in self._workers.values() if not w.wants_to_leave]
        for worker in sorted(staying, key=lambda w: w.order)[size:]:
            worker.wants_to_leave = True
            self._news.append(f"{worker.name} is no longer wanted")
        self._target = size
        orders = self._settle(now)
        missing = size - len(staying)
        return [*orders, Spawn(missing)] if missing > 0 and not self.is_over else orders

    def fail(self, text: str) -> list[Order]:
        """The program has failed, and would fail again."""
        return [] if self.is_over else self._fail(text)

    def tick(self, now: float) -> list[Order]:
        """Time has passed."""
        return self._settle(now)

    # -- consequences ----------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Order]:
        if self.is_over:
            return self._turn_away(self._at(_Is.WAITING))
        running = self._at(_Is.RUNNING)
        finished = self._at(_Is.FINISHED)
        if running:
            return self._stop(now, running)
        if finished:
            return self._finish(finished)
        return self._begin(now)

    def _at(self, place: _Is) -> list[_Worker]:
        return sorted((w for w in self._workers.values() if w.place is place), key=lambda w: w.order)

    def _stop(self, now: float, running: list[_Worker]) -> list[Order]:
        """What to tell those who train."""
        assert self._generation is not None
        number = self._generation.number
        returned = [w for w in self._at(_Is.WAITING) if w.generation == number]
        if returned:  # the generation is over
            assert self._stopping_since is not None
            late = now - self._stopping_since >= self.limits.stopping
            return [End(w.number) for w in running] if late else []
        members = [*running, *self._at(_Is.FINISHED)]
        leaving = any(w.wants_to_leave for w in members)
        staying = [w for w in members if not w.wants_to_leave]
        room = min(self._target, self.limits.maximum) - len(staying)
        since = min((w.since for w in self._at(_Is.WAITING) if not w.wants_to_leave), default=now)
        gathers = self._at(_Is.COMING) and now - since < self.limits.gathering
        waits = any(not w.wants_to_leave for w in self._at(_Is.WAITING)) and not gathers
        if not leaving and not (waits and room > 0):
            return []
        order = Stop(tuple(w.number for w in running), leaving)
        if self._asked is not None and (self._asked.save or not leaving):
            return []  # they know
        self._asked = order
        return [order]

    def _finish(self, finished: list[_Worker]) -> list[Order]:
        assert self._generation is not None
        number = self._generation.number
        if any(w.generation == number for w in self._at(_Is.WAITING)):
            for worker in finished:
                worker.place = _Is.RUNNING
            return [Again(w.number) for w in finished]
        self.is_over = True
        orders: list[Order] = [Release(w.number, "finished") for w in finished]
        return orders + self._turn_away(self._at(_Is.WAITING))

    def _turn_away(self, waiting: Iterable[_Worker]) -> list[Order]:
        found = list(waiting)
        for worker in found:
            del self._workers[worker.number]
        return [Release(w.number, "left" if w.wants_to_leave else "late") for w in found]

    def _begin(self, now: float) -> list[Order]:
        """None trains: begin a generation if there are enough workers, or give up."""
        orders = self._turn_away(self._may_leave())
        waiting = self._at(_Is.WAITING)
        coming = self._at(_Is.COMING)
        enough = len(waiting) >= self.limits.minimum
        if self._generation is None and coming and now - self._begun < self.limits.patience:
            return orders  # at the start, all that were started are waited for
        if enough:
            return orders + self._new_generation(waiting)
        if not waiting and not coming and orders:
            return orders  # all have left as they wanted
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since < self.limits.patience:
            return orders
        return orders + self._fail(
            f"{self._shortage(waiting)} No other came within {self.limits.patience:g} seconds."
        )

    def _may_leave(self) -> list[_Worker]:
        """Those who want to leave, unless they have to hand over a state that no other has."""
        waiting = self._at(_Is.WAITING)
        leaving = [w for w in waiting if w.wants_to_leave]
        staying = [w for w in waiting if not w.wants_to_leave]
        is_safe = not staying or any(w.holds for w in staying) or all(w.recoverable for w in staying)
        has_room = len(leaving) < self.limits.maximum
        return [] if has_room and not is_safe and any(w.holds for w in leaving) else leaving

    def _give_up_if_empty(self, orders: list[Order]) -> list[Order]:
        """None is left, and none is being started: there is no one to wait for."""
        if self._workers or self.is_over or any(isinstance(o, Spawn) for o in orders):
            return []
        return self._fail(f"{self._shortage([])} None is left to go on.")

    def _shortage(self, waiting: list[_Worker]) -> str:
        here = ", ".join(w.name for w in waiting) or "none"
        happened = "; ".join(self._news) or "no worker has come"
        return (
            f"The job needs at least {self.limits.minimum} workers and has {len(waiting)} ({here}): "
            f"{happened}."
        )

    def _new_generation(self, waiting: list[_Worker]) -> list[Order]:
        leaving = [w for w in waiting if w.wants_to_leave]  # who hand over their state
        room = min(self.limits.maximum - len(leaving), max(self._target, self.limits.minimum))
        staying = [w for w in waiting if not w.wants_to_leave][:room]
        members = sorted([*leaving, *staying], key=lambda w: w.order)
        holding = [w for w in members if w.holds]
        if not holding and self._progress > 0 and not all(w.recoverable for w in members):
            return self._fail(
                "The state of the training is lost, because no worker has all of it in memory and no "
                "checkpoint directory was given to px.train.elastic: " + "; ".join(self._news) + "."
            )
        step = max((w.step for w in holding), default=0)
        holders = tuple(i for i, w in enumerate(members) if w.holds and w.step == step)
        number = 1 if self._generation is None else self._generation.number + 1
        self._generation = Generation(
            number,
            tuple(w.number for w in members),
            step,
            holders[0] if holders else None,
            holders,
            "; ".join(self._news) or ("the job begins" if number == 1 else _LATE),
        )
        for rank, worker in enumerate(members):
            worker.place, worker.generation, worker.order = _Is.RUNNING, number, (0, rank)
        self._news, self._asked = [], None
        self._stopping_since = self._short_since = None
        return [Begin(self._generation)]

    def _fail(self, text: str) -> list[Order]:
        self.is_over, self.failure = True, text
        return [Fail(text)]
