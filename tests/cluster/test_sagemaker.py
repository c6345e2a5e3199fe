"""SageMakerClusterResolver."""

import json

import pytest

from phalanx.cluster.resolvers import SageMakerClusterResolver
from phalanx.errors import PhalanxError


@pytest.fixture
def sagemaker(monkeypatch):
    """Sets the variables of a training job on two hosts, and others."""

    def set_variables(**changes):
        variables = {"SM_HOSTS": '["algo-2","algo-1"]', "SM_CURRENT_HOST": "algo-2", **changes}
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    set_variables()
    return set_variables


def test_a_training_job(sagemaker):
    resolver = SageMakerClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["algo-1:2223", "algo-2:2223"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.rpc_layer, resolver.environment) == (None, None)
    assert resolver.master() == "algo-2:2223"
    assert resolver.master("worker", 0) == "algo-1:2223"
    assert resolver.master("worker", 0, "x") == "x://algo-1:2223"
    with pytest.raises(ValueError, match="no such task"):
        resolver.master("worker", 2)


def test_arguments_win(sagemaker):
    resolver = SageMakerClusterResolver(5000, "worker", 0, "grpc", "lab")
    assert resolver.cluster_spec().as_dict() == {"worker": ["algo-1:5000", "algo-2:5000"]}
    assert (resolver.task_id, resolver.rpc_layer, resolver.environment) == (0, "grpc", "lab")
    assert resolver.master() == "grpc://algo-1:5000"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = None, None, None
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "algo-2:5000")


def test_the_variables_are_read_at_each_call(sagemaker):
    resolver = SageMakerClusterResolver()
    sagemaker(SM_HOSTS='["a", "b", "c"]', SM_CURRENT_HOST="a")
    assert resolver.cluster_spec().num_tasks("worker") == 3
    assert resolver.task_id == 0


def test_one_host_needs_no_address(sagemaker):
    sagemaker(SM_HOSTS='["algo-2"]')
    resolver = SageMakerClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["algo-2:2223"]}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 0, "")


@pytest.mark.parametrize("hosts", ['["algo-1"]', "[]", ""])
def test_a_host_that_is_not_listed_has_no_cluster(sagemaker, hosts):
    sagemaker(SM_HOSTS=hosts)
    resolver = SageMakerClusterResolver()
    assert resolver.cluster_spec().as_dict() == {}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")


def test_accelerators(sagemaker):
    resolver = SageMakerClusterResolver()
    assert resolver.num_accelerators() == {}
    sagemaker(SM_NUM_GPUS="4")
    assert resolver.num_accelerators() == {"GPU": 4}
    assert resolver.num_accelerators("worker", 0) == {"GPU": 4}
    sagemaker(SM_NUM_GPUS="0")
    assert resolver.num_accelerators() == {}
    with pytest.raises(ValueError, match="no such task"):
        resolver.num_accelerators("worker", 5)
    sagemaker(SM_NUM_GPUS="many")
    with pytest.raises(ValueError, match=r"SM_NUM_GPUS must be a whole number.* Received: 'many'"):
        resolver.num_accelerators()


@pytest.mark.parametrize("missing", ["SM_HOSTS", "SM_CURRENT_HOST"])
def test_outside_of_sagemaker(sagemaker, missing):
    sagemaker(**{missing: None})
    resolver = SageMakerClusterResolver()
    for builtin in (AssertionError, RuntimeError, PhalanxError):
        with pytest.raises(builtin, match=f"{missing} is not set. SageMaker sets it"):
            resolver.cluster_spec()
    with pytest.raises(AssertionError):
        _ = resolver.task_id


def test_hosts_that_are_no_json(sagemaker):
    sagemaker(SM_HOSTS="algo-1")
    with pytest.raises(
        json.JSONDecodeError, match=r"SM_HOSTS is not valid JSON.*\"algo-2\"\]"
    ) as caught:
        SageMakerClusterResolver().cluster_spec()
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize("hosts", ['{"a": 1}', "5", "[1]", '"algo-1"', "null"])
def test_hosts_that_are_no_list_of_names(sagemaker, hosts):
    sagemaker(SM_HOSTS=hosts)
    with pytest.raises(ValueError, match=r"SM_HOSTS must be a JSON list of names.* Received: "):
        SageMakerClusterResolver().cluster_spec()


def test_task_id_must_be_an_index():
    with pytest.raises(ValueError, match="`task_id` must be a whole number"):
        SageMakerClusterResolver(task_id="x")
