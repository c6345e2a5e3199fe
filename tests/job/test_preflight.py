"""What is wrong with a cluster before its processes meet, and the token that they share."""

from __future__ import annotations

import os
import socket

import pytest

from phalanx import errors
from phalanx.cluster.resolvers import SimpleClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.job import preflight
from phalanx.job.hub.descriptions import Task
from phalanx.job.tokens import find_token, own_token
from phalanx.net.addresses import listen


def resolver(cluster, task_type="worker", task_id=0):
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=task_type, task_id=task_id)


def test_the_place_of_a_process():
    cluster = {"worker": ["a:1", "b:1"], "chief": ["c:1"], "ps": ["d:1"]}
    place = preflight.find_membership(resolver(cluster, "worker", 1))
    assert [str(task) for task in place.tasks] == ["chief 0", "worker 0", "worker 1"]
    assert place.rank == 2
    assert place.task.address == "b:1"
    assert not place.is_local
    same = preflight.find_membership(resolver(dict(reversed(cluster.items())), "chief", 0))
    assert same.cluster == place.cluster


def test_a_process_that_does_not_know_which_task_it_is():
    with pytest.raises(errors.InvalidValueError, match="task_type=None"):
        preflight.find_membership(SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]})))


@pytest.mark.parametrize("task_type", ["ps", "evaluator"])
def test_a_task_that_does_not_train_with_others(task_type):
    with pytest.raises(errors.InvalidValueError, match=task_type):
        preflight.find_membership(resolver({"worker": ["a:1"], "ps": ["b:1"]}, task_type, 0))


@pytest.mark.parametrize("local", ["localhost:2222", "127.0.0.1:2222", "127.8.0.1:1", "[::1]:2222"])
def test_localhost_in_a_cluster_of_several_machines(local):
    with pytest.raises(errors.ClusterEnvironmentError, match="means another machine") as caught:
        preflight.find_membership(resolver({"worker": [local, "host1:2222"]}))
    assert str(caught.value).endswith(f"Received: worker 0 at {local}")


def test_a_cluster_on_one_machine():
    assert preflight.find_membership(resolver({"worker": ["localhost:1", "127.0.0.1:2"]})).is_local


def test_two_tasks_with_one_address():
    with pytest.raises(errors.DuplicateTaskError, match="worker 0, worker 1 have the same"):
        preflight.find_membership(resolver({"worker": ["host0:2222", "host0:2222"]}))


def test_a_port_in_use_is_named():
    with listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        problem = preflight.port_problem(Task("worker", 1, f"127.0.0.1:{port}"))
        assert problem is not None
        assert f"Port {port} of worker 1 (127.0.0.1:{port}) is in use" in problem
    assert preflight.port_problem(Task("worker", 1, f"127.0.0.1:{port}")) is None


def test_an_address_of_another_machine():
    problem = preflight.port_problem(Task("worker", 0, "192.0.2.1:2222"))  # reserved for examples
    assert problem is not None
    assert "does not belong to this machine" in problem
    assert preflight.port_problem(Task("worker", 0, "192.0.2.1:0"), bind="127.0.0.1") is None


def test_a_name_that_nobody_knows():
    task = Task("worker", 0, "no-such-host.invalid:2222")
    assert "is not known" in str(preflight.port_problem(task))
    with pytest.raises(errors.ClusterEnvironmentError, match=r"no-such-host\.invalid"):
        preflight.resolve("no-such-host.invalid")


def test_where_to_listen(monkeypatch):
    local = Task("worker", 0, "localhost:2222")
    assert preflight.bind_host(local, is_local=True) in ("127.0.0.1", "::1")
    assert preflight.bind_host(local, is_local=True, bind="0.0.0.0") == "0.0.0.0"
    # Many systems map their own name to a loopback address, where no other machine could connect.
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    assert preflight.bind_host(Task("worker", 0, "host0:2222"), is_local=False) == "0.0.0.0"


# -- the token ------------------------------------------------------------------------------------


def test_the_token_of_the_environment_counts(monkeypatch):
    monkeypatch.setenv("PHALANX_TOKEN", "from the environment")
    assert find_token(is_local=False) == find_token(is_local=True) == "from the environment"


def test_several_machines_need_a_token(monkeypatch):
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    with pytest.raises(errors.ClusterEnvironmentError, match=r"secrets\.token_hex"):
        find_token(is_local=False)


def test_one_machine_has_a_token_that_only_the_user_can_read(monkeypatch, tmp_path):
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    token = find_token(is_local=True)
    assert len(token) >= 32
    assert find_token(is_local=True) == token
    (path,) = (tmp_path / "phalanx").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_token_that_others_can_read_is_refused(tmp_path):
    own_token(tmp_path)
    os.chmod(tmp_path / "token", 0o644)
    with pytest.raises(errors.PermissionDeniedError, match="token"):
        own_token(tmp_path)
