"""Schedules of pipelines as values: which stage does what, in which order, and what follows from it.

A model is a row of *chunks* that stand at positions 0, 1, 2, …; each stage has one of them or
several. A batch is cut into micro batches, and perhaps those into slices of their sequences. An
action is the forward or backward computation of one slice of one micro batch by one chunk. A schedule
says in which order each stage does its actions. Everything else follows: when each can begin, how
long stages wait, and how much they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.pipelines import schedule_pictures
from phalanx.runtime.formatting import shown

__all__ = ["ActionCosts", "PipelineAction", "PipelineSchedule", "TimedAction"]

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"


@dataclass(frozen=True, order=True)
class PipelineAction:
    """What a stage does at a time.

    Args:
        kind: ``F`` is the forward computation. ``B`` is the backward computation: all of it, or, in a
            schedule that has ``W``, only the gradient of the input. ``W`` is the gradient of the
            weights.
        micro: the number of the micro batch.
        chunk: the number of the chunk among those of the stage.
        slice: the number of the slice of the sequence.

    >>> print(PipelineAction("F", 3), PipelineAction("B", 3, chunk=1))
    F3 B3.1
    """

    kind: str
    micro: int
    chunk: int = 0
    slice: int = 0

    def __str__(self) -> str:
        text = f"{self.kind}{self.micro}"
        if self.chunk or self.slice:
            text += f".{self.chunk}"
        return f"{text}/{self.slice}" if self.slice else text


@dataclass(frozen=True)
class ActionCosts:
    """How long actions take, in any unit. Numbers are for all chunks; sequences have one per position.

    Args:
        forward: a forward computation.
        input: the gradient of the input.
        weight: the gradient of the weights. A backward computation that is not split takes both.
        transfer: from one stage to the next; it keeps no stage busy.
    """

    forward: float | Sequence[float] = 1
    input: float | Sequence[float] = 1
    weight: float | Sequence[float] = 1
    transfer: float = 0

    def of(self, kind: str, position: int, split: bool) -> float:
        """The cost of an action of a chunk."""

        def at(cost: float | Sequence[float]) -> float:
            return cost if isinstance(cost, int | float) else cost[position]

        if kind == FORWARD:
            return at(self.forward)
        if kind == WEIGHT:
            return at(self.weight)
        return at(self.input) if split else at(self.input) + at(self.weight)


@dataclass(frozen=True)
class TimedAction:
    """An action, and when a stage does it."""

    stage: int
    action: PipelineAction
    start: float
    end: float


Key = tuple[str, int, int, int]
"""An action by its kind, micro batch, position and slice."""


@dataclass(frozen=True)
class PipelineSchedule:
    """What each stage of a pipeline does, in which order.

    It is checked when it is made. `px.parallel.schedule` makes those that have a name; others are made
    of lists of actions.

    Args:
        name: for pictures and errors.
        orders: the actions of each stage, in order.
        micro_batches: into how many a batch is cut.
        chunks: how many chunks each stage has.
        slices: into how many each sequence is cut.
        placement: the stage of each position. By default the chunks go around: position ``p`` is at
            stage ``p % stages``.

    Raises:
        InvalidValueError: if it cannot be carried out, with the reason.

    >>> F, B = (lambda m: PipelineAction("F", m)), (lambda m: PipelineAction("B", m))
    >>> schedule = PipelineSchedule("mine", [[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]], 2)
    >>> print(schedule)
    mine: 2 stages, 2 micro batches, bubble 33.3%, live 2 1
    0 |F0|F1|..|..|B0   |..|B1   |
    1 |..|F0|B0   |F1|B1   |..|..|
    >>> schedule.peak_live
    (2, 1)
    """

    name: str
    orders: Sequence[Sequence[PipelineAction]]
    micro_batches: int
    chunks: int = 1
    slices: int = 1
    placement: Sequence[int] = field(default=())

    def __post_init__(self) -> None:
        for what in ("micro_batches", "chunks", "slices"):
            count = getattr(self, what)
            if isinstance(count, bool) or not isinstance(count, int):
                raise InvalidTypeError(f"{what} must be a whole number. Received: {shown(count)}")
            if count < 1:
                raise InvalidValueError(f"{what} must be at least 1. Received: {count}")
        orders = tuple(tuple(order) for order in self.orders)
        object.__setattr__(self, "orders", orders)
        loop = tuple(p % len(orders) for p in range(self.chunks * len(orders))) if orders else ()
        object.__setattr__(self, "placement", tuple(self.placement) or loop)
        reason = refusal(self)
        if reason:
            raise InvalidValueError(f"The schedule {self.name!r} cannot be carried out: {reason}")

    # -- what it is --------------------------------------------------------------------------------

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.orders)

    @property
    def positions(self) -> int:
        """How many chunks there are in all."""
        return len(self.placement)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are actions of their own."""
        return any(action.kind == WEIGHT for order in self.orders for action in order)

    @cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the chunks of each stage."""
        return tuple(
            tuple(p for p, at in enumerate(self.placement) if at == stage)
            for stage in range(self.stages)
        )

    def position(self, stage: int, chunk: int) -> int:
        """The position of a chunk of a stage."""
        return self.homes[stage][chunk]

    def key(self, stage: int, action: PipelineAction) -> Key:
        """An action with its position."""
        return action.kind, action.micro, self.position(stage, action.chunk), action.slice

    def needs(self, key: Key) -> list[Key]:
        """What must be done before an action."""
        kind, micro, position, part = key
        if kind == FORWARD:
            before = [(FORWARD, micro, position - 1, part)] if position else []
            return before + ([(FORWARD, micro, position, part - 1)] if part else [])
        if kind == WEIGHT:
            return [(BACKWARD, micro, position, part)]
        found = [(FORWARD, micro, position, part)]
        if position + 1 < self.positions:
            found.append((BACKWARD, micro, position + 1, part))
        if part + 1 < self.slices:
            found.append((BACKWARD, micro, position, part + 1))
        return found

    # -- what follows ------------------------------------------------------------------------------

    def timed(self, costs: ActionCosts | None = None) -> tuple[TimedAction, ...]:
        """When each action begins and ends, if every stage does the next one as soon as it can."""
        found, waiting = _run(self, costs or ActionCosts())
        assert not waiting, "a schedule is checked when it is made"
        return tuple(found)

    @cached_property
    def table(self) -> Mapping[tuple[int, int], PipelineAction]:
        """The actions by tick and stage. A backward computation that is not split takes two ticks."""
        return {
            (tick, timed.stage): timed.action
            for timed in self.timed()
            for tick in range(int(timed.start), int(timed.end))
        }

    @cached_property
    def issue_order(self) -> tuple[tuple[int, PipelineAction], ...]:
        """All actions in an order in which one thread can start them: by their ticks."""
        timed = sorted(self.timed(), key=lambda t: (t.start, t.end, t.stage))
        return tuple((t.stage, t.action) for t in timed)

    def latency(self, costs: ActionCosts | None = None) -> float:
        """When the last action ends."""
        return max((t.end for t in self.timed(costs)), default=0)

    def bubble(self, costs: ActionCosts | None = None) -> float:
        """The share of the time of all stages in which they wait.

        With equal costs it is ``(p - 1) / (v m + p - 1)`` for p stages, m micro batches and v chunks.
        """
        timed = self.timed(costs)
        whole = max((t.end for t in timed), default=0) * self.stages
        return 1 - sum(t.end - t.start for t in timed) / whole if whole else 0.0

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """How many results of forward computations each stage holds at most for their gradients."""
        return tuple(max(self.live(stage), default=0) for stage in range(self.stages))

    @property
    def peak_micro_batches(self) -> tuple[Fraction, ...]:
        """The same in micro batches of a whole stage: a chunk or a slice is a part of one."""
        return tuple(Fraction(n, self.chunks * self.slices) for n in self.peak_live)

    def live(self, stage: int) -> Iterator[int]:
        """How many results a stage holds after each of its actions began."""
        last = WEIGHT if self.splits_backward else BACKWARD
        held = 0
        for action in self.orders[stage]:
            held += action.kind == FORWARD
            yield held
            held -= action.kind == last

    def __str__(self) -> str:
        return schedule_pictures.text(self)

    def to_svg(self, costs: ActionCosts | None = None) -> str:
        """A picture, as SVG."""
        return schedule_pictures.svg(self, costs)


# -- checks ----------------------------------------------------------------------------------------


def refusal(schedule: PipelineSchedule) -> str | None:
    """Why a schedule cannot be carried out; None if it can."""
    if not schedule.orders:
        return "it has no stages. Received: orders=()"
    return _misplaced(schedule) or _missing(schedule) or _stuck(schedule)


def _misplaced(schedule: PipelineSchedule) -> str | None:
    placement, stages = schedule.placement, schedule.stages
    if len(placement) != stages * schedule.chunks or any(
        placement.count(stage) != schedule.chunks for stage in range(stages)
    ):
        return (
            f"each of the {stages} stages must have {schedule.chunks} chunk(s). "
            f"Received: placement={tuple(placement)}"
        )
    return None


def _missing(schedule: PipelineSchedule) -> str | None:
    """What is there too often, not at all, or at a place that there is not."""
    kinds = (FORWARD, BACKWARD, WEIGHT)
    for stage, order in enumerate(schedule.orders):
        seen: set[PipelineAction] = set()
        for action in order:
            if type(action) is not PipelineAction:
                return f"orders are lists of PipelineAction. Received: {shown(action)}"
            if action.kind not in kinds:
                return f"an action is F, B or W. Received: kind={action.kind!r} at stage {stage}"
            counts = (schedule.micro_batches, schedule.chunks, schedule.slices)
            numbers = (action.micro, action.chunk, action.slice)
            if any(not 0 <= n < count for n, count in zip(numbers, counts, strict=True)):
                return (
                    f"stage {stage} has {action}, and there are {counts[0]} micro batches, "
                    f"{counts[1]} chunks and {counts[2]} slices"
                )
            if action in seen:
                return f"stage {stage} does {action} twice"
            seen.add(action)
        wanted = kinds if schedule.splits_backward else kinds[:2]
        for kind in wanted:
            for each in _every(schedule):
                if PipelineAction(kind, *each) not in seen:
                    return f"stage {stage} never does {PipelineAction(kind, *each)}"
    return None


def _every(schedule: PipelineSchedule) -> Iterable[tuple[int, int, int]]:
    return (
        (micro, chunk, part)
        for micro in range(schedule.micro_batches)
        for chunk in range(schedule.chunks)
        for part in range(schedule.slices)
    )


def _stuck(schedule: PipelineSchedule) -> str | None:
    """Who waits for whom, if the stages would wait for each other forever."""
    done, waiting = _run(schedule, ActionCosts())
    if not waiting:
        return None
    finished = {schedule.key(t.stage, t.action) for t in done}
    reasons = []
    for stage, action in waiting:
        needed = next(k for k in schedule.needs(schedule.key(stage, action)) if k not in finished)
        where = schedule.placement[needed[2]]
        chunk = schedule.homes[where].index(needed[2])
        missing = PipelineAction(needed[0], needed[1], chunk, needed[3])
        reasons.append(f"stage {stage} waits before {action} for {missing} of stage {where}")
    return f"{'; '.join(reasons)}. None of these can begin"


def _run(
    schedule: PipelineSchedule, costs: ActionCosts
) -> tuple[list[TimedAction], list[tuple[int, PipelineAction]]]:
    """When actions begin and end, and those that could never begin."""
    ends: dict[Key, tuple[float, int]] = {}
    free = [0.0] * schedule.stages
    places = [0] * schedule.stages
    found: list[TimedAction] = []
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(schedule.orders):
            while places[stage] < len(order):
                action = order[places[stage]]
                key = schedule.key(stage, action)
                needed = [ends.get(k) for k in schedule.needs(key)]
                if None in needed:
                    break
                known = [n for n in needed if n is not None]
                arrivals = [end if at == stage else end + costs.transfer for end, at in known]
                start = max([free[stage], *arrivals])
                free[stage] = start + costs.of(action.kind, key[2], schedule.splits_backward)
                ends[key] = free[stage], stage
                found.append(TimedAction(stage, action, start, free[stage]))
                places[stage] += 1
                moved = True
    orders = enumerate(zip(schedule.orders, places, strict=True))
    return found, [(stage, order[i]) for stage, (order, i) in orders if i < len(order)]
