"""Schedules: what is refused and why, and what follows from an order."""

from __future__ import annotations

import copy
import itertools
import random
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.pipelines.named_schedules import SCHEDULES, schedule
from phalanx.parallel.pipelines.schedule import ActionCosts, PipelineAction, PipelineSchedule, refusal


def action(text: str) -> PipelineAction:
    """`F3`, or `F3.1` for chunk 1."""
    micro, _, chunk = text[1:].partition(".")
    return PipelineAction(text[0], int(micro), int(chunk or 0))


def orders(*rows: str) -> list[list[PipelineAction]]:
    return [[action(text) for text in row.split()] for row in rows]


@st.composite
def named(draw: Any) -> PipelineSchedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    chunks, slices = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if name in ("1f1b", "interleaved", "zero_bubble_v"):
        slices = 1
    if name in ("interleaved", "seqvpp", "seqsmartvpp"):
        chunks = max(chunks, 2)
    if name == "zero_bubble_v":
        chunks = 2
    if name == "seqsmartvpp":
        stages += stages % 2
    if name.startswith("seq") and name != "seqpipe":
        slices = min(slices, stages)
        micro_batches = max(micro_batches, -(-stages // slices))
    return schedule(name, stages, micro_batches, chunks, slices)


@given(named())
def test_every_action_begins_when_what_it_needs_has_ended(made: PipelineSchedule) -> None:
    timed = made.timed(ActionCosts(1, 1.5, 0.5, 0.25))
    ends = {made.key(t.stage, t.action): (t.end, t.stage) for t in timed}
    for t in timed:
        for needed in made.needs(made.key(t.stage, t.action)):
            end, stage = ends[needed]
            assert t.start >= end + (0.25 if stage != t.stage else 0)
    for stage in range(made.stages):
        row = sorted((t.start, t.end) for t in timed if t.stage == stage)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(row))
    assert len(timed) == sum(map(len, made.orders))
    assert 0 <= made.bubble() < 1


@given(st.integers(1, 6), st.integers(1, 12))
def test_bubbles_and_live_micro_batches_are_those_of_the_formulas(
    stages: int, micro_batches: int
) -> None:
    share = (stages - 1) / (micro_batches + stages - 1)
    gpipe, alternating = (schedule(name, stages, micro_batches) for name in ("gpipe", "1f1b"))
    assert gpipe.bubble() == pytest.approx(share)
    assert alternating.bubble() == pytest.approx(share)
    assert gpipe.peak_live == (micro_batches,) * stages
    assert alternating.peak_live == tuple(min(micro_batches, stages - i) for i in range(stages))


@given(st.integers(2, 5), st.integers(1, 3), st.integers(2, 3))
def test_interleaving_divides_the_bubble(stages: int, turns: int, chunks: int) -> None:
    made = schedule("interleaved", stages, stages * turns, chunks)
    assert made.bubble() == pytest.approx((stages - 1) / (chunks * stages * turns + stages - 1))


@given(st.integers(1, 5), st.integers(0, 4))
def test_a_v_waits_only_for_its_start(stages: int, more: int) -> None:
    made = schedule("zero_bubble_v", stages, 2 * stages - 1 + more)
    work = 6 * made.micro_batches
    assert made.latency() == work + stages - 1
    assert max(made.peak_live) <= 2 * stages


def test_slices_hold_less() -> None:
    def held(name: str) -> float:
        return float(max(schedule(name, 4, 8, 2, 2).peak_micro_batches))

    assert held("seqsmartvpp") < held("seqvpp") < held("seqpipe") < 5.5
    assert max(schedule("interleaved", 4, 8, 2).peak_micro_batches) == 5.5


@given(named(), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_random_orders_are_refused_or_carried_out(made: PipelineSchedule, rng: random.Random) -> None:
    rows = [list(order) for order in made.orders]
    stage = rng.randrange(made.stages)
    i, j = (rng.randrange(len(rows[stage])) for _ in range(2))
    rows[stage][i], rows[stage][j] = rows[stage][j], rows[stage][i]
    numbers = (made.micro_batches, made.chunks, made.slices, made.placement)
    unchecked = copy.copy(made)
    object.__setattr__(unchecked, "orders", tuple(map(tuple, rows)))
    reason = refusal(unchecked)
    if reason is not None:
        with pytest.raises(InvalidValueError, match="waits before"):
            PipelineSchedule("other", rows, *numbers)
        return
    other = PipelineSchedule("other", rows, *numbers)
    assert len(other.timed()) == len(made.timed())
    place = {key: n for n, key in enumerate(other.key(s, a) for s, a in other.issue_order)}
    assert all(place[k] < n for key, n in place.items() for k in other.needs(key))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ((), "it has no stages"),
        (("F0 F1 B0",), "stage 0 never does B1"),
        (("F0 F0 B0 B1",), "stage 0 does F0 twice"),
        (("F0 F1 B0 B2",), "stage 0 has B2, and there are 2 micro batches"),
        (("F0 F1 B0 X1",), "an action is F, B or W. Received: kind='X' at stage 0"),
        (("B0 F0 F1 B1",), "stage 0 waits before B0 for F0 of stage 0"),
        (
            ("F0 B0 F1 B1", "F1 B1 F0 B0"),
            "stage 0 waits before B0 for B0 of stage 1; stage 1 waits before F1 for F1 of stage 0",
        ),
        (("F0 F1 B0 B1 W0",), "stage 0 never does W1"),
        (("F0 F1 W0 B0 B1 W1",), "stage 0 waits before W0 for B0 of stage 0"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(rows: tuple[str, ...], reason: str) -> None:
    with pytest.raises(InvalidValueError, match="The schedule 'mine' cannot be carried out") as caught:
        PipelineSchedule("mine", orders(*rows), 2)
    assert reason in str(caught.value)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="must have 2 chunk"):
        PipelineSchedule("mine", orders("F0 B0"), 1, chunks=2, placement=[0])
    with pytest.raises(InvalidTypeError, match="micro_batches must be a whole number"):
        PipelineSchedule("mine", orders("F0 B0"), True)
    with pytest.raises(InvalidValueError, match="Known schedules are gpipe, 1f1b"):
        schedule("2f2b", 2, 2)
    with pytest.raises(InvalidValueError, match="stages must be even"):
        schedule("seqsmartvpp", 3, 4, 2)
    with pytest.raises(InvalidValueError, match="at least as many stages as slices"):
        schedule("seqvpp", 2, 4, 2, 3)
    with pytest.raises(InvalidValueError, match="at least the number of stages"):
        schedule("seqvpp", 4, 1, 2, 2)
    with pytest.raises(InvalidValueError, match="needs at least 2 chunks"):
        schedule("interleaved", 2, 4, 1)
    with pytest.raises(InvalidValueError, match="Slices of sequences are for"):
        schedule("1f1b", 2, 4, slices=2)
    with pytest.raises(InvalidValueError, match="is for 2 stages, 4 micro batches"):
        schedule(schedule("1f1b", 2, 4), 2, 8)


def test_pictures_show_every_action() -> None:
    made = schedule("zero_bubble_v", 2, 3)
    text = str(made).splitlines()
    assert text[0] == "zero_bubble_v: 2 stages, 3 micro batches, 2 chunks, bubble 5.3%, live 4 4"
    for stage, order in enumerate(made.orders):
        assert [
            cell for cell in text[stage + 1][3:].replace("|", " ").split() if "." not in cell[:1]
        ] == [str(a) for a in order]
    picture = ET.fromstring(made.to_svg())
    names = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(names) == 2 * 3 * 2 * 3
    assert "stage 0: F0, 0 to 1" in names


def test_pictures_stay_small_if_one_action_is_short() -> None:
    made = schedule("gpipe", 2, 4)
    equal, uneven = (
        float(ET.fromstring(made.to_svg(costs)).attrib["width"])
        for costs in (None, ActionCosts(forward=[1e-6, 1.0]))
    )
    assert uneven < 2 * equal


def test_the_table_has_ticks() -> None:
    made = schedule("1f1b", 2, 2)
    assert made.table[0, 0] == action("F0")
    assert (0, 1) not in made.table
    assert made.table[2, 1] == made.table[3, 1] == action("B0")
    assert refusal(made) is None
