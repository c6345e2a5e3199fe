"""Order and number: shuffling, repeating, leaving out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx.data.ops.shuffling import previous_occurrence

D = px.data.Dataset


def ints(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


def through_columns(dataset: Any) -> Any:
    """The same elements, in a way that cannot be run on row numbers."""
    return dataset.map(lambda x: x, vectorized=True)


# -- shuffling ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=30))
def test_previous_occurrences(slots: list[int]) -> None:
    expected = [max((j for j in range(i) if slots[j] == s), default=-1) for i, s in enumerate(slots)]
    assert previous_occurrence(np.array(slots, np.int64)).tolist() == expected


@given(st.integers(0, 60), st.integers(1, 70), st.integers(0, 1000), st.integers(1, 9), st.booleans())
@settings(deadline=None)
def test_shuffling_permutes_within_the_buffer(
    size: int, buffer: int, seed: int, batch: int, columns: bool
) -> None:
    source = D.from_tensor_slices(np.arange(size))
    source = through_columns(source) if columns else source
    order = [int(x) for b in source.shuffle(buffer, seed=seed).batch(batch) for x in b]
    assert sorted(order) == list(range(size))
    assert all(x <= place + buffer - 1 for place, x in enumerate(order))


def test_all_orders_are_about_equally_likely() -> None:
    dataset = D.range(4).shuffle(4, seed=0)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(2400):
        order = tuple(ints(dataset))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    chi2 = sum((n - 100) ** 2 / 100 for n in counts.values())
    assert chi2 < 50  # 23 degrees of freedom: more with probability 0.001, and the seed is fixed


def test_a_small_buffer_moves_elements_towards_the_end_only_by_chance() -> None:
    orders = [ints(D.range(100).shuffle(10, seed=s)) for s in range(20)]
    delays = [place - x for order in orders for place, x in enumerate(order)]
    assert min(delays) >= -9
    assert max(delays) > 20
    assert abs(np.mean(delays)) < 1e-9


def test_each_iteration_has_an_order_of_its_own_and_the_same_seed_the_same_orders() -> None:
    def orders(**options: Any) -> list[list[int]]:
        dataset = D.range(20).shuffle(20, **options)
        return [ints(dataset) for _ in range(4)]

    first = orders(seed=3)
    assert len({tuple(order) for order in first}) == 4
    assert orders(seed=3) == first
    assert orders(seed=4) != first
    assert orders() != orders()
    fixed = orders(seed=3, reshuffle_each_iteration=False)
    assert fixed == [fixed[0]] * 4
    unseeded = orders(reshuffle_each_iteration=False)
    assert unseeded == [unseeded[0]] * 4


def test_each_pass_of_repeat_has_an_order_of_its_own() -> None:
    order = ints(D.range(20).shuffle(20, seed=1).repeat(3))
    passes = [order[:20], order[20:40], order[40:]]
    assert all(sorted(p) == list(range(20)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    order = ints(D.range(20).shuffle(20, seed=1, reshuffle_each_iteration=False).repeat(2))
    assert order[:20] == order[20:]
    order = ints(D.range(20).repeat(2).shuffle(40, seed=1))
    assert sorted(order[:20]) != list(range(20))


def test_shuffles_of_one_plan_are_independent() -> None:
    start = {"epoch": 0, "index": 0, "seed": 9}
    twice = ints(D.range(30).shuffle(30).shuffle(30).iterator(start))
    once = ints(D.range(30).shuffle(30).iterator(start))
    assert [once[i] for i in once] != twice
    pairs = list(D.zip(D.range(30).shuffle(30), D.range(30).shuffle(30)))
    assert any(a != b for a, b in pairs)
    inner = ints(D.range(2).flat_map(lambda _: D.range(30).shuffle(30)))
    assert inner[:30] != inner[30:]


def test_ragged_elements_and_strings_are_shuffled_too() -> None:
    rows = [[i] * (i % 3) for i in range(20)]
    dataset = D.from_generator(lambda: ((np.array(r, int), str(i)) for i, r in enumerate(rows)))
    shuffled = list(dataset.shuffle(5, seed=0))
    assert sorted(int(name) for _, name in shuffled) == list(range(20))
    assert all(row.tolist() == rows[int(name)] for row, name in shuffled)
    assert [name for _, name in shuffled] != [str(i) for i in range(20)]


def test_a_buffer_for_everything() -> None:
    assert sorted(ints(D.range(9).shuffle(px.data.UNKNOWN_CARDINALITY))) == list(range(9))
    assert ints(D.range(0).shuffle(px.data.UNKNOWN_CARDINALITY)) == []
    with pytest.raises(px.errors.InvalidValueError, match="number of elements is unknown"):
        D.range(9).repeat().shuffle(px.data.UNKNOWN_CARDINALITY)


def test_the_buffer_is_never_handed_out() -> None:
    dataset = through_columns(D.range(40)).shuffle(8, seed=1).batch(4)
    batches = list(dataset)
    kept = [b.copy() for b in batches]
    list(dataset)
    assert all((a == b).all() for a, b in zip(batches, kept, strict=True))


# -- the rest -------------------------------------------------------------------------------------


def test_repeating() -> None:
    assert ints(D.range(2).repeat(3)) == [0, 1] * 3
    assert ints(D.range(2).repeat(0)) == []
    assert ints(D.range(0).repeat()) == []
    assert ints(D.range(2).repeat().take(5)) == [0, 1, 0, 1, 0]
    assert D.range(2).repeat(-1).cardinality() == px.data.INFINITE_CARDINALITY
    assert ints(D.range(2).repeat().skip(10**12 + 1).take(2)) == [1, 0]
    calls: list[int] = []
    ints(D.range(2).map(lambda x: calls.append(x) or x).repeat(10**6).skip(10**6 + 1).take(1))
    assert len(calls) == 1


def test_an_empty_pass_ends_a_repetition() -> None:
    passes = iter([[1], [2], []])
    assert ints(D.from_generator(lambda: next(passes)).repeat()) == [1, 2]


def test_taking_reads_no_more_than_it_needs() -> None:
    read: list[int] = []
    dataset = D.range(100).map(lambda x: read.append(int(x)) or x)
    assert ints(dataset.skip(2).take(3).batch(10).unbatch()) == [2, 3, 4]
    assert read == [2, 3, 4]


def test_sharding() -> None:
    parts = [ints(D.range(10).shard(3, i)) for i in range(3)]
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert [x.tolist() for x in through_columns(D.range(10)).shard(3, 1).batch(2)] == [[1, 4], [7]]
    hint = px.data.experimental.SHARD_HINT
    assert ints(D.range(3).shard(hint, hint)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda d: d.take(-2), r"count must be at least -1. Received: -2"),
        (lambda d: d.skip(-2), "count must be at least -1"),
        (lambda d: d.repeat(-2), "count must be at least -1"),
        (lambda d: d.batch(0), "batch_size must be at least 1"),
        (lambda d: d.shuffle(0), "buffer_size must be at least 1"),
        (lambda d: d.shuffle(-3), "buffer_size must be at least 1"),
        (lambda d: d.prefetch(-2), "buffer_size must be at least -1"),
        (lambda d: d.shard(0, 0), "num_shards must be positive"),
        (lambda d: d.shard(2, 2), "num_shards=2, index=2"),
        (lambda d: d.shard(2, -2), "index=-2"),
        (lambda d: d.shard(2, -1), "SHARD_HINT"),
        (lambda d: d.window(0), "size must be at least 1"),
        (lambda d: d.window(2, 0), "shift"),
        (lambda d: d.window(2, 1, 0), "stride"),
        (lambda d: d.batch(2).rebatch(0), "batch_size"),
        (lambda d: d.batch(2).rebatch([0, 0]), "not 0"),
        (lambda d: d.batch(2).rebatch([]), "not 0"),
        (lambda d: d.interleave(D.range, cycle_length=0), "cycle_length"),
        (lambda d: d.interleave(D.range, block_length=0), "block_length"),
        (lambda d: d.map(abs, num_parallel_calls=0), "num_parallel_calls"),
        (lambda d: d.unbatch(), "unbatch needs elements with a first dimension"),
        (lambda d: d.rebatch(2), "rebatch needs elements with a first dimension"),
        (lambda d: D.sample_from_datasets([]), "at least one dataset"),
        (lambda d: D.sample_from_datasets([d], [-1]), "none of them negative"),
        (lambda d: D.sample_from_datasets([d], [0]), "must be positive"),
        (lambda d: D.sample_from_datasets([d], [1, 2]), "1 numbers"),
        (lambda d: D.zip(()), "at least one dataset"),
        (lambda d: d.apply(px.data.experimental.assert_cardinality(4)), "has 3 elements"),
    ],
)
def test_bad_sizes_fail_when_the_plan_is_made(call: Any, match: str) -> None:
    with pytest.raises(px.errors.InvalidValueError, match=match):
        call(D.range(3))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda d: d.take(1.0), "count must be an int"),
        (lambda d: d.take(True), "count must be an int"),
        (lambda d: d.shuffle("3"), "buffer_size must be an int"),
        (lambda d: d.shuffle(3, seed=1.5), "seed must be an int"),
        (lambda d: d.shuffle(3, reshuffle_each_iteration=2), "True or False"),
        (lambda d: d.batch(2, 1), "drop_remainder must be True or False"),
        (lambda d: d.map(3), "map needs a function"),
        (lambda d: d.filter(None), "filter needs a function"),
        (lambda d: d.flat_map([d]), "flat_map needs a function"),
        (lambda d: d.interleave(1), "interleave needs a function"),
        (lambda d: d.reduce(0, 1), "reduce needs a function"),
        (lambda d: d.apply(1), "apply needs a function"),
        (lambda d: d.map(abs, deterministic="yes"), "deterministic"),
        (lambda d: d.concatenate([1]), "concatenate needs datasets"),
        (lambda d: d.concatenate(d.batch(2)), "concatenate: leaves must have"),
        (lambda d: d.concatenate(D.zip((d, d))), "one structure"),
        (lambda d: d.cache(3), "filename must be a path"),
        (lambda d: d.with_options({}), "px.data.Options"),
        (lambda d: D.zip(), "zip needs datasets"),
        (lambda d: D.zip(d, datasets=d), "zip needs datasets"),
        (lambda d: D.zip(d, 3), "zip needs datasets"),
        (lambda d: D.sample_from_datasets([d, 1]), "sample_from_datasets needs datasets"),
        (lambda d: D.sample_from_datasets([d, d.batch(1)]), "one dtype and number of dimensions"),
        (lambda d: D.choose_from_datasets([d], d.batch(2)), "single integers"),
        (lambda d: D.choose_from_datasets([d], D.from_tensors(1.0)), "single integers"),
        (lambda d: d.window(2).batch(2), "datasets cannot be stacked"),
        (lambda d: D.from_tensors([[1], [2, 3]]).batch(2), "ragged values and datasets cannot"),
        (lambda d: px.data.experimental.cardinality(3), "cardinality needs datasets"),
    ],
)
def test_bad_types_fail_when_the_plan_is_made(call: Any, match: str) -> None:
    with pytest.raises(px.errors.InvalidTypeError, match=match):
        call(D.range(3))


# -- how many -------------------------------------------------------------------------------------


def test_asserted_cardinality_is_checked_at_the_end() -> None:
    odd = D.range(10).filter(lambda x: x % 2 == 1)
    assert px.data.experimental.cardinality(odd) == px.data.UNKNOWN_CARDINALITY
    said = odd.apply(px.data.experimental.assert_cardinality(5))
    assert len(said) == 5
    assert ints(said) == [1, 3, 5, 7, 9]
    assert len(list(said.batch(2))) == 3
    for wrong in (4, 6, px.data.INFINITE_CARDINALITY):
        with pytest.raises(px.errors.FailedPreconditionError, match="was said to have"):
            ints(odd.apply(px.data.experimental.assert_cardinality(wrong)))


def test_names_are_ignored() -> None:
    dataset = D.range(4, name="a").map(lambda x: x, name="b").batch(2, name="c").prefetch(1, name="d")
    assert len(dataset) == 2
