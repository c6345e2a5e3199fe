"""KubernetesClusterResolver, with the answers of a Kubernetes API server."""

import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from phalanx.cluster.resolvers import KubernetesClusterResolver, KubernetesExecutableLocation
from phalanx.errors import PhalanxError

# The answer of `GET /api/v1/pods?labelSelector=...`, shortened.
POD = """{
  "metadata": {
    "name": "NAME", "namespace": "ml", "uid": "8f1c7e1e-2f6c-4a61-9a0e-5f7b2f0f3a11",
    "labels": {"job-name": "train", "batch.kubernetes.io/job-completion-index": "0"},
    "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "controller": true}]
  },
  "spec": {"nodeName": "node-a", "restartPolicy": "Never",
           "containers": [{"name": "main", "image": "registry/train:1",
                           "ports": [{"containerPort": 8470, "protocol": "TCP"}]}]},
  "status": {"phase": "PHASE", "hostIP": "HOST", "podIP": "POD", "podIPs": [{"ip": "POD"}],
             "conditions": [{"type": "Ready", "status": "True"}], "qosClass": "BestEffort"}
}"""


def pod(name, host, phase="Running"):
    text = POD.replace("NAME", name).replace("PHASE", phase)
    return text.replace("HOST", f"10.1.0.{host}").replace("POD", f"10.8.0.{host}")


def pod_list(*pods):
    return (
        '{"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "90210"}, '
        f'"items": [{", ".join(pods)}]}}'
    )


def as_client_object(value):
    """What the Kubernetes client makes of JSON: objects with snake_case attributes."""
    if isinstance(value, list):
        return [as_client_object(item) for item in value]
    if isinstance(value, dict):
        names = {re.sub(r"(?<=[a-z])([A-Z])", r"_\1", key).lower(): value[key] for key in value}
        return SimpleNamespace(**{name: as_client_object(item) for name, item in names.items()})
    return value


class Client:
    """Answers as `kubernetes.client.CoreV1Api` does."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def list_pod_for_all_namespaces(self, *, label_selector):
        return self.list_namespaced_pod(None, label_selector=label_selector)

    def list_namespaced_pod(self, namespace, *, label_selector):
        self.asked.append((namespace, label_selector))
        return as_client_object(json.loads(self.answers[label_selector]))


def test_the_pods_of_several_selectors_and_jobs():
    client = Client(
        {
            "app=a": pod_list(pod("a-1", 2), pod("a-0", 1)),
            "app=b,tier!=test": pod_list(pod("a-0", 9)),
            "app=ps": pod_list(pod("ps-0", 7)),
        }
    )
    resolver = KubernetesClusterResolver(
        {"worker": ["app=b,tier!=test", "app=a"], "ps": ["app=ps"]}, override_client=client
    )
    assert client.asked == []
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.1.0.9:8470", "10.1.0.1:8470", "10.1.0.2:8470"],
        "ps": ["10.1.0.7:8470"],
    }
    assert client.asked == [(None, "app=b,tier!=test"), (None, "app=a"), (None, "app=ps")]


def test_numbers_in_names_count_as_numbers():
    names = ["train-10-zzzzz", "train-2-aaaaa", "train-0-bbbbb", "train-1-ccccc"]
    client = Client({"app=a": pod_list(*(pod(name, int(name.split("-")[1])) for name in names))})
    spec = KubernetesClusterResolver({"worker": ["app=a"]}, override_client=client).cluster_spec()
    assert spec.job_tasks("worker") == [f"10.1.0.{i}:8470" for i in (0, 1, 2, 10)]


def test_pods_are_asked_for_again():
    client = Client({"job-name=tensorflow": pod_list(pod("a", 1))})
    resolver = KubernetesClusterResolver(override_client=client)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.1.0.1:8470"]}
    client.answers["job-name=tensorflow"] = pod_list(pod("a", 1), pod("b", 2))
    assert resolver.cluster_spec().num_tasks("worker") == 2
    client.answers["job-name=tensorflow"] = pod_list()
    assert resolver.cluster_spec().as_dict() == {"worker": {}}


def test_addresses_of_pods_in_one_namespace():
    client = Client({"app=a": pod_list(pod("a-0", 1), pod("a-1", 2))})
    resolver = KubernetesClusterResolver(
        {"worker": ["app=a"]},
        tf_server_port=2222,
        override_client=client,
        namespace="ml",
        use_pod_ip=True,
    )
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.8.0.1:2222", "10.8.0.2:2222"]}
    assert client.asked == [("ml", "app=a")]


def test_the_task_is_set_by_the_program():
    client = Client({"app=a": pod_list(pod("a-0", 1), pod("a-1", 2))})
    resolver = KubernetesClusterResolver({"worker": ["app=a"]}, override_client=client)
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "")
    assert resolver.master("worker", 0) == "grpc://10.1.0.1:8470"
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://10.1.0.2:8470"
    assert resolver.master(rpc_layer="x") == "x://10.1.0.2:8470"
    resolver.rpc_layer = None
    assert resolver.master() == "10.1.0.2:8470"
    assert resolver.num_accelerators() == {}
    with pytest.raises(ValueError, match="no such task"):
        resolver.num_accelerators("worker", 5)


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed", "Unknown"])
def test_pods_must_be_running(phase):
    client = Client({"app=a": pod_list(pod("a-0", 1), pod("a-1", 2, phase))})
    resolver = KubernetesClusterResolver({"worker": ["app=a"]}, override_client=client)
    with pytest.raises(RuntimeError, match=f"pod 'a-1', phase '{phase}'") as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize("mapping", ["app=a", ["app=a"], {"worker": "app=a"}])
def test_selectors_must_be_lists_by_job(mapping):
    with pytest.raises(TypeError, match=r"\{'worker': \['job-name=train'\]\}\. Received: "):
        KubernetesClusterResolver(mapping, override_client=Client({}))


# -- the client ------------------------------------------------------------------------------------


class ConfigException(Exception):
    """As `kubernetes.config.ConfigException`."""


@pytest.fixture
def kubernetes(monkeypatch):
    """A stand-in for the Kubernetes client package, which notes how it is set up."""
    package, config, client = (
        ModuleType(name) for name in ("kubernetes", "kubernetes.config", "kubernetes.client")
    )
    package.loaded = []
    config.ConfigException = ConfigException
    config.load_incluster_config = lambda: package.loaded.append("incluster")
    config.load_kube_config = lambda: package.loaded.append("kubectl")
    client.CoreV1Api = lambda: Client({"app=a": pod_list(pod("a", 1))})
    package.config = config
    for module in (package, config, client):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        ({}, "incluster"),
        ({"executable_location": KubernetesExecutableLocation.WITHIN_CLUSTER}, "incluster"),
        ({"executable_location": KubernetesExecutableLocation.OFF_CLUSTER}, "kubectl"),
    ],
)
def test_the_api_is_found(kubernetes, arguments, loaded):
    resolver = KubernetesClusterResolver({"worker": ["app=a"]}, **arguments)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.1.0.1:8470"]}
    assert kubernetes.loaded == [loaded]


def test_the_api_is_not_found(kubernetes):
    def fail():
        raise ConfigException("Service host/port is not set.")

    kubernetes.config.load_incluster_config = fail
    with pytest.raises(RuntimeError, match=r"OFF_CLUSTER.*host/port is not set") as caught:
        KubernetesClusterResolver()
    assert isinstance(caught.value, PhalanxError)


def test_an_unknown_location(kubernetes):
    with pytest.raises(ValueError, match="Received: 'moon'"):
        KubernetesClusterResolver(executable_location="moon")
    KubernetesClusterResolver(executable_location="moon", override_client=Client({}))


def test_without_the_client_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    with pytest.raises(ImportError, match=r"pip install 'phalanx\[kubernetes\]'") as caught:
        KubernetesClusterResolver()
    assert isinstance(caught.value, PhalanxError)
    assert "`override_client`" in str(caught.value)


def test_locations():
    assert [location.value for location in KubernetesExecutableLocation] == [0, 1]
