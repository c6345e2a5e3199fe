"""Several datasets as one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px

D = px.data.Dataset
DEADLINE = 30.0


def ints(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


# -- zip and concatenate --------------------------------------------------------------------------


def test_zipping_nests() -> None:
    dataset = D.zip({"a": D.range(3), "b": (D.range(10, 20), D.from_tensor_slices(["x", "y", "z"]))})
    assert [(int(e["a"]), int(e["b"][0]), e["b"][1]) for e in dataset] == [
        (0, 10, "x"),
        (1, 11, "y"),
        (2, 12, "z"),
    ]
    assert len(dataset) == 3
    assert ints(D.zip(datasets=(D.range(3),)).map(lambda x: x)) == [0, 1, 2]
    assert len(list(D.zip([D.range(3), D.range(4)]))) == 3
    assert D.zip(D.range(3), D.range(3).repeat()).cardinality() == 3
    assert D.zip(D.range(3).repeat()).cardinality() == px.data.INFINITE_CARDINALITY
    assert D.zip(D.range(3), D.range(3).filter(bool)).cardinality() == px.data.UNKNOWN_CARDINALITY
    assert D.zip(D.range(0), D.range(3).filter(bool)).cardinality() == 0


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))
def test_zipping_stops_with_the_shortest(a: int, b: int, batch: int) -> None:
    odd = D.range(2 * b).filter(lambda x: bool(x % 2))
    pairs = D.zip(D.range(a), odd).batch(batch)
    found = [(int(x), int(y)) for xs, ys in pairs for x, y in zip(xs, ys, strict=True)]
    assert found == [(i, 2 * i + 1) for i in range(min(a, b))]


def test_zipping_reads_no_further_than_the_shortest() -> None:
    calls: list[int] = []
    pairs = D.zip(D.range(10).map(lambda x: calls.append(1) or x), D.range(3))
    assert len(list(pairs.batch(5))) == 1
    assert len(calls) == 5


def test_concatenating() -> None:
    assert ints(D.range(2).concatenate(D.range(5, 7)).concatenate(D.range(1))) == [0, 1, 5, 6, 0]
    assert ints(D.range(0).concatenate(D.range(2))) == [0, 1]
    assert len(D.range(2).concatenate(D.range(5))) == 7
    assert D.range(2).concatenate(D.range(5).repeat()).cardinality() == px.data.INFINITE_CARDINALITY
    shapes = D.from_tensor_slices(np.zeros((1, 2))).concatenate(D.from_tensor_slices(np.zeros((1, 3))))
    assert shapes.element_spec.shape == (None,)
    assert [x.shape for x in shapes] == [(2,), (3,)]


def test_what_is_concatenated_is_compared_as_soon_as_it_is_known() -> None:
    mapped = D.range(2).map(float)
    late = D.range(2).concatenate(mapped)
    iterator = iter(late)
    assert [int(next(iterator)) for _ in range(2)] == [0, 1]
    with pytest.raises(px.errors.InvalidTypeError, match="concatenate: leaves must have one dtype"):
        next(iterator)
    with pytest.raises(px.errors.InvalidTypeError, match="concatenate"):
        D.range(2).concatenate(mapped)
    with pytest.raises(px.errors.InvalidTypeError, match="concatenate"):
        _ = late.element_spec


def test_empty_parts_fit_everything() -> None:
    nothing = D.range(0).map(lambda x: {"a": x})
    assert ints(nothing.concatenate(D.range(2))) == [0, 1]
    assert nothing.concatenate(D.range(2)).element_spec == D.range(2).element_spec
    with pytest.raises(px.errors.InvalidValueError, match="empty"):
        _ = nothing.concatenate(nothing).element_spec


def test_later_parts_are_not_touched_before_their_turn() -> None:
    calls: list[int] = []
    dataset = D.range(3).concatenate(D.range(1).map(lambda x: calls.append(1) or x))
    iterator = iter(dataset)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    assert calls == []
    next(iterator)
    assert calls == [1]


# -- mixing ---------------------------------------------------------------------------------------


def test_sampling_takes_each_dataset_in_its_order() -> None:
    mixed = ints(D.sample_from_datasets([D.range(50), D.range(100, 150)], seed=2))
    assert [x for x in mixed if x < 100] == list(range(50))
    assert [x for x in mixed if x >= 100] == list(range(100, 150))
    assert mixed != sorted(mixed)
    assert len(D.sample_from_datasets([D.range(50), D.range(100, 150)])) == 100


def test_weights_say_how_often() -> None:
    zeros, ones = D.from_tensors(0).repeat(), D.from_tensors(1).repeat()
    mixed = D.sample_from_datasets([zeros, ones], [0.2, 0.8], seed=1).take(5000)
    assert 0.77 < np.mean(ints(mixed)) < 0.83
    only = D.sample_from_datasets([zeros, ones], [0, 1], seed=1).take(50)
    assert set(ints(only)) == {1}
    assert D.sample_from_datasets([zeros, ones]).cardinality() == px.data.INFINITE_CARDINALITY


def test_draws_are_repeatable_and_differ_between_iterations() -> None:
    def orders(**options: Any) -> list[list[int]]:
        parts = [D.from_tensors(i).repeat(20) for i in range(2)]
        dataset = D.sample_from_datasets(parts, **options)
        return [ints(dataset) for _ in range(3)]

    first = orders(seed=1)
    assert orders(seed=1) == first
    assert len({tuple(order) for order in first}) == 3
    fixed = orders(seed=1, rerandomize_each_iteration=False)
    assert fixed == [fixed[0]] * 3
    assert orders() != orders()


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.data(),
    st.booleans(),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_choosing_is_done_as_told(
    sizes: list[int], data: st.DataObject, stop: bool, batch: int
) -> None:
    choices = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    parts = [D.range(100 * i, 100 * i + n) for i, n in enumerate(sizes)]
    choice = D.from_tensor_slices(np.array(choices, np.int64))
    dataset = D.choose_from_datasets(parts, choice, stop_on_empty_dataset=stop)
    expected, used = [], [0] * len(sizes)
    for c in choices:
        if used[c] == sizes[c]:
            if stop:
                break
            continue
        expected.append(100 * c + used[c])
        used[c] += 1
    assert [int(x) for b in dataset.batch(batch) for x in b] == expected


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 99), st.booleans())
@settings(deadline=None)
def test_sampling_loses_and_doubles_nothing(sizes: list[int], seed: int, stop: bool) -> None:
    parts = [D.range(100 * i, 100 * i + n) for i, n in enumerate(sizes)]
    found = ints(D.sample_from_datasets(parts, seed=seed, stop_on_empty_dataset=stop))
    expected = [100 * i + j for i, n in enumerate(sizes) for j in range(n)]
    if not stop:
        assert sorted(found) == expected
    else:
        assert set(found) <= set(expected)
        assert len(set(found)) == len(found)
        assert any(sum(x // 100 == i for x in found) == n for i, n in enumerate(sizes))
    batched = D.sample_from_datasets(parts, seed=seed, stop_on_empty_dataset=stop).batch(4)
    assert [int(x) for b in batched for x in b] == found


def test_numbers_of_datasets_that_do_not_exist() -> None:
    with pytest.raises(px.errors.InvalidArgumentError, match=r"from 0 to 0\. Received: 1"):
        ints(D.choose_from_datasets([D.range(3)], D.range(2)))


def test_endless_choices_end_with_the_last_dataset() -> None:
    endless = D.range(2).repeat()
    mixed = D.choose_from_datasets([D.range(2), D.range(10, 15)], endless, stop_on_empty_dataset=False)
    assert ints(mixed) == [0, 10, 1, 11, 12, 13, 14]


def test_mixed_datasets_must_fit() -> None:
    mapped = D.range(3).map(float)
    with pytest.raises(px.errors.InvalidTypeError, match="choose_from_datasets: leaves"):
        ints(D.choose_from_datasets([D.range(3), mapped], D.range(2)))


# -- datasets of elements -------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [None, 1, 2, px.data.AUTOTUNE])
@pytest.mark.parametrize(("cycle", "block"), [(1, 1), (2, 1), (3, 2), (2, 5)])
def test_interleaving_in_parallel_keeps_the_order(parallel: Any, cycle: int, block: int) -> None:
    def part(x: Any) -> Any:
        return D.range(10 * x, 10 * x + (x * 7) % 5)

    plain = ints(D.range(8).interleave(part, cycle, block))
    assert ints(D.range(8).interleave(part, cycle, block, num_parallel_calls=parallel)) == plain
    assert sorted(plain) == [10 * x + i for x in range(8) for i in range((x * 7) % 5)]


def test_interleaving_in_any_order_loses_nothing() -> None:
    dataset = D.range(8).interleave(
        lambda x: D.range(10 * x, 10 * x + 4), 3, 2, num_parallel_calls=2, deterministic=False
    )
    assert sorted(ints(dataset)) == [10 * x + i for x in range(8) for i in range(4)]


def test_interleaving_does_not_wait_where_the_order_does_not_matter() -> None:
    go = threading.Event()

    def slow(x: Any) -> Any:
        assert go.wait(DEADLINE)
        return x

    def part(x: Any) -> Any:
        return D.range(x, x + 1).map(slow if x == 0 else lambda y: y)

    with iter(D.range(2).interleave(part, 2, 1, 2, deterministic=False)) as iterator:
        assert int(next(iterator)) == 1
        go.set()
        assert int(next(iterator)) == 0
        assert list(iterator) == []


def test_interleaving_opens_only_as_many_as_it_may() -> None:
    opened: list[int] = []

    def part(x: Any) -> Any:
        opened.append(int(x))
        return D.range(3)

    with iter(D.range(10).interleave(part, cycle_length=2)) as iterator:
        next(iterator)
        assert opened == [0]
        next(iterator)
        assert opened == [0, 1]
    assert D.range(3).interleave(part).cardinality() == px.data.UNKNOWN_CARDINALITY


@pytest.mark.parametrize("parallel", [None, 2])
def test_errors_inside_come_after_what_was_read_before(parallel: Any) -> None:
    def part(x: Any) -> Any:
        return D.range(3).map(lambda y: np.zeros(2)[y] if x == 1 and y == 2 else y)

    dataset = D.range(3).interleave(part, 1, 1, num_parallel_calls=parallel)
    with iter(dataset) as iterator:
        assert [int(next(iterator)) for _ in range(5)] == [0, 1, 2, 0, 1]
        with pytest.raises(px.errors.DatasetFunctionError, match="element 2: IndexError"):
            next(iterator)
    with iter(dataset.batch(2)) as batches:
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 0]]
        with pytest.raises(px.errors.DatasetFunctionError, match="element 2: IndexError"):
            next(batches)


def test_datasets_inside_must_be_alike() -> None:
    dataset = D.range(2).flat_map(lambda x: D.from_tensors(1 if x == 0 else 1.5))
    with pytest.raises(px.errors.InvalidTypeError, match="flat_map: leaves must have one dtype"):
        list(dataset)
    empty_first = D.range(3).flat_map(D.range)
    assert ints(empty_first) == [0, 0, 1]
    assert empty_first.element_spec == px.TensorSpec((), np.dtype(np.int64))


def test_flat_map_passes_over_datasets_without_reading_them() -> None:
    calls: list[int] = []

    def part(x: Any) -> Any:
        return D.range(10).map(lambda y: calls.append(1) or 10 * x + y)

    assert ints(D.range(5).flat_map(part).skip(35).take(2)) == [35, 36]
    assert len(calls) == 2
