"""The resolvers that read the program and the environment."""

import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
from hypothesis import given, settings, strategies as st

from phalanx.cluster import ClusterSpec
from phalanx.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from phalanx.errors import PhalanxError

CLUSTER = ClusterSpec({"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]})
CONFIG = {
    "cluster": {"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]},
    "task": {"type": "worker", "index": 1},
    "rpc_layer": "grpc",
}


@pytest.fixture
def accelerators(monkeypatch):
    """Lets a test choose the platforms of the devices that JAX reports."""

    def set_platforms(*platforms):
        devices = [SimpleNamespace(platform=platform) for platform in platforms]
        monkeypatch.setattr(jax, "local_devices", lambda: devices)

    set_platforms("cpu")
    return set_platforms


@pytest.fixture
def tf_config(monkeypatch):
    """Sets TF_CONFIG to an object or a text, or removes it; absent at the start."""

    def set_config(config):
        if config is None:
            monkeypatch.delenv("TF_CONFIG", raising=False)
        else:
            text = config if isinstance(config, str) else json.dumps(config)
            monkeypatch.setenv("TF_CONFIG", text)

    set_config(None)
    return set_config


# -- the base class --------------------------------------------------------------------------------


class MinimalResolver(ClusterResolver):
    def cluster_spec(self):
        return CLUSTER

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return "m:1"


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract") as caught:
        ClusterResolver()
    assert "cluster_spec" in str(caught.value)
    assert "master" in str(caught.value)


def test_a_subclass_needs_no_constructor():
    resolver = MinimalResolver()
    assert (resolver.task_type, resolver.task_id, resolver.environment) == (None, None, "")
    resolver.task_type, resolver.task_id = "ps", 0
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert MinimalResolver().task_type is None


@pytest.mark.parametrize(
    ("platforms", "expected"),
    [
        (["cpu", "cpu"], {}),
        (["gpu", "gpu", "cpu"], {"GPU": 2}),
        (["tpu"] * 4, {"TPU": 4}),
    ],
)
def test_local_accelerators_are_counted_by_kind(accelerators, platforms, expected):
    accelerators(*platforms)
    assert MinimalResolver().num_accelerators() == expected
    assert MinimalResolver().num_accelerators("worker", 0, None) == expected


def test_describing_a_cluster_does_not_start_jax():
    # JAX cannot start on a platform that does not exist, and says so when it tries.
    program = """
from phalanx.cluster import ClusterSpec
from phalanx.cluster import resolvers
simple = resolvers.SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}))
simple.master("worker", 0)
resolvers.SlurmClusterResolver({"worker": 1}, tasks_per_node={"a": 1}, gpus_per_node=4).master()
resolvers.SageMakerClusterResolver().master()
resolvers.UnionResolver(simple, resolvers.TPUClusterResolver("grpc://a,b")).cluster_spec()
resolver = resolvers.TFConfigClusterResolver()
print(resolver.task_type, resolver.cluster_spec())
try:
    resolver.num_accelerators()
except RuntimeError as error:
    print("started:", "no_such_platform" in str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "JAX_PLATFORMS": "no_such_platform",
            "TF_CONFIG": "{}",
            "SLURM_PROCID": "0",
            "SM_HOSTS": '["a"]',
            "SM_CURRENT_HOST": "a",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["None ClusterSpec({})", "started: True"], done.stderr


# -- SimpleClusterResolver -------------------------------------------------------------------------


def test_task_of_this_process():
    resolver = SimpleClusterResolver(CLUSTER, task_type="worker", task_id=0)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert SimpleClusterResolver(CLUSTER, task_type="worker", task_id=1).task_type == "worker"


def test_simple_defaults(accelerators):
    resolver = SimpleClusterResolver(CLUSTER)
    assert resolver.cluster_spec() is CLUSTER
    assert resolver.task_type is None
    assert resolver.task_id is None
    assert resolver.environment == ""
    assert resolver.num_accelerators() == {}
    assert resolver.rpc_layer is None
    assert resolver.master() == ""


@pytest.mark.parametrize(
    ("made_with", "asked", "expected"),
    [
        ({"master": "m:1"}, {}, "m:1"),
        ({"master": "m:1"}, {"task_type": "worker", "task_id": 1}, "w1:1"),
        ({"master": "m:1"}, {"task_type": "worker"}, "m:1"),
        ({"master": "m:1"}, {"task_id": 1}, "m:1"),
        ({"task_type": "worker", "task_id": 1}, {}, ""),
        ({"task_type": "worker", "task_id": 1}, {"task_type": "ps", "task_id": 0}, "p0:1"),
        ({"master": "m:1", "rpc_layer": "grpc"}, {}, "grpc://m:1"),
        ({"rpc_layer": "grpc"}, {"task_type": "ps", "task_id": 0}, "grpc://p0:1"),
        ({"rpc_layer": "grpc"}, {}, "grpc://"),
        ({"master": "m:1", "rpc_layer": "grpc"}, {"rpc_layer": "x"}, "x://m:1"),
        ({"master": "m:1", "rpc_layer": "grpc"}, {"rpc_layer": ""}, "grpc://m:1"),
        ({}, {"task_type": "worker", "task_id": 0, "rpc_layer": "x"}, "x://w0:1"),
    ],
)
def test_simple_master(made_with, asked, expected):
    assert SimpleClusterResolver(CLUSTER, **made_with).master(**asked) == expected


def test_simple_task_and_protocol_can_be_set():
    resolver = SimpleClusterResolver(CLUSTER, environment="lab")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, "grpc"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, "grpc")
    assert resolver.environment == "lab"
    with pytest.raises(AttributeError):
        resolver.environment = "office"


@pytest.mark.parametrize("given", [{"GPU": 8}, {}, 3, 0])
def test_given_accelerators_win_over_the_local_ones(accelerators, given):
    accelerators("tpu")
    resolver = SimpleClusterResolver(CLUSTER, num_accelerators=given)
    assert resolver.num_accelerators() == given
    assert resolver.num_accelerators("worker", 1) == given
    assert SimpleClusterResolver(CLUSTER).num_accelerators("worker", 1) == {"TPU": 1}


@pytest.mark.parametrize("cluster", [None, {"worker": ["a:1"]}, CLUSTER.as_cluster_def()])
def test_simple_needs_a_cluster_spec(cluster):
    with pytest.raises(TypeError, match=r"`cluster_spec` must be a ClusterSpec.* Received: "):
        SimpleClusterResolver(cluster)


@pytest.mark.parametrize("master", [5, None])
def test_simple_master_must_be_a_string(master):
    with pytest.raises(TypeError, match=f"`master` must be a string.* Received: {master}") as error:
        SimpleClusterResolver(CLUSTER, master=master)
    assert isinstance(error.value, PhalanxError)


@pytest.mark.parametrize("task", [("worker", 7), ("zz", 0)])
def test_simple_unknown_task(task):
    resolver = SimpleClusterResolver(CLUSTER, task_type=task[0], task_id=task[1])
    with pytest.raises(ValueError, match="no such") as caught:
        resolver.master(*task)
    assert isinstance(caught.value, PhalanxError)
    with pytest.raises(ValueError, match="no such"):
        resolver.num_accelerators(*task)


# -- TFConfigClusterResolver -----------------------------------------------------------------------


def test_tf_config_in_full(tf_config, accelerators):
    tf_config(CONFIG)
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"ps": ["p0:1"], "worker": ["w0:1", "w1:1"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.rpc_layer == "grpc"
    assert resolver.master() == "grpc://w1:1"
    assert resolver.environment is None
    assert resolver.num_accelerators() == {}


@pytest.mark.parametrize("config", [None, "{}", {"unknown": 1}])
def test_tf_config_without_content(tf_config, accelerators, config):
    tf_config(config)
    resolver = TFConfigClusterResolver(rpc_layer="x")
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert TFConfigClusterResolver().rpc_layer is None
    assert resolver.master() == ""
    assert resolver.master("worker", 0) == ""
    assert resolver.num_accelerators() == {}


def test_tf_config_index_may_be_a_string(tf_config):
    tf_config({**CONFIG, "task": {"type": "worker", "index": "1"}})
    assert TFConfigClusterResolver().task_id == 1


def test_arguments_win_over_tf_config(tf_config):
    tf_config(CONFIG)
    resolver = TFConfigClusterResolver(task_type="ps", task_id=0, rpc_layer="x", environment="google")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, "x")
    assert resolver.environment == "google"
    assert resolver.master() == "x://p0:1"
    assert TFConfigClusterResolver(task_id="0").task_id == 0
    assert TFConfigClusterResolver(rpc_layer="").master() == "w1:1"


def test_assignments_win_over_tf_config_until_none(tf_config):
    tf_config(CONFIG)
    resolver = TFConfigClusterResolver()
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, "x"
    assert resolver.master() == "x://p0:1"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = None, None, None
    assert resolver.master() == "grpc://w1:1"


def test_tf_config_is_read_at_each_call(tf_config):
    tf_config(CONFIG)
    resolver = TFConfigClusterResolver()
    before = resolver.task_id
    tf_config({**CONFIG, "cluster": {"ps": ["q:1"]}, "task": {"type": "ps", "index": 0}})
    assert [before, resolver.task_id, resolver.task_type] == [1, 0, "ps"]
    assert resolver.cluster_spec().as_dict() == {"ps": ["q:1"]}


@pytest.mark.parametrize("asked", [(), ("worker", 0), ("worker", 0, "q")])
@pytest.mark.parametrize("session_master", ["sm:7", ""])
def test_session_master_is_returned_as_it_is(tf_config, session_master, asked):
    tf_config({**CONFIG, "session_master": session_master})
    assert TFConfigClusterResolver(rpc_layer="x").master(*asked) == session_master


@pytest.mark.parametrize(
    ("change", "asked", "expected"),
    [
        ({}, {"task_type": "ps", "task_id": 0}, "grpc://p0:1"),
        ({}, {"task_id": 0}, "grpc://w0:1"),
        ({}, {"rpc_layer": "q"}, "q://w1:1"),
        ({}, {"rpc_layer": ""}, "w1:1"),
        ({"rpc_layer": None}, {}, "w1:1"),
        ({"session_master": None}, {}, "grpc://w1:1"),
        # A cluster of one task needs no address, whatever the task is.
        ({"cluster": {}}, {}, ""),
        ({"cluster": {"worker": []}}, {}, ""),
        ({"cluster": {"worker": ["a:1"]}}, {}, ""),
        # Worker 0 is not listed, but there is one.
        ({"cluster": {"worker": {"1": "w1:1"}}}, {}, "grpc://w1:1"),
        ({"cluster": {"chief": ["c:1"], "worker": {"1": "b:1"}}}, {}, "grpc://b:1"),
    ],
)
def test_tf_config_master(tf_config, change, asked, expected):
    tf_config({**CONFIG, **change})
    assert TFConfigClusterResolver().master(**asked) == expected


@pytest.mark.parametrize("task", [("worker", 9), ("zz", 0), ("ps", None)])
def test_tf_config_unknown_task(tf_config, task):
    tf_config(CONFIG)
    with pytest.raises(ValueError, match="no such") as caught:
        TFConfigClusterResolver().master(*task)
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize("text", ["", " ", "{", "{'cluster': {}}"])
@pytest.mark.parametrize("key", ["task_type", "task_id", "rpc_layer"])
def test_tf_config_that_is_no_json(tf_config, text, key):
    tf_config(text)
    resolver = TFConfigClusterResolver()
    with pytest.raises(json.JSONDecodeError) as caught:
        getattr(resolver, key)
    error = caught.value
    assert isinstance(error, PhalanxError)
    assert isinstance(error, ValueError)
    assert error.doc == text
    assert str(error).startswith("TF_CONFIG is not valid JSON")
    assert str(error).endswith(f"Received: {text!r}")
    # The example in the message works.
    example = str(error).split("Write for example ")[1].split(", or unset")[0]
    tf_config(example)
    assert resolver.task_type == "worker"
    assert resolver.master() == "host0:2222"
    # Errors travel between processes.
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    for ask in (resolver.cluster_spec, resolver.master, resolver.num_accelerators):
        tf_config(text)
        with pytest.raises(json.JSONDecodeError):
            ask()


@pytest.mark.parametrize("text", ["null", "5", "[]", '"x"'])
def test_tf_config_must_be_an_object(tf_config, text):
    tf_config(text)
    for builtin in (ValueError, TypeError, PhalanxError):
        with pytest.raises(builtin, match=r"TF_CONFIG must be a JSON object.* Received: "):
            TFConfigClusterResolver().cluster_spec()


@pytest.mark.parametrize(
    ("change", "key", "received"),
    [
        ({"cluster": None}, "cluster", "None"),
        ({"cluster": ["w0:1"]}, "cluster", "['w0:1']"),
        ({"cluster": {"worker": "w0:1"}}, "cluster", "'w0:1'"),
        ({"cluster": {"worker": [5]}}, "cluster", "5"),
        ({"cluster": {"worker": {"x": "w0:1"}}}, "cluster", "'x'"),
        ({"task": None}, "task", "None"),
        ({"task": "worker"}, "task", "'worker'"),
        ({"task": {"type": 5, "index": 0}}, "task.type", "5"),
        ({"task": {"index": 0}}, "task.type", "None"),
        ({"task": {}}, "task.type", "None"),
        ({"task": {"type": "worker"}}, "task.index", "None"),
        ({"task": {"type": "worker", "index": "x"}}, "task.index", "'x'"),
        ({"task": {"type": "worker", "index": None}}, "task.index", "None"),
        ({"task": {"type": "worker", "index": 1.5}}, "task.index", "1.5"),
        ({"task": {"type": "worker", "index": -1}}, "task.index", "-1"),
        ({"task": {"type": "worker", "index": 2}}, "task.index", "2"),
        ({"task": {"type": "zz", "index": 0}}, "task.type", "'zz'"),
        ({"rpc_layer": 5}, "rpc_layer", "5"),
        ({"session_master": ["m:1"]}, "session_master", "['m:1']"),
    ],
)
def test_a_wrong_key_is_named_and_shown_right(tf_config, change, key, received):
    tf_config({**CONFIG, **change})
    resolver = TFConfigClusterResolver()
    for builtin in (ValueError, TypeError, PhalanxError):
        with pytest.raises(builtin) as caught:
            resolver.master()
    message = str(caught.value)
    assert message.startswith(f"The key {key!r} of TF_CONFIG ")
    assert message.endswith(f"Received: {received}")
    # Writing what the message shows repairs the key.
    shown = message.split("Write for example ")[1]
    repair, _ = json.JSONDecoder().raw_decode(shown[shown.index(":") + 1 :].lstrip())
    tf_config({**CONFIG, shown[1 : shown.index('":')]: repair})
    assert resolver.master()


@pytest.mark.parametrize(
    ("config", "key", "written"),
    [
        ({"clusters": CONFIG["cluster"], "task": CONFIG["task"]}, "cluster", "clusters"),
        ({"Cluster": CONFIG["cluster"]}, "cluster", "Cluster"),
        ({"cluster": CONFIG["cluster"], "tasks": CONFIG["task"]}, "task", "tasks"),
        ({"cluster": CONFIG["cluster"], "task": {"type": "ps", "idx": 0}}, "task.index", "idx"),
        ({"cluster": CONFIG["cluster"], "task": {"job": "ps", "index": 0}}, "task.type", "job"),
    ],
)
def test_a_key_that_is_spelt_otherwise_is_not_overlooked(tf_config, config, key, written):
    """A program would run alone, as if there were no other workers."""
    tf_config(config)
    resolver = TFConfigClusterResolver()
    with pytest.raises(ValueError, match="is missing") as caught:
        _ = (resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    assert str(caught.value).startswith(
        f"The key {key!r} of TF_CONFIG is missing, and {written!r} is not known. Write for example "
    )


def test_a_wrong_key_does_not_hide_the_right_ones(tf_config):
    tf_config({**CONFIG, "task": None})
    assert TFConfigClusterResolver().cluster_spec() == CLUSTER
    assert TFConfigClusterResolver(task_type="ps", task_id=0).master() == "grpc://p0:1"


@pytest.mark.parametrize("task_id", ["x", -1])
def test_task_id_argument_must_be_an_index(task_id):
    with pytest.raises(ValueError, match=r"`task_id` must be a whole number.* Received: ") as caught:
        TFConfigClusterResolver(task_id=task_id)
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"task": {"index": ' + "1" * 5000 + "}}"])
def test_tf_config_beyond_what_json_reads(tf_config, text):
    tf_config(text)
    with pytest.raises(ValueError, match="TF_CONFIG is not valid JSON: ") as caught:
        TFConfigClusterResolver().cluster_spec()
    assert isinstance(caught.value, PhalanxError)


# Any JSON, with the keys that matter at the places where they matter, and values of all kinds.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.sampled_from(["worker", "1", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TASKS = st.lists(st.just("a:1"), max_size=3) | st.dictionaries(st.sampled_from("012x"), JSON) | JSON
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(st.sampled_from(["worker", "ps"]), TASKS) | JSON,
        "task": st.fixed_dictionaries({}, optional={"type": JSON, "index": JSON}) | JSON,
        "rpc_layer": JSON,
        "session_master": JSON,
        "other": JSON,
    },
)


@settings(deadline=None, max_examples=300)
@given(
    (CONFIGS | JSON).map(json.dumps)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9)
)
def test_any_tf_config_is_a_cluster_or_a_clear_error(text):
    resolver = TFConfigClusterResolver()
    read = {
        "cluster": resolver.cluster_spec,
        "task.type": lambda: resolver.task_type,
        "task.index": lambda: resolver.task_id,
        "rpc_layer": lambda: resolver.rpc_layer,
        "master": resolver.master,
    }
    for key, ask in read.items():
        problem = None
        with mock.patch.dict(os.environ, TF_CONFIG=text):
            try:
                answer = ask()
            except ValueError as error:
                problem, kind = str(error), type(error)
        if problem is None:
            assert isinstance(answer, str | int | ClusterSpec | None)
            continue
        assert issubclass(kind, PhalanxError)
        assert "Write for example " in problem
        assert "Received: " in problem
        if not problem.startswith(("TF_CONFIG is not valid JSON", "TF_CONFIG must be a JSON object")):
            named = problem.split("'")[1]
            assert problem.startswith(f"The key {named!r} of TF_CONFIG ")
            assert key == "master" or named in (key, key.partition(".")[0])
