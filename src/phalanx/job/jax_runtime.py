"""JAX as one runtime over the processes of a job: its start, a first touch, and its end."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.errors import ClusterEnvironmentError, DeadlineExceededError, PhalanxError
from phalanx.job import jax_distributed
from phalanx.job.device_connections import Address, listening
from phalanx.job.hub.client import Member
from phalanx.job.hub.descriptions import Failure, Task
from phalanx.job.preflight import Membership, bind_host, is_loopback
from phalanx.runtime import compat, devices
from phalanx.runtime.futures import settle
from phalanx.runtime.processes import redirected

_log = logging.getLogger("phalanx")

_COLLECTIVE_TIMEOUT = "--xla_cpu_collective_timeout_seconds"

T = TypeVar("T")


def start_problem(task: Task) -> Failure | None:
    """What keeps this process from becoming one of several, or None."""
    if jax.distributed.is_initialized():
        text = (
            f"The process of {task} has joined others already (by jax.distributed.initialize, or by "
            "another strategy over several workers). Leave that to Phalanx, and create one such "
            "strategy per program."
        )
    elif compat.backends_are_initialized():
        text = (
            f"JAX has already started in the process of {task}, which therefore cannot become one of "
            "several. Create the strategy at the top of the program, before any array is made and "
            "before the devices are listed."
        )
    else:
        return None
    return Failure("precondition", text, str(task))


def prepare(devices_per_worker: int | None, collective_timeout: float) -> None:
    """Set what JAX reads when it starts; the user's own settings stay."""
    if devices_per_worker is not None:
        devices.set_cpu_device_count(devices_per_worker)
    flags = os.environ.get("XLA_FLAGS", "")
    if _COLLECTIVE_TIMEOUT not in flags:
        flags = f"{flags} {_COLLECTIVE_TIMEOUT}={int(collective_timeout) + 1}"
        os.environ["XLA_FLAGS"] = flags.strip()
    devices.prepare_backend()


def start(membership: Membership, service: str, timeout: float) -> Address | None:
    """Start JAX on the devices of all workers, and let them talk to each other once.

    `service` is the address of JAX's coordination service. Returns the address at which devices of
    other workers reach this one's, if it is known.
    """
    host = _own_host(membership)
    before = listening()
    jax_distributed.join(service, membership.rank, len(membership.tasks), timeout=timeout, host=host)
    jax.devices()
    new = listening() - before
    try:
        with _without_greetings():
            _touch_all()
    except (RuntimeError, ValueError) as error:
        raise ClusterEnvironmentError(
            f"{membership.task} has found the other workers, but its devices cannot talk to theirs. "
            "They use ports that the system chooses: open all ports between the machines. "
            f"Received: {error}"
        ) from error
    return new.pop() if len(new) == 1 else None


def leave(*, abandon: bool = False) -> None:
    """Leave the runtime; does not wait for the others, and raises nothing.

    `abandon` is for a runtime whose service is gone: it sends no message.
    """
    try:
        jax_distributed.leave(abandon=abandon)
    except (RuntimeError, ValueError) as error:
        _log.info("JAX's runtime did not end in order: %s", error)


def run_unless_failed(action: Callable[[], T], member: Member, timeout: float) -> T:
    """Run an action that native code may never come back from, until it is done or the job fails."""
    future: Future[T] = Future()
    over = threading.Event()
    member.on_failure(lambda _: over.set())
    future.add_done_callback(lambda _: over.set())
    threading.Thread(target=settle, args=(future, action), name="phalanx-start", daemon=True).start()
    over.wait(timeout)
    member.check()
    if not future.done():
        raise DeadlineExceededError(
            f"JAX did not start on all workers within {timeout:g} seconds. Received: {member.task}"
        )
    error = future.exception()
    if error is not None:
        raise member.cause_of(error) or error
    return future.result()


def _own_host(membership: Membership) -> str | None:
    """The address of this machine in the cluster, if it really is one of this machine's."""
    try:
        host = bind_host(membership.task, membership.is_local)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (OSError, PhalanxError):
        return None
    is_reachable = membership.is_local or not is_loopback(host)
    return host if is_reachable and host not in ("0.0.0.0", "::") else None


def _touch_all() -> None:
    """Add one number over all devices, which connects each of them to the others."""
    mesh = Mesh(np.array(jax.devices()), ("device",))
    spec = PartitionSpec("device")
    one = np.ones(1, np.float32)
    ones = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, spec), lambda index: one)
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "device"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
        )
    )(ones)
    found = float(np.asarray(total.addressable_shards[0].data)[0])
    if found != mesh.size:
        raise ValueError(f"{mesh.size} devices together counted {found:g}")


@contextlib.contextmanager
def _without_greetings() -> Iterator[None]:
    """Leave out the lines that gloo prints to the standard output when it connects."""
    with tempfile.TemporaryFile() as file:
        try:
            _flush_stdout()
            with redirected(1, file.fileno()):
                yield
                _flush_stdout()
        finally:
            file.seek(0)
            for line in file:  # several threads print, and each prints the end of a line separately
                if line.strip() and b"[Gloo] " not in line:
                    os.write(1, line)


def _flush_stdout() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is none
        sys.stdout.flush()
