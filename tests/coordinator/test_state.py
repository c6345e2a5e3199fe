"""Random sequences of events against the coordinator's machine, with servers and workers as models."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings, strategies as st

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
from phalanx.coordinator.state import Machine
from phalanx.parameter_server.requests import Token

WORKERS = 3


class Boom(Exception):
    """What a closure raises."""


@dataclass
class Servers:
    """All servers as one: what was applied, and which attempts are refused."""

    low: int = 0
    applied: dict[int, int] = field(default_factory=dict)  # which attempt counts
    fenced: set[Token] = field(default_factory=set)
    log: list[int] = field(default_factory=list)

    def push(self, token: Token) -> bool:
        known = self.applied.get(token.closure)
        if known is not None or token in self.fenced or token.closure < self.low:
            return known == token.attempt
        self.applied[token.closure] = token.attempt
        self.log.append(token.closure)
        return True

    def inquire(self, token: Token) -> bool:
        self.fenced.add(token)
        return token.closure in self.applied


@dataclass
class Worker:
    """A worker, or one that the coordinator believes to be lost, which goes on regardless."""

    index: int
    todo: deque[tuple[int, Token]] = field(default_factory=deque)
    halted: int = -1
    resources: list[int] = field(default_factory=list)
    is_lost: bool = False


class World:
    """A coordinator, its workers, zombies among them, and servers.

    Each method is an event, for which two small numbers say what exactly happens.
    """

    def __init__(self, window: int, staleness: int | None, backups: int, crowd: int) -> None:
        self.crowd = crowd  # how many closures are scheduled at once, at most
        self.machine = Machine(WORKERS, window=window, max_staleness=staleness, backups=backups)
        self.window, self.staleness, self.backups = window, staleness, backups
        self.servers = Servers()
        self.workers: dict[int, Worker] = {}
        self.zombies: list[Worker] = []
        self.inquiries: list[Token] = []
        self.settled: dict[int, ClosureSettled] = {}
        self.scheduled: list[int] = []
        self.needs: dict[int, set[int]] = {}
        self.started: dict[Token, int] = {}  # how many commits there were
        self.pending: BaseException | None = None  # the first failure that was not raised yet
        self.resources: list[int] = []
        self.made = 0

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case RunAttempts(worker, era, attempts):
                    assert self.machine.error is None
                    assert not self.machine.is_paused
                    for token in attempts:
                        assert token not in self.started, "an attempt is made once"
                        assert token.closure not in self.settled
                        assert all(
                            self.outcome(n) is ClosureOutcome.DONE for n in self.needs[token.closure]
                        )
                        self.started[token] = len(self.servers.log)
                        self.workers[worker].todo.append((era, token))
                case ReturnAttempts(worker, era):
                    self.workers[worker].halted = max(era, self.workers[worker].halted)
                case Build(worker, resources):
                    self.workers[worker].resources += resources
                case Inquire(_, attempts):
                    self.inquiries += attempts
                case ClosureSettled(closure, outcome, error):
                    assert closure not in self.settled, "a closure settles once"
                    self.settled[closure] = action
                    if outcome is ClosureOutcome.FAILED:
                        self.pending = self.pending or error

    def then(self, actions: list[Action]) -> None:
        self.act(actions)
        self.act(self.machine.dispatch())

    def outcome(self, closure: int) -> ClosureOutcome | None:
        return self.settled[closure].outcome if closure in self.settled else None

    # -- the user

    def schedule(self, i: int, j: int) -> None:
        for _ in range(i % self.crowd):
            number = self.machine.schedule()
            self.scheduled.append(number)
            self.needs[number] = set()
        self.then([])

    def schedule_with_inputs(self, i: int, j: int) -> None:
        needs = set(self.scheduled[-1 - i :][:1] + self.scheduled[-1 - j :][:1])
        if any(self.outcome(n) in (ClosureOutcome.FAILED, ClosureOutcome.CANCELLED) for n in needs):
            number, actions = self.machine.reject(Boom())
        else:
            number, actions = self.machine.schedule(needs), []
        self.scheduled.append(number)
        self.needs[number] = needs
        self.then(actions)

    def take_error(self, i: int, j: int) -> None:
        if self.machine.error is None or not self.machine.is_quiet:
            return
        error, actions = self.machine.take_error()
        assert error is self.pending
        self.pending = None
        self.act(actions)
        assert set(self.settled) == set(self.scheduled), "all others are cancelled"
        self.then([])

    def cancel(self, i: int, j: int) -> None:
        can = self.machine.error is not None and self.machine.is_quiet
        self.act(self.machine.cancel())
        if can:
            assert set(self.settled) == set(self.scheduled), "nothing waits in vain"
        assert self.machine.error is self.pending, "it is still to be raised"

    def pause(self, i: int, j: int) -> None:
        self.act(self.machine.pause())
        assert self.machine.dispatch() == []

    def resume(self, i: int, j: int) -> None:
        self.machine.resume()
        self.then([])

    def add_resource(self, i: int, j: int) -> None:
        self.made += 1
        self.resources.append(self.made)
        self.act(self.machine.add_resource(self.resources[-1]))

    def drop_resource(self, i: int, j: int) -> None:
        if self.resources:
            gone = self.resources.pop(i % len(self.resources))
            self.machine.drop_resource(gone)
            for worker in self.workers.values():
                worker.resources.remove(gone)

    # -- workers

    def come(self, i: int, j: int) -> None:
        index = i % WORKERS
        if index not in self.workers:
            self.workers[index] = Worker(index)
            self.then(self.machine.worker_up(index))

    def lose(self, i: int, j: int) -> None:
        index = i % WORKERS
        worker = self.workers.pop(index, None)
        if worker is not None:
            self.zombies.append(worker)
        self.then(self.machine.worker_lost(index))

    def change_pace(self, i: int, j: int) -> None:
        self.machine.set_window(i % WORKERS, j)
        self.then([])

    def work(self, i: int, j: int, fails: bool = False) -> None:
        worker = self.workers.get(i % WORKERS)
        for _ in range(1 + j % 4):
            if worker is not None and worker.todo:
                self.then(self.step(worker, fails))

    def fail(self, i: int, j: int) -> None:
        self.work(i, j, fails=True)

    def step(self, worker: Worker, fails: bool) -> list[Action]:
        """A worker makes an attempt, and reports it."""
        era, token = worker.todo.popleft()
        if era <= worker.halted:
            return self.machine.returned(worker.index, *token)
        if fails:
            worker.halted = era
            return self.machine.failed(worker.index, *token, Boom())
        if not self.push(token):
            return self.machine.refused(worker.index, *token)
        return self.machine.done(worker.index, *token)

    def push(self, token: Token) -> bool:
        commits = len(self.servers.log)
        accepted = self.servers.push(token)
        if self.staleness is not None and len(self.servers.log) > commits:
            assert commits - self.started[token] <= self.staleness
        return accepted

    def work_as_zombie(self, i: int, j: int) -> None:
        if self.zombies and (todo := self.zombies[i % len(self.zombies)].todo):
            self.push(todo.popleft()[1])

    def cut(self, i: int, j: int) -> None:
        """A worker commits, and is lost before it can say so."""
        worker = self.workers.get(i % WORKERS)
        if worker is not None and worker.todo and worker.todo[0][0] > worker.halted:
            self.push(worker.todo.popleft()[1])
            self.lose(i, j)

    def answer(self, i: int, j: int) -> None:
        if self.inquiries:
            token = self.inquiries.pop(i % len(self.inquiries))
            self.then(self.machine.resolved(*token, self.servers.inquire(token)))

    def give_up(self, i: int, j: int) -> None:
        """Servers are gone that should know of an attempt, and whatever it does is lost with them."""
        if self.inquiries:
            token = self.inquiries.pop(i % len(self.inquiries))
            if not self.servers.inquire(token):
                self.then(self.machine.abandoned(*token, Boom()))
            else:
                self.then(self.machine.resolved(*token, True))

    def report_late(self, i: int, j: int) -> None:
        if self.started:
            token = sorted(self.started)[-1 - j % len(self.started)]
            index = i % WORKERS
            if self.machine.running(index).get(token.closure) != token.attempt:
                assert self.machine.done(index, *token) == []
                assert self.machine.returned(index, *token) == []
                assert self.machine.refused(index, *token) == []

    def speculate(self, i: int, j: int) -> None:
        self.act(self.machine.speculate(lambda closure: closure % 10 <= i))

    def forget(self, i: int, j: int) -> None:
        self.servers.low = self.machine.low

    # -- what always holds

    def check(self) -> None:
        machine = self.machine
        assert machine.error is self.pending
        unsettled = set(self.scheduled) - set(self.settled)
        assert machine.unsettled == sorted(unsettled)
        assert machine.is_idle == (not unsettled)
        assert machine.low == min(unsettled, default=len(self.scheduled) + 1)
        for index, worker in self.workers.items():
            assert len(worker.todo) <= self.window
            assert machine.running(index) == dict(t for _, t in worker.todo)
            assert worker.resources == self.resources
            assert machine.state(index) is WorkerState.UP
        running = [t.closure for w in self.workers.values() for _, t in w.todo]
        live = [number for number in running if number in unsettled]
        assert len(live) - len(set(live)) <= self.backups
        doubtful = [t for t in self.inquiries if t.closure in unsettled]
        assert machine.in_doubt == len(doubtful)
        assert machine.is_quiet == (not live and not doubtful)
        if self.staleness is not None:
            assert len(set(live)) <= self.staleness + 1
        elif machine.queued and machine.error is None and not machine.is_paused:
            assert all(w.todo for w in self.workers.values()), "no worker is idle"

    def end(self) -> None:
        """Let everything settle: there are as many effects as closures that are done."""
        self.machine.resume()
        for index in range(WORKERS):
            self.come(index, 0)
        self.then([])
        while not self.machine.is_idle or self.machine.error is not None:
            busy = [w for w in self.workers.values() if w.todo]
            if self.inquiries:
                self.answer(0, 0)
            elif busy:
                self.then(self.step(busy[0], fails=False))
            else:
                assert self.machine.error is not None, "nothing hangs"
                self.take_error(0, 0)
        for zombie in (*self.zombies, *self.workers.values()):
            for _, token in zombie.todo:
                self.servers.push(token)
        assert set(self.settled) == set(self.scheduled), "no closure is lost"
        done = [n for n in self.scheduled if self.outcome(n) is ClosureOutcome.DONE]
        assert sorted(self.servers.log) == done, "each effect counts once"
        assert self.machine.done_count == len(done)


EVENTS = [
    *(
        World.schedule,
        World.schedule_with_inputs,
        World.take_error,
        World.cancel,
        World.pause,
        World.resume,
    ),
    *(World.add_resource, World.drop_resource, World.come, World.lose, World.cut, World.work),
    *(World.fail, World.change_pace, World.work_as_zombie, World.answer, World.report_late),
    *(World.speculate, World.forget, World.give_up),
]
ALWAYS = [World.schedule, World.work, World.come, World.resume]


def run_schedule(seed: int) -> None:
    """A random schedule, in which some events are frequent and some never happen."""
    random = Random(seed)
    staleness = random.choice([None, None, 0, 1, 3])
    world = World(random.choice([1, 2, 8]), staleness, random.choice([0, 1, 2]), random.choice([2, 10]))
    weights = [random.choice([0, 1, 1, 5]) + (event in ALWAYS) for event in EVENTS]
    for event in random.choices(EVENTS, weights, k=random.randrange(20, 250)):
        event(world, random.randrange(10), random.randrange(10))
        world.check()
    world.end()


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens(seed: int) -> None:
    run_schedule(seed)


def started(actions: list[Action]) -> RunAttempts:
    """The only action, which starts something."""
    [run] = actions
    assert isinstance(run, RunAttempts)
    return run


def test_an_attempt_that_only_servers_know_of_is_inquired() -> None:
    machine = Machine(1)
    machine.worker_up(0)
    closure = machine.schedule()
    machine.dispatch()
    assert machine.refused(0, closure, 0) == [Inquire(0, [Token(closure, 0)])]
    assert machine.resolved(closure, 0, True) == [ClosureSettled(closure, ClosureOutcome.DONE)]


def test_without_staleness_workers_take_turns() -> None:
    machine = Machine(2, max_staleness=0)
    for _ in range(4):
        machine.schedule()
    machine.worker_up(1)
    assert machine.dispatch() == [], "who comes first must not matter"
    machine.worker_up(0)
    order = []
    for closure in range(1, 5):
        run = started(machine.dispatch())
        assert run.attempts == [Token(closure)]
        order.append(run.worker)
        machine.done(run.worker, closure, 0)
    assert order == [0, 1, 0, 1]


def test_few_closures_go_to_different_workers() -> None:
    machine = Machine(3)
    for worker in range(3):
        machine.worker_up(worker)
    for expected in range(3):
        machine.schedule()
        assert started(machine.dispatch()).worker == expected


def test_a_worker_that_has_halted_goes_on_in_the_next_era() -> None:
    machine = Machine(2, backups=1)
    machine.worker_up(0)
    closure = machine.schedule()
    started(machine.dispatch())
    machine.worker_up(1)
    second = started(machine.speculate(lambda _: True))
    assert second.worker == 1
    assert machine.failed(1, closure, 1, Boom()) == [], "the other attempt goes on"
    assert machine.done(0, closure, 0) == [ClosureSettled(closure, ClosureOutcome.DONE)]
    machine.schedule()
    assert started(machine.dispatch()).era > second.era


def test_what_waits_is_cancelled_when_nothing_can_succeed() -> None:
    machine = Machine(1)
    closure = machine.schedule()
    error = Boom()
    assert machine.doomed(error) == []
    machine.worker_up(0)
    assert machine.dispatch() == []
    assert machine.take_error() == (error, [ClosureSettled(closure, ClosureOutcome.CANCELLED)])
    assert machine.doomed(error) == [], "it may be said again"
