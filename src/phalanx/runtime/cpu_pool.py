"""The size of XLA's CPU thread pool, which JAX reads from the environment when it starts.

One pool launches and runs multi-device programs on CPU. With fewer than two threads per device it
deadlocks once many programs are in flight, and XLA aborts the process. So the pool gets
``max(cores, 2 * devices)`` threads, unless the user has set PJRT_NPROC. A number that a parent process
chose for itself, and that was inherited, is not the user's.

Nothing here imports JAX: ``import phalanx`` prepares the environment, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from phalanx.runtime.numbers import parse_digits

__all__ = ["cpu_device_environment", "forced_by_flags", "prepare", "prepare_as_asked", "threads"]

_CHOSEN = "PHALANX_CHOSEN_PJRT_NPROC"
"""The environment variable that marks a PJRT_NPROC as Phalanx's own choice."""

_FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def prepare(count: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Choose the size of the pool for so many CPU devices. To be called before JAX starts."""
    given = environ.get("PJRT_NPROC")
    if given is not None and given != environ.get(_CHOSEN):
        return
    if count > 1:
        environ["PJRT_NPROC"] = environ[_CHOSEN] = str(max(os.cpu_count() or 1, 2 * count))
    elif given is not None:
        del environ["PJRT_NPROC"]


def prepare_as_asked() -> None:
    """Choose the size of the pool for the CPU devices that the environment asks for, if it does."""
    asked = parse_digits(os.environ.get("JAX_NUM_CPU_DEVICES", "")) or forced_by_flags(os.environ)
    if asked is not None and asked > 1:
        prepare(asked)


def threads(count: int) -> tuple[int, int]:
    """How many threads the pool has with so many CPU devices, and how many it needs."""
    given = parse_digits(os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(given or cores or 1, count), 2 * count if count > 1 else 1


def forced_by_flags(environ: Mapping[str, str]) -> int | None:
    """How many CPU devices XLA_FLAGS asks for, if it does."""
    flag = _FORCED.search(environ.get("XLA_FLAGS", ""))
    return parse_digits(flag.group(1)) if flag else None


def cpu_device_environment(count: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which another process starts JAX with `count` CPU devices.

    Everything else is taken from `environ`. The pool of threads gets the size that `prepare` would
    choose, unless the user has chosen one.

    Examples:
        >>> flags = "--xla_force_host_platform_device_count=8"
        >>> environment = cpu_device_environment(64, {"XLA_FLAGS": flags})
        >>> environment["JAX_NUM_CPU_DEVICES"], environment["PJRT_NPROC"], environment["XLA_FLAGS"]
        ('64', '128', '')
    """
    result = {**environ, "JAX_NUM_CPU_DEVICES": str(count)}
    if "XLA_FLAGS" in result:
        result["XLA_FLAGS"] = _FORCED.sub("", result["XLA_FLAGS"]).strip()
    prepare(count, result)
    if count == 1:
        result.pop(_CHOSEN, None)
    return result
