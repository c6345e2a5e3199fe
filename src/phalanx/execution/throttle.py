"""At most a bounded number of multi-device programs in flight.

XLA's CPU client deadlocks once many computations per device are queued and its thread pool is no
larger than the number of devices: the threads that should run the oldest program are all busy waiting
for a place in the queue. The pool that `prepare_backend` asks for is large enough, but it cannot be
changed once JAX has started. So all multi-device programs of Phalanx are also dispatched here: one at a
time, and each waits until the one sixteen before it has finished. On other platforms the bound merely
limits memory.

What the user computes with results of programs takes places in the queue, too. If JAX was started with
a smaller pool, before Phalanx had any say, that alone could fill it, so each program then waits for the
one before it.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from phalanx.job import shared_programs
from phalanx.job.shared_programs import SharedProgram
from phalanx.runtime import cpu_pool
from phalanx.runtime.devices import cpu_device_count

T = TypeVar("T")

MAX_IN_FLIGHT = 16

_log = logging.getLogger("phalanx")


class Throttle:
    """Dispatches programs that return ``(result, token)``.

    The token is a small array that is ready when the program has finished. It is kept here and given
    to no other code, so that holding it neither keeps results alive nor breaks when they are donated.

    Args:
        limit: how many programs may be in flight; by default as many as are safe.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        # Signal handlers may dispatch programs too, hence locks that a thread can take again.
        self._lock = threading.RLock()
        self._between_workers = threading.RLock()
        self._tokens: collections.deque[Any] = collections.deque()
        self._latest_between_workers: tuple[int, jax.Array] | None = None  # its thread and its token
        self.seconds_between_workers = 0.0
        """How long this process was in programs of several workers; the last to come is there less."""

    def dispatch(
        self,
        program: Callable[..., tuple[T, jax.Array]],
        *args: Any,
        shared: SharedProgram | None = None,
        wait: bool = False,
    ) -> T:
        """Start a program, first waiting for an old one if too many are in flight.

        Args:
            program: what to run.
            args: its arguments.
            shared: what other workers must run at the same time, if they take part in it.
            wait: whether to wait until it has finished, and to raise if it has failed.
        """
        self.make_room()

        def start() -> tuple[T, jax.Array]:
            if not wait:
                return self.start(program, *args)
            with self._lock:
                return program(*args)

        result, token = start() if shared is None else self.in_order(start, shared)
        if wait:
            token.block_until_ready()
        return result

    def in_order(
        self,
        start: Callable[[], tuple[T, jax.Array]],
        shared: SharedProgram,
        *,
        may_return: bool = False,
    ) -> tuple[T, jax.Array]:
        """Let a program start in which other workers take part, on all of them in the same order.

        Args:
            start: starts it.
            shared: what the others must run.
            may_return: whether the caller may go on while it runs, also between CPUs.
        """
        ledger = shared_programs.ledger()
        if ledger is None:
            return start()
        with self._between_workers:
            began = time.monotonic()
            with ledger.meet(shared):
                self._keep_order()
                result, token = start()
            self._latest_between_workers = threading.get_ident(), token
            ledger.begun(token, may_return)
            self.seconds_between_workers += time.monotonic() - began
            return result, token

    def start(self, program: Callable[..., tuple[T, jax.Array]], *args: Any) -> tuple[T, jax.Array]:
        """Start a program at once; call `make_room` before."""
        with self._lock:
            started = program(*args)
            self._tokens.append(started[1])
            return started

    def make_room(self) -> None:
        """Wait until fewer programs are in flight than there may be."""
        limit = self._limit
        if limit is None:
            limit = self._limit = _safe_limit()
        while len(self._tokens) >= limit:
            try:
                self._tokens.popleft().block_until_ready()
                self._forget_finished()
            except (IndexError, jax.errors.JaxRuntimeError):
                pass  # another thread was quicker; or the program has failed, as its results say

    def _forget_finished(self) -> None:
        """Forget the oldest programs if they have finished: together that takes half the time."""
        tokens = self._tokens
        while tokens:
            token = tokens.popleft()
            if not token.is_ready():
                tokens.appendleft(token)
                return

    def _keep_order(self) -> None:
        """Wait for the latest program between workers if another thread has dispatched it.

        JAX runs the programs of one thread in their order, but those of different threads at the same
        time, and gloo would mix up their messages.
        """
        latest = self._latest_between_workers
        if latest is not None and latest[0] != threading.get_ident():
            latest[1].block_until_ready()

    def forget(self) -> None:
        """Wait for no program that was started before, because its devices are given up."""
        with self._lock:
            self._tokens.clear()
            self._latest_between_workers = None

    @property
    def in_flight(self) -> int:
        """How many programs may still be running."""
        return len(self._tokens)


def _safe_limit() -> int:
    """How many programs may be in flight, whatever else the user computes; JAX has started."""
    size, needed = cpu_pool.threads(cpu_device_count())
    if size >= needed:
        return MAX_IN_FLIGHT
    _log.warning(
        "JAX was started before Phalanx could prepare it: XLA has %d threads for its CPU devices and "
        "needs %d to let several steps be under way. So each step waits for the one before it. Call "
        "px.config.ensure_cpu_devices, or create the strategy, before the first computation, or set "
        "the environment variable PJRT_NPROC=%d.",
        size,
        needed,
        needed,
    )
    return 1


def token(between_workers: bool) -> jax.Array:
    """What a program returns to say that it has finished.

    XLA runs programs of fewer than a thousand operations in the thread that calls them, on CPU devices,
    and a program between workers may have to be left: see `phalanx.runtime.awaiting`. So those do a
    little more, of which XLA cannot know the result.
    """
    zero = jnp.int32(0)
    if not between_workers:
        return zero
    return jnp.max(jax.lax.iota(jnp.int32, 1024) * jax.lax.optimization_barrier(zero))


THROTTLE = Throttle()
"""The throttle of this process; the limit is per process, so there is only one."""
