"""Ranks that disagree, die, or never come: the others raise in time, and say who it was."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import phalanx as px


def cluster_of(workers: int, **env: str) -> px.testing.MultiProcess:
    return px.testing.MultiProcess(workers=workers, env=env, preload=["phalanx"])


def outcome(call: Any) -> tuple[str, str]:
    try:
        call()
    except px.PhalanxError as error:
        return type(error).__name__, str(error) + "".join(getattr(error, "__notes__", []))
    return "", ""


def different(what: str) -> tuple[str, str]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    x = np.zeros(2)
    first, second = lambda: c.all_reduce(x), lambda: c.broadcast(x)
    named = [c.create_group("a", [0, 1]), c.create_group("b", [1, 0])]
    for call in (first, second, first, second):  # all of these are known
        call()
    if what == "order":
        return outcome(lambda: [call() for call in ((first, second) if rank else (second, first))])
    if what == "dtype":
        return outcome(lambda: c.all_reduce(x.astype(np.int64) if rank else x))
    if what == "group":
        return outcome(lambda: c.all_reduce(x, group=named[rank]))
    if what == "splits":
        return outcome(lambda: c.all_to_all_single(np.zeros(4), [1 + rank, 3 - rank], [2, 2]))
    if rank == 0:
        c.send(np.zeros(3), 1)
        return outcome(c.barrier)
    return outcome(lambda: c.recv(np.zeros(2), 0))


SHOWN = {
    "order": ["broadcast", "all_reduce"],
    "dtype": ["int64[2]", "float64[2]"],
    "group": ["'a' of the ranks [0, 1]", "'b' of the ranks [1, 0]"],
    "splits": ["[1, 3]", "[2, 2]"],
    "message": ["rank 1", "rank 0"],
}


@pytest.mark.parametrize("what", SHOWN)
def test_a_mismatch_is_one_error_on_all_ranks(what: str) -> None:
    with cluster_of(2) as cluster:
        found = cluster.run(different, what)
    assert [kind for kind, _ in found] == ["CollectiveMismatchError"] * 2
    for _, text in found:
        assert "test_faults.py" in text
    for word in SHOWN[what]:
        assert word in found[0][1]


LARGE = np.zeros(3 << 20, np.float32)
OPERATIONS: dict[str, Any] = {
    "all_reduce": lambda c, later: c.all_reduce(LARGE, async_op=later),
    "broadcast": lambda c, later: c.broadcast(LARGE, 1, async_op=later),
    "all_gather": lambda c, later: c.all_gather(LARGE, async_op=later),
    "gather": lambda c, later: c.gather(LARGE, 1, async_op=later),
    "scatter_tensor": lambda c, later: c.scatter_tensor(LARGE, 1, async_op=later),
    "reduce_scatter_tensor": lambda c, later: c.reduce_scatter_tensor(LARGE, async_op=later),
    "all_to_all_single": lambda c, later: c.all_to_all_single(LARGE, async_op=later),
    "reduce": lambda c, later: c.reduce(LARGE, 1, async_op=later),
    "all_reduce_coalesced": lambda c, later: c.all_reduce_coalesced([LARGE, LARGE], async_op=later),
    "all_gather_into_tensor": lambda c, later: c.all_gather_into_tensor(LARGE, async_op=later),
    "gather_into_tensor": lambda c, later: c.gather_into_tensor(LARGE, 1, async_op=later),
    "scatter": lambda c, later: c.scatter(
        [LARGE] * 3 if c.get_rank() == 1 else None, 1, async_op=later
    ),
    "reduce_scatter": lambda c, later: c.reduce_scatter([LARGE] * 3, async_op=later),
    "all_to_all": lambda c, later: c.all_to_all([LARGE] * 3, async_op=later),
    "all_reduce_": lambda c, later: c.all_reduce_(LARGE.copy(), async_op=later),
    "recv": lambda c, later: c.irecv(LARGE, 1) if later else c.recv(LARGE, 1 if c.get_rank() else 2),
    "barrier": lambda c, later: None if later else c.barrier(),
    "all_gather_object": lambda c, later: None if later else c.all_gather_object({"a": 1}),
    "broadcast_object_list": lambda c, later: None if later else c.broadcast_object_list([1], 1),
}


def die_inside(name: str) -> tuple[str, str, float]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    c.all_reduce(np.float32([1]))
    if rank == 1:
        if name != "recv":
            OPERATIONS[name](c, True)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()

    def go_on() -> None:
        for _ in range(3):
            OPERATIONS[name](c, False)

    return *outcome(go_on), time.monotonic() - begin


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_that_dies_inside_of_an_operation(name: str) -> None:
    with cluster_of(3) as cluster:
        outcomes = cluster.start(die_inside, name).results(timeout=60)
    for i in (0, 2):
        kind, text, _ = outcomes[i].value
        assert kind == "WorkerLostError"
        assert "worker 1" in text


def never_come(how: str) -> tuple[str, str, float]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    c.all_reduce(np.float32([1]))
    begin = time.monotonic()
    if rank == 2:  # waits for nobody, until the others give up
        while not outcome(lambda: c.all_reduce(np.float32([1]), group=c.new_group([2])))[0]:
            if time.monotonic() - begin > 30:
                return "", "", 0.0
            from phalanx.collectives.groups import world

            try:
                world().check()
            except px.PhalanxError as error:
                return type(error).__name__, str(error), time.monotonic() - begin
    call = {
        "barrier": lambda: c.barrier(timeout=1.0),
        "recv": lambda: (
            c.recv(np.float32([1]), 2) if rank == 0 else c.barrier(c.new_group([0, 1]), timeout=20)
        ),
    }[how]
    return *outcome(call), time.monotonic() - begin


@pytest.mark.parametrize("how", ["barrier", "recv"])
def test_a_rank_that_never_comes_is_named(how: str) -> None:
    with cluster_of(3, PHALANX_DEADLINE="2") as cluster:
        found = cluster.run(never_come, how)
    assert [kind for kind, _, _ in found] == ["DeadlineExceededError"] * 3
    for _, text, _ in found:
        assert "Late: worker 2 " in text
        assert "test_faults.py" in text


def raise_at_wait() -> list[Any]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    _, handle = c.all_reduce(np.zeros(2 + rank), async_op=True)
    first = outcome(handle.wait)
    return [*first, handle.wait(), type(handle.exception()).__name__]


def test_the_error_is_raised_at_wait_once_with_the_line_of_the_launch() -> None:
    with cluster_of(2) as cluster:
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
    with cluster_of(2) as cluster:
        assert cluster.run(meet_first) == ["FailedPreconditionError"] * 2
