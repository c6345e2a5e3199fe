"""ClusterSpec and the definitions around it."""

import pickle

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.cluster import ClusterDef, ClusterSpec, JobDef, ServerDef
from phalanx.errors import PhalanxError

# -- accessors -------------------------------------------------------------------------------------


def test_dense_jobs():
    cluster = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    assert cluster.as_dict() == {"ps": ["c:1"], "worker": ["a:1", "b:1"]}
    assert cluster.jobs == ["worker", "ps"]
    assert cluster.num_tasks("worker") == 2
    assert cluster.task_indices("worker") == [0, 1]
    assert cluster.task_address("worker", 1) == "b:1"
    assert cluster.job_tasks("ps") == ["c:1"]
    assert bool(cluster) is True
    assert repr(cluster) == "ClusterSpec({'ps': ['c:1'], 'worker': ['a:1', 'b:1']})"
    assert str(cluster) == repr(cluster)


def test_sparse_jobs():
    cluster = ClusterSpec({"worker": {3: "d:1", 1: "b:1"}})
    assert cluster.as_dict() == {"worker": {1: "b:1", 3: "d:1"}}
    assert cluster.job_tasks("worker") == [None, "b:1", None, "d:1"]
    assert cluster.num_tasks("worker") == 2
    assert cluster.task_indices("worker") == [1, 3]
    assert cluster.task_address("worker", 3) == "d:1"


def test_string_indices_become_ints():
    assert ClusterSpec({"worker": {"0": "a:1", "1": "b:1"}}).as_dict() == {"worker": ["a:1", "b:1"]}


def test_empty_cluster():
    cluster = ClusterSpec({})
    assert bool(cluster) is False
    assert cluster.jobs == []
    assert cluster.as_dict() == {}


def test_job_without_tasks():
    cluster = ClusterSpec({"worker": []})
    assert cluster
    assert cluster.as_dict() == {"worker": {}}
    assert cluster.num_tasks("worker") == 0
    # A deliberate difference: tf.distribute fails here, on the maximum of nothing.
    assert cluster.job_tasks("worker") == []


def test_tuples_and_bytes_are_accepted():
    assert ClusterSpec({b"worker": (b"a:1", "b:1")}).as_dict() == {"worker": ["a:1", "b:1"]}


def test_a_spec_does_not_follow_what_it_was_made_from_or_gave_out():
    tasks = {0: "a:1", 2: "c:1"}
    cluster = ClusterSpec({"worker": tasks})
    tasks[1] = "b:1"
    cluster.as_dict()["worker"][1] = "b:1"
    cluster.jobs.append("ps")
    ClusterSpec(cluster).as_dict()["worker"].clear()
    assert cluster == {"worker": {0: "a:1", 2: "c:1"}}


# -- equality and copies ---------------------------------------------------------------------------


def test_equal_specs():
    cluster = ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]})
    assert cluster == ClusterSpec({"ps": {0: "b:1"}, "worker": {"0": "a:1"}})
    assert cluster != ClusterSpec({"worker": ["a:1"]})
    assert cluster != ClusterSpec({"worker": ["a:1"], "ps": ["b:2"]})
    assert cluster != 5


def test_a_spec_equals_only_the_dict_of_dicts():
    cluster = ClusterSpec({"worker": ["a:1"]})
    assert cluster == {"worker": {0: "a:1"}}
    assert cluster != {"worker": ["a:1"]}


def test_specs_have_no_hash():
    with pytest.raises(TypeError, match="unhashable"):
        hash(ClusterSpec({}))


JOB_NAMES = st.text(max_size=5)
ADDRESSES = st.text(max_size=8)
SPECS = st.dictionaries(
    JOB_NAMES,
    st.lists(ADDRESSES, max_size=4) | st.dictionaries(st.integers(0, 9), ADDRESSES, max_size=4),
    max_size=4,
).map(ClusterSpec)


@settings(deadline=None)
@given(SPECS)
def test_every_form_of_a_spec_makes_the_same_spec(cluster):
    assert ClusterSpec(cluster) == cluster
    assert ClusterSpec(cluster.as_dict()) == cluster
    assert ClusterSpec(cluster.as_cluster_def()) == cluster
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert ClusterSpec(cluster).jobs == cluster.jobs


@settings(deadline=None)
@given(SPECS)
def test_accessors_agree(cluster):
    for job in cluster.jobs:
        indices = cluster.task_indices(job)
        tasks = cluster.job_tasks(job)
        assert cluster.num_tasks(job) == len(indices)
        assert [index for index, task in enumerate(tasks) if task is not None] == indices
        assert [cluster.task_address(job, index) for index in indices] == [
            tasks[index] for index in indices
        ]
        assert isinstance(cluster.as_dict()[job], list) == (indices == [*range(len(tasks))] != [])


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (None, "`cluster` must be a dict"),
        ("a:1", "`cluster` must be a dict"),
        (["a:1"], "`cluster` must be a dict"),
        (ServerDef(), "`cluster` must be a dict"),
        ({"worker": "a:1"}, "The tasks of job 'worker' must be a list"),
        ({"worker": None}, "The tasks of job 'worker' must be a list"),
        ({"worker": {"a:1"}}, "The tasks of job 'worker' must be a list"),
        ({"worker": [1]}, r"address of job 'worker' must be a string\. Received: 1"),
        ({"worker": {0: None}}, r"address of job 'worker' must be a string\. Received: None"),
        ({"worker": [["a:1"]]}, "address of job 'worker' must be a string"),
        ({1: ["a:1"]}, "The name of a job must be a string. Received: 1"),
        ({"worker": {0.5: "a:1"}}, "task index of job 'worker' .* Received: 0.5"),
        ({"worker": {None: "a:1"}}, "task index of job 'worker' .* Received: None"),
    ],
)
def test_wrong_types(cluster, message):
    with pytest.raises(TypeError, match=message) as caught:
        ClusterSpec(cluster)
    assert isinstance(caught.value, PhalanxError)
    assert "Received: " in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"worker": {"x": "a:1"}}, "whole number from 0.* Received: 'x'"),
        ({"worker": {-1: "a:1"}}, "whole number from 0.* Received: -1"),
        ({"worker": {0: "a:1", "0": "b:1"}}, "A task of job 'worker' is given twice"),
    ],
)
def test_wrong_values(cluster, message):
    with pytest.raises(ValueError, match=message) as caught:
        ClusterSpec(cluster)
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize(
    "ask",
    [
        lambda cluster: cluster.num_tasks("w"),
        lambda cluster: cluster.task_indices("w"),
        lambda cluster: cluster.task_address("w", 0),
        lambda cluster: cluster.job_tasks("w"),
    ],
)
def test_unknown_job(ask):
    with pytest.raises(ValueError, match=r"\['worker'\]\. Received: job_name='w'") as caught:
        ask(ClusterSpec({"worker": ["a:1"]}))
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize("index", [5, 0, -1, None, "1"])
def test_unknown_task(index):
    with pytest.raises(ValueError, match=rf"\[1\]\. Received: task_index={index!r}") as caught:
        ClusterSpec({"worker": {1: "b:1"}}).task_address("worker", index)
    assert isinstance(caught.value, PhalanxError)


# -- definitions -----------------------------------------------------------------------------------


def test_cluster_def_sorts_jobs_by_name():
    definition = ClusterSpec({"worker": ["a:1"], "ps": {2: "c:1"}, "e": []}).as_cluster_def()
    assert definition == ClusterDef(
        job=[
            JobDef(name="e"),
            JobDef(name="ps", tasks={2: "c:1"}),
            JobDef(name="worker", tasks={0: "a:1"}),
        ]
    )
    assert ClusterSpec(definition).jobs == ["e", "ps", "worker"]


def test_definitions_are_empty_by_default():
    assert ClusterSpec(ClusterDef()) == ClusterSpec({})
    assert JobDef() == JobDef(name="", tasks={})
    server = ServerDef()
    assert server.cluster == ClusterDef()
    assert (server.job_name, server.task_index, server.replica) == ("", 0, 0)
    assert (server.protocol, server.port) == ("", 0)
    assert server.default_session_config is None
    assert server.cluster_device_filters is None


def test_definitions_take_keywords_only():
    for definition in (JobDef, ClusterDef, ServerDef):
        with pytest.raises(TypeError, match="positional"):
            definition("worker")


@pytest.mark.parametrize(
    "make",
    [
        lambda: JobDef(name=1),
        lambda: JobDef(name="worker", tasks={0: 1}),
        lambda: JobDef(name="worker", tasks="a:1"),
        lambda: ClusterDef(job=["worker"]),
        lambda: ClusterDef(job=JobDef(name="worker")),
        lambda: ServerDef(cluster=ClusterSpec({"worker": ["a:1"]})),
    ],
)
def test_definitions_check_their_types(make):
    with pytest.raises(TypeError, match="Received: ") as caught:
        make()
    assert isinstance(caught.value, PhalanxError)


def test_a_job_is_defined_once():
    definition = ClusterDef(job=[JobDef(name="worker"), JobDef(name="worker", tasks={0: "a:1"})])
    with pytest.raises(ValueError, match=r"defined twice.* Received: jobs") as caught:
        ClusterSpec(definition)
    assert isinstance(caught.value, PhalanxError)
