"""Nests: splitting and joining are inverse to each other, for any structure."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import pytest
from hypothesis import given, strategies as st

import phalanx as px
from phalanx.core.regrouping import local_results, regroup
from phalanx.core.structure import leaves, map_nest, merge_nests, replace_leaves
from phalanx.core.values import PerReplica, select_replica

Pair = collections.namedtuple("Pair", "first second")


def nests(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def extend(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), children, max_size=3),
            st.tuples(children, children).map(lambda p: Pair(*p)),
        )

    return st.recursive(leaf, extend, max_leaves=12)


@given(nests(st.integers()))
def test_mapping_identity_keeps_the_nest(nest: Any) -> None:
    assert map_nest(lambda x: x, nest) == nest
    assert replace_leaves(nest, leaves(nest)) == nest


@given(nests(st.integers(0, 3)), st.integers(1, 4))
def test_regrouping_and_selecting_are_inverse(nest: Any, n: int) -> None:
    per_replica = [map_nest(lambda x, i=i: 1000 + 10 * i + x, nest) for i in range(n)]
    joined = regroup(per_replica, always_wrap=True)
    assert all(isinstance(x, PerReplica) for x in leaves(joined))
    assert [select_replica(i, joined) for i in range(n)] == per_replica
    if leaves(nest):
        assert list(local_results(joined)) == per_replica


@given(nests(st.sampled_from([None, "text", 1.5])), st.integers(1, 4))
def test_one_object_for_all_replicas_stays_plain(nest: Any, n: int) -> None:
    assert regroup([nest] * n) == nest


def test_equal_but_different_objects_are_kept_apart() -> None:
    joined = regroup([float("1.5"), float("1.5")])
    assert isinstance(joined, PerReplica)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1], [1, 1]),
        ({"k0": 1}, {"k1": 1}),
        ([1], (1,)),
        ([1], 1),
        ({"a": [1, 2]}, {"a": [1]}),
        (Pair(1, 2), (1, 2)),
    ],
)
def test_different_structures_are_named(a: Any, b: Any) -> None:
    with pytest.raises(AssertionError, match="replica 1") as caught:
        merge_nests([a, b], tuple)
    assert isinstance(caught.value, px.PhalanxError)
    assert repr(b) in str(caught.value) or "[1]" in str(caught.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    weights: Any
    step: Any


def test_registered_pytrees_are_containers() -> None:
    joined = regroup([State(1.0, 10), State(2.0, 20)])
    assert isinstance(joined, State)
    assert joined.weights.values == (1.0, 2.0)
    assert select_replica(1, joined) == State(2.0, 20)


def test_mapping_types_and_order_are_kept() -> None:
    ordered = collections.OrderedDict([("z", 1), ("a", 2)])
    joined = regroup([ordered, collections.OrderedDict([("z", 3), ("a", 4)])])
    assert type(joined) is collections.OrderedDict
    assert list(joined) == ["z", "a"]
    defaults = collections.defaultdict(list, a=1)
    assert regroup([defaults, defaults]).default_factory is list


def test_mappings_are_joined_by_key_whatever_their_order() -> None:
    assert merge_nests([{"a": 1, "b": 2}, {"b": 4, "a": 3}], tuple) == {"a": (1, 3), "b": (2, 4)}
