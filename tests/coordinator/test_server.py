"""`px.Server` in this process and in others."""

from __future__ import annotations

import logging
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx as px
from phalanx.coordinator import server as module
from phalanx.job.launch.ports import PortReservation
from phalanx.job.tokens import find_token
from phalanx.net.client import connect


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def server() -> Iterator[px.Server]:
    with px.Server.create_local_server() as server:
        yield server


def address_of(server: px.Server) -> str:
    return server.target.removeprefix("grpc://")


def test_the_only_task_is_the_default() -> None:
    server = px.Server(px.train.ClusterSpec({"worker": {3: "localhost:0"}}), start=False)
    server.stop()
    assert (server.server_def.job_name, server.server_def.task_index) == ("worker", 3)
    assert server.server_def.protocol == "grpc"
    assert server.target.startswith("grpc://localhost:")
    assert not server.target.endswith(":0")


def test_a_server_def_says_everything() -> None:
    with PortReservation(1) as reservation:
        (port,) = reservation.ports
    cluster = px.train.ClusterSpec({"ps": ["localhost:1", "localhost:2"]}).as_cluster_def()
    given = px.train.ServerDef(cluster=cluster, job_name="ps", task_index=1, port=port)
    with px.Server(given, start=False) as server:
        assert server.target == f"grpc://localhost:{port}"
    with px.Server(given, task_index=0, start=False) as server:
        assert server.server_def.task_index == 0
    assert given.task_index == 1  # a copy was changed


@pytest.mark.parametrize("cluster", [{"a": ["x:1", "x:2"]}, {"a": ["x:1"], "b": ["x:2"]}, {}])
def test_a_task_that_is_not_clear(cluster: dict[str, list[str]]) -> None:
    with pytest.raises(ValueError, match="Say which"):
        px.Server(cluster, start=False)


def test_a_task_that_the_cluster_does_not_have() -> None:
    for error in (px.errors.InternalError, ValueError):
        with pytest.raises(error, match="Received: a 1"):
            px.Server({"a": ["localhost:0"]}, job_name="a", task_index=1)
        with pytest.raises(error, match="Received: b 0"):
            px.Server({"a": ["localhost:0"]}, job_name="b", task_index=0)


def test_a_port_in_use(server: px.Server) -> None:
    with pytest.raises(px.errors.UnknownError, match="in use"):
        px.Server({"ps": [address_of(server)]})


def test_a_cluster_of_several_machines_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    with pytest.raises(px.errors.ClusterEnvironmentError, match="PHALANX_TOKEN"):
        px.Server({"ps": ["127.0.0.1:0"], "worker": ["10.0.0.9:2222"]}, "ps", 0)


def test_it_says_who_it_is_and_stops_when_asked(server: px.Server) -> None:
    joined = threading.Thread(target=server.join)
    joined.start()
    client = px.rpc.Client.create("grpc", address_of(server))
    assert client.status_blocking()["task"] == "localhost 0"
    assert client.stop_blocking() is None
    joined.join(20)
    assert not joined.is_alive()
    server.join()  # returns at once
    client.close()
    with pytest.raises(px.errors.FailedPreconditionError, match="again"):
        server.start()


def test_a_server_that_never_started_cannot_be_joined() -> None:
    server = px.Server.create_local_server(start=False)
    with pytest.raises(px.errors.FailedPreconditionError, match="not been started"):
        server.join()
    server.start()
    server.start()
    assert not server.target.endswith(":0")
    server.stop()


def test_it_serves_what_its_job_needs_and_nothing_else(server: px.Server) -> None:
    key = find_token(True).encode()
    with pytest.raises(px.errors.UnavailableError, match="does not serve"):
        connect(address_of(server), key, {"for": "tea"}, 5.0)
    with pytest.raises(px.errors.UnauthenticatedError):
        connect(address_of(server), b"wrong", {"for": "rpc"}, 5.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_join_can_be_interrupted(number: int) -> None:
    program = """
import phalanx as px
server = px.Server({"ps": ["localhost:0"]})
try:
    print("serving", flush=True)
    server.join()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n"
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert (rest, process.returncode) == ("interrupted\n", 0)
    else:
        assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_wait_for_the_others_is_not_silent(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALONE", 0.01)
    monkeypatch.setattr(module, "compute_in_calling_threads", lambda: None)  # for this process only
    monkeypatch.delenv("PHALANX_HUB", raising=False)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    ear = logging.Handler()
    monkeypatch.setattr(ear, "emit", lambda record: said.put(record.getMessage()))
    module._log.addHandler(ear)
    try:
        with px.Server({"chief": ["localhost:1"], job: ["localhost:0"]}, job, 0) as server:
            joined = threading.Thread(target=server.join)
            joined.start()
            assert re.search(
                f"{job} 0 at .* no task has come yet.* chief 0 at localhost:1", said.get(timeout=20)
            )
            purpose = {"ps": "ps", "worker": "closures"}[job]
            connect(address_of(server), find_token(True).encode(), {"for": purpose}, 5.0).close()
            while "any more" not in (text := said.get(timeout=20)):
                assert "no task has come yet" in text
            assert re.search(f"{job} 0 at .* chief 0 at localhost:1. It serves until", text)
    finally:
        module._log.removeHandler(ear)
    joined.join(20)
    assert not joined.is_alive()


def test_a_process_that_only_serves_computes_where_it_waits() -> None:
    program = """
import phalanx as px
server = px.Server({"worker": ["localhost:0"]})
server.stop()
server.join()
import jax, jax.numpy as jnp
multiply = jax.jit(lambda x: x @ x @ x)
x = multiply(jnp.ones((700, 700)))
print(all(multiply(x).is_ready() for _ in range(5)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True\n", done.stderr


def test_a_stranger_that_says_nothing_harms_nobody(server: px.Server) -> None:
    host, port = address_of(server).split(":")
    with socket.create_connection((host, int(port)), 10):
        client = px.rpc.Client.create("grpc", address_of(server))
        assert client.status_blocking()["pid"] > 0
        client.close()


def test_a_server_that_stops_takes_no_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    server = px.Server.create_local_server()
    service = server._services["rpc"]
    close = service.close

    def close_late() -> None:
        with pytest.raises(px.PhalanxError):
            connect(address_of(server), find_token(True).encode(), {"for": "rpc"}, 0.2)
        close()

    monkeypatch.setattr(service, "close", close_late)
    server.stop()
