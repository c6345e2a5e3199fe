"""Several workers of one input, all in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

import phalanx as px
from phalanx.strategies.mirrored import MirroredExtended

T = TypeVar("T")

DEADLINE = 60.0


class Meeting:
    """Where the workers of a test agree; alone, each decides for itself."""

    def __init__(self, workers: int) -> None:
        self._barrier = threading.Barrier(workers, timeout=DEADLINE)
        self._said: list[Any] = [None] * workers
        self.count = 0

    def exchange(self, worker: int, value: Any) -> list[Any]:
        """What every worker said."""
        self._said[worker] = value
        if self._barrier.wait() == 0:
            self.count += 1
        said = list(self._said)
        self._barrier.wait()
        return said


class WorkerExtended(MirroredExtended):
    """A mirrored strategy that is one of several workers as far as input is concerned."""

    workers, worker = 1, 0
    meeting: Meeting | None = None

    @property
    def _input_worker(self) -> tuple[int, int]:
        return self.workers, self.worker

    def _exchange(self, name: str, value: Any, given_up: threading.Event | None = None) -> list[Any]:
        if self.meeting is None:
            return [7] if name == "seed" else [value]
        return self.meeting.exchange(self.worker, value)


class Worker(px.Strategy):
    """One of several workers with `replicas` replicas each."""

    def __init__(
        self, workers: int, worker: int, replicas: int, meeting: Meeting | None = None
    ) -> None:
        devices = tuple(jax.devices()[:replicas])
        extended = WorkerExtended(self, devices)
        extended.workers, extended.worker, extended.meeting = workers, worker, meeting
        super().__init__(extended)


def separately(workers: int, replicas: int, fn: Callable[[Worker], T]) -> list[T]:
    """The results of `fn` on each worker, one after the other; they do not wait for each other."""
    return [fn(Worker(workers, i, replicas)) for i in range(workers)]


def together(workers: int, replicas: int, fn: Callable[[Worker], T]) -> list[T]:
    """The results of `fn` on each worker, in threads that meet where workers agree."""
    meeting = Meeting(workers)
    results: list[Any] = [None] * workers
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            results[i] = fn(Worker(workers, i, replicas, meeting))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            meeting._barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
    if real:
        raise real[0]
    return results
