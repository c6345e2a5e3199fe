"""Leaving a cluster in a process that lives on, so that it can join another one.

On CPU devices JAX can begin anew in the same process, which takes a fraction of a second. What the
program has kept of the old devices would be useless then. So if arrays are left, or a program between
workers has not come back, or there are other devices, Python starts anew in the same process instead,
and finds the state in a file in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import sys
import tempfile
import time
from typing import NoReturn

import jax
import numpy as np

from phalanx.collectives.groups import leave_world
from phalanx.data.run.thread_pool import is_any_reading
from phalanx.errors import FailedPreconditionError
from phalanx.execution.throttle import THROTTLE
from phalanx.job import jax_distributed
from phalanx.job.connection import leave_job
from phalanx.runtime import compat
from phalanx.runtime.awaiting import is_any_left
from phalanx.runtime.caches import clear_caches
from phalanx.runtime.shared_numbers import begin_anew
from phalanx.train.elastic_training.carried_state import CarriedState

__all__ = [
    "CARRIED",
    "begin_before_joining",
    "can_stay",
    "forget_devices",
    "leave_cluster",
    "start_anew",
    "take_over",
]

CARRIED = "PHALANX_CARRIED"
"""Where a process that has started anew finds the state that it had."""

_log = logging.getLogger("phalanx")

_SWITCH = "PHALANX_ELASTIC_RESTART"
_SHOWN = 3
_PATIENCE = 2.0  # seconds that threads may take to come back when a generation is over
_LOOK_EVERY = 0.02  # seconds


def begin_before_joining() -> None:
    """Let JAX begin anew if the program has started it, so that this process can join others.

    No array is on devices of several workers yet, so those that were made before stay what they are:
    their devices live as long as they do, and JAX copies them where they are used.
    """
    if not compat.backends_are_initialized() or jax.distributed.is_initialized():
        return
    if (kind := jax.default_backend()) != "cpu":
        raise FailedPreconditionError(
            f"JAX has already started, and devices of type {kind} do not begin anew, so this process "
            "cannot join other workers. Make arrays in the function that is given to "
            f"px.train.elastic. Received: {len(jax.live_arrays())} arrays that were made before"
        )
    THROTTLE.forget()
    jax.clear_caches()
    forget_devices()


def can_stay() -> str:
    """Why this process has to start Python anew; empty if it need not. It must have left the others."""
    if os.environ.get(_SWITCH) == "1":
        return f"{_SWITCH} says so"
    if jax.default_backend() != "cpu":
        return f"devices of type {jax.default_backend()} do not begin anew"
    end = time.monotonic() + _PATIENCE
    while True:
        why = _left_of_devices()
        # The thread of an iterator that was dropped may be in the middle of an element.
        is_final = not why or not (is_any_left() or is_any_reading())
        if is_final or time.monotonic() >= end:
            return why
        time.sleep(_LOOK_EVERY)


def _left_of_devices() -> str:
    """What is left of the old devices at this moment; empty if nothing is."""
    if is_any_left():
        return "a program between workers has not come back"
    THROTTLE.forget()
    clear_caches()
    jax.clear_caches()  # which keep constants of programs
    gc.collect()
    left = jax.live_arrays()
    if left:
        shown = ", ".join(f"{x.dtype}{list(x.shape)}" for x in left[:_SHOWN])
        return f"the program keeps {len(left)} arrays of the old devices ({shown})"
    return ""


def leave_cluster() -> None:
    """Leave the other workers, whatever has become of them."""
    with contextlib.suppress(Exception):  # its connections are cut
        leave_world()
    leave_job()


def forget_devices() -> None:
    """Let JAX begin anew in this process."""
    jax_distributed.forget_devices()
    clear_caches()
    begin_anew()


def start_anew(state: CarriedState | None, step: int) -> NoReturn:
    """Start Python anew in this process, with the same program, which finds its state in memory."""
    kept = _new_file()
    with open(kept, "wb", closefd=False) as file:
        file.write(step.to_bytes(8, "little"))
        if state is not None:
            state.pack().tofile(file)
    os.environ[CARRIED] = str(kept)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        # Sockets of gloo would stay open, and keep up who waits at the other end.
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                fcntl.fcntl(int(name), fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _new_file() -> int:
    """A file in memory without a name, so that nothing is left of it if this process is killed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("phalanx-carried", 0)
    with tempfile.TemporaryFile() as file:
        kept = os.dup(file.fileno())
    os.set_inheritable(kept, True)
    return kept


def take_over() -> tuple[int, CarriedState | None] | None:
    """The step and the state that this process had before it started anew; None if it did not."""
    kept = os.environ.pop(CARRIED, None)
    if kept is None:
        return None
    with open(int(kept), "rb") as file:
        file.seek(0)
        data = np.fromfile(file, np.uint8)
    step = int.from_bytes(data[:8].tobytes(), "little")
    return step, CarriedState.unpack(data[8:]) if len(data) > 8 else None
