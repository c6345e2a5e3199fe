"""Interleaving many elements at once: the order of blocks, and how rarely datasets are asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.data.naive import in_turns

import phalanx as px

D = px.data.Dataset


@given(
    sizes=st.lists(st.integers(0, 30), max_size=8),
    cycle=st.integers(1, 5),
    block=st.integers(1, 4),
    batch=st.integers(1, 40),
    parallel=st.sampled_from([None, 2]),
)
def test_the_order_does_not_depend_on_how_many_are_read_at_once(
    sizes: list[int], cycle: int, block: int, batch: int, parallel: int | None
) -> None:
    numbers = D.from_tensor_slices(np.array(sizes, np.int64))
    starts = D.zip(numbers, D.range(len(sizes)))
    parts = starts.interleave(
        lambda n, i: D.range(100 * i, 100 * i + n), cycle, block, num_parallel_calls=parallel
    )
    found = [int(x) for part in parts.batch(batch) for x in part]
    ranges = [range(100 * i, 100 * i + n) for i, n in enumerate(sizes)]
    assert found == in_turns(ranges, cycle, block)
    for position in (1, batch):
        assert [int(x) for x in parts.skip(position)] == found[position:]


@pytest.mark.parametrize("parallel", [None, 2])
def test_datasets_are_not_asked_for_single_elements(parallel: int | None) -> None:
    calls: list[int] = []

    def count(x: Any) -> Any:
        calls.append(len(x))
        return x

    def part(i: Any) -> Any:
        return D.range(1000).map(count, vectorized=True)

    dataset = D.range(4).interleave(part, 4, num_parallel_calls=parallel).batch(400)
    assert sum(len(x) for x in dataset) == 4000
    assert len(calls) <= 100


def test_threads_do_not_read_far_ahead_where_elements_are_large() -> None:
    asked: list[int] = []

    def large(x: Any) -> Any:
        asked.append(len(x))
        return np.zeros((len(x), 2**18), np.float32)

    parts = D.range(1).interleave(
        lambda _: D.range(9).map(large, vectorized=True), 1, num_parallel_calls=1
    )
    assert len(list(parts)) == 9
    assert max(asked) == 1


def test_choosing_does_not_ask_for_single_choices() -> None:
    asked: list[int] = []

    def count(x: Any) -> Any:
        asked.append(len(x))
        return x

    numbers = D.range(1000).map(count, vectorized=True)
    chosen = D.choose_from_datasets([numbers, numbers], D.range(2).repeat()).batch(100)
    assert sum(len(x) for x in chosen) == 2000
    assert len(asked) <= 60
