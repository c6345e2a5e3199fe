"""The schedules that have names: GPipe, 1F1B, its interleaved and sliced forms, and zero-bubble V.

All of them but GPipe and zero-bubble V have one shape: a stage begins with some forward computations,
then does one backward computation after each forward one. They differ in how many it begins with, and
in how many micro batches go through a chunk before the next chunk has its turn.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.pipelines.schedule import PipelineAction, PipelineSchedule
from phalanx.runtime.formatting import shown

__all__ = ["SCHEDULES", "schedule"]

Unit = tuple[int, int, int]
"""A micro batch, a chunk and a slice."""


def schedule(
    name: str | PipelineSchedule,
    stages: int,
    micro_batches: int,
    chunks: int | None = None,
    slices: int = 1,
) -> PipelineSchedule:
    """A schedule by its name.

    * ``gpipe``: all forward computations, then all backward ones.
    * ``1f1b``: one forward, one backward; stage i holds ``stages - i`` micro batches at most. With more
      than one chunk it is ``interleaved``.
    * ``interleaved``: 1F1B with several chunks per stage, so that stages wait less.
    * ``seqpipe``: 1F1B on slices of sequences, with any number of chunks.
    * ``seqvpp``: the same, but a chunk has its turn after ``stages / slices`` micro batches, so
      that less is held. It needs two chunks.
    * ``seqsmartvpp``: ``seqvpp`` that begins with fewer forward computations. It needs an even number
      of stages.
    * ``zero_bubble_v``: two chunks per stage, placed in the form of a V, and gradients of weights
      computed when a stage would wait.

    Args:
        name: of the schedule; a `PipelineSchedule` is taken as it is, if its numbers are these.
        stages: how many.
        micro_batches: into how many a batch is cut.
        chunks: of each stage; by default the fewest that the schedule can do with.
        slices: into how many each sequence is cut.

    >>> schedule("1f1b", 4, 8).peak_live, schedule("gpipe", 4, 8).peak_live
    ((4, 3, 2, 1), (8, 8, 8, 8))
    >>> round(schedule("1f1b", 4, 8).bubble(), 3), round(schedule("interleaved", 4, 8, 2).bubble(), 3)
    (0.273, 0.158)
    """
    if isinstance(name, PipelineSchedule):
        return _given(name, stages, micro_batches, chunks, slices)
    if not isinstance(name, str) or name not in SCHEDULES:
        raise InvalidValueError(
            f"Known schedules are {', '.join(SCHEDULES)}; others are made with "
            f"px.parallel.PipelineSchedule. Received: {shown(name)}"
        )
    least = 2 if name in ("interleaved", "seqvpp", "seqsmartvpp", "zero_bubble_v") else 1
    count = least if chunks is None else chunks
    for what, number in (
        ("stages", stages),
        ("micro_batches", micro_batches),
        ("chunks", count),
        ("slices", slices),
    ):
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidTypeError(f"{what} must be a whole number. Received: {shown(number)}")
        if number < 1:
            raise InvalidValueError(f"{what} must be at least 1. Received: {number}")
    if count < least:
        raise InvalidValueError(
            f"The schedule {name!r} needs at least {least} chunks per stage. Received: chunks={count}"
        )
    if slices > 1 and name not in ("gpipe", "seqpipe", "seqvpp", "seqsmartvpp"):
        raise InvalidValueError(
            "Slices of sequences are for 'seqpipe', 'seqvpp', 'seqsmartvpp' and 'gpipe'. "
            f"Received: slices={slices} for {name!r}"
        )
    return SCHEDULES[name](stages, micro_batches, count, slices)


def _given(
    given: PipelineSchedule, stages: int, micro_batches: int, chunks: int | None, slices: int
) -> PipelineSchedule:
    found = (given.stages, given.micro_batches, given.chunks, given.slices)
    wanted = (stages, micro_batches, given.chunks if chunks is None else chunks, slices)
    if found != wanted:
        words = ("stages", "micro batches", "chunks", "slices")
        texts = [
            ", ".join(f"{n} {word}" for n, word in zip(numbers, words, strict=True))
            for numbers in (found, wanted)
        ]
        raise InvalidValueError(f"The schedule {given.name!r} is for {texts[0]}. Received: {texts[1]}")
    return given


def _gpipe(stages: int, micro_batches: int, chunks: int, slices: int) -> PipelineSchedule:
    units = list(_units([micro_batches], chunks, slices))
    backwards = [(m, chunks - 1 - c, slices - 1 - s) for m, c, s in units]
    order = [*_actions("F", units), *_actions("B", backwards)]
    return PipelineSchedule("gpipe", [order] * stages, micro_batches, chunks, slices)


def _one_f_one_b(stages: int, micro_batches: int, chunks: int, slices: int) -> PipelineSchedule:
    name = "1f1b" if chunks == 1 else "interleaved"
    return _alternating(name, stages, micro_batches, chunks, slices, stages, 1 if chunks == 1 else 2)


def _seqpipe(stages: int, micro_batches: int, chunks: int, slices: int) -> PipelineSchedule:
    bias = 1 if chunks == 1 else 2
    return _alternating("seqpipe", stages, micro_batches, chunks, slices, stages, bias)


def _seqvpp(
    stages: int, micro_batches: int, chunks: int, slices: int, name: str = "seqvpp", bias: int = 2
) -> PipelineSchedule:
    if stages < slices:
        raise InvalidValueError(
            f"For the schedule {name!r}, there must be at least as many stages as slices. "
            f"Received: stages={stages}, slices={slices}"
        )
    if micro_batches * slices < stages:
        raise InvalidValueError(
            f"For the schedule {name!r}, micro_batches * slices must be at least the number of stages. "
            f"Received: micro_batches={micro_batches}, slices={slices}, stages={stages}"
        )
    # The first slice must be back at the first stage before the next chunk has its turn.
    turn = -(-stages // slices)
    return _alternating(name, stages, micro_batches, chunks, slices, turn, bias)


def _seqsmartvpp(stages: int, micro_batches: int, chunks: int, slices: int) -> PipelineSchedule:
    if stages % 2:
        raise InvalidValueError(
            f"For the schedule 'seqsmartvpp', the number of stages must be even. Received: {stages}"
        )
    return _seqvpp(stages, micro_batches, chunks, slices, "seqsmartvpp", 1)


def _alternating(
    name: str, stages: int, micro_batches: int, chunks: int, slices: int, turn: int, bias: int
) -> PipelineSchedule:
    """Some forward computations, then forward and backward by turns.

    Args:
        name: of the schedule.
        stages: how many.
        micro_batches: how many.
        chunks: per stage.
        slices: of each sequence.
        turn: how many micro batches go through a chunk before the next one has its turn.
        bias: how many more forward computations a stage begins with than the one after it.
    """
    turns = _turns(micro_batches, turn)
    units = list(_units(turns, chunks, slices))
    orders = []
    for stage in range(stages):
        first = (stages - 1 - stage) * bias + (chunks - 1) * turns[0] * slices + slices - 1
        orders.append(_alternate(units, min(first, len(units) - 1)))
    return PipelineSchedule(name, orders, micro_batches, chunks, slices)


def _turns(micro_batches: int, turn: int) -> list[int]:
    """How many micro batches each turn has: `turn`, or one more while there is a rest."""
    count = max(1, micro_batches // turn)
    turns = [turn] * count if micro_batches >= turn else [micro_batches]
    for i in range(micro_batches - sum(turns)):
        turns[i % count] += 1
    return turns


def _units(turns: Sequence[int], chunks: int, slices: int) -> Iterable[Unit]:
    """All units in the order in which they go forward."""
    first = 0
    for length in turns:
        for chunk in range(chunks):
            for micro in range(first, first + length):
                yield from ((micro, chunk, part) for part in range(slices))
        first += length


def _alternate(units: Sequence[Unit], first: int) -> list[PipelineAction]:
    """Go forward with all units, and backward with the oldest micro batch from the `first` one on.

    What went forward last goes backward first, in each micro batch.
    """
    micros: deque[int] = deque()
    open_units: dict[int, list[Unit]] = defaultdict(list)
    order = []
    for i, unit in enumerate(units):
        order.append(PipelineAction("F", *unit))
        micros.append(unit[0])
        open_units[unit[0]].append(unit)
        if i >= first:
            order.append(PipelineAction("B", *open_units[micros.popleft()].pop()))
    return [*order, *(PipelineAction("B", *open_units[micro].pop()) for micro in micros)]


def _actions(kind: str, units: Iterable[Unit]) -> list[PipelineAction]:
    return [PipelineAction(kind, *unit) for unit in units]


def _zero_bubble_v(stages: int, micro_batches: int, chunks: int, slices: int) -> PipelineSchedule:
    if chunks != 2:
        raise InvalidValueError(
            f"The schedule 'zero_bubble_v' has 2 chunks per stage. Received: chunks={chunks}"
        )
    placement = [*range(stages), *reversed(range(stages))]
    orders = [_v_order(stage, stages, micro_batches) for stage in range(stages)]
    return PipelineSchedule("zero_bubble_v", orders, micro_batches, 2, 1, placement)


def _v_order(stage: int, stages: int, micro_batches: int) -> list[PipelineAction]:
    """The order of one stage of a V.

    Chunk 0 goes down the V and chunk 1 comes up, so the stage at the bottom begins to go backward
    first. There is always something to do if there are ``2 * stages - 1`` micro batches; with fewer,
    the actions of those that are missing are left out.
    """
    count = max(micro_batches, 2 * stages - 1)
    order: list[PipelineAction] = []
    done: dict[tuple[str, int], int] = defaultdict(int)

    def do(*actions: tuple[str, int]) -> None:
        for kind, chunk in actions:
            order.append(PipelineAction(kind, done[kind, chunk], chunk))
            done[kind, chunk] += 1

    f0, f1, b0, b1, w0, w1 = ((kind, chunk) for kind in "FBW" for chunk in (0, 1))
    below = stages - stage
    do(*[f0] * (2 * below - 1))
    do(*[f1, f0] * stage)
    do(*[f1, b1, w1] * below)
    while done[f1] < count:
        if done[f0] < count:
            do(f0)
        do(b0, w0, f1, b1, w1)
    do(*[b0, b1] * stage)
    do(*[b0, w0] * below)
    do(*[w1] * (count - done[w1]), *[w0] * (count - done[w0]))
    return [action for action in order if action.micro < micro_batches]


SCHEDULES: dict[str, Callable[[int, int, int, int], PipelineSchedule]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _one_f_one_b,
    "seqpipe": _seqpipe,
    "seqvpp": _seqvpp,
    "seqsmartvpp": _seqsmartvpp,
    "zero_bubble_v": _zero_bubble_v,
}
"""The schedules that have names. What MindSpore calls ``1f1b`` is interleaved if there are chunks."""
