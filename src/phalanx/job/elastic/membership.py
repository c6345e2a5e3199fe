"""Who trains in an elastic job, as a pure state machine: events in, orders out.

The life of a job is a row of *generations*. In each, the same workers train together. A generation ends
when one of them is lost, or at a step that all agree on, because a worker waits at the door or wants to
leave. When all who were in it and live have said at which step they stand, the next one begins: at the
largest step whose state a survivor has.

There are no sockets, threads or clocks in here: the time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from phalanx.errors import InvalidValueError
from phalanx.job.elastic.orders import (
    Again,
    Begin,
    End,
    Fail,
    Generation,
    Order,
    Release,
    Spawn,
    Stop,
    WorkerLimits,
)

__all__ = ["ElasticMembership"]


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
    heard: float = 0.0  # when its process was seen to run, while it is awaited
    ended: str = ""  # how it ends because it is killed from here


class ElasticMembership:
    """The workers of one job.

    Args:
        limits: how many there may be.
        size: how many are wanted at first; as many as possible if None.

    Examples:
        >>> from phalanx.job.elastic.orders import WorkerLimits
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
        self._turned_away: dict[int, _Worker] = {}  # until their processes have ended
        self._generation: Generation | None = None
        self._replacements = limits.replacements
        self._ordered = 0  # workers that are to be started, and have not been yet
        self._all_leave = False
        self._progress = 0  # the largest step that a worker has told of
        self._news: list[str] = []  # what has happened since the generation began
        self._missed: list[tuple[str, str]] = []  # names of those who are gone, and how
        self._has_lost = False  # whether a member of this generation is gone
        self._asked: Stop | None = None
        self._asked_since = 0.0
        self._stopping_since: float | None = None
        self._short_since: float | None = None
        self._idle_since: float | None = None  # when it was seen that none trains any more
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
        """The workers that were started, and have neither been turned away nor ended."""
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
        self._workers[worker] = _Worker(worker, name, wants_to_leave=self._all_leave)
        self._ordered = max(0, self._ordered - 1)
        self._idle_since = None  # it has its time from now on
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
        what = f"{found.name} had lost its connections" if found is not None else ""
        if found is not None and found.generation and what not in self._news:
            self._news.append(what)

    def leaves(self, worker: int, now: float) -> list[Order]:
        """A worker wants to leave after the next common step, as its machine will be taken away."""
        found = self._workers.get(worker)
        if found is None or found.wants_to_leave:
            return []
        self._news.append(f"{found.name} wants to leave")
        return self._leave(found, now)

    def all_leave(self, now: float) -> list[Order]:
        """All machines will be taken away: none is started any more."""
        self._all_leave = True
        orders = [order for worker in self.alive for order in self.leaves(worker, now)]
        return orders + self._settle(now)  # those that were about to leave need not wait for others

    def gone(
        self, worker: int, how: str, now: float, replace: bool = True, left: bool = False
    ) -> list[Order]:
        """The process of a worker has ended.

        Args:
            worker: which.
            how: in words, as "was killed".
            now: the time.
            replace: whether another one may be started in its place.
            left: whether it has ended because of a notice that it could not pass on; see `leaves`.
        """
        self._turned_away.pop(worker, None)
        found = self._workers.pop(worker, None)
        if found is None:
            return []
        if found.generation or found.place is _Is.COMING:
            self._news.append(f"{found.name} {found.ended or how}")
        self._missed.append((found.name, found.ended or how))
        if self._generation is not None and found.generation == self._generation.number:
            self._has_lost = True
        if found.wants_to_leave:
            orders = self._settle(now)
        elif left:
            orders = self._leave(found, now)
        elif replace:
            orders = self._settle(now) + self._replace(self._target)
        else:
            self._target = max(self.limits.minimum, self._target - 1)
            orders = self._settle(now)
        return orders + self._give_up_if_empty()

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
        missing = size - len(staying) - self._ordered
        return orders + self._spawn(missing) if missing > 0 and not self.is_over else orders

    def fail(self, text: str) -> list[Order]:
        """The program has failed, and would fail again."""
        return [] if self.is_over else self._fail(text)

    def ends(self, worker: int, how: str) -> None:
        """A worker is killed from here; `how` is what to say of it when it is gone."""
        if worker in self._workers:
            self._workers[worker].ended = how

    @property
    def awaited(self) -> list[int]:
        """The workers that are to stop, or to end, so that it counts whether they are heard of."""
        is_stopping = self._stopping_since is not None or self._asked is not None
        stopping = [w.number for w in self._at(_Is.RUNNING)] if is_stopping else []
        return [*stopping, *self._turned_away]

    def tick(self, now: float, heard: Iterable[int] = ()) -> list[Order]:
        """Time has passed, and the processes of some workers are known to run."""
        for worker in heard:
            for workers in (self._workers, self._turned_away):
                if worker in workers:
                    workers[worker].heard = now
        return self._settle(now)

    # -- consequences ----------------------------------------------------------------------------

    def _leave(self, worker: _Worker, now: float) -> list[Order]:
        worker.wants_to_leave = True
        self._target = max(self.limits.minimum, self._target - 1)
        return self._settle(now) + self._replace(self.limits.minimum)

    def _replace(self, wanted: int) -> list[Order]:
        """Start a worker if fewer stay than are wanted, and one more may be started."""
        staying = sum(not w.wants_to_leave for w in self._workers.values()) + self._ordered
        if staying >= wanted or not self._replacements or self._all_leave or self.is_over:
            return []
        self._replacements -= 1
        return self._spawn(1)

    def _spawn(self, count: int) -> list[Order]:
        self._ordered += count
        return [Spawn(count)]

    def _settle(self, now: float) -> list[Order]:
        if self.is_over:
            return self._turn_away(self._at(_Is.WAITING), now) + self._end_silent(now)
        running = self._at(_Is.RUNNING)
        finished = self._at(_Is.FINISHED)
        if running:
            return self._stop(now, running)
        if finished:
            return self._finish(finished, now)
        return self._begin(now)

    def _at(self, place: _Is) -> list[_Worker]:
        return sorted((w for w in self._workers.values() if w.place is place), key=lambda w: w.order)

    def _stop(self, now: float, running: list[_Worker]) -> list[Order]:
        """What to tell those who train."""
        assert self._generation is not None
        number = self._generation.number
        finished = self._at(_Is.FINISHED)
        has_returned = any(w.generation == number for w in self._at(_Is.WAITING))
        # If one is lost, those that have finished are needed again, and wait like those that are back:
        # for the rest of the end, which may take long, but not for one that is frozen.
        if has_returned or (self._has_lost and finished):
            if self._stopping_since is None:
                self._stopping_since = now
            longest = self.limits.longest if has_returned else math.inf
            return [order for w in running for order in self._end_if_late(w, now, longest)]
        members = [*running, *finished]
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
            return self._end_if_all_are_silent(running, now)  # they know
        self._asked, self._asked_since = order, now
        return [order]

    def _end_if_all_are_silent(self, running: list[_Worker], now: float) -> list[Order]:
        """If one that trains is silent, the others find out; here none is left who could."""
        silent = min(now - max(self._asked_since, w.heard) for w in running)
        is_known = any(w.ended for w in running) or self._at(_Is.FINISHED)
        if is_known or silent < self.limits.stopping:
            return []
        for worker in running:
            worker.ended = "was ended, because nothing was heard of it"
        why = (
            "It has been asked to stop, as workers come or go, and nothing has been heard of any that "
            f"trains for {self.limits.stopping:g} seconds."
        )
        return [End(worker.number, why) for worker in running]

    def _end_if_late(self, worker: _Worker, now: float, longest: float) -> list[Order]:
        """Others wait at the door for this one: for how long depends on whether its process runs."""
        assert self._stopping_since is not None
        limits, since = self.limits, self._stopping_since
        silent = now - max(since, worker.heard)
        if worker.ended or (silent < limits.stopping and now - since < longest):
            return []
        worker.ended = "was ended, because it did not stop with the others"
        why = (
            f"Nothing has been heard of it for {limits.stopping:g} seconds"
            if silent >= limits.stopping
            else f"It has not done so for {longest:g} seconds, the deadline (PHALANX_DEADLINE)"
        )
        return [End(worker.number, f"The others wait for it to stop, as workers come or go. {why}.")]

    def _finish(self, finished: list[_Worker], now: float) -> list[Order]:
        assert self._generation is not None
        number = self._generation.number
        if self._has_lost or any(w.generation == number for w in self._at(_Is.WAITING)):
            for worker in finished:  # what a lost one had to do at the end is done by another one
                worker.place = _Is.RUNNING
            self._stopping_since = self._asked_since = now  # they hear of it only now
            return [Again(w.number) for w in finished]
        self.is_over = True
        orders: list[Order] = [Release(w.number, "finished") for w in finished]
        return orders + self._turn_away(self._at(_Is.WAITING), now)

    def _end_silent(self, now: float) -> list[Order]:
        """None trains any more: what is still there may be frozen."""
        if self._idle_since is None:
            self._idle_since = now
        limits, since = self.limits, self._idle_since
        awaited = [(w, limits.stopping) for w in self._at(_Is.COMING)]
        # One that has left may have something to do of which nothing can be heard.
        awaited += [
            (w, limits.longest if w.wants_to_leave else limits.stopping)
            for w in self._turned_away.values()
        ]
        orders: list[Order] = []
        for worker, seconds in awaited:
            if not worker.ended and now - max(since, worker.heard) >= seconds:
                worker.ended = "was ended, because nothing was heard of it"
                why = f"None trains any more, and nothing has been heard of it for {seconds:g} seconds."
                orders.append(End(worker.number, why))
        return orders

    def _turn_away(self, waiting: Iterable[_Worker], now: float) -> list[Order]:
        found = list(waiting)
        for worker in found:
            self._turned_away[worker.number] = self._workers.pop(worker.number)
            worker.heard = now
            if worker.wants_to_leave:
                self._missed.append((worker.name, "has left"))
                self._news = self._news or [f"{worker.name} has left"]  # who had to hand over its state
        return [Release(w.number, "left" if w.wants_to_leave else "late") for w in found]

    def _begin(self, now: float) -> list[Order]:
        """None trains: begin a generation if there are enough workers, or give up."""
        orders = self._turn_away(self._may_leave(), now)
        waiting = self._at(_Is.WAITING)
        coming = self._at(_Is.COMING)
        staying = [w for w in waiting if not w.wants_to_leave]
        enough = len(waiting) >= self.limits.minimum and staying
        if self._generation is None and coming and now - self._begun < self.limits.patience:
            return orders  # at the start, all that were started are waited for
        if enough:
            return orders + self._new_generation(waiting)
        if not waiting and not coming and not self._ordered and self._turned_away:
            return orders + self._end_silent(now)  # all have left as they wanted
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since < self.limits.patience:
            return orders
        return orders + self._fail(
            f"{self._shortage(staying)} No other came within {self.limits.patience:g} seconds."
        )

    def _may_leave(self) -> list[_Worker]:
        """Those who want to leave, unless they have to hand over a state that no other has."""
        waiting = self._at(_Is.WAITING)
        leaving = [w for w in waiting if w.wants_to_leave]
        staying = [w for w in waiting if not w.wants_to_leave]
        is_awaited = any(not w.wants_to_leave for w in self._at(_Is.COMING))
        is_last = not staying and (self._all_leave or not (is_awaited or self._ordered))
        is_safe = (
            is_last or any(w.holds for w in staying) or all(w.recoverable for w in staying or leaving)
        )
        has_room = len(leaving) < self.limits.maximum
        return [] if has_room and not is_safe and any(w.holds for w in leaving) else leaving

    def _give_up_if_empty(self) -> list[Order]:
        """None is left, and none is being started: there is no one to wait for."""
        if self._workers or self._ordered or self.is_over or self._all_leave:
            return []
        return self._fail(f"{self._shortage([])} None is left to go on.")

    def _shortage(self, waiting: list[_Worker]) -> str:
        here = ", ".join(w.name for w in waiting) or "none"
        happened = "; ".join(f"{name} {how}" for name, how in self._missed) or "no worker has come"
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
        here = {worker.name for worker in members}  # a name is that of a place, also of later workers
        self._missed = [(name, how) for name, how in self._missed if name not in here]
        self._news, self._asked, self._has_lost = [], None, False
        self._stopping_since = self._short_since = None
        return [Begin(self._generation)]

    def _fail(self, text: str) -> list[Order]:
        self.is_over, self.failure = True, text
        return [Fail(text)]
