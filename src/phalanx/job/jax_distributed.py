"""Becoming one of several processes for JAX, and leaving them: the private calls behind it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import threading
from typing import Any

import jax

from phalanx.runtime import compat
from phalanx.runtime.private_names import find, need

_JOINING = "Computing with several processes"
_ADDRESS = "Choosing the address at which CPU devices talk to each other"
_ENDING = "Ending a process whose peers are gone, without waiting,"
_state = find(_JOINING, "jax._src.distributed:global_state")
_make_client = find(_JOINING, "jaxlib._jax:get_distributed_runtime_client")
_factories = find(_ADDRESS, "jax._src.xla_bridge:_backend_factories")
_make_gloo = find(_ADDRESS, "jaxlib._jax:make_gloo_tcp_collectives")
_make_cpu_client = find(_ADDRESS, "jax._src.xla_bridge:make_cpu_client")
_STAYING = "Joining other processes once more"
_all_backends = find(_ENDING, "jax.extend.backend:backends")
_clear_backends = find(_STAYING, "jax.extend.backend:clear_backends")
_clean_up = find(_ENDING, "jax._src.api:clean_up")

_HEARTBEAT = 7 * 24 * 3600
"""Seconds after which JAX would end the process because of a silent peer; Phalanx is much quicker."""


def join(
    address: str, process: int, processes: int, *, timeout: float, host: str | None = None
) -> None:
    """Make this process one of several that compute together, before JAX starts its backends.

    Like `jax.distributed.initialize`, but with a service that runs elsewhere, and without handling
    SIGTERM, which belongs to the program. CPU devices talk to each other through gloo at `host`, the
    address of this machine for the others; None leaves the choice to gloo.
    """
    need(_state, _make_client)
    if host is not None:  # gloo's own choice could be open to the network
        need(_factories, _make_gloo, _make_cpu_client)
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    client = _make_client(
        address,
        process,
        init_timeout=max(1, int(timeout)),
        shutdown_timeout=10,
        heartbeat_timeout=_HEARTBEAT,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    _state.client = client
    _state.process_id, _state.num_processes = process, processes
    _state.coordinator_address = address
    if host is not None:
        factory = functools.partial(_cpu_client_at, host)
        _factories["cpu"] = dataclasses.replace(_factories["cpu"], factory=factory)


def _cpu_client_at(host: str) -> Any:
    if _state.client is None:
        return _make_cpu_client()
    return _make_cpu_client(_make_gloo(_state.client, hostname=host))


def leave(*, abandon: bool = False) -> None:
    """Undo `join`. With the service's peers gone or not, this does not wait for them.

    `abandon` is for a service that is gone, and would not answer.
    """
    client, _state.client = _state.client, None
    _state.process_id, _state.num_processes, _state.coordinator_address = 0, 1, None
    if client is not None and abandon:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))  # so that it is never destroyed
    elif client is not None:
        client.shutdown()


def abandon_backends() -> None:
    """Let the process end without waiting for programs that will never finish.

    JAX waits for its devices when it is cleaned up, and forever if another process is gone.
    """
    need(_clean_up)
    atexit.unregister(_clean_up)
    _keep_backends()


def _keep_backends() -> None:
    """Never destroy the backends: that would wait for their programs."""
    need(_all_backends)
    for backend in _all_backends().values() if compat.backends_are_initialized() else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def forget_devices() -> None:
    """Let JAX begin with new backends, in a process that has left the others.

    All arrays, devices and compiled programs of before are useless. The old backends are destroyed by
    another thread, because that waits for what is still under way, and gives up its threads and memory.
    """
    need(_clear_backends, _all_backends)
    old = list(_all_backends().values()) if compat.backends_are_initialized() else []
    _clear_backends()
    threading.Thread(target=_destroy, args=(old,), name="phalanx-forget", daemon=True).start()


def _destroy(backends: list[Any]) -> None:
    """Let backends go, and give the memory that this frees back to the system."""
    backends.clear()
    with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def publish(key: str, value: str) -> None:
    """Let all processes that have joined know a value."""
    _state.client.key_value_set(key, value)


def look_up(key: str, seconds: float) -> str | None:
    """A value that another process has published; None if it does not come in time."""
    try:
        return str(_state.client.blocking_key_value_get(key, int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
