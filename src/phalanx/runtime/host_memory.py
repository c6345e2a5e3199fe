"""Large buffers on the host: keep freed memory instead of asking the system for it at each step.

The C library gives blocks above 32 MB back to the system when they are freed. A program whose working
memory is larger gets fresh pages at every step and spends up to half of its time on page faults. So do
input pipelines: of smaller blocks it gives back whatever is more than twice the largest one.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown

LARGE_MODEL_BYTES = 12 << 20
"""A training step needs at least two to three times the bytes of its variables as working memory."""

_ALIGNMENT = 64  # bytes
_SWITCH = "PHALANX_RETAIN_HOST_MEMORY"
# The parameters of mallopt(3), by their numbers in malloc.h.
_M_MMAP_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_ARENA_MAX = -4, -3, -1, -2, -8
_RETAIN_BATCHES = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 128 << 20}
_RETAIN = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: (1 << 31) - 1, _M_TOP_PAD: 64 << 20}

_log = logging.getLogger("phalanx")


def retain_host_memory() -> bool:
    """Let this process keep host memory that it has freed, up to 2 GB, for its next large buffers.

    Steps of large models on CPU devices need it: with 23 MB of parameters they took 0.73, 0.55 and
    0.56 of the time on 2, 4 and 8 devices. Phalanx does most of it by itself before the first step of a
    model of 12 MB or more on CPU devices, and keeps up to 128 MB once it reads a dataset, unless the
    environment variable PHALANX_RETAIN_HOST_MEMORY is 0. Call it before the first use of a device if a
    step needs more than 64 MB at once on a device: then all threads share one pool of memory, which
    makes steps of small models up to a third slower.

    Returns:
        Whether it was done. Only the GNU C library can do it.
    """
    return _set("all", _RETAIN | {_M_ARENA_MAX: 1})


_lock = threading.Lock()
_done: list[str] = []
_ORDER = ("batches", "steps", "all")


def _set(what: str, settings: dict[int, int]) -> bool:
    """Change the C library's settings, unless they are as good already."""
    with _lock:
        if any(_ORDER.index(done) >= _ORDER.index(what) for done in _done):
            return True
        if platform.libc_ver()[0] != "glibc":
            return False
        mallopt = ctypes.CDLL(None).mallopt
        results = [mallopt(parameter, value) for parameter, value in settings.items()]
        worked = all(results)
        if worked:
            _done.append(what)
        return worked


def _is_wanted() -> bool:
    switch = os.environ.get(_SWITCH, "1")
    if switch not in ("0", "1"):
        raise InvalidValueError(
            f"The environment variable {_SWITCH} must be 0 or 1. Received: {shown(switch)}"
        )
    return switch == "1"


def expect_model(parameters: Sequence[Any]) -> None:
    """Prepare for steps of a model with these parameters, arrays or variables, on each device."""
    expect_buffer(sum(math.prod(x.shape) * x.dtype.itemsize for x in parameters))


def expect_buffer(nbytes: int) -> None:
    """Prepare for buffers of so many bytes that are made and freed again and again."""
    if nbytes < LARGE_MODEL_BYTES or jax.default_backend() != "cpu":
        return
    if _is_wanted() and _set("steps", _RETAIN):
        _log.debug("Keeping freed host memory for large steps on CPU devices.")


def expect_input() -> None:
    """Prepare for batches, or values of parameter servers, that are made anew at each step."""
    if "batches" not in _done and _is_wanted() and _set("batches", _RETAIN_BATCHES):
        _log.debug("Keeping freed host memory for batches.")


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """A new array whose memory begins where CPU devices use it without copying.

    >>> aligned_empty((2, 3), np.float32).ctypes.data % 64
    0
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
