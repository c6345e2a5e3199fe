"""Ranks that disagree, die, or never come: the others raise in time, and say who it was."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import phalanx as px


def outcome(call: Any) -> tuple[str, str]:
    try:
        call()
    except px.PhalanxError as error:
        return type(error).__name__, str(error) + "".join(getattr(error, "__notes__", []))
    return "", ""


def different(what: str) -> tuple[str, str]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    c.all_reduce(np.float32([1]))
    if what == "operation":
        x = np.zeros(2)
        return outcome(lambda: c.all_reduce(x) if rank else c.broadcast(x))
    if what == "splits":
        return outcome(lambda: c.all_to_all_single(np.zeros(4), [1 + rank, 3 - rank], [2, 2]))
    if rank == 0:
        c.send(np.zeros(3), 1)
        return outcome(c.barrier)
    return outcome(lambda: c.recv(np.zeros(2), 0))


@pytest.mark.parametrize("what", ["operation", "splits", "message"])
def test_a_mismatch_is_one_error_on_all_ranks(what: str) -> None:
    with px.testing.MultiProcess(workers=2) as cluster:
        found = cluster.run(different, what)
    assert [kind for kind, _ in found] == ["CollectiveMismatchError"] * 2
    for _, text in found:
        assert "test_faults.py" in text
    shown = {"operation": ["broadcast", "all_reduce"], "splits": ["[1, 3]", "[2, 2]"]}
    for word in shown.get(what, ["rank 1", "rank 0"]):
        assert word in found[0][1]


def die_inside() -> tuple[str, str, float]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    c.all_reduce(np.float32([1]))
    if rank == 1:
        c.all_reduce(np.zeros(1 << 20), async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()

    def go_on() -> None:
        for _ in range(3):
            c.all_reduce(np.zeros(1 << 20))

    return *outcome(go_on), time.monotonic() - begin


def test_a_rank_that_dies_inside_of_an_operation() -> None:
    with px.testing.MultiProcess(workers=3) as cluster:
        outcomes = cluster.start(die_inside).results(timeout=60)
    for i in (0, 2):
        kind, text, seconds = outcomes[i].value
        assert kind == "WorkerLostError"
        assert "worker 1" in text
        assert seconds < 20


def never_come(how: str) -> tuple[str, str, float]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    c.all_reduce(np.float32([1]))
    begin = time.monotonic()
    if rank == 2:  # waits for nobody, until the others give up
        while not outcome(lambda: c.all_reduce(np.float32([1]), group=c.new_group([2])))[0]:
            if time.monotonic() - begin > 30:
                return "", "", 0.0
            from phalanx.comm.groups import world

            try:
                world().check()
            except px.PhalanxError as error:
                return type(error).__name__, str(error), time.monotonic() - begin
    call = {
        "barrier": lambda: c.barrier(timeout=1.0),
        "recv": lambda: c.recv(np.float32([1]), 2) if rank == 0 else c.barrier(c.new_group([0, 1])),
    }[how]
    return *outcome(call), time.monotonic() - begin


@pytest.mark.parametrize("how", ["barrier", "recv"])
def test_a_rank_that_never_comes_is_named(how: str) -> None:
    with px.testing.MultiProcess(workers=3, env={"PHALANX_DEADLINE": "2"}) as cluster:
        found = cluster.run(never_come, how)
    assert [kind for kind, _, _ in found] == ["DeadlineExceededError"] * 3
    for _, text, seconds in found:
        assert "rank 2 (worker 2)" in text
        assert "test_faults.py" in text
        assert seconds < 15


def raise_at_wait() -> list[Any]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    _, handle = c.all_reduce(np.zeros(2 + rank), async_op=True)
    first = outcome(handle.wait)
    return [*first, handle.wait(), type(handle.exception()).__name__]


def test_the_error_is_raised_at_wait_once_with_the_line_of_the_launch() -> None:
    with px.testing.MultiProcess(workers=2) as cluster:
        found = cluster.run(raise_at_wait)
    for kind, text, again, exception in found:
        assert kind == exception == "CollectiveMismatchError"
        assert "launched at" in text
        assert "float64[2]" in text
        assert "float64[3]" in text
        assert again is False


def meet_first() -> str:
    return outcome(px.comm.get_rank)[0]


def test_workers_that_have_not_met() -> None:
    with px.testing.MultiProcess(workers=2) as cluster:
        assert cluster.run(meet_first) == ["FailedPreconditionError"] * 2
