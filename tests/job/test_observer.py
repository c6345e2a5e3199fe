"""Looking at jobs and clusters from outside, and at the connections of this process."""

from __future__ import annotations

import io
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console
from tests.processes import free_addresses, resolver

from phalanx import errors
from phalanx.cluster.resolvers import TFConfigClusterResolver
from phalanx.job import device_connections
from phalanx.job.arrivals import Arrivals
from phalanx.job.doctor import Finding, doctor, examine, examine_together
from phalanx.job.explain import explain
from phalanx.job.hub.client import Member
from phalanx.job.hub.descriptions import Failure, Task
from phalanx.job.hub.server import Hub
from phalanx.job.registry import RunningJob, announced
from phalanx.net.addresses import listen


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("PHALANX_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def job():
    """A hub with one worker of two, which other processes can find."""
    with Hub([Task("worker", i, f"h{i}:1") for i in range(2)], "secret", coordination=False) as hub:
        member = Member(hub.address, "secret", "worker", 0)
        member.status.phase, member.status.site = "input", "data.py:7 in load"
        with announced(RunningJob(os.getpid(), "train.py", hub.address, "secret")):
            yield hub, member
        member.leave()


def shown(function, *args, **kwargs):
    console = Console(file=io.StringIO(), width=200)
    code = function(*args, console=console, **kwargs)
    return code, console.file.getvalue()


# -- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["name", "number", "address", "nothing"])
def test_a_job_is_explained(job, how):
    hub, _ = job
    name = {"name": "train.py", "number": str(os.getpid()), "address": hub.address}.get(how)
    code, text = shown(explain, name)
    assert code == 0
    assert "worker 1" in text
    assert "not there yet" in text
    assert "Thread MainThread:" in text
    assert "test_a_job_is_explained" in text


def test_a_failed_job_is_explained(job):
    _, member = job
    member.report(Failure("raised", "worker 0 raised [KeyError]"))
    code, text = shown(explain, "train.py", stacks=False)
    assert code == 1
    assert "The job has failed: worker 0 raised [KeyError]" in text
    assert "Thread" not in text


def test_a_job_elsewhere_needs_a_token(monkeypatch):
    with Hub([Task("worker", 0)], "secret", coordination=False) as hub:
        with pytest.raises(errors.NotFoundError):
            explain(hub.address)
        monkeypatch.setenv("PHALANX_TOKEN", "secret")
        assert shown(explain, hub.address)[0] == 0
        monkeypatch.setenv("PHALANX_TOKEN", "other")
        with pytest.raises(errors.UnauthenticatedError):
            explain(hub.address)


def test_a_job_that_does_not_run():
    with pytest.raises(errors.NotFoundError, match=r"nothing\.py"):
        explain("nothing.py")


# -- doctor ------------------------------------------------------------------------------------------


def levels(findings):
    return {finding.subject: finding.level for finding in findings}


def test_a_machine_without_a_cluster_is_well(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    code, text = shown(doctor)
    assert code == 0
    assert "There is no cluster" in text
    assert "phalanx" in text


def test_a_cluster_that_is_well():
    found = examine(resolver(free_addresses(2)))
    assert set(levels(found).values()) == {"ok"}
    assert {"cluster", "name 127.0.0.1", "port", "token"} <= set(levels(found))


def test_a_port_in_use_and_a_name_that_nobody_knows():
    addresses = free_addresses(1)
    with listen("127.0.0.1", int(addresses[0].rpartition(":")[2])):
        assert levels(examine(resolver(addresses)))["port"] == "error"
    found = levels(examine(resolver(["no-such-host.invalid:1", "192.0.2.1:1"], rank=1)))
    assert found["name no-such-host.invalid"] == "error"
    assert found["port"] == "error"
    assert found["token"] == "error"


def test_a_description_that_cannot_be_used(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["localhost:1", "b:1"]}}))
    (finding,) = (f for f in examine(TFConfigClusterResolver()) if f.subject == "cluster")
    assert finding.level == "error"
    code, text = shown(doctor)
    assert code == 1
    assert "error" in text


def test_a_proxy_in_the_way(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("PHALANX_TOKEN", "a secret that is not shown")
    assert levels(examine(resolver(["10.0.0.1:1", "10.0.0.2:1"])))["proxy"] == "warning"
    monkeypatch.setenv("no_proxy", "10.0.0.1,10.0.0.2")
    found = examine(resolver(["10.0.0.1:1", "10.0.0.2:1"]))
    assert "proxy" not in levels(found)
    assert not any("a secret that is not shown" in finding.text for finding in found)


def test_the_hub_of_a_launcher_is_asked(job, monkeypatch):
    hub, _ = job
    monkeypatch.setenv("PHALANX_HUB", hub.address)
    monkeypatch.setenv("PHALANX_TOKEN", "secret")
    (finding,) = (f for f in examine(resolver(free_addresses(2))) if f.subject == "hub")
    assert finding == Finding("ok", "hub", f"answers at {hub.address}; 1 of 2 workers have joined")
    monkeypatch.setenv("PHALANX_TOKEN", "other")
    assert levels(examine(resolver(free_addresses(2))))["hub"] == "error"


def together(addresses, count):
    with ThreadPoolExecutor(count) as pool:
        futures = [
            pool.submit(examine_together, resolver(addresses, rank), timeout=40)
            for rank in range(count)
        ]
        return [future.result(60) for future in futures]


def test_workers_examine_themselves_together(monkeypatch):
    first, second = together(free_addresses(2), 2)
    assert first == second
    assert levels(first) == {"workers": "ok", "network": "ok"}


def test_workers_that_differ_or_do_not_reach_each_other(monkeypatch):
    from phalanx.job import doctor as module

    ports = iter(["127.0.0.1:1"])
    monkeypatch.setattr(module, "join_address", lambda host, port: next(ports, f"{host}:{port}"))
    cores = iter([4])
    monkeypatch.setattr(os, "cpu_count", lambda: next(cores, 8))
    first, second = together(free_addresses(2), 2)
    assert first == second
    assert levels(first)["network"] == "error"
    assert levels(first)["cores"] == "warning"
    assert sum("127.0.0.1:1" in finding.text for finding in first) == 2, "nobody reaches it"


# -- arrivals -------------------------------------------------------------------------------------

ARRIVAL = {"worker": "worker 0", "host": "a", "missing": ["worker 1"]}
TASKS = [Task("worker", 0, "a:1"), Task("worker", 1, "b:1")]


def test_arrivals_are_lines_of_the_log(caplog):
    with caplog.at_level("INFO", logger="phalanx"), Arrivals(TASKS) as arrivals:
        arrivals.note(ARRIVAL)
    assert caplog.messages == ["worker 0 joined from a; missing: worker 1"]


def test_the_missing_are_named_after_a_while(caplog, monkeypatch):
    monkeypatch.setattr(Arrivals, "_patience", 0.2)
    with Arrivals(TASKS) as arrivals:
        arrivals.note(ARRIVAL)
        arrivals._reminder.join(20)
    assert caplog.messages == ["Waiting for worker 1 (b:1) to join."]


def test_arrivals_are_shown_live_in_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Arrivals(TASKS) as arrivals:
        arrivals.note(ARRIVAL)
    assert "1 of 2 workers have joined" in terminal.getvalue()
    assert "worker 1  b:1  not there yet" in terminal.getvalue()


# -- connections ------------------------------------------------------------------------------------


def test_only_connections_of_these_addresses_are_cut():
    before = device_connections.listening()
    with listen("127.0.0.1", 0) as data, listen("127.0.0.1", 0) as other:
        assert device_connections.listening() - before == {data.getsockname(), other.getsockname()}
        pairs = []
        for listener in (data, other):
            client = socket.create_connection(listener.getsockname(), 5.0)
            pairs.append((client, listener.accept()[0]))
        assert device_connections.cut([list(data.getsockname()), None]) == 2, "both ends are here"
        for end in pairs[0]:
            end.settimeout(5.0)
            assert end.recv(1) == b""
        pairs[1][0].sendall(b"!")
        assert pairs[1][1].recv(1) == b"!"
        client = socket.create_connection(data.getsockname(), 5.0)  # who listens still listens
        for end in (*pairs[0], *pairs[1], client):
            end.close()
    assert device_connections.cut([]) == 0
