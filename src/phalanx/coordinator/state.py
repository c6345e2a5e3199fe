"""Which closure runs on which worker: events in, actions out. No clock, no thread, no socket.

A closure is, one after the other:

* waiting, for the values of other closures;
* queued;
* running: one attempt at it is on a worker, or more than one if a worker is slow;
* in doubt: the worker of its last attempt was lost, and only servers know what it did;
* settled, once: done, failed or cancelled.

After the first failure nothing starts. Workers return what they have not begun. When nothing runs and
nothing is in doubt, all other closures are cancelled. When the error is taken, work goes on.

Resources are built on each worker before any closure that comes later, and again when it comes back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

from phalanx.coordinator.actions import (
    Action,
    Build,
    ClosureOutcome,
    ClosureSettled,
    Inquire,
    ReturnAttempts,
    RunAttempts,
    WorkerState,
)
from phalanx.parameter_server.requests import Token

__all__ = ["Machine"]


class _Closure:
    __slots__ = ("attempt", "dependents", "doubtful", "error", "live", "needs")

    def __init__(self, needs: int) -> None:
        self.needs = needs  # how many values it waits for
        self.attempt = 0  # the number of the next attempt
        self.live: dict[int, int] = {}  # the workers of attempts that run
        self.doubtful: set[int] | None = None  # attempts that only servers know of
        self.dependents: list[int] | None = None  # closures that wait for its value
        self.error: BaseException | None = None  # of an attempt, while there are others

    @property
    def is_busy(self) -> bool:
        return bool(self.live or self.doubtful)


class _Worker:
    __slots__ = ("index", "running", "state", "window")

    def __init__(self, index: int, window: int) -> None:
        self.index, self.window = index, window
        self.state = WorkerState.STARTING
        self.running: dict[int, int] = {}  # the attempts, by closure, in the order of sending


class Machine:
    """The state of all closures and workers.

    Methods that are events return what to do. Call `dispatch` after events: it starts closures.

    Args:
        workers: how many there are.
        window: how many attempts a worker may have at a time.
        max_staleness: how many other closures may commit between the start of an attempt and its own
            commit; None for any number. With 0, closures run one after another, on workers in turn.
        backups: how many additional attempts there may be at a time, at closures that take long.
        first: the number of the first closure.

    Attributes:
        error: the first failure that was not taken yet.
        low: all closures with smaller numbers are settled.
        is_paused: whether nothing starts.
    """

    def __init__(
        self,
        workers: int,
        *,
        window: int = 32,
        max_staleness: int | None = None,
        backups: int = 0,
        first: int = 1,
    ) -> None:
        self._window, self._staleness, self._backups = window, max_staleness, backups
        self._workers = [_Worker(i, window) for i in range(workers)]
        self._up: list[_Worker] = []
        self._open: dict[int, _Closure] = {}  # those that are not settled
        self._queue: deque[int] = deque()
        self._again: list[int] = []  # a heap of those that must run once more, before all others
        self._next = first
        self._busy = 0
        self._additional: set[int] = set()  # closures of which two attempts run
        self._stamps: dict[int, int] = {}  # how many others may commit while a closure runs
        self._turn = 0  # the worker that is next in turn
        self._resources: dict[int, None] = {}
        self._settled: set[int] = set()  # above the low-water mark
        self._era = 0
        self.low = first
        self.error: BaseException | None = None
        self.is_paused = False
        self.done_count = self.retried_count = 0

    # -- what is known ---------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """How many closures could start."""
        return len(self._queue) + len(self._again)

    @property
    def is_idle(self) -> bool:
        """Whether all closures are settled."""
        return not self._open

    @property
    def is_quiet(self) -> bool:
        """Whether nothing runs, and nothing is in doubt."""
        return not self._busy

    @property
    def in_doubt(self) -> int:
        """How many attempts only servers know the end of."""
        return sum(len(c.doubtful) for c in self._open.values() if c.doubtful)

    @property
    def is_hungry(self) -> bool:
        """Whether a closure that is scheduled now could start at once."""
        if self.queued or self.is_paused or self.error is not None:
            return False
        return any(len(w.running) <= w.window // 2 for w in self._up)

    @property
    def unsettled(self) -> list[int]:
        """The closures that are not settled, in the order in which they were scheduled."""
        return list(self._open)

    def is_busy(self, number: int) -> bool:
        """Whether an attempt at a closure that is not settled runs, or is in doubt."""
        return self._open[number].is_busy

    @property
    def next_closure(self) -> int:
        """The number of the closure that is scheduled next."""
        return self._next

    def running(self, worker: int) -> dict[int, int]:
        """The attempts that a worker has, by closure."""
        return dict(self._workers[worker].running)

    def state(self, worker: int) -> WorkerState:
        """What is known of a worker."""
        return self._workers[worker].state

    def staleness(self, worker: int) -> int:
        """How many others may commit while a closure of this worker runs, at most."""
        running = self._workers[worker].running
        if self._staleness is None:
            return max(0, self._busy - 1) if running else 0
        return max((self._stamps.get(c, 0) for c in running), default=0)

    # -- events: the user ------------------------------------------------------------------------

    def schedule(self, needs: Iterable[int] = ()) -> int:
        """A new closure, which starts when those that it needs are done; returns its number."""
        number = self._next
        self._next = number + 1
        if not needs:
            self._open[number] = _Closure(0)
            self._queue.append(number)
        else:
            waits_for = [self._open[n] for n in set(needs) if n in self._open]
            self._open[number] = _Closure(len(waits_for))
            for other in waits_for:
                other.dependents = [*(other.dependents or ()), number]
            if not waits_for:
                self._queue.append(number)
        return number

    def reject(self, error: BaseException) -> tuple[int, list[Action]]:
        """A new closure that has failed already, because something that it needs has."""
        number = self._next
        self._next = number + 1
        self._open[number] = closure = _Closure(0)
        return number, self._fail(number, closure, error)

    def cancel(self) -> list[Action]:
        """Cancel what can never run, because of the error and because nothing runs any more."""
        if self.error is None or not self.is_quiet:
            return []
        self._queue.clear()
        self._again.clear()
        actions: list[Action] = []
        for number in list(self._open):
            actions += self._settle(number, self._open[number], ClosureOutcome.CANCELLED)
        return actions

    def take_error(self) -> tuple[BaseException, list[Action]]:
        """Take the error, once, when all is quiet: cancels everything that has not run."""
        assert self.error is not None
        assert self.is_quiet
        actions = self.cancel()
        error, self.error = self.error, None
        return error, actions

    def pause(self) -> list[Action]:
        """Start nothing, and let workers return what they have not begun."""
        self.is_paused = True
        return self._recall()

    def resume(self) -> None:
        """Start closures again."""
        self.is_paused = False

    # -- events: resources -----------------------------------------------------------------------

    def add_resource(self, resource: int) -> list[Action]:
        """Every worker shall have this resource."""
        self._resources[resource] = None
        return [Build(w.index, [resource]) for w in self._up]

    def drop_resource(self, resource: int) -> None:
        """No worker needs this resource any more."""
        self._resources.pop(resource, None)

    # -- events: workers -------------------------------------------------------------------------

    def worker_up(self, worker: int) -> list[Action]:
        """A worker is there, or there again. It knows nothing of closures and resources."""
        w = self._workers[worker]
        if w.state is WorkerState.UP:
            return []
        w.state, w.window = WorkerState.UP, self._window
        self._up = sorted([*self._up, w], key=lambda w: w.index)
        return [Build(worker, list(self._resources))] if self._resources else []

    def worker_lost(self, worker: int) -> list[Action]:
        """A worker is gone, or was never there."""
        w = self._workers[worker]
        if w.state is WorkerState.UP:
            self._up.remove(w)
        w.state = WorkerState.LOST
        doubtful = []
        for number, attempt in w.running.items():
            closure = self._open.get(number)
            if closure is not None:
                self._doubt(number, closure, attempt)
                doubtful.append(Token(number, attempt))
        w.running.clear()
        return [Inquire(worker, doubtful)] if doubtful else []

    def set_window(self, worker: int, window: int) -> None:
        """Let a worker have so many attempts at a time, at most as many as any."""
        self._workers[worker].window = max(1, min(window, self._window))

    # -- events: attempts ------------------------------------------------------------------------

    def done(self, worker: int, number: int, attempt: int) -> list[Action]:
        """An attempt has succeeded, and its updates count."""
        closure = self._ended(worker, number, attempt)
        if closure is None:
            return []
        self._calm(number)
        return self._settle(number, closure, ClosureOutcome.DONE)

    def failed(self, worker: int, number: int, attempt: int, error: BaseException) -> list[Action]:
        """An attempt has raised an error, and has changed nothing."""
        self._era += 1  # because the worker runs nothing more of this one
        closure = self._ended(worker, number, attempt)
        if closure is None:
            return []
        closure.live.pop(attempt)
        if closure.is_busy:
            closure.error = closure.error or error
            return []
        self._calm(number)
        return self._fail(number, closure, error)

    def returned(self, worker: int, number: int, attempt: int) -> list[Action]:
        """A worker has not begun an attempt, and never will."""
        closure = self._ended(worker, number, attempt)
        if closure is None:
            return []
        closure.live.pop(attempt)
        return [] if closure.is_busy else self._run_again(number, closure)

    def refused(self, worker: int, number: int, attempt: int) -> list[Action]:
        """Servers have not accepted the updates of an attempt: those of another one may count."""
        closure = self._ended(worker, number, attempt)
        if closure is None:
            return []
        if len(closure.live) > 1 or closure.doubtful:
            closure.live.pop(attempt)
            return []
        self._doubt(number, closure, attempt)
        return [Inquire(worker, [Token(number, attempt)])]

    def resolved(self, number: int, attempt: int, committed: bool) -> list[Action]:
        """What servers know of an attempt in doubt, and hold to."""
        closure = self._open.get(number)
        if closure is None or not closure.doubtful or attempt not in closure.doubtful:
            return []
        closure.doubtful.remove(attempt)
        if committed:
            self._calm(number)
            return self._settle(number, closure, ClosureOutcome.DONE)
        return [] if closure.is_busy else self._run_again(number, closure)

    def abandoned(self, number: int, attempt: int, error: BaseException) -> list[Action]:
        """Servers cannot be asked about an attempt in doubt: its end stays unknown."""
        closure = self._open.get(number)
        if closure is None or not closure.doubtful or attempt not in closure.doubtful:
            return []
        closure.doubtful.remove(attempt)
        if closure.is_busy:
            return []
        self._calm(number)
        return self._fail(number, closure, error)

    def doomed(self, error: BaseException) -> list[Action]:
        """No closure can succeed any more, for a reason that is not its own."""
        if self.error is not None:
            return []
        self.error = error
        return self._recall()

    # -- starting --------------------------------------------------------------------------------

    def dispatch(self) -> list[Action]:
        """Start closures on workers that have room."""
        queued = self.queued
        if not queued or not self._up or self.is_paused or self.error is not None:
            return []
        if self._staleness is not None:
            return self._dispatch_bounded()
        actions: list[Action] = []
        level = -(-(queued + sum(len(w.running) for w in self._up)) // len(self._up))
        for w in sorted(self._up, key=_load):
            load = len(w.running)
            if load > w.window // 2:  # few large messages are cheaper than many small ones
                continue
            count = min(w.window, level) - load
            if count > 0:
                attempts = [self._start(w, number) for number in self._take(count)]
                if attempts:
                    actions.append(RunAttempts(w.index, self._era, attempts))
        return actions

    def speculate(self, is_slow: Callable[[int], bool]) -> list[Action]:
        """Start additional attempts at slow closures, on workers that have nothing to do."""
        if not self._backups or self.queued or self.is_paused or self.error is not None:
            return []
        idle = [w for w in self._up if not w.running]
        actions: list[Action] = []
        for number, closure in self._open.items():
            if not idle or len(self._additional) >= self._backups:
                break
            if len(closure.live) == 1 and not closure.doubtful and is_slow(number):
                self._additional.add(number)
                w = idle.pop(0)
                actions.append(RunAttempts(w.index, self._era, [self._begin(w, number, closure)]))
        return actions

    def _dispatch_bounded(self) -> list[Action]:
        if self._staleness == 0 and any(w.state is WorkerState.STARTING for w in self._workers):
            return []  # who comes first must not matter
        batches: dict[int, list[Token]] = {}
        while self.queued and self._may_start():
            free = [w for w in self._up if len(w.running) < w.window]
            if not free:
                break
            count = len(self._workers)
            w = min(free, key=lambda w: (len(w.running), (w.index - self._turn) % count))
            self._turn = w.index + 1
            [number] = self._take(1)
            for other in self._stamps:
                self._stamps[other] += 1
            self._stamps[number] = self._busy
            batches.setdefault(w.index, []).append(self._start(w, number))
        return [RunAttempts(w, self._era, attempts) for w, attempts in batches.items()]

    def _may_start(self) -> bool:
        """Whether all that runs stays fresh enough if one more closure commits meanwhile."""
        bound = self._staleness
        assert bound is not None
        return all(n < bound for n in self._stamps.values())

    def _take(self, count: int) -> list[int]:
        """The next closures in the queue, at most so many."""
        again, queue = self._again, self._queue
        numbers = [heapq.heappop(again) for _ in range(min(count, len(again)))]
        numbers += [queue.popleft() for _ in range(min(count - len(numbers), len(queue)))]
        return numbers

    def _start(self, w: _Worker, number: int) -> Token:
        self._busy += 1
        return self._begin(w, number, self._open[number])

    def _begin(self, w: _Worker, number: int, closure: _Closure) -> Token:
        attempt = closure.attempt
        closure.attempt = attempt + 1
        closure.live[attempt] = w.index
        w.running[number] = attempt
        return Token(number, attempt)

    # -- ending ----------------------------------------------------------------------------------

    def _ended(self, worker: int, number: int, attempt: int) -> _Closure | None:
        """The closure of an attempt that has left its worker, unless that is no news."""
        running = self._workers[worker].running
        if running.get(number) != attempt:
            return None  # of a connection that was lost
        del running[number]
        if self._additional:
            self._additional.discard(number)
        return self._open.get(number)

    def _doubt(self, number: int, closure: _Closure, attempt: int) -> None:
        del closure.live[attempt]
        closure.doubtful = {*(closure.doubtful or ()), attempt}
        self._additional.discard(number)

    def _calm(self, number: int) -> None:
        """A closure neither runs nor is in doubt any more."""
        self._busy -= 1
        if self._stamps:
            self._stamps.pop(number, None)

    def _run_again(self, number: int, closure: _Closure) -> list[Action]:
        self._calm(number)
        if closure.error is not None:
            return self._fail(number, closure, closure.error)
        if self.error is not None:
            return self._settle(number, closure, ClosureOutcome.CANCELLED)
        self.retried_count += 1
        heapq.heappush(self._again, number)
        return []

    def _fail(self, number: int, closure: _Closure, error: BaseException) -> list[Action]:
        settled = self._settle(number, closure, ClosureOutcome.FAILED, error)
        return [*settled, *self.doomed(error)]

    def _settle(
        self,
        number: int,
        closure: _Closure,
        outcome: ClosureOutcome,
        error: BaseException | None = None,
    ) -> list[Action]:
        del self._open[number]
        if number == self.low:
            self._raise_low()
        else:
            self._settled.add(number)
        if outcome is ClosureOutcome.DONE:
            self.done_count += 1
            if closure.dependents is not None:
                self._release(closure.dependents)
        return [ClosureSettled(number, outcome, error)]

    def _raise_low(self) -> None:
        low, settled = self.low + 1, self._settled
        while low in settled:
            settled.remove(low)
            low += 1
        self.low = low

    def _release(self, dependents: Iterable[int]) -> None:
        for number in dependents:
            closure = self._open.get(number)
            if closure is not None:
                closure.needs -= 1
                if not closure.needs:
                    self._queue.append(number)

    def _recall(self) -> list[Action]:
        era, self._era = self._era, self._era + 1
        return [ReturnAttempts(w.index, era) for w in self._up if w.running]


def _load(w: _Worker) -> int:
    return len(w.running)
