"""JAX's coordination service: the private call behind it, without importing JAX itself.

A hub must start quickly and does not compute.
"""

from __future__ import annotations

import os
from typing import Any

from phalanx.runtime.private_names import find, need
from phalanx.runtime.processes import redirected

HEARTBEAT = 7 * 24 * 3600
"""Seconds after which JAX would end a process because of a silent peer; the hub is much quicker."""


def start_coordination_service(address: str, processes: int) -> Any:
    """Start the service through which JAX's processes find each other; it has a method `shutdown`.

    It must last longer than any process that uses it: JAX aborts a process whose service vanishes, so
    shut it down only when all have left.
    """
    start = find("Starting a job of several workers", "jaxlib._jax:get_distributed_runtime_service")
    need(start)
    with open(os.devnull, "w") as nowhere, redirected(2, nowhere.fileno()):  # its warnings help no user
        return start(
            address,
            processes,
            heartbeat_timeout=HEARTBEAT,
            cluster_register_timeout=3600,
            shutdown_timeout=10,
            recoverable=True,
        )
