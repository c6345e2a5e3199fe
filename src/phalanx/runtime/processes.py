"""Processes of this machine."""

from __future__ import annotations

import os

__all__ = ["is_alive"]


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
