"""What the workers of a cluster on one machine open to the network."""

from __future__ import annotations

import os

import phalanx as px
from phalanx.job import device_connections
from phalanx.net.addresses import split_address
from tests.multi_worker.rules import strategy


def test_nothing_listens_beyond_this_machine(cluster: px.testing.MultiProcess) -> None:
    """Each worker listens for the devices of the others, at loopback, and there is the hub's port."""

    def listening() -> list[device_connections.Address]:
        strategy()
        return sorted(device_connections.listening())

    for found in cluster.run(listening):
        assert [host for host, _ in found] == ["127.0.0.1"]
    assert split_address(cluster.hub.address) in device_connections.listening()
    ours = {host for host, _ in device_connections.listening()}
    assert ours == {"127.0.0.1"}
    assert len(set(cluster.run(os.getpid))) == len(cluster.names)
