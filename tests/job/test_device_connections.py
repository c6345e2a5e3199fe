"""Strangers at the socket of gloo: they do not get in, and programs over other devices still do."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.job import device_connections


def connects(address: Any, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        socket.create_connection(address, seconds).close()
        return True
    return False


def test_a_gate_is_open_for_a_moment_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        before = listener.getblocking()
        gate = device_connections.Gate(address)
        assert gate.is_closed
        assert not connects(address, 0.2)
        gate.open(60.0)
        gate.close()
        assert not gate.is_closed, "it was opened a moment ago"
        assert connects(address, 5.0)
        gate.open(0.0)
        gate.close()
        assert not connects(address, 0.2)
        assert listener.getblocking() == before, "its owner notices nothing"
        listener.settimeout(5.0)
        listener.accept()[0].close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        gate.release()


def test_a_process_sees_that_it_tries_to_connect_in_vain() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        address = listener.getsockname()
        gate = device_connections.Gate(address)
        assert not device_connections.tries_to_connect([address, None])
        client.setblocking(False)
        client.connect_ex(address)
        assert device_connections.tries_to_connect([list(address)])
        assert not device_connections.tries_to_connect([("127.0.0.1", 1)])
        gate.open()
        listener.settimeout(10.0)
        listener.accept()[0].close()
        assert not device_connections.tries_to_connect([address])
        gate.release()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def besieged(addresses: list[Any] | None) -> Any:
    """The address of this worker's devices, and then what becomes of it when strangers have come."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as Spec

    s = px.MultiWorkerMirroredStrategy()
    gate = s.extended._connection._watchdog._gate  # type: ignore[attr-defined]
    if addresses is None:
        return gate._sock.getsockname()

    def total(devices: list[Any]) -> float:
        mesh = Mesh(np.array(devices), ("d",))
        ones = jax.make_array_from_callback(
            (len(devices),), NamedSharding(mesh, Spec("d")), lambda _: np.ones(1, np.float32)
        )
        add = jax.shard_map(
            lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=Spec("d"), out_specs=Spec()
        )
        return float(jax.jit(add)(ones).addressable_shards[0].data[0])

    before = descriptors()
    reached = 0
    if s.extended._connection.rank == 1:  # type: ignore[attr-defined]
        strangers = [socket.socket() for _ in range(60)]
        for stranger in strangers:
            stranger.setblocking(False)
            stranger.connect_ex(addresses[0])
        reached = sum(_is_connected(stranger) for stranger in strangers)
        for stranger in strangers:
            stranger.close()
    px.comm.barrier()
    leaked = descriptors() - before
    firsts = [d for d in jax.devices() if d.id % 2 == jax.devices()[0].id % 2]
    by_worker = {d.process_index: d for d in firsts}
    return reached, leaked, total(list(by_worker.values())), total(jax.devices())


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def test_strangers_take_no_descriptors_and_new_sets_of_devices_connect() -> None:
    with px.testing.MultiProcess(2, 2, preload=["phalanx"], env={"PHALANX_DEADLINE": "30"}) as cluster:
        addresses = cluster.run(besieged, None)
        found = cluster.run(besieged, addresses)
    for reached, leaked, some, everywhere in found:
        assert reached == 0
        assert leaked < 20, "what px.comm opens"
        assert (some, everywhere) == (2.0, 4.0)
