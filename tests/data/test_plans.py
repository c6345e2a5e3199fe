"""Random plans: what is run on whole columns is what the plan means, element by element."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.data.naive import naive

import phalanx as px
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.nodes import INFINITE, UNKNOWN
from phalanx.data.plan.opening import GatherCursor, open_plan

D = px.data.Dataset
MOST = 60  # how many elements of a plan are compared; plans may be infinite

Step = tuple[str, tuple[Any, ...]]

moving = st.one_of(
    st.tuples(st.just("take"), st.tuples(st.integers(-1, 12))),
    st.tuples(st.just("skip"), st.tuples(st.integers(0, 6))),
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(st.just("shard"), st.tuples(st.just(n), st.integers(0, n - 1)))
    ),
    st.tuples(st.just("repeat"), st.tuples(st.sampled_from([None, 0, 1, 2, 3]))),
    st.tuples(
        st.just("shuffle"),
        st.tuples(st.integers(1, 12), st.sampled_from([None, 0, 7]), st.booleans()),
    ),
)
grouping = st.one_of(
    st.tuples(st.just("batch"), st.tuples(st.integers(1, 5), st.booleans())),
    st.tuples(st.just("rebatch"), st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=3))),
    st.tuples(st.just("unbatch"), st.just(())),
)
calling = st.sampled_from(["map", "vectorized", "parallel", "filter", "flat_map", "prefetch"]).map(
    lambda name: (name, ())
)
choosing = st.sampled_from(["unique", "windows", "failing", "failing side by side", "failing at once"])
steps = st.lists(
    st.one_of(moving, grouping, calling, choosing.map(lambda name: (name, ()))), max_size=6
)
MAY_LEAVE_NOTHING = {"filter", "unique", "failing", "failing side by side", "failing at once"}
limits = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def add(dataset: Any, step: Step) -> Any:
    """The dataset with one more step."""
    name, args = step
    if name == "map":
        return dataset.map(lambda x: x + 1)
    if name == "parallel":
        return dataset.map(lambda x: x + 2, num_parallel_calls=2)
    if name == "vectorized":
        return dataset.map(lambda x: x * 2, vectorized=True)
    if name == "filter":
        return dataset.filter(lambda x: bool(np.sum(x) % 3))
    if name == "flat_map":
        return dataset.flat_map(lambda x: D.from_tensors(x).repeat(2).shuffle(2))
    if name == "prefetch":
        return dataset.prefetch(3)
    if name == "windows":
        return dataset.group_by_window(lambda x: int(np.sum(x)) % 2, lambda key, window: window, 2)
    if name.startswith("failing"):
        calls = 2 if name.endswith("side by side") else None
        at_once = name.endswith("at once")
        return dataset.map(fails_for_some, calls, vectorized=at_once).ignore_errors()
    return getattr(dataset, name)(*args)


def fails_for_some(x: Any) -> Any:
    if np.any(x % 5 == 1):
        raise ZeroDivisionError
    return x + 1


def build(source: Any, plan: list[Step]) -> Any:
    """A plan of the steps that fit: what is taken apart must be a batch, what is stacked equal."""
    depth, equal = 0, True
    if MAY_LEAVE_NOTHING & {
        name for name, _ in plan
    }:  # may leave nothing, and nothing must not be repeated for ever
        plan = [("repeat", (3,)) if step == ("repeat", (None,)) else step for step in plan]
    for step in plan:
        name = step[0]
        if (name in ("unbatch", "rebatch") and depth == 0) or (name == "batch" and not equal):
            continue
        depth += {"batch": 1, "unbatch": -1}.get(name, 0)
        uneven = name == "rebatch" or (name == "batch" and not step[1][1])
        equal = name == "unbatch" or (equal and not uneven)
        source = add(source, step)
    return source


def source(kind: str, size: int) -> Any:
    return D.range(size) if kind == "range" else D.from_tensor_slices(np.arange(size) * 3)


def read_all(cursor: Cursor, limits: list[int]) -> list[Any]:
    found: list[Any] = []
    for limit in itertools.cycle(limits):
        chunk = cursor.read(limit)
        if chunk is None:
            assert cursor.read(limit) is None, "the end is the end"
            break
        assert 1 <= chunk.count <= limit
        found += [chunk.element(i)[0] for i in range(chunk.count)]
        if len(found) >= MOST:
            break
    cursor.close()
    return found[:MOST]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(x, y) and np.shape(x) == np.shape(y) for x, y in zip(a, b, strict=True)
    )


sources = st.tuples(st.sampled_from(["range", "slices"]), st.integers(0, 14))


@given(sources, steps, limits, st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_a_plan_means_what_its_steps_mean(
    which: tuple[str, int], plan: list[Step], limits: list[int], seed: int
) -> None:
    dataset = build(source(*which), plan)
    run = Run(seed, (2,))
    expected = list(itertools.islice(naive(dataset._node, run), MOST))
    assert same(read_all(open_plan(dataset._node, run), limits), expected)
    size = dataset.cardinality()
    if size >= 0 and len(expected) < MOST:
        assert size == len(expected)
    elif size == INFINITE:
        assert len(expected) == MOST
    else:
        assert size == UNKNOWN or size >= MOST


@given(sources, steps, st.integers(0, 20), limits)
@settings(max_examples=200, deadline=None)
def test_skipping_is_reading_and_forgetting(
    which: tuple[str, int], plan: list[Step], count: int, limits: list[int]
) -> None:
    dataset = build(source(*which), plan)
    run = Run(5, (1,))
    expected = list(itertools.islice(naive(dataset._node, run), MOST + 21))
    for start in (0, 1):
        cursor = open_plan(dataset._node, run)
        if start and cursor.read(1) is None:
            return
        assert cursor.skip(count) == min(count, len(expected) - start)
        assert same(read_all(cursor, limits), expected[start + count :][:MOST])


@given(st.integers(0, 10), st.lists(st.one_of(moving, grouping), max_size=5), st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_an_iterator_can_be_resumed_anywhere(size: int, plan: list[Step], index: int) -> None:
    dataset = build(source("slices", size), [*plan, ("prefetch", ())])
    with dataset.iterator() as whole:
        seen, states = [], [whole.state()]
        for x in itertools.islice(whole, 15):
            seen.append(x)
            states.append(whole.state())
    state = json.loads(json.dumps(states[min(index, len(seen))]))
    again = build(source("slices", size), [*plan, ("prefetch", ())])
    with again.iterator(state) as rest:
        left = list(itertools.islice(rest, len(seen) - state["index"]))
    assert same(left, seen[state["index"] :])


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d,
        lambda d: d.shuffle(4, seed=1).batch(2),
        lambda d: d.map(lambda x: x + 1).shuffle(4, seed=1).repeat(2).batch(3),
        lambda d: d.map(lambda x: x + 1, num_parallel_calls=2).prefetch(4),
        lambda d: d.map(lambda x: x).cache().shuffle(20).repeat(3),
        lambda d: d.shuffle(20).cache().shuffle(3).batch(4, drop_remainder=True),
        lambda d: d.interleave(lambda x: D.range(x % 4), 3, 2).prefetch(2),
        lambda d: d.interleave(lambda x: D.range(x % 4), 3, 2, num_parallel_calls=2),
        lambda d: d.filter(lambda x: x % 3 > 0).enumerate().map(lambda i, x: i * x),
        lambda d: D.sample_from_datasets([d, d.skip(5)], [0.3, 0.7], seed=4),
        lambda d: D.choose_from_datasets([d, d.skip(5)], D.range(2).repeat(9).shuffle(3)),
        lambda d: d.concatenate(d.shuffle(3)),
        lambda d: D.zip(d, d.shuffle(5)).map(lambda a, b: a - b),
        lambda d: d.batch(4).rebatch([3, 2]).unbatch(),
        lambda d: d.window(3, 2).flat_map(lambda w: w),
        lambda d: d.map(np.arange).padded_batch(3),
        lambda d: d.map(lambda x: x % 7).unique().repeat(2),
        lambda d: d.group_by_window(lambda x: x % 3, lambda key, w: w.shuffle(3).batch(2), 3),
        lambda d: d.map(fails_for_some).ignore_errors().shuffle(4).batch(2),
        lambda d: d.map(fails_for_some, 2).batch(2).ignore_errors(),
        lambda d: d.rejection_resample(lambda x: x % 2, [0.2, 0.8]).map(lambda c, x: c + x),
        lambda d: d.shuffle(5).rejection_resample(lambda x: x % 2, [1, 0], [1, 1]).map(lambda c, x: x),
    ],
)
def test_resuming_at_every_position_is_the_same_as_going_on(make: Any) -> None:
    dataset = make(D.from_tensor_slices(np.arange(13)))
    list(dataset)  # a first iteration, which fills caches
    with dataset.iterator() as whole:
        start = whole.state()
        expected = list(whole)
    assert start["epoch"] == 1
    assert len(expected) > 2
    for index in range(len(expected) + 1):
        for fresh in (dataset, make(D.from_tensor_slices(np.arange(13)))):
            with fresh.iterator({**start, "index": index}) as rest:
                assert same(list(rest), expected[index:])


def test_a_restored_iteration_is_followed_by_the_next() -> None:
    one = D.range(10).shuffle(10)
    first = one.iterator()
    next(first)
    state = first.state()
    order = [list(one) for _ in range(2)]
    other = D.range(10).shuffle(10)
    assert same(list(other.iterator(state)), list(first))
    assert [list(other) for _ in range(2)] == order


# -- the rewriting --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "on_numbers"),
    [
        (lambda d: d, True),
        (lambda d: d.shuffle(3).repeat(2).take(5).skip(1).shard(2, 0).batch(2).shuffle(2), True),
        (lambda d: D.zip(d, d).shuffle(3), True),
        (lambda d: d.enumerate().shuffle(3).batch(2), True),
        (lambda d: d.cache().shuffle(3), True),
        (lambda d: d.with_options(px.data.Options()).shuffle(3), True),
        (lambda d: d.map(lambda x: x), False),
        (lambda d: d.shuffle(2).prefetch(1), False),
        (lambda d: d.shuffle(2).cache(), False),
    ],
)
def test_what_only_moves_rows_is_run_on_row_numbers(make: Any, on_numbers: bool) -> None:
    dataset = make(D.from_tensor_slices(np.arange(10)))
    assert isinstance(open_plan(dataset._node, Run()), GatherCursor) == on_numbers


def test_a_full_cache_is_a_source_of_rows() -> None:
    cached = D.range(10).map(lambda x: x).cache()
    dataset = cached.shuffle(4).batch(3)
    assert not isinstance(open_plan(dataset._node, Run()), GatherCursor)
    list(cached)
    assert isinstance(open_plan(dataset._node, Run()), GatherCursor)


def test_ragged_rows_are_shuffled_by_number_and_batched_by_hand() -> None:
    rows = D.from_tensor_slices([[1], [2, 3], [4]])
    assert isinstance(open_plan(rows.shuffle(3)._node, Run()), GatherCursor)
    assert sorted(x.tolist() for x in rows.shuffle(3)) == [[1], [2, 3], [4]]
    with pytest.raises(px.errors.InvalidArgumentError, match=r"padded_batch .* ragged_batch"):
        list(rows.shuffle(3).batch(3))


def test_consecutive_rows_are_views_that_nobody_can_write_to() -> None:
    x = np.arange(12.0).reshape(6, 2)
    for batch in D.from_tensor_slices(x).skip(1).batch(2):
        assert np.shares_memory(batch, x)
        with pytest.raises(ValueError, match="read-only"):
            batch[0, 0] = 7
    assert x.flags.writeable


def test_every_batch_of_gathered_rows_has_memory_of_its_own() -> None:
    batches = list(D.from_tensor_slices(np.arange(12)).shuffle(12, seed=0).batch(3).repeat(2))
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(batches, 2))


# -- answers of TensorFlow 2.21 ---------------------------------------------------------------------

RECORDED = json.loads((Path(__file__).parent / "recorded_plans.json").read_text())


def plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    return [plain(v) for v in x] if isinstance(x, tuple) else np.asarray(x).tolist()


def test_plans_yield_what_tensorflow_yields() -> None:
    names = {"D": D, "np": np, "np_range": np.arange}
    assert len(RECORDED) > 400
    different = {}
    for plan, expected in RECORDED.items():
        dataset = eval(plan, names)
        found = [plain(x) for x in dataset]
        if found != expected["elements"]:
            different[plan] = found
        assert dataset.cardinality() in (expected["cardinality"], len(found)), plan
    assert different == {}
