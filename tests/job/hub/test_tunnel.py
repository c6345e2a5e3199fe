"""The way of JAX's own connections through the hub."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx import errors
from phalanx.job import device_connections
from phalanx.job.hub.descriptions import Task
from phalanx.job.hub.server import Hub
from phalanx.job.hub.tunnel import PrivateSocket, Tunnel, open_tunnel
from phalanx.net.addresses import split_address
from phalanx.net.framing import ProtocolError

SECONDS = 20.0


def test_the_place_of_a_private_socket(monkeypatch, tmp_path):
    place = PrivateSocket()
    assert stat.S_IMODE(os.stat(place.folder).st_mode) == 0o700
    place.remove()
    assert not os.path.exists(place.folder)
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    place = PrivateSocket()
    assert len(place.path) < 100
    place.remove()


@pytest.fixture
def short_path():
    """A folder with a short name, as sockets need it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_the_places_of_killed_processes_are_removed(monkeypatch, short_path):
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    mine = PrivateSocket()
    dead = PrivateSocket()
    os.close(dead._lock)  # what the end of its process does
    other = PrivateSocket()
    assert sorted(map(str, short_path.iterdir())) == sorted([mine.folder, other.folder])
    assert os.path.exists(os.path.join(mine.folder, "lock"))
    mine.remove()
    other.remove()
    assert list(short_path.iterdir()) == []


def test_a_process_that_was_killed_before_it_had_the_lock_leaves_nothing(monkeypatch, short_path):
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    (short_path / f"phalanx-socket-{ended.pid}-abc").mkdir()
    fresh = short_path / f"phalanx-socket-{os.getpid()}-abc"  # another thread makes it right now
    fresh.mkdir()
    mine = PrivateSocket()
    assert sorted(map(str, short_path.iterdir())) == sorted([str(fresh), mine.folder])
    mine.remove()


# -- with JAX's service -----------------------------------------------------------------------------


def client(address, rank):
    from jaxlib import _jax

    made = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=20, heartbeat_timeout=1000, shutdown_on_destruction=False
    )
    made.connect()
    return made


def test_jax_finds_its_service_through_the_hub():
    before = device_connections.listening()
    with Hub([Task("worker", 0), Task("worker", 1)], "secret") as hub:
        assert device_connections.listening() - before == {split_address(hub.address)}, (
            "nothing else is open"
        )
        tunnels = [Tunnel(hub.address, "secret") for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            clients = list(pool.map(client, [t.address for t in tunnels], range(2), timeout=60))
        clients[0].key_value_set("greeting", "hello")
        assert clients[1].blocking_key_value_get("greeting", 10_000) == "hello"
        for c in clients:
            c.shutdown()
        for tunnel in tunnels:
            tunnel.close()
            assert not os.path.exists(tunnel._place.folder)
    assert device_connections.listening() == before


def test_who_does_not_know_the_token_gets_no_tunnel():
    with Hub([Task("worker", 0)], "secret") as hub:
        with pytest.raises(errors.UnauthenticatedError):
            open_tunnel(hub.address, "other", SECONDS)
        open_tunnel(hub.address, "secret", SECONDS).close()


def test_a_hub_without_a_service_has_no_tunnel():
    with (
        Hub([Task("worker", 0)], "secret", coordination=False) as hub,
        pytest.raises(ProtocolError, match="does not serve"),
    ):
        open_tunnel(hub.address, "secret", SECONDS)


def test_a_hub_that_goes_is_not_noticed_by_jax(monkeypatch):
    monkeypatch.setattr("phalanx.job.hub.tunnel._PATIENCE", 1.0)
    with Hub([Task("worker", 0)], "secret") as hub:
        tunnel = Tunnel(hub.address, "secret")
        with socket.socket(socket.AF_UNIX) as local:
            local.settimeout(SECONDS)
            local.connect(tunnel._place.path)
            assert local.recv(1), "the service greets"
            hub.close(timeout=0.0)
            with socket.socket(socket.AF_UNIX) as later:
                later.connect(tunnel._place.path)
                later.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    later.recv(1)
        tunnel.close()
        assert not any(t.name.startswith("phalanx-tunnel") for t in threading.enumerate())
