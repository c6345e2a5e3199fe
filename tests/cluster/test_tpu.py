"""TPUClusterResolver, with the answers of the Cloud TPU API and of metadata servers."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace

import jax
import pytest
from hypothesis import given, settings, strategies as st

from phalanx.cluster.resolvers import TPUClusterResolver, TPUSystemMetadata, tpu_endpoints
from phalanx.cluster.resolvers.clients import google_metadata
from phalanx.errors import NotFoundError, PhalanxError

TWO = {"worker": ["10.130.0.12:8470", "10.130.0.13:8470"]}
# The answer of `projects.locations.nodes.get`.
NODE = {
    "name": "projects/my-project/locations/us-central2-b/nodes/my-tpu",
    "acceleratorType": "v4-16",
    "state": "READY",
    "health": "HEALTHY",
    "runtimeVersion": "tpu-ubuntu2204-base",
    "cidrBlock": "10.130.0.0/29",
    "networkEndpoints": [
        {"ipAddress": "10.130.0.12", "port": 8470, "accessConfig": {"externalIp": "34.1.2.3"}},
        {"ipAddress": "10.130.0.13", "port": 8470, "accessConfig": {"externalIp": "34.1.2.4"}},
    ],
}


class Service:
    """Answers as `googleapiclient.discovery.build("tpu", "v2")` does."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def projects(self):
        return self

    locations = nodes = projects

    def get(self, *, name):
        self.asked.append(name)
        return self

    def execute(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture(autouse=True)
def no_tpu_here(monkeypatch):
    monkeypatch.setattr(tpu_endpoints, "has_tpu", lambda: False)


@pytest.fixture
def cores(monkeypatch):
    """Lets JAX report TPU cores: a number of hosts with a number of cores each."""

    def set_cores(hosts, per_host, **kwargs):
        devices = [
            SimpleNamespace(platform="tpu", process_index=host, device_kind="TPU v4", id=i, **kwargs)
            for host in range(hosts)
            for i in range(per_host)
        ]
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(jax, "local_devices", lambda: devices[:per_host])
        return devices

    return set_cores


def no_metadata(path):
    raise AssertionError(f"asked for {path}")


# -- what `tpu` can be -----------------------------------------------------------------------------


def test_the_tpu_of_this_machine():
    resolver = TPUClusterResolver(tpu="local", metadata=no_metadata)
    assert resolver.cluster_spec().as_dict() == {}
    assert resolver.master() == resolver.get_master() == ""
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.num_accelerators() == {"TPU": 0}
    assert (resolver.environment, resolver.tpu_hardware_feature) == ("", None)
    assert resolver.get_job_name() == "worker"
    assert resolver.get_coordination_service_leader() == "/job:worker/task:0"


@pytest.mark.parametrize(
    ("tpu", "workers"),
    [
        ("grpc://10.1.2.3:8470", ["10.1.2.3:8470"]),
        ("grpc://10.1.2.3", ["10.1.2.3:8470"]),
        ("grpc://10.1.2.3:8470,10.1.2.4:1", ["10.1.2.3:8470", "10.1.2.4:1"]),
        ("grpc://a,grpc://b:7", ["a:8470", "b:7"]),
        (["grpc://a:1"], ["a:1"]),
        (b"grpc://a:1", ["a:1"]),
    ],
)
def test_addresses(tpu, workers):
    resolver = TPUClusterResolver(tpu, metadata=no_metadata)
    assert resolver.cluster_spec().as_dict() == {"worker": workers}
    assert resolver.master() == resolver.get_master() == f"grpc://{workers[0]}"
    assert resolver.master("worker", len(workers) - 1) == f"grpc://{workers[-1]}"
    assert resolver.master(rpc_layer="x") == f"x://{workers[0]}"
    resolver.task_id = None
    assert resolver.master() == f"grpc://{workers[0]}"
    with pytest.raises(ValueError, match="no such task"):
        resolver.master("worker", 9)


def test_job_and_coordinator():
    resolver = TPUClusterResolver(
        "grpc://a:1,b:1",
        job_name="tpu_worker",
        coordinator_name="coordinator",
        coordinator_address="c:1",
    )
    assert resolver.cluster_spec().as_dict() == {
        "tpu_worker": ["a:1", "b:1"],
        "coordinator": ["c:1"],
    }
    assert resolver.get_job_name() == "tpu_worker"
    assert resolver.get_coordination_service_leader() == "/job:tpu_worker/task:0"
    assert resolver.master("coordinator", 0) == "grpc://c:1"


def test_a_name_is_asked_for_at_each_call():
    service = Service(NODE)
    resolver = TPUClusterResolver(
        "my-tpu", "us-central2-b", "my-project", service=service, metadata=no_metadata
    )
    assert service.asked == []
    assert resolver.cluster_spec().as_dict() == TWO
    assert resolver.master() == "grpc://10.130.0.12:8470"
    assert service.asked == [NODE["name"]] * 2


@pytest.mark.parametrize(
    ("node", "workers"),
    [
        (
            {"state": "READY", "networkEndpoints": [{"ipAddress": "10.2.0.2", "port": "8471"}]},
            ["10.2.0.2:8471"],
        ),
        ({"state": "READY", "networkEndpoints": [{"ipAddress": "10.2.0.2"}]}, ["10.2.0.2:8470"]),
        ({"state": "READY", "ipAddress": "10.2.0.2", "port": "8470"}, ["10.2.0.2:8470"]),
    ],
)
def test_other_answers_of_the_service(node, workers):
    resolver = TPUClusterResolver("t", "z", "p", service=Service(node))
    assert resolver.cluster_spec().as_dict() == {"worker": workers}


@pytest.mark.parametrize(
    ("answer", "builtin", "message"),
    [
        ({"state": "CREATING"}, RuntimeError, "TPU 't' is not ready.* Received: 'CREATING'"),
        ({**NODE, "state": "PREEMPTED"}, RuntimeError, "Received: 'PREEMPTED'"),
        ({"state": "READY"}, RuntimeError, "gives no address"),
        (OSError("404"), ValueError, "does not know 'projects/p/locations/z/nodes/t'.* Received: 404"),
    ],
)
def test_a_tpu_that_cannot_be_used(answer, builtin, message):
    resolver = TPUClusterResolver("t", "z", "p", service=Service(answer))
    with pytest.raises(builtin, match=message) as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value, PhalanxError)


def test_project_and_zone_of_this_machine():
    answers = {
        "instance/zone": "projects/123456/zones/us-central2-b",
        "project/project-id": "my-project",
    }
    service = Service(NODE)
    resolver = TPUClusterResolver("my-tpu", service=service, metadata=answers.__getitem__)
    assert resolver.cluster_spec().as_dict() == TWO
    assert service.asked == [NODE["name"]]


@pytest.mark.parametrize("variable", [None, "https://other"])
def test_the_service_is_made(monkeypatch, variable):
    made = []
    discovery = ModuleType("googleapiclient.discovery")
    discovery.build = lambda *args, **kwargs: made.append((args, kwargs)) or Service(NODE)
    monkeypatch.setitem(sys.modules, "googleapiclient", ModuleType("googleapiclient"))
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
    if variable:
        monkeypatch.setenv("TPU_API_DISCOVERY_URL", variable)
    resolver = TPUClusterResolver("t", "z", "p", credentials="mine", discovery_url="https://given")
    assert resolver.cluster_spec() == resolver.cluster_spec()
    url = variable or "https://given"
    keywords = {"credentials": "mine", "cache_discovery": False, "discoveryServiceUrl": url}
    assert made == [(("tpu", "v2"), keywords)]


def test_without_the_client_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    resolver = TPUClusterResolver("t", "z", "p")
    for builtin in (ImportError, RuntimeError, PhalanxError):
        with pytest.raises(builtin, match=r"pip install 'phalanx\[gcp\]'.*`service`"):
            resolver.cluster_spec()


# -- the environment -------------------------------------------------------------------------------

HOSTNAMES = {"TPU_WORKER_HOSTNAMES": "t1k-w-0,t1k-w-1", "TPU_WORKER_ID": "1"}
KUBE = {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.0.0.1:8470,grpc://10.0.0.2:8470"}


@pytest.mark.parametrize(
    ("variables", "workers", "task_id"),
    [
        (KUBE, ["10.0.0.1:8470", "10.0.0.2:8470"], 0),
        (HOSTNAMES, ["t1k-w-0:8470", "t1k-w-1:8470"], 1),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, ["localhost:8470"], 0),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "1"}, ["a:8470", "b:8470"], 0),
        ({"TPU_PROCESS_ADDRESSES": "h:8476,h:8477", "TPU_WORKER_ID": "1"}, ["h:8476", "h:8477"], 1),
        ({"TPU_NAME": "grpc://z:1"}, ["z:1"], 0),
        # In this order.
        ({**HOSTNAMES, **KUBE}, ["10.0.0.1:8470", "10.0.0.2:8470"], 0),
        ({**HOSTNAMES, "TPU_NAME": "grpc://z:1"}, ["t1k-w-0:8470", "t1k-w-1:8470"], 1),
        ({"TPU_NAME": "grpc://z:1", "TPU_CONFIG": '{"tpu_node_name": "t"}'}, ["z:1"], 0),
    ],
)
@pytest.mark.parametrize("tpu", [None, ""])
def test_variables(monkeypatch, variables, workers, task_id, tpu):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    resolver = TPUClusterResolver(tpu, metadata=no_metadata)
    assert resolver.cluster_spec().as_dict() == {"worker": workers}
    assert (resolver.task_type, resolver.task_id) == ("worker", task_id)
    assert resolver.master() == f"grpc://{workers[task_id]}"


def test_an_argument_wins_over_variables(monkeypatch):
    for name, value in {**KUBE, **HOSTNAMES, "TPU_NAME": "grpc://z:1"}.items():
        monkeypatch.setenv(name, value)
    assert TPUClusterResolver("grpc://a:1").cluster_spec().as_dict() == {"worker": ["a:1"]}
    assert TPUClusterResolver("local").cluster_spec().as_dict() == {}


def test_names_in_variables(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "local")
    assert TPUClusterResolver().cluster_spec().as_dict() == {}
    monkeypatch.delenv("TPU_NAME")
    config = {"tpu_node_name": "my-tpu", "project": "my-project", "zone": "us-central2-b"}
    monkeypatch.setenv("TPU_CONFIG", json.dumps(config))
    service = Service(NODE)
    assert TPUClusterResolver(service=service).cluster_spec().as_dict() == TWO
    TPUClusterResolver(zone="z", project="p", service=service).cluster_spec()
    assert service.asked == [NODE["name"], "projects/p/locations/z/nodes/my-tpu"]


@pytest.mark.parametrize(
    ("variables", "builtin", "message"),
    [
        ({}, ValueError, r"TPUClusterResolver\('local'\)"),
        ({"TPU_CONFIG": "{"}, ValueError, "TPU_CONFIG is not valid JSON"),
        ({"TPU_CONFIG": "[1]"}, ValueError, r"TPU_CONFIG must be a JSON object.* Received: \[1\]"),
        ({"TPU_CONFIG": '{"zone": "z"}'}, ValueError, "Nothing says which TPU"),
        ({**HOSTNAMES, "TPU_WORKER_ID": "x"}, ValueError, "TPU_WORKER_ID must be.* Received: 'x'"),
        ({"TPU_WORKER_HOSTNAMES": "a,,b"}, ValueError, "Received: 'a,,b'"),
        ({**HOSTNAMES, "MEGASCALE_NUM_SLICES": "2"}, RuntimeError, "several slices.* Received: "),
    ],
)
def test_wrong_variables(monkeypatch, variables, builtin, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(builtin, match=message) as caught:
        TPUClusterResolver()
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize(
    ("arguments", "builtin", "message"),
    [
        ({"tpu": []}, ValueError, r"names no TPU.* Received: tpu=\[\]"),
        ({"tpu": ["a", "b"]}, NotImplementedError, "UnionClusterResolver"),
        ({"tpu": 5}, ValueError, "`tpu` must be a string.* Received: tpu=5"),
        ({"tpu": "grpc://"}, ValueError, "Received: 'grpc://'"),
        ({"tpu": "local", "coordinator_name": "c"}, ValueError, "belong together"),
        ({"tpu": "local", "coordinator_address": "c:1"}, ValueError, "belong together"),
    ],
)
def test_wrong_arguments(arguments, builtin, message):
    with pytest.raises(builtin, match=message) as caught:
        TPUClusterResolver(**arguments)
    assert isinstance(caught.value, PhalanxError)


@settings(deadline=None)
@given(st.lists(st.from_regex(r"[a-z0-9.-]{1,9}(:[0-9]{1,5})?", fullmatch=True), min_size=1))
def test_addresses_survive(addresses):
    expected = [a if ":" in a else f"{a}:8470" for a in addresses]
    assert tpu_endpoints.parse_endpoints("grpc://" + ",".join(addresses)) == expected
    assert tpu_endpoints.parse_endpoints(",grpc://".join(addresses)) == expected
    assert tpu_endpoints.parse_endpoints(",".join(expected)) == expected


# -- the metadata server ---------------------------------------------------------------------------

ATTRIBUTES = "instance/attributes/"


@pytest.mark.parametrize(
    ("endpoints", "workers"),
    [
        ("unknown:unknown:10.164.0.3,unknown:unknown:10.164.0.4", ["10.164.0.3", "10.164.0.4"]),
        ("t1v-n-a-w-0,t1v-n-a-w-1", ["t1v-n-a-w-0", "t1v-n-a-w-1"]),
    ],
)
def test_a_tpu_machine_asks_its_metadata_server(endpoints, workers):
    answers = {
        ATTRIBUTES + "worker-network-endpoints": endpoints,
        ATTRIBUTES + "agent-worker-number": "1\n",
        ATTRIBUTES + "tpu-env": "ACCELERATOR_TYPE: 'v4-16'\nWORKER_ID: '1'\n",
    }
    resolver = TPUClusterResolver(metadata=answers.__getitem__)
    assert resolver.cluster_spec().as_dict() == {"worker": [f"{w}:8470" for w in workers]}
    assert resolver.task_id == 1
    assert resolver.master() == f"grpc://{workers[1]}:8470"
    answers[ATTRIBUTES + "tpu-env"] += "MEGASCALE_NUM_SLICES: '2'\n"
    with pytest.raises(RuntimeError, match="several slices"):
        TPUClusterResolver(metadata=answers.__getitem__)


@pytest.fixture
def metadata_server(monkeypatch):
    """A metadata server on this machine, which answers as that of Google Cloud does."""
    answers = {
        ATTRIBUTES + "worker-network-endpoints": "unknown:unknown:10.164.0.3",
        ATTRIBUTES + "agent-worker-number": "0",
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.removeprefix("/computeMetadata/v1/")
            if self.headers["Metadata-Flavor"] != "Google":
                self.send_error(403)
            elif path not in answers:
                self.send_error(404)
            else:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answers[path].encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    yield answers
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_machine_with_chips_asks_over_http(metadata_server, monkeypatch):
    monkeypatch.setattr(tpu_endpoints, "has_tpu", lambda: True)
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.164.0.3:8470"]}
    metadata_server["instance/zone"] = "projects/1/zones/us-west1-b"
    assert google_metadata("instance/zone") == "projects/1/zones/us-west1-b"


def test_metadata_that_is_not_there(metadata_server, monkeypatch):
    with pytest.raises(RuntimeError, match=r"does not answer for 'instance/zone'.*404"):
        google_metadata("instance/zone")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    with pytest.raises(RuntimeError, match="name the project, the zone and the TPU") as caught:
        TPUClusterResolver("my-tpu", service=Service(NODE)).cluster_spec()
    assert isinstance(caught.value, PhalanxError)


# -- what JAX knows --------------------------------------------------------------------------------


def test_no_tpu():
    resolver = TPUClusterResolver("local")
    assert resolver.get_tpu_system_metadata() == TPUSystemMetadata(0, 0, 0, None, ())
    with pytest.raises(NotFoundError, match=r"JAX finds no TPU.* Received: tpu='local'"):
        TPUClusterResolver.connect("local")


def test_cores_and_hosts(cores):
    devices = cores(hosts=2, per_host=4, coords=(1, 0, 2))
    resolver = TPUClusterResolver.connect("grpc://a,b")
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 1) == {"TPU": 4}
    assert resolver.tpu_hardware_feature == "TPU v4"
    known = resolver.get_tpu_system_metadata()
    assert (known.num_cores, known.num_hosts, known.num_of_cores_per_host) == (8, 2, 4)
    assert known.devices == tuple(devices)
    assert known.topology == ((1, 0, 2),) * 8
    cores(hosts=1, per_host=4)
    assert resolver.get_tpu_system_metadata().topology is None
