"""`RayClusterResolver` without Ray: tasks that meet in a directory of this process."""

from __future__ import annotations

import json
import sys
import threading

import pytest

import phalanx as px
from phalanx.cluster.resolvers.ray import RayClusterResolver, TaskDirectory


def test_tasks_are_given_in_the_order_of_the_roles() -> None:
    directory = TaskDirectory({"chief": 1, "worker": 1, "ps": 1})
    sizes = {"ps": 1, "worker": 1, "chief": 1}
    resolvers = [
        RayClusterResolver(sizes, directory=directory, host="10.0.0.1", port=i + 1) for i in range(3)
    ]
    assert [(r.task_type, r.task_id) for r in resolvers] == [("chief", 0), ("worker", 0), ("ps", 0)]
    assert resolvers[0].cluster_spec().as_dict() == {
        "chief": ["10.0.0.1:1"],
        "worker": ["10.0.0.1:2"],
        "ps": ["10.0.0.1:3"],
    }
    assert resolvers[1].master() == "grpc://10.0.0.1:2"
    assert resolvers[1].master("ps", 0) == "grpc://10.0.0.1:3"
    with pytest.raises(ValueError, match="no such task"):
        RayClusterResolver(sizes, directory=directory, host="h", port=9)


def test_a_task_that_comes_back_has_its_new_address() -> None:
    directory = TaskDirectory({"worker": 2})
    sizes = {"worker": 2}
    first = RayClusterResolver(sizes, "worker", 0, directory=directory, host="a", port=1)
    RayClusterResolver(sizes, "worker", 1, directory=directory, host="b", port=1)
    again = RayClusterResolver(sizes, "worker", 1, directory=directory, host="c", port=1)
    assert first.cluster_spec() == again.cluster_spec()
    assert first.cluster_spec().task_address("worker", 1) == "c:1"


def test_who_is_missing_is_named() -> None:
    directory = TaskDirectory({"worker": 2, "ps": 2})
    resolver = RayClusterResolver(
        {"worker": 2, "ps": 2}, "ps", 1, directory=directory, host="a", timeout=0.01
    )
    assert int(resolver.address.rpartition(":")[2]) > 0
    with pytest.raises(px.errors.DeadlineExceededError, match="worker 0, worker 1, ps 0"):
        resolver.cluster_spec()


def test_it_waits_for_the_others() -> None:
    directory = TaskDirectory({"worker": 2})
    first = RayClusterResolver({"worker": 2}, directory=directory, host="a", port=1)
    found: list[px.train.ClusterSpec] = []
    thread = threading.Thread(target=lambda: found.append(first.cluster_spec()))
    thread.start()
    RayClusterResolver({"worker": 2}, directory=directory, host="b", port=1)
    thread.join(30)
    assert found[0].as_dict() == {"worker": ["a:1", "b:1"]}


def test_a_launcher_has_said_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["a:1", "b:1"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    resolver = RayClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == cluster
    assert resolver.master() == "grpc://b:1"
    resolver.close()  # nothing to end
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(px.errors.ClusterEnvironmentError, match="--engine ray"):
        RayClusterResolver()


def test_arguments() -> None:
    with pytest.raises(TypeError, match="how many"):
        RayClusterResolver(["worker"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'boss'"):
        RayClusterResolver({"boss": 1})
    with pytest.raises(ValueError, match="number of tasks"):
        RayClusterResolver({"worker": -1})


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(px.errors.MissingPackageError, match=r"phalanx\[ray\]"):
        RayClusterResolver({"worker": 1})
