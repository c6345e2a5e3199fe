"""GCEClusterResolver, with the answers of the Compute Engine API."""

import sys
from types import ModuleType

import pytest

from phalanx.cluster.resolvers import GCEClusterResolver
from phalanx.errors import PhalanxError

URL = "https://www.googleapis.com/compute/v1/projects/my-project/zones/us-west1-b"
# The pages of `instanceGroups.listInstances`: the token of the next page is in the one before.
PAGES = {
    None: {
        "kind": "compute#instanceGroupsListInstances",
        "id": "projects/my-project/zones/us-west1-b/instanceGroups/group/listInstances",
        "items": [
            {"instance": f"{URL}/instances/train-b", "status": "RUNNING"},
            {"instance": f"{URL}/instances/train-a", "status": "RUNNING"},
        ],
        "selfLink": f"{URL}/instanceGroups/group/listInstances",
        "nextPageToken": "CgV0cmFpbg==",
    },
    "CgV0cmFpbg==": {
        "kind": "compute#instanceGroupsListInstances",
        "items": [{"instance": f"{URL}/instances/train-c", "status": "RUNNING"}],
    },
}
ADDRESSES = {"train-a": "10.138.0.9", "train-b": "10.138.0.10", "train-c": "10.138.0.4"}


def instance(name):
    """The answer of `instances.get`, shortened."""
    return {
        "kind": "compute#instance",
        "name": name,
        "status": "RUNNING",
        "zone": URL,
        "networkInterfaces": [
            {
                "kind": "compute#networkInterface",
                "name": "nic0",
                "networkIP": ADDRESSES[name],
                "accessConfigs": [{"type": "ONE_TO_ONE_NAT", "natIP": "34.82.0.1"}],
            },
            {"name": "nic1", "networkIP": "192.168.0.1"},
        ],
    }


class Request:
    def __init__(self, body, token=None):
        self.body = body
        self.token = token

    def execute(self):
        return self.body


class Service:
    """Answers as `googleapiclient.discovery.build("compute", "v1")` does, and checks the questions."""

    def __init__(self, pages=PAGES):
        self.pages = pages

    def instanceGroups(self):
        return self

    def listInstances(self, *, project, zone, instanceGroup, body, orderBy):
        assert (project, zone, instanceGroup) == ("my-project", "us-west1-b", "group")
        assert (body, orderBy) == ({"instanceState": "RUNNING"}, "name")
        return Request(self.pages[None])

    def listInstances_next(self, *, previous_request, previous_response):
        assert previous_request.body is previous_response
        token = previous_response.get("nextPageToken")
        return None if token is None else Request(self.pages[token], token)

    def instances(self):
        return self

    def get(self, *, project, zone, instance):
        assert (project, zone) == ("my-project", "us-west1-b")
        return Request(globals()["instance"](instance))


def resolver(service=None, **kwargs):
    service = Service() if service is None else service
    return GCEClusterResolver("my-project", "us-west1-b", "group", 8470, service=service, **kwargs)


def test_all_pages_in_the_order_of_the_addresses():
    assert resolver().cluster_spec().as_dict() == {
        "worker": ["10.138.0.10:8470", "10.138.0.4:8470", "10.138.0.9:8470"]
    }
    assert resolver(task_type="ps").cluster_spec().jobs == ["ps"]


def test_a_group_without_running_instances():
    empty = {None: {"kind": "compute#instanceGroupsListInstances"}}
    assert resolver(Service(empty)).cluster_spec().as_dict() == {"worker": {}}


def test_instances_are_asked_for_again():
    service = Service({None: PAGES["CgV0cmFpbg=="]})
    found = resolver(service)
    assert found.cluster_spec().as_dict() == {"worker": ["10.138.0.4:8470"]}
    service.pages = PAGES
    assert found.cluster_spec().num_tasks("worker") == 3


def test_addresses():
    found = resolver(task_id=2)
    assert (found.task_type, found.task_id, found.rpc_layer) == ("worker", 2, "grpc")
    assert found.environment == ""
    assert found.master() == "grpc://10.138.0.9:8470"
    assert found.master("worker", 0) == "grpc://10.138.0.10:8470"
    assert found.master(task_id=1, rpc_layer="x") == "x://10.138.0.4:8470"
    found.task_id, found.rpc_layer = 1, None
    assert found.master() == "10.138.0.4:8470"
    found.task_id = None
    assert found.master() == ""
    assert found.num_accelerators() == {}
    with pytest.raises(ValueError, match="no such task"):
        found.master("worker", 7)


def test_the_task_type_is_fixed():
    found = resolver()
    with pytest.raises(RuntimeError, match="task_type='ps'") as caught:
        found.task_type = "ps"
    assert isinstance(caught.value, PhalanxError)
    assert found.task_type == "worker"


def test_the_service_is_made(monkeypatch):
    made = []
    discovery = ModuleType("googleapiclient.discovery")
    discovery.build = lambda *args, **kwargs: made.append((args, kwargs)) or Service()
    monkeypatch.setitem(sys.modules, "googleapiclient", ModuleType("googleapiclient"))
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
    GCEClusterResolver("my-project", "us-west1-b", "group", 8470)
    GCEClusterResolver("my-project", "us-west1-b", "group", 8470, credentials="mine")
    assert made == [
        (("compute", "v1"), {"credentials": None, "cache_discovery": False}),
        (("compute", "v1"), {"credentials": "mine", "cache_discovery": False}),
    ]


def test_without_the_client_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(ImportError, match=r"pip install 'phalanx\[gcp\]'") as caught:
        GCEClusterResolver("my-project", "us-west1-b", "group", 8470)
    assert isinstance(caught.value, PhalanxError)
    assert "`service`" in str(caught.value)
