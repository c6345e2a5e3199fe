"""Processes of this machine."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

__all__ = ["cpu_seconds", "is_alive", "lower_priority", "redirected"]


_LOWEST = 19


def is_alive(pid: int) -> bool:
    """Whether there is a process with this number.

    >>> is_alive(os.getpid()), is_alive(2**31 - 1)
    (True, False)
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def cpu_seconds(pid: int) -> float | None:
    """For how long a process has computed, on Linux; None if that cannot be seen.

    >>> used = cpu_seconds(os.getpid())
    >>> used is None or used > 0
    True
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # the name in it need not be text
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def lower_priority() -> None:
    """Let this thread compute only where others leave a processor; on Linux, where threads can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox that does not permit it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)


@contextlib.contextmanager
def redirected(descriptor: int, target: int) -> Iterator[None]:
    """Let what native code writes to a descriptor, if there is one, go to another."""
    try:
        kept = os.dup(descriptor)
    except OSError:  # there is none
        yield
        return
    try:
        os.dup2(target, descriptor)
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
