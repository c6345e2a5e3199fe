"""Cluster specifications, resolvers and the rules of several workers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import phalanx as px
from phalanx.cluster import roles
from phalanx.cluster.resolvers.hostlist import expand_hostlist
from tests.conformance.harness import case, cases, differs, encode, records

ClusterSpec = px.train.ClusterSpec
Simple = px.cluster_resolver.SimpleClusterResolver
Slurm = px.cluster_resolver.SlurmClusterResolver

WORKERS = {"worker": ["a:1", "b:1"]}
CONFIG = {
    "cluster": {"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]},
    "task": {"type": "worker", "index": 1},
    "rpc_layer": "grpc",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1-2],m5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Only these variables of those that describe clusters."""
    prefixes = ("SLURM", "SM_", "TPU_", "KUBE_", "TF_CONFIG", "CUDA_VISIBLE_DEVICES")
    others = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    with mock.patch.dict(os.environ, {**others, **variables}, clear=True):
        yield


def tf_config(**changes: Any) -> contextlib.AbstractContextManager[None]:
    return environment(TF_CONFIG=json.dumps({**CONFIG, **changes}))


def error_or(ask: Callable[[], Any]) -> Any:
    """An answer, or the name of the builtin that an error is, as the recordings write it."""
    try:
        return ask()
    except ValueError:
        return {"raises": "ValueError"}


def recorded(name: str) -> Any:
    (record,) = (r for r in records("clusters") if r["case"] == name)
    return record["result"]


# -- specifications -------------------------------------------------------------------------------


@case()
def cs_dense() -> Any:
    c = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    return {
        "dict": c.as_dict(),
        "jobs": c.jobs,
        "n": c.num_tasks("worker"),
        "idx": c.task_indices("worker"),
        "addr": c.task_address("worker", 1),
        "tasks": c.job_tasks("ps"),
        "bool": bool(c),
        "repr": repr(c),
    }


@case()
def cs_sparse() -> Any:
    c = ClusterSpec({"worker": {1: "b:1", 3: "d:1"}})
    return {
        "dict": json.loads(json.dumps(c.as_dict())),  # the keys of JSON are strings
        "tasks": c.job_tasks("worker"),
        "n": c.num_tasks("worker"),
        "idx": c.task_indices("worker"),
    }


@case()
def cs_empty() -> Any:
    c = ClusterSpec({})
    return [bool(c), c.jobs, c.as_dict()]


# -- resolvers in the program ---------------------------------------------------------------------


@case()
def union_dict_and_list() -> Any:
    sparse = Simple(ClusterSpec({"worker": {2: "c:1"}}))
    union = px.cluster_resolver.UnionResolver(sparse, Simple(ClusterSpec(WORKERS)))
    return union.cluster_spec().as_dict()


@case()
def union_conflict() -> Any:
    sparse = Simple(ClusterSpec({"worker": {1: "x:1"}}))
    return px.cluster_resolver.UnionResolver(sparse, Simple(ClusterSpec(WORKERS))).cluster_spec()


# -- TF_CONFIG ------------------------------------------------------------------------------------


@case()
def tfconfig_basic() -> Any:
    with tf_config():
        r = px.cluster_resolver.TFConfigClusterResolver()
        return {
            "spec": r.cluster_spec().as_dict(),
            "task": [r.task_type, r.task_id],
            "rpc": r.rpc_layer,
            "master": r.master(),
            "env": r.environment,
            "acc": dict(r.num_accelerators()),
        }


@case()
def tfconfig_index_is_string() -> Any:
    with tf_config(task={"type": "worker", "index": "1"}):
        return px.cluster_resolver.TFConfigClusterResolver().task_id


@case()
def tfconfig_overrides() -> Any:
    with tf_config():
        r = px.cluster_resolver.TFConfigClusterResolver(
            task_type="ps", task_id=0, rpc_layer="x", environment="google"
        )
        return [r.task_type, r.task_id, r.rpc_layer, r.environment, r.master()]


@case()
def tfconfig_session_master() -> Any:
    with tf_config(session_master="sm:7"):
        return px.cluster_resolver.TFConfigClusterResolver().master()


@case()
def tfconfig_reread_each_time() -> Any:
    r = px.cluster_resolver.TFConfigClusterResolver()
    with tf_config():
        before = r.task_id
    with tf_config(task={"type": "ps", "index": 0}):
        return [before, r.task_id, r.task_type]


@case()
def tfconfig_mirrored_ignores() -> Any:
    # A process of its own: it was recorded with one device, and the tests have another number.
    program = "import phalanx as px; print(px.MirroredStrategy().num_replicas_in_sync)"
    with tf_config():
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
        )
    return int(done.stdout)


# -- several workers ------------------------------------------------------------------------------


@case()
def mw_util_ids() -> Any:
    u = roles
    c = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"], "evaluator": ["e:1"]}
    d = WORKERS
    return {
        "ids": [
            u.id_in_cluster(c, "chief", 0),
            u.id_in_cluster(c, "worker", 0),
            u.id_in_cluster(c, "worker", 1),
            u.id_in_cluster(c, "evaluator", 0),
            error_or(lambda: u.id_in_cluster(c, "ps", 0)),
        ],
        "count": [
            u.worker_count(c, "worker"),
            u.worker_count(c, "evaluator"),
            error_or(lambda: u.worker_count(c, "ps")),
            u.worker_count(d, "worker"),
        ],
        "chief": [
            u.is_chief(c, "chief", 0),
            u.is_chief(c, "worker", 0),
            u.is_chief(d, "worker", 0),
            u.is_chief(d, "worker", 1),
            u.is_chief(c, "evaluator", 0),
        ],
        "leader": [
            u.collective_leader(c, "worker", 0),
            u.collective_leader(d, "worker", 1),
            u.collective_leader(c, "evaluator", 0),
            u.coordination_leader(c),
            u.coordination_leader(d),
        ],
    }


# -- Slurm ----------------------------------------------------------------------------------------


@differs()
def slurm_auto() -> None:
    with environment(**SLURM):
        r = Slurm(gpus_per_node=2, auto_set_gpu=False)
        theirs = recorded("slurm_auto")
        # Ranks are on the hosts where Slurm starts them, not on those that come first by name.
        assert r.cluster_spec().as_dict() == {
            "worker": ["n1:8888", "n1:8889", "n2:8888", "n2:8889", "m5:8888"]
        }
        assert sorted(r.cluster_spec().job_tasks("worker")) == sorted(theirs["spec"]["worker"])
        assert r.master() == "grpc://n2:8889"
        # The task is known from the beginning.
        assert list(Slurm(gpus_per_node=2, auto_set_gpu=False).get_task_info()) == theirs["info"]
        assert r.num_accelerators() == theirs["acc"]
        assert r.rpc_layer == theirs["rpc"]


@differs()
def slurm_jobs() -> None:
    with environment(**SLURM):
        r = Slurm(jobs={"worker": 4, "ps": 1}, port_base=9000, gpus_per_node=2, auto_set_gpu=False)
        assert r.cluster_spec().as_dict() == {
            "ps": ["n1:9000"],
            "worker": ["n1:9001", "n2:9000", "n2:9001", "m5:9000"],
        }
        assert list(r.get_task_info()) == recorded("slurm_jobs")["info"]


@case()
def slurm_tasks_per_node_int() -> Any:
    with environment(**{**SLURM, "SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_NUM_TASKS": "4"}):
        r = Slurm(tasks_per_node=2, gpus_per_node=2, auto_set_gpu=False)
        return r.cluster_spec().as_dict()


@case()
def slurm_err_gpu_oversubscribe() -> Any:
    with environment(**SLURM):
        return Slurm(gpus_per_node=1, gpus_per_task=1, auto_set_gpu=False)


@case()
def slurm_err_bad_nodelist() -> Any:
    with environment(**{**SLURM, "SLURM_STEP_NODELIST": "n[1-"}):
        return Slurm(gpus_per_node=2, auto_set_gpu=False)


# -- clouds ---------------------------------------------------------------------------------------


@case()
def gce_no_client_library() -> Any:
    missing = {"googleapiclient": None, "googleapiclient.discovery": None}
    with mock.patch.dict(sys.modules, missing):
        return px.cluster_resolver.GCEClusterResolver("p", "z", "g", 8470)


@differs()
def sagemaker_basic() -> None:
    with environment(SM_HOSTS='["algo-2","algo-1"]', SM_CURRENT_HOST="algo-2"):
        r = px.cluster_resolver.SageMakerClusterResolver()
        ours = {
            "spec": r.cluster_spec().as_dict(),
            "task": [r.task_type, r.task_id],
            "master": r.master(),
            "rpc": r.rpc_layer,
            "public": False,
        }
    # All the same, but here it is public.
    assert encode(ours) == recorded("sagemaker_basic")


@case()
def sagemaker_no_env() -> Any:
    with environment():
        return px.cluster_resolver.SageMakerClusterResolver().cluster_spec()


@case()
def tpu_local() -> Any:
    r = px.cluster_resolver.TPUClusterResolver(tpu="local")
    return {
        "spec": r.cluster_spec().as_dict(),
        "master": r.master(),
        "task": [r.task_type, r.task_id],
        "acc": r.num_accelerators(),
        "env": r.environment,
        "leader": r.get_coordination_service_leader(),
        "job": r.get_job_name(),
        "hw": r.tpu_hardware_feature,
    }


@case()
def tpu_address_coordinator() -> Any:
    r = px.cluster_resolver.TPUClusterResolver(
        tpu="grpc://10.1.2.3:8470,10.1.2.4:8470",
        coordinator_name="coordinator",
        coordinator_address="10.0.0.1:1",
    )
    return r.cluster_spec().as_dict()


# -- servers and remote calls ---------------------------------------------------------------------


@case()
def srv_err_bad_type() -> Any:
    return px.Server(3)  # type: ignore[arg-type]


@case()
def srv_err_unknown_job() -> Any:
    return px.Server({"a": ["localhost:0"]}, job_name="zz")


@case()
def srv_err_bad_protocol() -> Any:
    return px.Server({"a": ["localhost:0"]}, protocol="carrier-pigeon")


@case()
def rpc_register_without_signature() -> Any:
    server = px.experimental.rpc.Server.create("grpc", "localhost:0")
    server.register("f", px.function(lambda x: x))


# -- strategies of several workers ----------------------------------------------------------------


def strategy_of(cluster: dict[str, list[str]], task_type: str, task_id: int) -> Any:
    resolver = Simple(ClusterSpec(cluster), task_type=task_type, task_id=task_id)
    return px.MultiWorkerMirroredStrategy(resolver)


# -- one expression each ---------------------------------------------------------------------------


def preemption(resolver: Any, *folder: str) -> Any:
    checkpoint = px.train.Checkpoint()
    return px.experimental.PreemptionCheckpointHandler(resolver, checkpoint, *folder)


def termination_config() -> Any:
    config = px.experimental.TerminationConfig()
    return [config.termination_watcher_fn, config.exit_fn, config.grace_period, config.save_fn]


cases(
    {
        "pre_no_dir": lambda: preemption(None),
        "pre_ps_cluster": lambda: preemption(
            Simple(ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}), task_type="worker", task_id=0),
            tempfile.mkdtemp(),
        ),
        "pre_termination_config_fields": termination_config,
        "cs_sparse_string_keys": lambda: ClusterSpec({"worker": {"0": "a:1", "1": "b:1"}}).as_dict(),
        "cs_err_not_dict": lambda: ClusterSpec(["a:1"]),
        "cs_err_task_int": lambda: ClusterSpec({"worker": [1]}),
        "cs_err_unknown_task": lambda: ClusterSpec(WORKERS).task_address("worker", 5),
        "cs_err_unknown_indices": lambda: ClusterSpec(WORKERS).task_indices("w"),
        "simple_err_master_not_str": lambda: Simple(ClusterSpec(WORKERS), master=5),
        "simple_err_bad_task": lambda: Simple(ClusterSpec(WORKERS)).master("worker", 7),
        "simple_err_abstract": px.cluster_resolver.ClusterResolver,
        "slurm_expand_hostlist": lambda: [
            expand_hostlist("n[1-2],m5,o[3-4,6,7-9]"),
            expand_hostlist("n[08-11]"),
            expand_hostlist("a,b"),
            error_or(lambda: expand_hostlist("n[1-2")),
            error_or(lambda: expand_hostlist("n[a-b]")),
        ],
        "tpu_strategy_without_tpu": lambda: px.TPUStrategy(
            px.cluster_resolver.TPUClusterResolver(tpu="local")
        ),
        "mwms_err_index_too_big": lambda: strategy_of(WORKERS, "worker", 9),
        "mwms_err_bad_job": lambda: strategy_of({"foo": ["a:1"]}, "foo", 0),
        "mwms_err_two_chiefs": lambda: strategy_of({"chief": ["a:1", "b:1"]}, "chief", 0),
        "mwms_err_bad_resolver": lambda: px.MultiWorkerMirroredStrategy(cluster_resolver="x"),
        "mwms_err_bad_options": lambda: px.MultiWorkerMirroredStrategy(communication_options="NCCL"),
        "mwms_isinstance_experimental": lambda: isinstance(
            px.MultiWorkerMirroredStrategy(), px.experimental.MultiWorkerMirroredStrategy
        ),
    }
)
