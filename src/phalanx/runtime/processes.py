"""Processes of this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["is_alive", "redirected"]


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
