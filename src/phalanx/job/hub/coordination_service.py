"""JAX's coordination service: the private call behind it, without importing JAX itself.

A hub must start quickly and does not compute.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from phalanx.runtime.private_names import find, need

HEARTBEAT = 7 * 24 * 3600
"""Seconds after which JAX would end a process because of a silent peer; the hub is much quicker."""


def start_coordination_service(address: str, processes: int) -> Any:
    """Start the service through which JAX's processes find each other; it has a method `shutdown`.

    It must last longer than any process that uses it: JAX aborts a process whose service vanishes, so
    shut it down only when all have left.
    """
    start = find("Starting a job of several workers", "jaxlib._jax:get_distributed_runtime_service")
    need(start)
    with _silence():
        return start(
            address,
            processes,
            heartbeat_timeout=HEARTBEAT,
            cluster_register_timeout=3600,
            shutdown_timeout=10,
            recoverable=True,
        )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop what native code writes to the standard error output: warnings that help no user."""
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
