"""The rules of training over several workers."""

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.cluster import ClusterSpec, roles as rules
from phalanx.errors import PhalanxError

FULL = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"], "evaluator": ["e:1"]}
WORKERS = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("cluster", "task", "chief", "number"),
    [
        (FULL, ("chief", 0), True, 0),
        (FULL, ("worker", 0), False, 1),
        (FULL, ("worker", 1), False, 2),
        (FULL, ("evaluator", 0), True, 0),
        (WORKERS, ("worker", 0), True, 0),
        (WORKERS, ("worker", 1), False, 1),
        # An evaluator need not be in the cluster.
        (WORKERS, ("evaluator", 0), True, 0),
    ],
)
def test_chief_and_number(cluster, task, chief, number):
    for form in (cluster, ClusterSpec(cluster), ClusterSpec(cluster).as_cluster_def()):
        assert rules.is_chief(form, *task) is chief
        assert rules.should_save_checkpoint(form, *task) is chief
        assert rules.id_in_cluster(form, *task) == number


def test_other_tasks_are_not_chief():
    assert rules.is_chief(FULL, "ps", 0) is False
    assert rules.is_chief(WORKERS, None, None) is False
    assert rules.should_save_checkpoint(FULL, "ps", 0) is False


def test_without_a_cluster_this_process_saves():
    assert rules.should_save_checkpoint({}, None, None) is True


@pytest.mark.parametrize(
    ("cluster", "task_type", "count"),
    [
        (FULL, "worker", 3),
        (FULL, "chief", 3),
        (FULL, "evaluator", 1),
        (WORKERS, "worker", 2),
        (WORKERS, "evaluator", 1),
        ({"chief": ["c:1"]}, "chief", 1),
    ],
)
def test_worker_count(cluster, task_type, count):
    assert rules.worker_count(cluster, task_type) == count


@pytest.mark.parametrize(
    ("cluster", "leader"),
    [
        ({}, ""),
        (WORKERS, "/job:worker/replica:0/task:0"),
        ({"chief": ["c:1"], **WORKERS}, "/job:chief/replica:0/task:0"),
        (FULL, "/job:ps/replica:0/task:0"),
        ({"evaluator": ["e:1"]}, ""),
    ],
)
def test_coordination_leader(cluster, leader):
    assert rules.coordination_leader(cluster) == leader


@pytest.mark.parametrize(
    ("cluster", "task", "leader"),
    [
        ({}, (None, None), ""),
        (WORKERS, ("worker", 1), "/job:worker/replica:0/task:0"),
        (FULL, ("worker", 0), "/job:chief/replica:0/task:0"),
        (FULL, ("evaluator", 0), ""),
    ],
)
def test_collective_leader(cluster, task, leader):
    assert rules.collective_leader(cluster, *task) == leader


@settings(deadline=None)
@given(st.booleans(), st.integers(1, 5), st.booleans())
def test_workers_are_numbered_without_gaps_and_one_leads(has_chief, workers, has_evaluator):
    cluster = {"worker": [f"w{i}:1" for i in range(workers)]}
    if has_chief:
        cluster["chief"] = ["c:1"]
    if has_evaluator:
        cluster["evaluator"] = ["e:1"]
    tasks = [(job, i) for job in ("chief", "worker") for i in range(len(cluster.get(job, [])))]
    numbers = [rules.id_in_cluster(cluster, *task) for task in tasks]
    assert numbers == list(range(rules.worker_count(cluster, "worker")))
    (chief,) = (task for task in tasks if rules.is_chief(cluster, *task))
    assert rules.id_in_cluster(cluster, *chief) == 0
    assert f"/job:{chief[0]}/replica:0/task:{chief[1]}" == rules.coordination_leader(cluster)
    assert {rules.collective_leader(cluster, *task) for task in tasks} == {
        rules.coordination_leader(cluster)
    }


@pytest.mark.parametrize(
    "ask",
    [
        lambda cluster, task: rules.is_chief(cluster, *task),
        lambda cluster, task: rules.id_in_cluster(cluster, *task),
        lambda cluster, task: rules.should_save_checkpoint(cluster, *task),
        lambda cluster, task: rules.collective_leader(cluster, *task),
    ],
)
@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        ({"foo": ["a:1"]}, ("foo", 0), r"must be among .* Received: \['foo'\]"),
        ({"foo": ["a:1"], **WORKERS}, ("worker", 0), r"must be among .* Received: \['foo'\]"),
        (WORKERS, ("foo", 0), r"a job of the cluster, \['worker'\]\. Received: 'foo'"),
        (WORKERS, ("chief", 0), r"a job of the cluster, \['worker'\]\. Received: 'chief'"),
        (WORKERS, ("worker", 9), r"one of \[0, 1\]\. Received: 9"),
        (WORKERS, ("worker", -1), "`task_id` must be a whole number from 0.* Received: -1"),
        ({"worker": {1: "b:1"}}, ("worker", 0), r"one of \[1\]\. Received: 0"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "at most one task in job 'chief'"),
        ({"evaluator": ["a:1", "b:1"]}, ("evaluator", 0), "at most one task in job 'evaluator'"),
        ("worker", ("worker", 0), "must be a ClusterSpec.* Received: 'worker'"),
    ],
)
def test_wrong_clusters_and_tasks(ask, cluster, task, message):
    with pytest.raises(ValueError, match=message) as caught:
        ask(cluster, task)
    assert isinstance(caught.value, PhalanxError)


def test_a_task_without_an_index():
    with pytest.raises(TypeError, match=r"`task_id` must be a whole number from 0.* Received: None"):
        rules.is_chief(WORKERS, "worker", None)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: rules.id_in_cluster(FULL, "ps", 0), "no number among the workers"),
        (lambda: rules.worker_count(FULL, "ps"), "Received: task_type='ps'"),
        (lambda: rules.worker_count(FULL, "foo"), "Received: 'foo'"),
        (lambda: rules.worker_count({"worker": {1: "b:1"}}, "worker"), "all of them are known"),
        (lambda: rules.id_in_cluster({"worker": {1: "b:1"}}, "worker", 1), "all of them are known"),
    ],
)
def test_tasks_that_cannot_be_counted(ask, message):
    with pytest.raises(ValueError, match=message) as caught:
        ask()
    assert isinstance(caught.value, PhalanxError)


def test_a_task_is_in_a_cluster_that_is_known_in_part():
    assert rules.is_chief({"worker": {0: "a:1", 3: "d:1"}}, "worker", 0)
    assert not rules.is_chief({"worker": {3: "d:1"}}, "worker", 3)


def test_normal_specs_stay_what_they_are():
    spec = ClusterSpec(WORKERS)
    assert rules.normalize_cluster_spec(spec) is spec
    assert rules.normalize_cluster_spec(WORKERS) == spec
    assert rules.normalize_cluster_spec(spec.as_cluster_def()) == spec
    assert rules.task_count(WORKERS, "worker") == 2
    assert rules.task_count(WORKERS, "ps") == 0
