"""Names of files, changed in ways that Python's library does not offer."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["exchange_names"]

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange the names of two files or directories in one step; False where that cannot be done.

    >>> exchange_names(Path("/no/such/file"), Path("/no/such/file/either"))
    False
    """
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0)
