"""What tests of threads and processes need: addresses, and waits with a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from phalanx.cluster.resolvers import SimpleClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.job.launch.ports import PortReservation


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine that no process uses, and that the system gives to nobody."""
    with PortReservation(count) as reservation:
        return [f"127.0.0.1:{port}" for port in reservation.ports]


def resolver(addresses: list[str], rank: int = 0) -> SimpleClusterResolver:
    """A worker of a cluster of workers."""
    spec = ClusterSpec({"worker": addresses})
    return SimpleClusterResolver(spec, task_type="worker", task_id=rank)


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something that other threads or processes bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        threading.Event().wait(0.01)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is not just waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_gone(pids: Iterable[int], timeout: float = 20.0) -> list[int]:
    """Wait until processes have ended; returns those that have not."""
    left = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([fd], [], [], timeout)
        finally:
            os.close(fd)
        if is_running(pid):
            left.append(pid)
    return left


@contextlib.contextmanager
def signalled_soon(number: int) -> Iterator[None]:
    """Let the main thread get a signal while it waits in the block, or before on a busy machine."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, number))
    try:
        timer.start()
        yield
    finally:
        timer.join()
