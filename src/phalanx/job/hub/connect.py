"""Connecting to a hub: as one that talks with it, or as one that it passes on to JAX's service."""

from __future__ import annotations

import socket

from phalanx.net.client import connect

HUB = {"service": "hub"}
"""What connections of members and observers are for."""
COORDINATION = {"service": "JAX's coordination service"}
"""What connections are for that become JAX's own."""

_HINT = (
    "It runs in the launcher, or next to the first worker: check that this has started, and that the "
    "address is right. "
)


def connect_to_hub(
    address: str, token: str, timeout: float, service: dict[str, str] = HUB
) -> socket.socket:
    """Connect to a hub, trying again until `timeout` has passed."""
    return connect(address, token.encode(), service, timeout, peer="hub", hint=_HINT)
