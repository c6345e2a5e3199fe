"""Descriptions of clusters that nobody means end in an error of ours, quickly."""

import contextlib
import json
import os
from collections.abc import Callable
from types import SimpleNamespace as Object
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st
from tests import hostile

import phalanx as px
from phalanx.cluster.resolvers.hostlist import deal_tasks, expand_hostlist, expand_tasks_per_node

DIGITS = "9" * 5000
resolvers = px.cluster_resolver


def refused(call: Callable[[], Any]) -> px.PhalanxError:
    """The error of ours that a call ends in."""
    with pytest.raises(px.PhalanxError) as caught:
        call()
    assert "Received" in str(caught.value)
    assert len(str(caught.value)) < 5000
    return caught.value


def allowed(call: Callable[[], Any]) -> None:
    """A call that may work, or end in an error of ours."""
    error = None
    try:
        call()
    except px.PhalanxError as raised:
        error = raised
    assert len(str(error)) < 5000


# -- Slurm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "n[0-999999999999]",
        "n[0-99999999999999999]",
        f"n[{DIGITS}]",
        f"n[1-{DIGITS}]",
        "a" + "[1-9]" * 1000,
        "a[1-9]" * 12,
        "aa[1]" * 40 + "]",
        "a[" + "1," * 20_000 + "]",
        "a," * 40_000,
        "n[0-99999],m[0-1]",
        "n[1-2",
        "n1]",
        "",
        ",",
    ],
    ids=range(14),
)
def test_node_lists_are_counted_before_they_are_written_out(text: str) -> None:
    refused(lambda: expand_hostlist(text))


def test_the_largest_node_list() -> None:
    assert len(expand_hostlist("n[0-99999]")) == 100_000
    assert expand_hostlist("r[0-1]n[08-10]-ib,m") == [
        *(f"r{r}n{n}-ib" for r in (0, 1) for n in ("08", "09", "10")),
        "m",
    ]


@pytest.mark.parametrize(
    "text", [DIGITS, f"1(x{DIGITS})", "1(x999999999999)", "999999999999", "999999(x2)", "", "-1"]
)
def test_numbers_of_tasks_are_counted_before_they_are_written_out(text: str) -> None:
    refused(lambda: expand_tasks_per_node(text))


@given(st.text(alphabet="an019[],-x() \n", max_size=40))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    for expand in (expand_hostlist, expand_tasks_per_node):
        found: Any = []
        with contextlib.suppress(px.errors.InvalidValueError):
            found = expand(text)
        assert len(found) <= 100_000


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 9))
def test_each_node_gets_its_number(counts: list[int], at_once: int) -> None:
    nodes = deal_tasks(counts, at_once)
    assert [nodes.count(i) for i in range(len(counts))] == counts


STEP = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "2",
}
TEXTS = ["", DIGITS, "-1", "1e9", "2147483647", "99999999999", "\u0663", "[", "{}", "null", "NaN"]


@pytest.mark.parametrize("name", STEP)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_slurm_variables(name: str, text: str) -> None:
    with mock.patch.dict(os.environ, {**STEP, name: text}, clear=True):
        allowed(lambda: resolvers.SlurmClusterResolver().cluster_spec())


@pytest.mark.parametrize(
    "name", ["jobs", "port_base", "gpus_per_node", "gpus_per_task", "tasks_per_node"]
)
@pytest.mark.parametrize("value", hostile.VALUES)
def test_slurm_arguments(name: str, value: str) -> None:
    with mock.patch.dict(os.environ, STEP, clear=True):
        bad = hostile.VALUES[value]
        allowed(lambda: resolvers.SlurmClusterResolver(**{name: bad}).cluster_spec())
        if name in ("jobs", "tasks_per_node"):
            allowed(lambda: resolvers.SlurmClusterResolver(**{name: {"n1": bad}}))


# -- TF_CONFIG, SageMaker, TPU ----------------------------------------------------------------------


def tf_config(text: str) -> None:
    with mock.patch.dict(os.environ, {"TF_CONFIG": text}, clear=True):
        resolver = resolvers.TFConfigClusterResolver()
        for ask in (
            resolver.cluster_spec,
            resolver.master,
            lambda: resolver.task_type,
            lambda: resolver.task_id,
            lambda: resolver.rpc_layer,
        ):
            allowed(ask)


@pytest.mark.parametrize(
    "text",
    [
        DIGITS,
        "[" * 100_000,
        '{"cluster": {"worker": {"2147483647": "a:1"}}}',
        f'{{"cluster": {{"worker": {{"{DIGITS}": "a:1"}}}}}}',
        f'{{"task": {{"index": {DIGITS}}}}}',
        f'{{"task": {{"index": "{DIGITS}"}}}}',
    ],
    ids=range(6),
)
def test_numbers_in_tf_config(text: str) -> None:
    tf_config(text)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["worker", "a:1", "1", ""]),
    lambda x: (
        st.lists(x, max_size=2)
        | st.dictionaries(
            st.sampled_from(["cluster", "task", "worker", "index", "type", "0", "-1", "rpc_layer"]),
            x,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@given(values)
def test_any_json_in_tf_config(value: Any) -> None:
    tf_config(json.dumps(value))


@given(values)
@settings(max_examples=50)
def test_any_json_elsewhere(value: Any) -> None:
    environment = {
        "SM_HOSTS": json.dumps(value),
        "SM_CURRENT_HOST": "a",
        "TPU_CONFIG": json.dumps(value),
    }
    with mock.patch.dict(os.environ, environment, clear=True):
        sagemaker = resolvers.SageMakerClusterResolver()
        for ask in (sagemaker.cluster_spec, sagemaker.master, lambda: sagemaker.task_id):
            allowed(ask)
        allowed(lambda: resolvers.TPUClusterResolver(metadata=lambda _: ""))


@given(values)
@settings(max_examples=50)
def test_any_answer_of_a_service(value: Any) -> None:
    nodes = Object(get=lambda name: Object(execute=lambda: value))
    service = Object(projects=lambda: Object(locations=lambda: Object(nodes=lambda: nodes)))
    allowed(lambda: resolvers.TPUClusterResolver("t", "z", "p", service=service).cluster_spec())
    ready = {"state": "READY", "networkEndpoints": value}
    nodes.get = lambda name: Object(execute=lambda: ready)
    allowed(lambda: resolvers.TPUClusterResolver("t", "z", "p", service=service).cluster_spec())


@pytest.mark.parametrize("item", [None, {}, {"instance": None}, {"instance": "a"}])
@pytest.mark.parametrize(
    "details",
    [None, {}, {"networkInterfaces": None}, {"networkInterfaces": []}, {"networkInterfaces": [{}]}],
)
def test_answers_of_compute_engine_that_lack_fields(item: Any, details: Any) -> None:
    groups = Object(
        listInstances=lambda **_: Object(execute=lambda: {"items": [item]}),
        listInstances_next=lambda **_: None,
    )
    instances = Object(get=lambda **_: Object(execute=lambda: details))
    service = Object(instanceGroups=lambda: groups, instances=lambda: instances)
    resolver = resolvers.GCEClusterResolver("p", "z", "g", 1, service=service)
    refused(resolver.cluster_spec)
    groups.listInstances = lambda **_: Object(execute=lambda: {"items": None})
    assert resolver.cluster_spec().num_tasks("worker") == 0


PODS = [
    Object(),
    Object(metadata=None, status=None),
    Object(metadata=Object(name=None), status=Object(phase=None, host_ip=None, pod_ip=None)),
    Object(metadata=Object(name="a" + DIGITS), status=Object(phase="Running", host_ip=None)),
    Object(metadata=Object(name="a"), status=Object(phase="Running", host_ip=3)),
]


@pytest.mark.parametrize("pod", PODS, ids=range(len(PODS)))
def test_answers_of_kubernetes_that_lack_fields(pod: Any) -> None:
    answer = Object(items=[pod])
    client = Object(list_pod_for_all_namespaces=lambda label_selector: answer)
    resolver = resolvers.KubernetesClusterResolver({"worker": ["a=b"]}, override_client=client)
    refused(resolver.cluster_spec)
    answer.items = None
    assert resolver.cluster_spec().num_tasks("worker") == 0


@pytest.mark.parametrize("value", hostile.VALUES)
def test_arguments_of_resolvers(value: str) -> None:
    bad = hostile.VALUES[value]
    client: Any = object()
    calls: list[Callable[[], Any]] = [
        lambda: resolvers.KubernetesClusterResolver(bad, override_client=client),
        lambda: resolvers.KubernetesClusterResolver(tf_server_port=bad, override_client=client),
        lambda: resolvers.GCEClusterResolver("p", "z", "g", bad, service=client),
        lambda: resolvers.SageMakerClusterResolver(port=bad),
        lambda: resolvers.SageMakerClusterResolver(task_id=bad),
        lambda: resolvers.TFConfigClusterResolver(task_id=bad),
        lambda: resolvers.SimpleClusterResolver(bad),
        lambda: resolvers.SimpleClusterResolver(px.train.ClusterSpec({}), master=bad),
        lambda: resolvers.UnionClusterResolver(bad),
        lambda: resolvers.TPUClusterResolver(bad, metadata=lambda _: ""),
    ]
    for call in calls:
        allowed(call)


# -- specs and messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", hostile.VALUES)
def test_specs_and_messages(value: str) -> None:
    bad = hostile.VALUES[value]
    spec = px.train.ClusterSpec({"worker": ["a:1"]})
    calls: list[Callable[[], Any]] = [
        lambda: px.train.ClusterSpec(bad),
        lambda: px.train.ClusterSpec({"worker": bad}),
        lambda: px.train.ClusterSpec({"worker": [bad]}),
        lambda: px.train.ClusterSpec({"worker": {3: bad}}),
        lambda: spec.task_address("worker", bad),
        lambda: spec.task_address(bad, 0),
        lambda: spec.num_tasks(bad),
        lambda: px.train.JobDef(name=bad),
        lambda: px.train.JobDef(tasks=bad),
        lambda: px.train.ClusterDef(job=bad),
        lambda: px.train.ServerDef(port=bad),
        lambda: px.train.ServerDef(cluster=bad),
        lambda: px.train.ServerDef(default_session_config=bad),
        lambda: px.train.ServerDef.FromString(bad),
        lambda: px.train.ServerDef().MergeFrom(bad),
        lambda: px.train.ServerDef().HasField(bad),
    ]
    for call in calls:
        allowed(call)


def test_a_list_of_two_milliards_of_tasks_is_not_made() -> None:
    spec = px.train.ClusterSpec({"worker": {2**31 - 1: "a:1"}})
    refused(lambda: spec.job_tasks("worker"))
    assert spec.task_indices("worker") == [2**31 - 1]


@given(st.binary(max_size=40))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for kind in (px.train.ServerDef, px.train.ClusterDef, px.train.JobDef):
        allowed(lambda kind=kind: kind.FromString(data))
