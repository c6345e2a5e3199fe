"""Going on in the middle of an epoch: exactly, and on any number of replicas."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.contract.conftest import READING, STRATEGIES
from tests.data.distribute.test_distributed_dataset import flat, mirrored, vals, with_policy
from tests.data.workers import Worker, separately

import phalanx as px

Dataset = px.data.Dataset


def shuffled(rows: int = 40, size: int = 6) -> Any:
    return Dataset.from_tensor_slices(np.arange(rows)).shuffle(rows // 2).batch(size)


def batches(dist: Any, count: int | None = None) -> list[list[Any]]:
    """Global batches: the parts of all replicas behind each other."""
    return [flat(x) for x in vals(itertools.islice(dist, count))]


@pytest.mark.parametrize("name", READING)
def test_a_position_holds_for_every_strategy(name: str) -> None:
    dataset = shuffled()
    it = iter(mirrored(3).experimental_distribute_dataset(dataset))
    batches(it, 2)
    state = json.loads(json.dumps(it.state()))
    expected = batches(it)
    assert set(state) == {"epoch", "index", "seed"}
    assert (state["epoch"], state["index"]) == (0, 2)
    assert len(expected) == 5
    other = STRATEGIES[name]().experimental_distribute_dataset(dataset)
    assert batches(other.iterator(state)) == expected


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(1, 7),
    st.integers(1, 3),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from(["DATA", "OFF"]),
    st.booleans(),
    st.data(),
)
def test_positions_are_exact(
    rows: int, size: int, epochs: int, replicas: Any, policy: str, mapped: bool, data: Any
) -> None:
    dataset = Dataset.range(rows).shuffle(10).batch(size).repeat(epochs)
    if mapped:
        dataset = dataset.map(lambda x: x * 1).prefetch(1)
    dataset = with_policy(dataset, policy)
    first, second = (mirrored(n).experimental_distribute_dataset(dataset) for n in replicas)
    whole = batches(first)  # the first epoch; another one is shuffled differently
    it = iter(first)
    every = batches(it)
    at = data.draw(st.integers(0, len(every)))
    it.restore({"epoch": 1, "index": 0, "seed": it.state()["seed"]})
    assert batches(it, at) == every[:at]
    rest = batches(second.iterator(it.state()))
    if policy == "OFF" and 1 in replicas:  # a single replica gets batches as they are
        assert flat(rest) == flat(every[at:])
    else:
        assert rest == every[at:]
    assert sorted(flat(whole)) == sorted(flat(every))


def test_a_position_may_be_inside_a_batch() -> None:
    """Cut by the nominal size, pieces reach across the ends of small batches."""
    dataset = with_policy(Dataset.range(7).batch(3).repeat(2), "OFF")
    it = iter(mirrored(2).experimental_distribute_dataset(dataset))
    assert batches(it, 3)[-1] == [6, 0, 1]
    state = it.state()
    assert (state["index"], state["rows"]) == (3, 2)
    for other in (mirrored(3), px.OneDeviceStrategy("CPU:1")):
        dist = other.experimental_distribute_dataset(dataset)
        assert batches(dist.iterator(state)) == [[2, 3, 4], [5, 6]]
    by_data = mirrored(3).experimental_distribute_dataset(with_policy(dataset, "DATA"))
    with pytest.raises(px.errors.InvalidValueError, match="middle of a batch"):
        by_data.iterator(state)


def test_the_next_epoch_follows_the_restored_one() -> None:
    dist = mirrored(2).experimental_distribute_dataset(shuffled())
    epochs, states = [], []
    for _ in range(3):
        it = iter(dist)
        batches(it, 2)
        states.append(it.state())
        epochs.append(batches(it))
    again = mirrored(4).experimental_distribute_dataset(shuffled())
    assert batches(again.iterator(states[1])) == epochs[1]
    assert batches(iter(again))[2:] == epochs[2]


def test_what_was_prepared_but_not_taken_is_not_lost() -> None:
    options = px.InputOptions(experimental_per_replica_buffer_size=5)
    dist = mirrored(2).experimental_distribute_dataset(Dataset.range(40).batch(4), options)
    it = iter(dist)
    assert batches(it, 3)[-1] == [8, 9, 10, 11]
    assert it.state()["index"] == 3
    it.restore(it.state())
    assert batches(it, 1) == [[12, 13, 14, 15]]


def test_positions_at_the_ends() -> None:
    dist = mirrored(2).experimental_distribute_dataset(shuffled(12, 4))
    it = iter(dist)
    start = it.state()
    every = batches(it)
    assert batches(dist.iterator(it.state())) == []
    it.restore(start)
    assert batches(it) == every
    it.restore(start)
    it.close()
    assert list(it) == []


def test_functions_are_not_called_for_what_is_skipped() -> None:
    seen: list[int] = []

    def look(x: Any) -> Any:
        seen.append(int(x[0]))
        return x

    dataset = Dataset.range(40).batch(4).map(look)
    dist = mirrored(2).experimental_distribute_dataset(
        dataset, px.InputOptions(experimental_per_replica_buffer_size=0)
    )
    it = dist.iterator({"epoch": 0, "index": 8, "seed": 1})
    seen.clear()
    assert batches(it) == [[32, 33, 34, 35], [36, 37, 38, 39]]
    assert seen == [32, 36]


def test_loaders_go_on_too() -> None:
    data = [np.arange(i, i + 4) for i in range(0, 20, 4)]
    for source in (data, tuple(data), _Again(data)):
        it = iter(mirrored(2).experimental_distribute_dataset(source))
        batches(it, 2)
        other = mirrored(4).experimental_distribute_dataset(source)
        assert batches(other.iterator(it.state())) == batches(it)


class _Again:
    def __init__(self, data: list[Any]) -> None:
        self._data = data

    def __iter__(self) -> Any:
        yield from self._data


def test_input_functions_go_on_too() -> None:
    def dataset_fn(context: px.InputContext) -> Any:
        return Dataset.range(20).shuffle(20).batch(2)

    for mode in px.InputReplicationMode:
        options = px.InputOptions(experimental_replication_mode=mode)
        dist = mirrored(2).distribute_datasets_from_function(dataset_fn, options)
        it = iter(dist)
        list(itertools.islice(it, 2))
        state = it.state()
        expected = vals(it)
        assert vals(dist.iterator(state)) == expected


def test_workers_that_share_a_stream_may_change_in_number() -> None:
    dataset = shuffled(40, 8)

    def first(strategy: Worker) -> Any:
        it = iter(strategy.experimental_distribute_dataset(dataset))
        list(itertools.islice(it, 2))
        return it.state()

    states = separately(2, 2, first)
    assert states[0] == states[1]
    expected = batches(mirrored(1).experimental_distribute_dataset(dataset).iterator(states[0]))

    def rest(strategy: Worker) -> Any:
        return vals(strategy.experimental_distribute_dataset(dataset).iterator(states[0]))

    by_worker = separately(4, 1, rest)
    pieces = [[worker[step][0] for worker in by_worker] for step in range(len(expected))]
    assert [flat(p) for p in pieces] == expected


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_workers_with_rows_of_their_own_go_on_as_themselves(at: int, mapped: bool) -> None:
    """Also in the middle of a batch, whose pieces are the next steps of one worker."""
    dataset = Dataset.range(30).batch(7)
    dataset = with_policy(dataset.map(lambda x: x + 0) if mapped else dataset, "OFF")

    def read(strategy: Worker) -> Any:
        dist = strategy.experimental_distribute_dataset(dataset)
        it = iter(dist)
        list(itertools.islice(it, at))
        state = json.loads(json.dumps(it.state()))
        rest = vals(it)
        assert vals(dist.iterator(state)) == rest
        return state

    states = separately(2, 2, read)
    assert [s["worker"] for s in states] == [0, 1]
    other = Worker(3, 0, 2).experimental_distribute_dataset(dataset)
    with pytest.raises(px.errors.InvalidValueError, match="worker 0 of 2"):
        other.iterator(states[0])
    with pytest.raises(px.errors.InvalidValueError, match="worker 0 of 2"):
        mirrored(2).experimental_distribute_dataset(dataset).iterator(states[0])


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        3,
        {},
        {"epoch": 0, "index": 0},
        {"epoch": 0, "index": "1", "seed": 2},
        {"epoch": 0, "index": -1, "seed": 2},
        {"epoch": True, "index": 0, "seed": 2},
    ],
)
def test_wrong_positions(wrong: Any) -> None:
    it = iter(mirrored(2).experimental_distribute_dataset(shuffled()))
    with pytest.raises(px.errors.InvalidValueError, match="epoch, index and seed"):
        it.restore(wrong)


def test_a_position_behind_the_end() -> None:
    dataset = with_policy(Dataset.range(4).batch(2), "OFF")
    it = iter(mirrored(2).experimental_distribute_dataset(dataset))
    it.restore({"epoch": 0, "index": 2, "seed": 0})
    assert list(it) == []
    with pytest.raises(px.errors.InvalidValueError, match="after 9 batches, and this dataset has 2"):
        it.restore({"epoch": 0, "index": 9, "seed": 0})
    it.restore({"epoch": 0, "index": 2, "rows": 1, "seed": 0})
    with pytest.raises(px.errors.InvalidArgumentError, match="behind the end"):
        next(it)
