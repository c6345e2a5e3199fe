"""Who trains, since which step, and from whose memory: whatever happens, in whatever order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.errors import InvalidValueError
from phalanx.job.elastic.membership import ElasticMembership
from phalanx.job.elastic.orders import (
    Again,
    Begin,
    End,
    Fail,
    Order,
    Release,
    Spawn,
    Stop,
    WorkerLimits,
)

LAST = 6  # steps of a training
DEADLINE = 100.0


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
        self.lost: set[int] = set()  # those of them that are dead
        self.frozen: set[int] = set()  # those that do nothing any more, and never end by themselves
        self.named = False  # whether the hub has found that members wait for one that is frozen
        self.checkpoint: list[int] = []
        self.count = 0
        self.asked = self.made = False
        self.heard = 0.0  # when all were known to run
        self.stopped = math.inf  # since when a member waits for the others to stop, or they shall
        self.leaving: set[int] = set()  # those that want to leave, or shall
        self.left_to_spawn = limits.replacements
        self.results: list[list[int]] = []
        self.failure: str | None = None
        for _ in range(size):
            self.spawn()

    def spawn(self) -> None:
        number, self.count = self.count, self.count + 1
        self.alive[number] = Process(number)
        self.do(self.job.started(number, f"worker {number}", self.now))

    def do(self, orders: list[Order]) -> None:
        if self.lost and any(p.place == "finished" for p in self.alive.values()):
            self.stopped = min(self.stopped, self.now)
        for order in orders:
            match order:
                case Begin(generation):
                    self.begin(generation)
                case Stop():
                    self.asked, self.stopped = True, min(self.stopped, self.now)
                case Again(worker):
                    assert self.alive[worker].place == "finished"
                    self.alive[worker].place = "running"
                    self.stopped = self.now  # it has heard of it just now
                case Release(worker, why):
                    process = self.alive[worker]
                    if why == "finished":
                        del self.alive[worker]
                        assert process.place == "finished"
                        assert not self.lost, "what a lost member had to do at the end is not done"
                        self.results.append(process.applied)
                    else:
                        assert process.place == "waiting"
                        process.place = "released"
                case Spawn(count):
                    for _ in range(count):
                        self.spawn()
                case End(worker, _):
                    assert worker in self.frozen or self.is_late(self.alive[worker])
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
        self.lost.clear()
        self.named, self.stopped = False, math.inf

    # -- what can happen -------------------------------------------------------------------------

    def step(self, process: Process) -> None:
        """Begin a step, or end it: that needs all members to have begun it."""
        if process.place != "running" or process.number in self.frozen:
            return
        if len(process.applied) == LAST:  # which needs no others any more
            process.place = "finished"
            self.do(self.job.finished(process.number, LAST, self.now))
        elif self.failed:
            return
        elif process.begun == len(process.applied):
            process.begun += 1
        elif all(p.begun >= process.begun for p in self.members.values()):
            process.applied.append(len(process.applied))
            self.made = True
            self.do(self.job.made(process.number, len(process.applied), self.now))

    @property
    def failed(self) -> bool:
        """Whether a member of the generation is gone, or known to be frozen."""
        return self.named or any(number not in self.alive for number in self.members)

    def stop(self, process: Process) -> None:
        """Leave the generation: it has failed, or all stand after the same step and shall stop."""
        if process.number in self.frozen:
            return
        there = {(p.begun, len(p.applied)) for p in self.members.values()}
        agreed = self.asked and len(there) == 1 and len(set(*there)) == 1
        returned = any(p.place == "waiting" for p in self.members.values())
        if process.place == "running" and (self.failed or agreed or returned):
            if agreed and self.spread:
                self.checkpoint = list(process.applied)
            process.place, process.holds = "waiting", not self.spread
            self.stopped = min(self.stopped, self.now)
            done = len(process.applied)
            self.do(self.job.stopped(process.number, done, process.holds, self.now))

    def arrive(self, process: Process) -> None:
        if process.place == "coming" and process.number not in self.frozen:
            process.place = "waiting"
            self.do(self.job.arrived(process.number, self.now, recoverable=self.spread))

    def die(self, number: int) -> None:
        if self.alive.pop(number, None) is not None:
            self.lost |= {number} & set(self.members)
            self.do(self.job.gone(number, "was killed", self.now))

    def tear(self, ahead: int) -> None:
        """All begin a step, one has made it, and another one dies before the rest have."""
        members = list(self.members.values())
        if self.failed or len(members) < 2 or any(p.place != "running" for p in members):
            return
        if self.frozen & set(self.members):
            return
        for process in members:
            while process.place == "running" and process.begun == len(process.applied) < LAST:
                self.step(process)
        if any(p.place != "running" for p in members):
            return
        self.step(members[ahead % len(members)])
        self.die(members[(ahead + 1) % len(members)].number)

    def approach_the_end(self) -> None:
        """All make all steps, unless one is lost or shall stop."""
        for _ in range(2 * LAST):
            for process in list(self.members.values()):
                if process.place == "running" and len(process.applied) < LAST:
                    self.step(process)

    def strand(self, first: int) -> None:
        """One has come to its end, another one is lost there, and the others freeze."""
        self.approach_the_end()
        members = list(self.members.values())
        ended = [p for p in members if p.place == "running" and len(p.applied) == LAST]
        if self.failed or len(ended) < len(members) or len(members) < 2:
            return
        finished, lost, *others = members[first % len(members) :] + members[: first % len(members)]
        self.step(finished)
        self.frozen |= {p.number for p in others}
        self.die(lost.number)

    def wait(self, seconds: float, heard: bool) -> None:
        self.now += seconds
        self.heard = self.now if heard else self.heard
        self.do(self.job.tick(self.now, set(self.alive) - self.frozen if heard else []))

    def find_frozen(self) -> None:
        """What the hub does for those that wait for a frozen member; none misses one that is alone."""
        there = [p for p in self.members.values() if p.number in self.alive and p.place != "released"]
        silent = [p for p in there if p.number in self.frozen and p.place == "running"]
        others = [p for p in there if p not in silent]
        wait = {p.number for p in self.alive.values() if p.place == "waiting"} - self.leaving
        if not others and not (self.asked and wait):
            for process in silent:  # a person finds out
                self.die(process.number)
        elif any(p.begun > s.begun for p in others for s in silent if p.place == "running"):
            self.named = True
        elif not self.failed and all(p.place == "finished" for p in others):
            for process in silent:
                self.job.ends(process.number, "was ended")
                self.die(process.number)

    def is_late(self, process: Process) -> bool:
        """Whether others have waited for a member, or nothing was heard of any worker, for long."""
        is_member = process.place in ("running", "finished")
        silent = self.now - (max(self.heard, self.stopped) if is_member else self.heard)
        return silent > self.job.limits.stopping - 1.0 or self.now - self.stopped > DEADLINE - 1.0

    def check_that_enough_stay(self) -> None:
        """As long as workers may be started in place of others, there are not less than the least."""
        staying = {p.number for p in self.alive.values() if p.place != "released"} - self.leaving
        enough = len(staying) >= self.job.limits.minimum
        assert enough or self.left_to_spawn == 0 or self.job.is_over

    def move(self, kind: str, which: int) -> None:
        before = self.count
        self._move(kind, which)
        self.left_to_spawn -= self.count - before
        assert self.left_to_spawn >= 0
        self.check_that_enough_stay()

    def _move(self, kind: str, which: int) -> None:
        self.now += 0.25
        if self.job.is_over or not self.alive:
            return
        process = list(self.alive.values())[which % len(self.alive)]
        if kind == "die":
            self.die(process.number)
        elif kind == "tear":
            self.tear(which)
        elif kind == "end":
            self.approach_the_end()
        elif kind == "strand":
            self.strand(which)
        elif kind == "freeze":
            self.frozen.add(process.number)
        elif kind == "leave":
            self.leaving.add(process.number)
            self.do(self.job.leaves(process.number, self.now))
        elif kind == "vanish":  # after a notice that its process did not take
            self.lost |= {process.number} & set(self.members)
            del self.alive[process.number]
            self.do(self.job.gone(process.number, "was killed", self.now, left=True))
        elif kind == "resize":
            limits = self.job.limits
            size = limits.minimum + which % (limits.maximum - limits.minimum + 1)
            orders = self.job.resize(size, self.now)
            self.left_to_spawn += sum(order.count for order in orders if isinstance(order, Spawn))
            about = self.job.describe()
            self.leaving |= {int(name.split()[1]) for name, doing in about if "leave" in doing}
            self.do(orders)
        elif kind == "wait":
            self.wait(10.0 * which, heard=which % 2 == 0)
        else:
            {"step": self.step, "stop": self.stop, "arrive": self.arrive}[kind](process)

    def drain(self) -> None:
        """Let the job come to its end without further misfortune, and all processes to theirs."""
        for count in range(400):
            if self.failure is not None or not self.alive:
                return
            for process in list(self.alive.values()):
                is_free = process.place == "released" and process.number not in self.frozen
                if is_free and count > 60:  # what it had left to do took longer than any wait
                    self.die(process.number)
                for act in (self.arrive, self.stop, self.step):
                    if process.number in self.alive:
                        act(process)
            self.find_frozen()
            self.wait(5.0, heard=True)
        raise AssertionError(f"the job does not end: {self.job.describe()}")


KINDS = ["step"] * 6 + ["stop"] * 3 + ["arrive"] * 3
KINDS += ["die", "tear", "tear", "leave", "leave", "vanish", "resize", "wait", "end"]
KINDS += ["freeze", "strand"]


@settings(max_examples=300, deadline=None)
@given(
    bounds=st.sampled_from([(1, 3), (1, 4), (2, 4), (2, 3), (1, 1), (2, 2)]),
    first=st.integers(0, 3),
    replacements=st.integers(0, 2),
    spread=st.booleans(),
    together=st.booleans(),
    reclaimed=st.booleans(),
    stranded=st.booleans(),
    moves=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), min_size=20, max_size=80),
)
def test_every_step_counts_once_whatever_happens(
    bounds: tuple[int, int],
    first: int,
    replacements: int,
    spread: bool,
    together: bool,
    reclaimed: bool,
    stranded: bool,
    moves: list[tuple[str, int]],
) -> None:
    least, most = bounds
    limits = WorkerLimits(least, most, replacements, 60.0, stopping=20.0, deadline=DEADLINE)
    world = World(limits, min(most, least + first), spread)
    if together:  # else it takes many moves until they train
        for process in list(world.alive.values()):
            world.arrive(process)
    for kind, which in moves:
        world.move(kind, which)
    if stranded:
        world.move("strand", first)
    count = world.count
    if reclaimed:
        world.do(world.job.all_leave(world.now))
    world.drain()
    assert not reclaimed or world.count == count
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


def test_all_who_are_missed_are_named_when_too_few_are_left() -> None:
    """Also those who were lost in earlier generations, but not the one in whose place another is."""
    job, _ = start(WorkerLimits(2, 4, replacements=1, patience=5.0), 4)
    job.gone(3, "was killed by signal 11", 2.0)
    for worker in (0, 1, 2):
        job.stopped(worker, 3, True, 2.1)
    job.started(4, "worker 3", 2.2)
    job.arrived(4, 2.3)
    for worker in (0, 1, 2):
        job.stopped(worker, 4, True, 2.4)
    job.leaves(1, 3.0)
    for worker in (0, 1, 2, 4):
        job.stopped(worker, 5, True, 3.1)
    job.gone(4, "was killed by signal 9", 4.0)
    job.stopped(0, 6, True, 4.1)
    job.stopped(2, 6, True, 4.1)
    job.gone(2, "was killed by signal 6", 5.0)
    job.stopped(0, 6, True, 5.1)
    [order] = job.tick(10.2)
    assert isinstance(order, Fail)
    assert "has 1 (worker 0): worker 1 has left; worker 3 was killed by signal 9; " in order.text
    assert "worker 2 was killed by signal 6." in order.text
    assert "signal 11" not in order.text


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
    [order] = job.tick(6.0)
    assert isinstance(order, End)
    assert order.worker == 1
    assert "Nothing has been heard of it for 4 seconds" in order.why
    assert job.tick(7.0) == []  # it is being ended
    [order] = job.gone(1, "was killed by signal 9", 7.1)
    assert isinstance(order, Begin)
    assert order.generation.reason == "worker 1 was ended, because it did not stop with the others"


def test_a_worker_that_is_busy_on_its_own_is_waited_for_until_the_deadline() -> None:
    job, _ = start(WorkerLimits(1, 3, stopping=4.0, deadline=60.0), 3)
    assert job.gone(2, "was killed", 2.0) == []
    assert job.stopped(0, 3, True, 2.0) == []
    assert job.awaited == [1]
    for now in range(3, 62):
        assert job.tick(now, [1]) == []
    [order] = job.tick(62.0, [1])
    assert isinstance(order, End)
    assert "for 60 seconds, the deadline (PHALANX_DEADLINE)" in order.why


def test_a_worker_that_was_heard_of_and_then_no_more_is_ended() -> None:
    job, _ = start(WorkerLimits(1, 2, stopping=4.0), 2)
    assert job.stopped(0, 3, True, 2.0) == []
    assert job.tick(5.0, [1]) == []
    assert job.tick(8.9) == []
    assert len(job.tick(9.0)) == 1


def test_when_all_that_train_are_silent_they_do_not_keep_out_those_at_the_door() -> None:
    """One that is alone has none beside it who would miss it."""
    job, _ = start(WorkerLimits(1, 2, stopping=4.0), 1)
    assert job.tick(10.0) == []  # none waits for it
    job.resize(2, 10.0)
    job.started(1, "worker 1", 10.0)
    assert job.awaited == []
    assert job.arrived(1, 11.0, recoverable=True) == [Stop((0,), save=False)]
    assert job.awaited == [0]
    assert job.tick(14.0, [0]) == []  # it has an evaluation to do, say, which may take long
    assert job.tick(17.9) == []
    [order] = job.tick(18.0)
    assert isinstance(order, End)
    assert order.worker == 0
    assert job.tick(30.0) == []  # it is being ended
    [order] = job.gone(0, "was killed by signal 9", 30.1)
    assert isinstance(order, Begin)
    assert order.generation.members == (1,)
    assert order.generation.reason.endswith("worker 0 was ended, because nothing was heard of it")


def test_one_that_is_silent_is_left_to_those_that_train_with_it() -> None:
    job, _ = start(WorkerLimits(1, 3, stopping=4.0), 2)
    job.resize(3, 2.0)
    job.started(2, "worker 2", 2.0)
    job.arrived(2, 3.0)
    for now in range(4, 60):
        assert job.tick(now, [0]) == []
    assert job.tick(62.9) == []
    assert {order.worker for order in job.tick(63.0)} == {0, 1}


def test_one_that_has_finished_comes_back_for_one_that_has_not() -> None:
    job, _ = start(WorkerLimits(1, 3), 3)
    assert job.finished(0, 10, 2.0) == []
    job.gone(2, "was killed", 2.1)
    assert job.stopped(1, 9, True, 2.2) == [Again(0)]
    [order] = job.stopped(0, 10, True, 2.3)
    assert isinstance(order, Begin)
    assert (order.generation.step, order.generation.source) == (10, 0)


def test_one_that_is_silent_is_ended_if_one_has_finished_and_another_one_is_lost() -> None:
    """The hub leaves it alone, because its generation has failed; and no member has come back."""
    job, _ = start(WorkerLimits(1, 3, stopping=4.0), 3)
    assert job.finished(0, 10, 2.0) == []
    assert job.gone(2, "was killed", 3.0) == []
    assert job.awaited == [1]
    for now in range(4, 800):  # it exports a model, say, for longer than the deadline of ten minutes
        assert job.tick(now, [1]) == []
    assert job.tick(802.9) == []
    [order] = job.tick(803.0)
    assert isinstance(order, End)
    assert order.worker == 1
    assert job.gone(1, "was killed by signal 9", 803.1) == [Again(0)]


def test_those_that_are_needed_again_have_their_time_from_then_on() -> None:
    """One exports the model for longer than any wait may last, while another one is lost."""
    job, _ = start(WorkerLimits(1, 3, stopping=30.0, deadline=600.0), 3)
    job.finished(0, 10, 2.0)
    job.gone(2, "was killed", 3.0)
    for now in range(4, 600):
        assert job.tick(now, [1]) == []
    assert job.finished(1, 10, 600.0) == [Again(0), Again(1)]
    assert job.tick(610.0) == []
    assert job.stopped(0, 10, True, 611.0) == job.tick(629.0) == []
    [order] = job.tick(630.0)
    assert isinstance(order, End)
    assert order.worker == 1


def test_a_job_that_a_worker_leaves_does_not_come_below_its_minimum() -> None:
    job, _ = start(WorkerLimits(2, 3, replacements=1), 2)
    assert job.leaves(1, 2.0) == [Stop((0, 1), save=True), Spawn(1)]
    assert job.target == 2
    job.started(2, "worker 2", 2.1)
    assert job.stopped(0, 4, True, 2.2) == []
    assert job.stopped(1, 4, True, 2.3) == [Release(1, "left")]
    [order] = job.arrived(2, 3.0)
    assert isinstance(order, Begin)
    assert (order.generation.members, order.generation.step) == ((0, 2), 4)
    assert job.leaves(0, 4.0) == [Stop((0, 2), save=True)]  # it takes as many as may be lost


def test_a_job_with_enough_workers_gets_none_for_one_that_leaves() -> None:
    job, _ = start(WorkerLimits(1, 3, replacements=3), 3)
    assert job.leaves(2, 2.0) == [Stop((0, 1, 2), save=True)]
    assert job.gone(1, "was killed", 2.1, left=True) == []
    assert job.target == 1
    assert job.resize(3, 3.0) == [Spawn(2)]


@pytest.mark.parametrize("recoverable", [True, False])
def test_the_only_one_waits_for_the_one_in_its_place_unless_a_checkpoint_has_the_state(
    recoverable: bool,
) -> None:
    job = ElasticMembership(WorkerLimits(1, 2, replacements=1), 1)
    job.started(0, "worker 0", 0.0)
    job.arrived(0, 1.0, recoverable)
    assert job.leaves(0, 2.0) == [Stop((0,), save=True), Spawn(1)]
    orders = job.stopped(0, 4, True, 2.1)
    assert orders == ([Release(0, "left")] if recoverable else [])
    job.started(1, "worker 1", 2.2)
    assert job.tick(100.0) == []
    [order] = job.arrived(1, 100.1, recoverable)
    assert isinstance(order, Begin)
    assert order.generation.members == ((1,) if recoverable else (0, 1))


def test_when_all_leave_none_is_started() -> None:
    """Not even one that was asked for when the notice of one came before the notice to all."""
    job, _ = start(WorkerLimits(2, 2, replacements=3), 2)
    assert job.leaves(1, 2.0) == [Stop((0, 1), save=True), Spawn(1)]
    assert job.all_leave(2.1) == []
    job.started(2, "worker 1", 2.2)
    assert job.stopped(0, 4, True, 2.3) == []
    assert job.stopped(1, 4, True, 2.4) == [Release(0, "left"), Release(1, "left")]
    assert job.gone(2, "was killed", 2.5) == []


def test_when_all_leave_those_that_waited_for_others_may_go() -> None:
    """Each got its notice by itself first, so others were asked for, to take over the state."""
    job, _ = start(WorkerLimits(2, 4, replacements=3), 2)
    assert job.leaves(0, 2.0) == [Stop((0, 1), save=True), Spawn(1)]
    assert job.leaves(1, 2.1) == [Spawn(1)]
    assert job.stopped(0, 4, True, 2.2) == job.stopped(1, 4, True, 2.3) == []
    assert job.all_leave(2.4) == [Release(0, "left"), Release(1, "left")]


@pytest.mark.parametrize("lost", ["while it was at the end", "when it had come to its end"])
def test_the_end_is_done_again_for_a_member_that_is_lost_before_all_have_done_it(lost: str) -> None:
    """The first exports the model, say, in the training function or after it."""
    job, _ = start(WorkerLimits(1, 2), 2)
    if lost == "when it had come to its end":
        assert job.finished(0, 10, 2.0) == []
        assert job.gone(0, "was killed", 2.1) == []
        orders = job.finished(1, 10, 2.2)
    else:
        assert job.finished(1, 10, 2.0) == []
        orders = job.gone(0, "was killed", 2.1)
    assert orders == [Again(1)]
    [order] = job.stopped(1, 10, True, 2.3)
    assert isinstance(order, Begin)
    assert (order.generation.members, order.generation.step) == ((1,), 10)
    assert job.finished(1, 10, 2.4) == [Release(1, "finished")]
    assert job.is_over


def test_one_that_is_still_being_started_does_not_keep_up_a_job_that_is_over() -> None:
    """It may be frozen while it imports the program."""
    job, _ = start(WorkerLimits(1, 2, stopping=30.0), 1)
    job.resize(2, 1.5)
    job.started(1, "worker 1", 2.0)
    assert job.finished(0, 10, 3.0) == [Release(0, "finished")]
    assert job.tick(4.0) == job.tick(33.0) == []
    [order] = job.tick(34.1)
    assert isinstance(order, End)
    assert (order.worker, "None trains any more" in order.why) == (1, True)
    assert job.tick(60.0) == []


@pytest.mark.parametrize(("why", "seconds"), [("late", 30.0), ("left", 600.0)])
def test_one_that_was_turned_away_and_is_silent_does_not_keep_up_a_job_that_is_over(
    why: str, seconds: float
) -> None:
    job, _ = start(WorkerLimits(1, 2, stopping=30.0, deadline=600.0), 2)
    if why == "left":
        job.leaves(1, 2.0)
        job.stopped(1, 5, True, 2.0)
        release, _ = job.stopped(0, 5, True, 2.0)
        job.finished(0, 9, 3.0)
    else:
        job.gone(1, "was killed", 1.5)
        job.stopped(0, 5, True, 1.5)
        job.started(2, "worker 1", 1.5)
        job.finished(0, 9, 3.0)
        [release] = job.arrived(2, 3.0)
    worker = release.worker
    assert (release, worker in job.alive) == (Release(worker, why), False)
    assert job.awaited == [worker]
    assert job.tick(1000.0, [worker]) == []  # its program has something to do
    assert job.tick(999.0 + seconds) == []
    [order] = job.tick(1000.0 + seconds)
    assert (order.worker, f"for {seconds:g} seconds" in order.why) == (worker, True)
    assert job.tick(5000.0) == []  # it is being ended
    assert job.gone(worker, "was killed by signal 9", 5001.0) == []
    assert job.awaited == []


def test_when_all_have_left_one_that_is_silent_is_ended_and_one_that_is_heard_of_is_not() -> None:
    job, _ = start(WorkerLimits(1, 2, patience=50.0, deadline=600.0), 2)
    job.all_leave(2.0)
    job.stopped(0, 5, True, 2.0)
    assert len(job.stopped(1, 5, True, 2.0)) == 2
    for now in range(3, 602):
        assert job.tick(now, [0]) == []
    assert [order.worker for order in job.tick(602.0, [0])] == [1]
    assert not job.is_over


def test_one_that_is_started_after_all_have_left_has_its_time_to_come() -> None:
    """Also if too few come, and the job is over because of that."""
    job, _ = start(WorkerLimits(2, 2, patience=50.0, stopping=30.0), 2)
    for worker in (0, 1):
        job.leaves(worker, 2.0)
    job.stopped(0, 5, False, 3.0)
    assert len(job.stopped(1, 5, False, 3.0)) == 2
    assert job.resize(2, 10.0) == [Spawn(2)]
    for worker in (2, 3):
        job.started(worker, f"worker {worker}", 60.0)
    assert job.tick(60.0) == []
    assert isinstance(job.tick(110.0)[0], Fail)
    assert job.tick(111.0) == job.tick(140.0) == []
    assert [order.worker for order in job.tick(141.0)] == [2, 3]


def test_a_network_that_comes_and_goes_is_told_of_once() -> None:
    job, _ = start(WorkerLimits(1, 2), 2)
    job.reconnected(1)
    job.reconnected(1)
    job.stopped(1, 3, True, 4.0)
    [order] = job.stopped(0, 3, True, 4.1)
    assert isinstance(order, Begin)
    assert order.generation.reason == "worker 1 had lost its connections"


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
    assert begun.generation.reason == "worker 0 has left"


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="3:2"):
        WorkerLimits(3, 2)
    job, _ = start(WorkerLimits(2, 3), 2)
    with pytest.raises(InvalidValueError, match="2 to 3 workers"):
        job.resize(4, 2.0)
