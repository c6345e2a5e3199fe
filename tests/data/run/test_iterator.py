"""Iterators: positions that can be kept and restored; options."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.data.plan.cursors import Run

D = px.data.Dataset
DEADLINE = 30.0


def ints(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


# -- iterating ------------------------------------------------------------------------------------


def test_the_end() -> None:
    iterator = iter(D.range(2))
    assert iter(iterator) is iterator
    assert [int(iterator.get_next()), int(next(iterator))] == [0, 1]
    for _ in range(2):
        with pytest.raises(px.errors.OutOfRangeError, match="end of the dataset"):
            iterator.get_next()
        with pytest.raises(StopIteration):
            next(iterator)


def test_iterators_are_independent() -> None:
    dataset = D.range(3)
    a, b = iter(dataset), iter(dataset)
    assert [int(next(a)), int(next(a)), int(next(b)), int(next(a))] == [0, 1, 0, 2]


def test_an_iterator_may_be_used_by_several_threads() -> None:
    iterator = iter(D.range(500).map(lambda x: x).prefetch(4))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(ints(iterator))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(found) == list(range(500))


def test_a_closed_iterator_is_at_its_end() -> None:
    with iter(D.range(3)) as iterator:
        next(iterator)
    assert list(iterator) == []
    assert iterator.state()["index"] == 1


# -- positions ------------------------------------------------------------------------------------


def test_a_state_is_small_and_can_be_written_as_json() -> None:
    dataset = D.range(100).shuffle(100).prefetch(10)
    iterator = iter(dataset)
    for _ in range(7):
        next(iterator)
    state = iterator.state()
    assert json.loads(json.dumps(state)) == state
    assert (state["epoch"], state["index"]) == (0, 7)
    assert iter(dataset).state()["epoch"] == 1
    assert iter(dataset).state()["seed"] == state["seed"]
    iterator.close()


def test_restoring_goes_back_and_forth() -> None:
    dataset = D.range(20).shuffle(20, seed=1).batch(3)
    iterator = iter(dataset)
    first = next(iterator)
    state = iterator.state()
    rest = list(iterator)
    assert rest
    iterator.restore(state)
    assert all((a == b).all() for a, b in zip(iterator, rest, strict=True))
    iterator.restore({**state, "index": 0})
    assert (next(iterator) == first).all()


def test_positions_behind_the_end_are_the_end() -> None:
    assert ints(D.range(5).iterator({"epoch": 0, "index": 5, "seed": 0})) == []
    assert ints(D.range(5).iterator({"epoch": 0, "index": 50, "seed": 0})) == []


def test_functions_are_not_called_for_elements_that_are_passed_over() -> None:
    calls: list[int] = []

    def note(x: Any) -> Any:
        calls.append(int(x))
        return x

    dataset = D.range(1000).shuffle(100, seed=1).map(note).batch(10).prefetch(2).repeat()
    with dataset.iterator({"epoch": 0, "index": 550, "seed": 0}) as iterator:
        next(iterator)
    assert len(calls) <= 40
    calls.clear()
    deep = D.range(1000).map(note).shuffle(10, seed=1).batch(10)
    next(deep.iterator({"epoch": 0, "index": 50, "seed": 0}))
    assert len(calls) == 20


@pytest.mark.parametrize(
    "bad",
    [
        3,
        {},
        {"epoch": 0, "index": 0},
        {"epoch": 0, "index": -1, "seed": 0},
        {"epoch": 0, "index": 1.5, "seed": 0},
        {"epoch": True, "index": 0, "seed": 0},
    ],
)
def test_states_that_are_none(bad: Any) -> None:
    with pytest.raises(px.errors.InvalidValueError, match="epoch, index and seed"):
        D.range(3).iterator(bad)


def test_generators_of_different_nodes_and_passes_are_different() -> None:
    runs = [
        Run(0).generator(None, 0),
        Run(1).generator(None, 0),
        Run(0).generator(0, 0),
        Run(0).generator(1, 0),
        Run(0).generator(None, 1),
        Run(0, (1,)).generator(None, 0),
        Run(0, (0, 0)).generator(None, 0),
        Run(0).in_pass(1).generator(None, 0),
        Run(0).in_branch(0).generator(None, 0),
        Run(0).in_branch(-1).generator(None, 0),
        Run(0).generator(-1, 0),
        Run(0).generator(None, 0, each_pass=False),
    ]
    assert len({rng.integers(2**62) for rng in runs}) == len(runs)
    fixed = [Run(0, (i,)).in_pass(i).generator(7, 0, each_pass=False).integers(2**62) for i in range(3)]
    assert len(set(fixed)) == 1


# -- options --------------------------------------------------------------------------------------


def test_policies_are_given_by_member_name_or_number() -> None:
    Policy = px.data.experimental.AutoShardPolicy
    assert {p.name: p.value for p in Policy} == {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3}
    options = px.data.Options()
    distribute = options.experimental_distribute
    assert distribute.auto_shard_policy is Policy.AUTO
    for value in (Policy.DATA, "DATA", "data", 2):
        distribute.auto_shard_policy = value
        assert options.experimental_distribute.auto_shard_policy is Policy.DATA
    with pytest.raises(
        px.errors.InvalidValueError, match=r"OFF, AUTO, FILE, DATA, HINT. Received: 'x'"
    ):
        distribute.auto_shard_policy = "x"
    distribute.num_devices = 8


def test_unknown_options_are_errors() -> None:
    options = px.data.Options()
    for owner in (options, options.experimental_distribute):
        with pytest.raises(AttributeError, match=r"has the attributes .* Received: speed"):
            owner.speed = 3
        with pytest.raises(AttributeError, match="Received: speed"):
            _ = owner.speed
    with pytest.raises(px.errors.InvalidTypeError, match="deterministic must be a bool"):
        options.deterministic = 1
    with pytest.raises(px.errors.InvalidTypeError, match="DistributeOptions"):
        options.experimental_distribute = "data"


def test_options_are_merged_and_kept_as_they_were() -> None:
    a, b = px.data.Options(), px.data.Options()
    a.experimental_distribute.auto_shard_policy = "OFF"
    a.experimental_deterministic = False
    b.experimental_distribute.num_devices = 2
    dataset = D.range(3).with_options(a).map(lambda x: x).with_options(b).batch(2)
    a.deterministic = True
    found = dataset.options()
    assert found.deterministic is found.experimental_deterministic is False
    assert found.experimental_distribute.auto_shard_policy.name == "OFF"
    assert found.experimental_distribute.num_devices == 2
    c = px.data.Options()
    c.experimental_distribute.auto_shard_policy = "FILE"
    policy = dataset.with_options(c).options().experimental_distribute.auto_shard_policy
    assert policy.name == "FILE"
    assert D.zip(dataset, D.range(2)).options() == found
    assert D.range(3).options() == px.data.Options()
    assert "deterministic=True" in repr(px.data.Options())


def test_options_can_be_copied() -> None:
    options = px.data.Options()
    options.experimental_distribute.auto_shard_policy = "DATA"
    for again in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert again == options
        again.experimental_distribute.auto_shard_policy = "OFF"
        assert again != options
    whole = px.data.Options()
    whole.experimental_distribute = options.experimental_distribute
    assert whole == options


def test_options_do_not_change_elements() -> None:
    dataset = D.from_tensor_slices(np.arange(5)).with_options(px.data.Options()).batch(2)
    assert [x.tolist() for x in dataset] == [[0, 1], [2, 3], [4]]
    assert len(dataset) == 3
