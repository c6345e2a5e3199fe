"""Who trains, since which step, and from whose memory: whatever happens, in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.errors import InvalidValueError
from phalanx.job.elastic.membership import (
    Again,
    Begin,
    ElasticMembership,
    End,
    Fail,
    Order,
    Release,
    Spawn,
    Stop,
    WorkerLimits,
)

LAST = 6  # steps of a training


@dataclass
class Process:
    """A worker of a simulated job. `applied` is its state: the steps that it has seen."""

    number: int
    place: str = "coming"
    begun: int = 0
    applied: list[int] = field(default_factory=list)
    holds: bool = False


class World:
    """A job whose workers really have states, which real workers would exchange as they are told."""

    def __init__(self, limits: WorkerLimits, size: int, spread: bool) -> None:
        self.job = ElasticMembership(limits, size)
        self.spread = spread  # whether the state is lost with any worker, but for a checkpoint
        self.now = 0.0
        self.alive: dict[int, Process] = {}
        self.members: dict[int, Process] = {}  # of the generation, dead or alive
        self.checkpoint: list[int] = []
        self.count = 0
        self.asked = self.made = False
        self.results: list[list[int]] = []
        self.failure: str | None = None
        for _ in range(size):
            self.spawn()

    def spawn(self) -> None:
        number, self.count = self.count, self.count + 1
        self.alive[number] = Process(number)
        self.do(self.job.started(number, f"worker {number}", self.now))

    def do(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Begin(generation):
                    self.begin(generation)
                case Stop():
                    self.asked = True
                case Again(worker):
                    assert self.alive[worker].place == "finished"
                    self.alive[worker].place = "running"
                case Release(worker, why):
                    process = self.alive.pop(worker)
                    if why == "finished":
                        self.results.append(process.applied)
                    else:
                        assert process.place == "waiting"
                case Spawn(count):
                    for _ in range(count):
                        self.spawn()
                case End(worker):
                    self.die(worker)
                case Fail(text):
                    assert self.failure is None
                    self.failure = text

    def begin(self, generation) -> None:  # type: ignore[no-untyped-def]
        limits = self.job.limits
        assert not any(p.place in ("running", "finished") for p in self.alive.values())
        members = [self.alive[number] for number in generation.members]
        assert len({p.number for p in members}) == len(members)
        assert limits.minimum <= len(members) <= limits.maximum
        assert all(p.place == "waiting" for p in members)
        steps = [len(p.applied) for p in members if p.holds]
        if generation.source is None:
            assert not steps
            assert self.spread or not self.made, "what was made is forgotten"
            state = list(self.checkpoint)
        else:
            assert generation.step == max(steps)
            assert generation.source in generation.holders
            for rank in generation.holders:
                assert members[rank].holds
                assert len(members[rank].applied) == generation.step
            state = members[generation.source].applied
        for process in members:
            process.applied, process.begun = list(state), len(state)
            process.place, process.holds = "running", False
        self.members, self.asked = {p.number: p for p in members}, False

    # -- what can happen -------------------------------------------------------------------------

    def step(self, process: Process) -> None:
        """Begin a step, or end it: that needs all members to have begun it."""
        if process.place != "running" or self.failed:
            return
        if process.begun == len(process.applied):
            if process.begun == LAST:
                process.place = "finished"
                self.do(self.job.finished(process.number, LAST, self.now))
            else:
                process.begun += 1
        elif all(p.begun >= process.begun for p in self.members.values()):
            process.applied.append(len(process.applied))
            self.made = True
            self.do(self.job.made(process.number, len(process.applied), self.now))

    @property
    def failed(self) -> bool:
        """Whether a member of the generation is gone."""
        return any(number not in self.alive for number in self.members)

    def stop(self, process: Process) -> None:
        """Leave the generation: it has failed, or all stand after the same step and shall stop."""
        there = {(p.begun, len(p.applied)) for p in self.members.values()}
        agreed = self.asked and len(there) == 1 and len(set(*there)) == 1
        returned = any(p.place == "waiting" for p in self.members.values())
        if process.place == "running" and (self.failed or agreed or returned):
            if agreed and self.spread:
                self.checkpoint = list(process.applied)
            process.place, process.holds = "waiting", not self.spread
            done = len(process.applied)
            self.do(self.job.stopped(process.number, done, process.holds, self.now))

    def arrive(self, process: Process) -> None:
        if process.place == "coming":
            process.place = "waiting"
            self.do(self.job.arrived(process.number, self.now, recoverable=self.spread))

    def die(self, number: int) -> None:
        if self.alive.pop(number, None) is not None:
            self.do(self.job.gone(number, "was killed", self.now))

    def tear(self, ahead: int) -> None:
        """All begin a step, one has made it, and another one dies before the rest have."""
        members = list(self.members.values())
        if self.failed or len(members) < 2 or any(p.place != "running" for p in members):
            return
        for process in members:
            while process.place == "running" and process.begun == len(process.applied) < LAST:
                self.step(process)
        if any(p.place != "running" for p in members):
            return
        self.step(members[ahead % len(members)])
        self.die(members[(ahead + 1) % len(members)].number)

    def move(self, kind: str, which: int) -> None:
        self.now += 0.25
        if self.job.is_over or not self.alive:
            return
        process = list(self.alive.values())[which % len(self.alive)]
        if kind == "die":
            self.die(process.number)
        elif kind == "tear":
            self.tear(which)
        elif kind == "leave":
            self.do(self.job.leaves(process.number, self.now))
        elif kind == "resize":
            limits = self.job.limits
            size = limits.minimum + which % (limits.maximum - limits.minimum + 1)
            self.do(self.job.resize(size, self.now))
        elif kind == "wait":
            self.now += 10.0 * which
            self.do(self.job.tick(self.now))
        else:
            {"step": self.step, "stop": self.stop, "arrive": self.arrive}[kind](process)

    def drain(self) -> None:
        """Let the job come to its end without further misfortune."""
        for _ in range(400):
            if self.job.is_over or not self.alive:
                return
            for process in list(self.alive.values()):
                for act in (self.arrive, self.stop, self.step):
                    if process.number in self.alive:
                        act(process)
            self.now += 5.0
            self.do(self.job.tick(self.now))
        raise AssertionError(f"the job does not end: {self.job.describe()}")


KINDS = (
    ["step"] * 6 + ["stop"] * 3 + ["arrive"] * 3 + ["die", "tear", "tear", "leave", "resize", "wait"]
)


@settings(max_examples=300, deadline=None)
@given(
    bounds=st.sampled_from([(1, 3), (1, 4), (2, 4), (2, 3), (1, 1), (2, 2)]),
    first=st.integers(0, 3),
    replacements=st.integers(0, 2),
    spread=st.booleans(),
    together=st.booleans(),
    moves=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), min_size=20, max_size=80),
)
def test_every_step_counts_once_whatever_happens(
    bounds: tuple[int, int],
    first: int,
    replacements: int,
    spread: bool,
    together: bool,
    moves: list[tuple[str, int]],
) -> None:
    least, most = bounds
    limits = WorkerLimits(least, most, replacements, patience=60.0, stopping=20.0)
    world = World(limits, min(most, least + first), spread)
    if together:  # else it takes many moves until they train
        for process in list(world.alive.values()):
            world.arrive(process)
    for kind, which in moves:
        world.move(kind, which)
    world.drain()
    assert all(result == list(range(LAST)) for result in world.results)
    if world.failure is not None:
        assert not world.results
        short = "needs at least" in world.failure
        assert short or ("is lost" in world.failure and not spread)
        assert "worker" in world.failure
    elif world.job.is_over:
        assert world.results


def start(limits: WorkerLimits, size: int) -> tuple[ElasticMembership, list[Order]]:
    job = ElasticMembership(limits, size)
    orders: list[Order] = []
    for number in range(size):
        orders += job.started(number, f"worker {number}", 0.0)
    for number in range(size):
        orders += job.arrived(number, 1.0)
    return job, orders


def test_a_lost_worker_is_named_when_too_few_are_left() -> None:
    job, _ = start(WorkerLimits(2, 2, patience=5.0), 2)
    assert job.gone(1, "was killed by signal 9 (SIGKILL)", 2.0) == []
    assert job.stopped(0, 3, True, 2.1) == []
    assert job.tick(7.0) == []
    [order] = job.tick(7.2)
    assert isinstance(order, Fail)
    assert "needs at least 2 workers and has 1 (worker 0)" in order.text
    assert "worker 1 was killed by signal 9 (SIGKILL)" in order.text


@pytest.mark.parametrize("recoverable", [True, False])
def test_when_all_are_lost_only_a_checkpoint_has_the_state(recoverable: bool) -> None:
    job, _ = start(WorkerLimits(1, 2, replacements=2), 2)
    assert job.made(0, 1, 1.5) == []
    assert job.gone(0, "was killed", 2.0) == [Spawn(1)]
    assert job.gone(1, "was killed", 2.1) == [Spawn(1)]
    job.started(2, "worker 0", 2.2)
    [order] = job.arrived(2, 3.0, recoverable)
    if recoverable:
        assert isinstance(order, Begin)
        assert order.generation.source is None
    else:
        assert isinstance(order, Fail)
        assert "state of the training is lost" in order.text
        assert "worker 0 was killed; worker 1 was killed" in order.text


def test_when_all_are_lost_before_the_first_step_nothing_is() -> None:
    job, _ = start(WorkerLimits(1, 1, replacements=1), 1)
    assert job.gone(0, "was killed", 2.0) == [Spawn(1)]
    job.started(1, "worker 0", 2.2)
    [order] = job.arrived(1, 3.0)
    assert isinstance(order, Begin)


def test_a_worker_that_was_cut_off_is_named() -> None:
    job, _ = start(WorkerLimits(1, 2), 2)
    job.reconnected(1)
    job.stopped(0, 3, True, 2.0)
    [order] = job.stopped(1, 3, True, 2.1)
    assert isinstance(order, Begin)
    assert order.generation.reason == "worker 1 had lost its connections"


def test_survivors_take_the_state_of_the_one_that_is_ahead() -> None:
    job, _ = start(WorkerLimits(1, 3), 3)
    job.gone(0, "was killed", 2.0)
    assert job.stopped(1, 6, True, 2.1) == []
    [order] = job.stopped(2, 7, True, 2.2)
    assert isinstance(order, Begin)
    assert (order.generation.step, order.generation.source) == (7, 1)
    assert order.generation.holders == (1,)


def test_who_waits_at_the_door_comes_in_at_the_next_stop() -> None:
    job, _ = start(WorkerLimits(1, 2), 1)
    assert job.resize(2, 1.5) == [Spawn(1)]
    job.started(5, "worker 1", 2.0)
    assert job.arrived(5, 3.0) == [Stop((0,), save=False)]
    assert job.tick(3.5) == []  # they know
    [order] = job.stopped(0, 9, True, 4.0)
    assert isinstance(order, Begin)
    assert order.generation.members == (0, 5)
    assert (order.generation.source, order.generation.holders) == (0, (0,))


def test_newcomers_that_start_together_come_in_together() -> None:
    job, _ = start(WorkerLimits(1, 3), 1)
    assert job.resize(3, 1.5) == [Spawn(2)]
    job.started(1, "worker 1", 2.0)
    job.started(2, "worker 2", 2.0)
    assert job.arrived(1, 3.0) == []
    assert job.arrived(2, 3.5) == [Stop((0,), save=False)]


def test_a_worker_that_says_nothing_is_ended() -> None:
    job, _ = start(WorkerLimits(1, 2, stopping=4.0), 2)
    assert job.stopped(0, 3, True, 2.0) == []  # the hub has named worker 1, which is frozen
    assert job.tick(5.0) == []
    assert job.tick(6.0) == [End(1)]


def test_one_that_has_finished_comes_back_for_one_that_has_not() -> None:
    job, _ = start(WorkerLimits(1, 3), 3)
    assert job.finished(0, 10, 2.0) == []
    job.gone(2, "was killed", 2.1)
    assert job.stopped(1, 9, True, 2.2) == [Again(0)]
    [order] = job.stopped(0, 10, True, 2.3)
    assert isinstance(order, Begin)
    assert (order.generation.step, order.generation.source) == (10, 0)


def test_the_last_one_hands_its_state_over_before_it_leaves() -> None:
    job, _ = start(WorkerLimits(1, 2), 1)
    job.resize(2, 1.5)
    job.started(1, "worker 1", 2.0)
    job.arrived(1, 2.5)
    assert job.leaves(0, 3.0) == [Stop((0,), save=True)]
    [order] = job.stopped(0, 4, True, 3.5)
    assert isinstance(order, Begin)
    assert order.generation.members == (0, 1)
    assert job.tick(4.0) == [Stop((0, 1), save=True)]
    assert job.stopped(1, 5, True, 4.1) == []
    released, begun = job.stopped(0, 5, True, 4.2)
    assert released == Release(0, "left")
    assert isinstance(begun, Begin)
    assert begun.generation.members == (1,)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="3:2"):
        WorkerLimits(3, 2)
    job, _ = start(WorkerLimits(2, 3), 2)
    with pytest.raises(InvalidValueError, match="2 to 3 workers"):
        job.resize(4, 2.0)
