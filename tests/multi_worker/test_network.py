"""What the workers of a cluster on one machine open to the network."""

from __future__ import annotations

import os

import phalanx as px
from phalanx.cluster import data_plane
from phalanx.cluster.hub.dialling import split_address
from tests.multi_worker.rules import strategy


def test_nothing_listens_beyond_this_machine(cluster: px.testing.MultiProcess) -> None:
    """Each worker listens for the devices of the others, at loopback, and there is the hub's port."""

    def listening() -> list[data_plane.Address]:
        strategy()
        return sorted(data_plane.listening())

    for found in cluster.run(listening):
        assert [host for host, _ in found] == ["127.0.0.1"]
    assert split_address(cluster.hub.address) in data_plane.listening()
    ours = {host for host, _ in data_plane.listening()}
    assert ours == {"127.0.0.1"}
    assert len(set(cluster.run(os.getpid))) == len(cluster.names)
