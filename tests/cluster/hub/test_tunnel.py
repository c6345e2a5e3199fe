"""The way of JAX's own connections through the hub."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.cluster import data_plane
from phalanx.cluster.hub.dialling import split_address
from phalanx.cluster.hub.facts import Task
from phalanx.cluster.hub.frames import ProtocolError
from phalanx.cluster.hub.server import Hub
from phalanx.cluster.hub.tunnel import PrivateSocket, Pump, Tunnel, open_tunnel
from phalanx.core import errors

SECONDS = 20.0


@pytest.fixture
def pump():
    pump = Pump("test")
    yield pump
    pump.close()


@contextlib.contextmanager
def pairs(count):
    """Connected sockets, with deadlines: the outer ones of each two pairs are the test's."""
    made = [socket.socketpair() for _ in range(count)]
    for s in (s for pair in made for s in pair):
        s.settimeout(SECONDS)
    yield made
    for s in (*(first for first, _ in made[::2]), *(second for _, second in made[1::2])):
        s.close()


def read_all(s, size):
    data = bytearray()
    while len(data) < size:
        piece = s.recv(65536)
        assert piece, f"the end after {len(data)} of {size} bytes"
        data += piece
    return bytes(data)


def test_bytes_arrive_in_both_directions_at_the_same_time(pump):
    chance = random.Random(1)
    with pairs(8) as made:
        data = {}
        for (a, inner), (other_inner, b) in zip(made[::2], made[1::2], strict=True):
            pump.add(inner, other_inner)
            data[a, b] = chance.randbytes(300_000)
            data[b, a] = chance.randbytes(200_000)
        with ThreadPoolExecutor(16) as pool:
            sent = [pool.submit(source.sendall, piece) for (source, _), piece in data.items()]
            got = [pool.submit(read_all, to, len(piece)) for (_, to), piece in data.items()]
            assert [future.result(SECONDS) for future in sent] == [None] * 8
            assert [future.result(SECONDS) for future in got] == list(data.values())


def test_a_reader_that_sleeps_does_not_fill_the_memory(pump):
    with pairs(4) as made:
        (a, inner), (other_inner, _), (c, third), (fourth, d) = made
        pump.add(inner, other_inner)
        a.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 50_000_000:
                sent += a.send(bytes(100_000))
        assert sent < 10_000_000
        pump.add(third, fourth)
        c.sendall(b"hello")
        assert read_all(d, 5) == b"hello", "others go on"


def test_the_last_bytes_arrive_before_the_end(pump):
    with pairs(2) as made:
        (a, inner), (other_inner, b) = made
        pump.add(inner, other_inner)
        a.sendall(b"goodbye")
        a.close()
        assert read_all(b, 7) == b"goodbye"
        assert b.recv(1) == b""


def test_a_lasting_end_falls_silent_instead(pump):
    with pairs(2) as made:
        (a, inner), (other_inner, b) = made
        pump.add(inner, other_inner, lasting=True)
        b.sendall(b"last words")
        b.close()
        assert read_all(a, 10) == b"last words"
        a.settimeout(0.3)
        with pytest.raises(TimeoutError):
            a.recv(1)
        a.sendall(b"nobody hears this")


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


# -- with JAX's service -----------------------------------------------------------------------------


def client(address, rank):
    from jaxlib import _jax

    made = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=20, heartbeat_timeout=1000, shutdown_on_destruction=False
    )
    made.connect()
    return made


def test_jax_finds_its_service_through_the_hub():
    before = data_plane.listening()
    with Hub([Task("worker", 0), Task("worker", 1)], "secret") as hub:
        assert data_plane.listening() - before == {split_address(hub.address)}, "nothing else is open"
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
    assert data_plane.listening() == before


def test_who_does_not_know_the_token_gets_no_tunnel():
    with Hub([Task("worker", 0)], "secret") as hub:
        with pytest.raises(errors.UnauthenticatedError):
            open_tunnel(hub.address, "other", SECONDS)
        open_tunnel(hub.address, "secret", SECONDS).close()


def test_a_hub_without_a_service_has_no_tunnel():
    with (
        Hub([Task("worker", 0)], "secret", coordination=False) as hub,
        pytest.raises(ProtocolError, match="no coordination service"),
    ):
        open_tunnel(hub.address, "secret", SECONDS)


def test_a_hub_that_goes_is_not_noticed_by_jax(monkeypatch):
    monkeypatch.setattr("phalanx.cluster.hub.tunnel._PATIENCE", 1.0)
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
