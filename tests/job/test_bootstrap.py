"""The start of a job without a launcher: a hub in a process of its own, and all that goes wrong."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from tests.processes import free_addresses, resolver, wait_gone

from phalanx import errors
from phalanx.job import bootstrap, preflight
from phalanx.job.observer import Observer
from phalanx.job.registry import find_job, running_jobs
from phalanx.job.tokens import find_token
from phalanx.net.addresses import listen

SECONDS = 40.0


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """No other job is seen, and every process that a test started is gone at its end."""
    for name in ("PHALANX_HUB", "PHALANX_TOKEN", "PHALANX_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    started = []
    popen = subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    yield
    for process in started:
        process.stdin.close()
        process.returncode = None  # it was let go of
        process.kill()
        process.wait(SECONDS)


def place(addresses, rank):
    return preflight.find_membership(resolver(addresses, rank))


@contextlib.contextmanager
def starting(addresses, ranks, timeout=SECONDS):
    """Workers that join in threads; their futures."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        yield [pool.submit(bootstrap.join_hub, place(addresses, r), timeout) for r in ranks]


def joined(addresses, ranks):
    """Wait until workers have joined; returns the process id of their hub."""
    end = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(errors.PhalanxError):
            with Observer(addresses[0], find_token(True), timeout=SECONDS) as observer:
                rows = observer.table().rows
            if all(rows[rank]["state"] == "joined" for rank in ranks):
                return find_job(addresses[0]).pid
        assert time.monotonic() < end


def texts_of(futures, error):
    texts = []
    for future in futures:
        with pytest.raises(error) as caught:
            future.result(SECONDS)
        texts.append(str(caught.value))
    return texts


def test_the_first_worker_starts_the_hub_and_it_ends_with_the_last():
    addresses = free_addresses(3)
    with starting(addresses, [0, 1, 2]) as futures:
        results = [future.result(SECONDS) for future in futures]
    members = [member for member, _ in results]
    assert {member.address for member in members} == {addresses[0]}
    assert {roster["service"] for _, roster in results} == {True}
    job = find_job(addresses[0])
    assert job.name == os.path.basename(sys.argv[0])
    for member in (members[0], members[2]):
        member.leave()
    assert [j.pid for j in running_jobs()] == [job.pid]
    members[1].leave()
    assert wait_gone([job.pid]) == []
    assert running_jobs() == []


def test_a_worker_that_does_not_come_is_named_on_all_others():
    addresses = free_addresses(3)
    with starting(addresses, [0, 1], timeout=3.0) as futures:
        texts = texts_of(futures, errors.DeadlineExceededError)
    assert texts[0] == texts[1]
    assert f"Missing: worker 2 ({addresses[2]})" in texts[0]


def test_a_first_worker_that_does_not_come_is_named():
    addresses = free_addresses(2)
    with starting(addresses, [1], timeout=1.0) as futures:
        (text,) = texts_of(futures, errors.DeadlineExceededError)
    assert f"The hub at {addresses[0]} could not be reached" in text
    assert "nothing listens there" in text


def test_a_port_in_use_is_an_error_on_all_workers():
    addresses = free_addresses(2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(addresses[1].rpartition(":")[2])))
        other.listen()
        with starting(addresses, [0, 1]) as futures:
            texts = texts_of(futures, errors.ClusterEnvironmentError)
    assert texts[0] == texts[1]
    port = addresses[1].rpartition(":")[2]
    assert f"Port {port} of worker 1 ({addresses[1]}) is in use" in texts[0]


def test_the_port_of_the_first_worker_in_use():
    addresses = free_addresses(2)
    port = int(addresses[0].rpartition(":")[2])
    with listen("127.0.0.1", port) as other:

        def refuse():
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = other.accept()
                    peer.sendall(b"220 mail.example.com ESMTP\r\n")
                    peer.close()

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        with starting(addresses, [0, 1]) as futures:
            (first,) = texts_of(futures[:1], errors.ClusterEnvironmentError)
            (second,) = texts_of(futures[1:], errors.UnavailableError)
        other.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)
    assert f"Port {port} of worker 0" in first
    assert "not a hub of Phalanx, or one of another version. Received: b'220 mail.examp" in second


@pytest.mark.parametrize("twice", [0, 1])
def test_two_processes_with_one_task_are_an_error_on_all(twice):
    addresses = free_addresses(3)
    with starting(addresses, [0, 1]) as futures:
        joined(addresses, [0, 1])
        with starting(addresses, [twice]) as more:
            texts = texts_of([*futures, *more], errors.DuplicateTaskError)
    assert len(set(texts)) == 1
    assert f"Two processes are worker {twice}" in texts[0]


def test_another_description_of_the_cluster_is_an_error_on_all():
    addresses = free_addresses(3)
    other = [addresses[0], addresses[1], free_addresses(1)[0]]
    with starting(addresses, [0]) as one, starting(other, [1]) as another:
        texts = texts_of([*one, *another], errors.ClusterEnvironmentError)
    assert texts[0] == texts[1]
    assert other[2] in texts[0]
    assert addresses[2] in texts[0]


def test_another_token_is_refused(monkeypatch):
    addresses = free_addresses(2)
    with starting(addresses, [0], timeout=3.0) as first:
        joined(addresses, [0])
        monkeypatch.setenv("PHALANX_TOKEN", "another one")
        with starting(addresses, [1]) as second:
            (text,) = texts_of(second, errors.UnauthenticatedError)
        assert "PHALANX_TOKEN" in text
        texts_of(first, errors.PhalanxError)


def test_the_hub_of_a_failed_start_makes_way_for_the_next():
    addresses = free_addresses(2)
    with starting(addresses, [0], timeout=3.0) as futures:
        old = joined(addresses, [0])
        texts_of(futures, errors.DeadlineExceededError)
    with starting(addresses, [0]) as first:
        assert wait_gone([old]) == []
        with starting(addresses, [1]) as second:
            members = [future.result(SECONDS)[0] for future in (*first, *second)]
    assert joined(addresses, [0, 1]) != old
    for member in members:
        member.leave()


def test_jax_that_has_started_is_an_error_on_all():
    jax.devices()
    addresses = free_addresses(2)
    with starting(addresses, [0]) as futures:
        with pytest.raises(errors.FailedPreconditionError) as caught:
            bootstrap.connect(resolver(addresses, 1), timeout=SECONDS)
        (text,) = texts_of(futures, errors.FailedPreconditionError)
    assert str(caught.value) == text
    assert "JAX has already started in the process of worker 1" in text


def test_several_machines_need_a_token():
    with pytest.raises(errors.ClusterEnvironmentError, match="PHALANX_TOKEN"):
        bootstrap.connect(resolver(["host0:1", "host1:1"], 1))


def test_localhost_among_several_machines():
    with pytest.raises(errors.ClusterEnvironmentError, match="means another machine"):
        bootstrap.connect(resolver(["localhost:1", "host1:1"], 1))


def test_a_launcher_has_the_hub(monkeypatch):
    from phalanx.job.hub.descriptions import Task
    from phalanx.job.hub.server import Hub

    addresses = ["127.0.0.1:1", "127.0.0.1:2"]  # nobody listens at the workers' own addresses
    tasks = [Task("worker", i, at) for i, at in enumerate(addresses)]
    with Hub(tasks, "secret", coordination=False) as hub:
        monkeypatch.setenv("PHALANX_HUB", hub.address)
        monkeypatch.setenv("PHALANX_TOKEN", "secret")
        with starting(addresses, [0, 1]) as futures:
            members = [future.result(SECONDS)[0] for future in futures]
        for member in members:
            member.leave()
    assert running_jobs() == []
