"""Tasks, their environment, ports, hosts, resolvers and the files of running jobs."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import phalanx as px
from phalanx.job.hub.descriptions import Task
from phalanx.job.launch.exit_policy import Patience
from phalanx.job.launch.from_resolver import parse_arguments, parse_task, resolved, resolved_config
from phalanx.job.launch.launcher import Job, planned_commands
from phalanx.job.launch.ports import PortReservation
from phalanx.job.launch.remote import parse_hosts, shell_text
from phalanx.job.launch.task_environment import (
    RETAIN_MEMORY,
    essential_tasks,
    job_tasks,
    task_environment,
    tf_config,
    with_addresses,
)
from phalanx.job.registry import RunningJob, announced, find_job, running_jobs, runtime_folder


@given(st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_tf_config_is_what_the_resolver_reads(workers: int, ps: int, chief: bool) -> None:
    tasks = job_tasks(workers, ps, chief)
    addresses = [f"host{i}:1" for i in range(len(tasks))]
    placed = with_addresses(tasks, addresses)
    for task, address in zip(placed, addresses, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TF_CONFIG", tf_config(placed, task))
            resolver = px.cluster_resolver.TFConfigClusterResolver()
            assert (resolver.task_type, resolver.task_id) == (task.type, task.id)
            assert resolver.cluster_spec().task_address(task.type, task.id) == address
            assert resolver.cluster_spec().num_tasks("worker") == workers


def test_what_a_job_waits_for() -> None:
    def waits(**kwargs: Any) -> set[str]:
        tasks = job_tasks(**kwargs)
        return {str(t) for t, e in zip(tasks, essential_tasks(tasks), strict=True) if e}

    assert waits(workers=2) == {"worker 0", "worker 1"}
    assert waits(workers=1, chief=True) == {"chief 0", "worker 0"}
    assert waits(workers=2, ps=1) == {"worker 0", "worker 1"}
    assert waits(workers=2, ps=1, chief=True) == {"chief 0"}


@pytest.mark.parametrize("bad", [{"workers": 0}, {"workers": -1}, {"workers": 1, "ps": -1}])
def test_impossible_jobs(bad: dict[str, int]) -> None:
    with pytest.raises(px.errors.InvalidValueError, match="at least one worker"):
        job_tasks(**bad)


def test_the_environment_of_a_task() -> None:
    base = {
        "HOME": "/me",
        "PHALANX_HUB": "old",
        "XLA_FLAGS": "--a --xla_force_host_platform_device_count=8",
    }
    env = task_environment(base, config="{}", hub="h:1", token="t", devices=4, retain_memory=True)
    assert env["HOME"] == "/me"
    assert (env["TF_CONFIG"], env["PHALANX_HUB"], env["PHALANX_TOKEN"]) == ("{}", "h:1", "t")
    assert env["JAX_NUM_CPU_DEVICES"] == "4"
    assert int(env["PJRT_NPROC"]) >= 8
    assert env["XLA_FLAGS"] == "--a"
    assert RETAIN_MEMORY.items() <= env.items()
    plain = task_environment(base, config="{}", restart=2)
    assert plain["XLA_FLAGS"] == base["XLA_FLAGS"]
    assert plain["PHALANX_RESTART"] == "2"
    assert task_environment(base, config="{}", terminate_grace=2.5)["PHALANX_TERMINATE_GRACE"] == "2.5"
    assert "PHALANX_TERMINATE_GRACE" not in task_environment(
        {"PHALANX_TERMINATE_GRACE": "3"}, config="{}"
    )
    assert not {"PHALANX_HUB", "PHALANX_TOKEN", "JAX_NUM_CPU_DEVICES", *RETAIN_MEMORY} & set(plain)


def test_processes_know_how_long_their_launcher_waits() -> None:
    tasks = job_tasks(1)
    job = Job(["x"], tasks, "x", environ={}, patience=Patience(terminate=40.0))
    (command,) = planned_commands(job, tasks, "h:1", "t")
    assert command.environ["PHALANX_TERMINATE_GRACE"] == "40"


def test_a_pool_size_that_the_user_chose_stays() -> None:
    env = task_environment({"PJRT_NPROC": "3"}, config="{}", devices=4)
    assert env["PJRT_NPROC"] == "3"


# -- ports ---------------------------------------------------------------------------------------


def test_reserved_ports_can_be_listened_at_and_are_not_given_twice() -> None:
    with PortReservation(20) as one, PortReservation(20) as two:
        ports = one.ports + two.ports
        assert len(set(ports)) == 40
        for port in ports[:5]:
            with socket.create_server(("127.0.0.1", port)):
                pass


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used, PortReservation(1) as free:
        in_use = used.getsockname()[1]
        (other,) = free.ports
        monkeypatch.setattr("phalanx.job.launch.ports._candidates", lambda: iter([in_use, other]))
        with pytest.raises(px.errors.ResourceExhaustedError):
            PortReservation(1)
        free.close()
        with PortReservation(0) as nothing:
            assert nothing.ports == []
        monkeypatch.setattr("phalanx.job.launch.ports._candidates", lambda: iter([in_use, other]))
        with PortReservation(1) as again:
            assert again.ports == [other]


# -- other machines ------------------------------------------------------------------------------


def test_hosts() -> None:
    assert parse_hosts("a, b ,a", 3) == (["a", "b", "a"], ["a:12300", "b:12300", "a:12301"])
    for bad in ("", "a,,b", "a b", "-oProxyCommand=x", "a:b", "me@"):
        with pytest.raises(px.errors.InvalidValueError, match="Received"):
            parse_hosts(bad, 1)


def test_tokens_are_not_shown() -> None:
    assert "secret" not in shell_text(["x"], {"PHALANX_TOKEN": "secret"})


def test_resolvers_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert json.loads(resolved_config(resolved("tfconfig", {}, None))) == config
    other = json.loads(resolved_config(resolved("tfconfig", {}, Task("worker", 0))))
    assert other["task"]["index"] == 0
    with pytest.raises(px.errors.InvalidValueError, match="task_id"):
        resolved("tfconfig", {}, Task("worker", 5))
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(px.errors.ClusterEnvironmentError, match="--task"):
        resolved("tfconfig", {}, None)
    with pytest.raises(px.errors.InvalidValueError, match="GCEClusterResolver cannot be made"):
        resolved("gce", {"nonsense": 1}, None)


def test_slurm_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {
        "PROCID": "1",
        "STEP_NUM_TASKS": "2",
        "STEP_NODELIST": "n[1-2]",
        "STEP_TASKS_PER_NODE": "1(x2)",
    }
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    arguments = parse_arguments(["port_base=9000", "gpus_per_node=0"])
    config = json.loads(resolved_config(resolved("slurm", arguments, None)))
    assert config["cluster"] == {"worker": ["n1:9000", "n2:9000"]}
    assert config["task"] == {"type": "worker", "index": 1}


@pytest.mark.parametrize("bad", ["port", "=3", "a b=3"])
def test_arguments_that_are_none(bad: str) -> None:
    with pytest.raises(px.errors.InvalidValueError, match="name=value"):
        parse_arguments([bad])


@pytest.mark.parametrize("bad", ["worker", "worker:", ":1", "worker:x", "worker:-1"])
def test_tasks_that_are_none(bad: str) -> None:
    with pytest.raises(px.errors.InvalidValueError, match="worker:1"):
        parse_task(bad)


# -- running jobs --------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_job_is_found_while_it_runs_and_by_its_user_only(runtime: Path) -> None:
    job = RunningJob(os.getpid(), "train.py", "127.0.0.1:5", "secret", {"ps 0": "127.0.0.1:6"})
    assert "secret" not in repr(job)
    with announced(job):
        (path,) = runtime.glob("phalanx/*")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert running_jobs() == [job]
        for which in (None, str(os.getpid()), "train.py", "127.0.0.1:5"):
            assert find_job(which) == job
        with pytest.raises(px.errors.NotFoundError, match=r"Running: \d+ \(train.py\)"):
            find_job("other.py")
    assert running_jobs() == []
    with pytest.raises(px.errors.NotFoundError, match="none"):
        find_job()


def test_one_of_several_jobs_must_be_named(runtime: Path) -> None:
    own, parent = (RunningJob(pid, "a.py", f"h:{pid}", "t") for pid in (os.getpid(), os.getppid()))
    with announced(own), announced(parent):
        with pytest.raises(px.errors.InvalidValueError, match="Several jobs"):
            find_job("a.py")
        assert find_job(str(parent.pid)) == parent


def test_two_jobs_of_one_process_are_both_found(runtime: Path) -> None:
    first, second = (RunningJob(os.getpid(), "a.py", f"h:{port}", "t") for port in (1, 2))
    with announced(first) as update:
        with announced(second):
            assert {job.address for job in running_jobs()} == {"h:1", "h:2"}
        changed = RunningJob(os.getpid(), "a.py", "h:3", "t")
        update(changed)
        assert running_jobs() == [changed]


def test_files_of_dead_launchers_are_removed(runtime: Path) -> None:
    folder = runtime_folder()
    gone = RunningJob(2**22 - 1, "a.py", "h:1", "t")
    with announced(gone):
        (folder / "broken.json").write_text("{")
        assert running_jobs() == []
        assert not list(folder.glob(f"{gone.pid}-*.json"))


def test_a_job_that_could_be_announced_late_only_leaves_no_file(runtime: Path) -> None:
    folder = runtime_folder()
    folder.chmod(0o755)
    job = RunningJob(os.getpid(), "a.py", "h:1", "t")
    with announced(job) as update:
        folder.chmod(0o700)
        update(job)
        assert running_jobs() == [job]
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_can_read_is_not_used(runtime: Path) -> None:
    runtime_folder().chmod(0o755)
    with pytest.raises(px.errors.PermissionDeniedError, match="chmod 700"):
        runtime_folder()
    with announced(RunningJob(os.getpid(), "a.py", "h:1", "t")):  # the job runs all the same
        assert list(runtime.glob("phalanx/*.json")) == []
