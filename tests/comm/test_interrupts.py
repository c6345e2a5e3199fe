"""Operations that are interrupted are made or not made, and connections stay in order."""

from __future__ import annotations

import random
import signal
import statistics
import threading
import time
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.collectives import groups


def operation(i: int) -> Any:
    x = np.full(1 + 4095 * (i % 2), i, np.float32)
    if i % 3 == 0:
        return px.comm.all_reduce(x)[0]
    if i % 3 == 1:
        px.comm.all_reduce_(x)
        return x
    return np.sum(px.comm.all_gather_object(i))


def interrupted(count: int) -> tuple[int, int]:
    """Make the operations of all ranks while signals come; those that came to nothing, again."""
    px.comm.init()
    assert threading.current_thread() is threading.main_thread()

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def made() -> int:
        return groups.world().channels[0, 1].number

    times = []
    for i in range(60):
        started = time.perf_counter()
        operation(i)
        times.append(time.perf_counter() - started)
    duration = statistics.median(times[12:])  # when all calls are prepared
    randomness, seen, again = random.Random(px.comm.get_rank()), 0, 0
    signal.signal(signal.SIGALRM, interrupt)
    for i in range(count):
        before = made()
        while made() == before:
            result = None
            started = time.perf_counter()
            try:
                try:
                    delay = 1e-6 + randomness.random() * 1.5 * duration
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    result = operation(i)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                duration += (time.perf_counter() - started - duration) / 8  # the machine may get faster
            except KeyboardInterrupt:
                seen += 1
                again += made() == before
        assert result is None or np.all(np.asarray(result) == 2 * i), (i, result)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    px.comm.barrier()
    return seen, again


def check(count: int) -> None:
    with px.testing.MultiProcess(2, preload=["phalanx"], env={"PHALANX_DEADLINE": "60"}) as cluster:
        for seen, again in cluster.run(interrupted, count, timeout=600.0):
            assert seen > count / 4
            assert again < seen


def test_interrupted_operations() -> None:
    check(100)


@pytest.mark.soak
def test_thousands_of_interrupted_operations() -> None:
    check(4000)
