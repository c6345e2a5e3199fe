"""What tests of processes need: no sleeps, a deadline for every wait."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from pathlib import Path


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
