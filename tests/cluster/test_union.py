"""UnionClusterResolver."""

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.cluster import ClusterSpec
from phalanx.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionClusterResolver,
    UnionResolver,
)
from phalanx.cluster.resolvers.union import joined
from phalanx.errors import PhalanxError


def simple(tasks, **kwargs):
    return SimpleClusterResolver(ClusterSpec(tasks), **kwargs)


FIRST = {"master": "m:1", "environment": "lab", "num_accelerators": {"GPU": 2}, "rpc_layer": "grpc"}


@pytest.mark.parametrize(
    ("clusters", "expected"),
    [
        ([{"worker": ["a:1"]}], {"worker": ["a:1"]}),
        (
            [{"worker": ["a:1"]}, {"ps": ["c:1"], "worker": ["b:1"]}],
            {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
        ),
        ([{"worker": {2: "c:1"}}, {"worker": ["a:1", "b:1"]}], {"worker": ["a:1", "b:1", "c:1"]}),
        ([{"worker": ["a:1"]}, {"worker": {3: "d:1"}}], {"worker": {0: "a:1", 3: "d:1"}}),
        # A job without tasks is neither a list nor a dict.
        ([{"worker": ["a:1"]}, {"worker": []}, {"worker": ["b:1"]}], {"worker": ["a:1", "b:1"]}),
        ([{}, {"worker": []}], {"worker": {}}),
    ],
)
def test_clusters_are_joined(clusters, expected):
    assert UnionResolver(*map(simple, clusters)).cluster_spec().as_dict() == expected


def test_both_names_are_one_class():
    assert UnionResolver is UnionClusterResolver


@pytest.mark.parametrize(
    "clusters",
    [
        [{"worker": {1: "x:1"}}, {"worker": ["a:1", "b:1"]}],
        [{"worker": ["a:1", "b:1"]}, {"worker": {1: "x:1"}}],
        [{"worker": {1: "x:1"}}, {"worker": {1: "x:1"}}],
    ],
)
def test_a_task_of_two_clusters(clusters):
    with pytest.raises(KeyError, match=r"job 'worker'.* Received: \[1\] twice") as caught:
        UnionResolver(*map(simple, clusters)).cluster_spec()
    assert isinstance(caught.value, PhalanxError)
    assert isinstance(caught.value, ValueError)


JOBS = st.dictionaries(
    st.sampled_from(["worker", "ps"]), st.lists(st.sampled_from(["a:1", "b:1"]), max_size=3)
)


@settings(deadline=None)
@given(st.lists(JOBS, max_size=4))
def test_lists_follow_one_another(clusters):
    spec = joined([ClusterSpec(cluster) for cluster in clusters])
    for job in spec.jobs:
        expected = [task for cluster in clusters for task in cluster.get(job, [])]
        assert spec.job_tasks(job) == expected
    assert spec == joined([spec, ClusterSpec({})])


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 9), st.sampled_from(["a:1", "b:1"])), st.data())
def test_the_parts_of_a_cluster_make_the_cluster(tasks, data):
    whole = ClusterSpec({"worker": tasks})
    owners = {index: data.draw(st.integers(0, 2)) for index in tasks}
    parts = [{i: t for i, t in tasks.items() if owners[i] == owner} for owner in range(3)]
    has_gaps = any(sorted(part) != list(range(len(part))) for part in parts)
    if has_gaps or sum(map(bool, parts)) < 2:
        assert joined([ClusterSpec({"worker": part}) for part in parts]) == whole


def test_the_rest_comes_from_the_first():
    first = simple({"worker": ["a:1"]}, task_type="worker", task_id=0, **FIRST)
    union = UnionResolver(first, simple({"worker": ["b:1"]}, task_type="ps", task_id=7))
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "grpc")
    assert union.environment == "lab"
    assert union.num_accelerators() == {"GPU": 2}
    assert union.master() == "grpc://m:1"
    assert union.master(rpc_layer="x") == "x://m:1"
    assert union.master("worker") == "grpc://m:1"


def test_given_values_win_over_the_first():
    first = simple({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=1, **FIRST)
    union = UnionResolver(first, task_type="ps", task_id=0, rpc_layer="x")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "x")
    assert union.master("worker", 1) == "x://b:1"
    assert union.master("worker", 1, "y") == "y://b:1"
    union.task_type, union.task_id, union.rpc_layer = "chief", 3, "z"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("chief", 3, "z")
    union.task_type, union.task_id, union.rpc_layer = None, None, None
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 1, "grpc")
    assert union.master("worker", 1) == "b:1"


def test_unions_of_unions_and_of_own_resolvers():
    class Own(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec({"ps": ["p:1"]})

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return "own:1"

    union = UnionResolver(UnionResolver(Own(), simple({"worker": ["a:1"]})), simple({"ps": ["q:1"]}))
    assert union.cluster_spec().as_dict() == {"ps": ["p:1", "q:1"], "worker": ["a:1"]}
    assert union.master() == "own:1"
    assert union.rpc_layer is None


@pytest.mark.parametrize(
    ("make", "builtin", "message"),
    [
        (UnionResolver, ValueError, "At least one resolver"),
        (lambda: UnionResolver("x"), TypeError, "must be resolvers.* Received: 'x'"),
        (lambda: UnionResolver(ClusterSpec({})), TypeError, "must be resolvers"),
        (lambda: UnionResolver(simple({}), foo=1), ValueError, r"Received: \{'foo': 1\}"),
    ],
)
def test_wrong_arguments(make, builtin, message):
    with pytest.raises(builtin, match=message) as caught:
        make()
    assert isinstance(caught.value, PhalanxError)


def test_an_unknown_task():
    with pytest.raises(ValueError, match="no such task"):
        UnionResolver(simple({"worker": ["a:1"]})).master("worker", 5)
