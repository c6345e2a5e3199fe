"""The caches of Phalanx, for a process whose devices begin anew."""

from __future__ import annotations

import functools
import sys

__all__ = ["clear_caches"]

_Cached = type(functools.cache(str))


def clear_caches() -> None:
    """Forget what functions of Phalanx have cached: some of it belongs to devices that are gone."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "phalanx":
            for value in list(vars(module).values()):
                if isinstance(value, _Cached):
                    value.cache_clear()
