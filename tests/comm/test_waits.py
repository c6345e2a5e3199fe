"""Ranks that wait in px.comm: the others are named early, and what can never end is ended at once."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.job.hub.worker_status import PeerWait, WorkerStatus

ONE = np.float32([1])


def cluster_of(workers: int, deadline: float) -> px.testing.MultiProcess:
    env = {"PHALANX_DEADLINE": str(deadline)}
    return px.testing.MultiProcess(workers=workers, env=env, preload=["phalanx"])


def outcome(call: Any) -> tuple[str, str, float]:
    """What a call raises, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except px.PhalanxError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def wait_for(c: Any) -> None:
    _, handle = c.all_reduce(ONE, async_op=True)
    handle.wait()


def until_failure() -> None:
    """Sit in Python code until the job has failed."""
    from phalanx.collectives.groups import world

    while True:
        world().check()
        threading.Event().wait(0.05)


def some(first: str, *others: str) -> Any:
    """The first case always, and the others with the stress tests."""
    slow = [pytest.param(other, marks=pytest.mark.soak) for other in others]
    return pytest.mark.parametrize("how", [first, *slow])


# -- the table ------------------------------------------------------------------------------------


def sit(how: str) -> tuple[str, str, float]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    c.all_reduce(ONE)
    if rank == 1:
        return outcome(until_failure)
    calls = {
        "all_reduce": lambda: c.all_reduce(ONE),
        "later": lambda: wait_for(c),
        "recv": lambda: c.recv(ONE, 1),
    }
    return outcome(calls[how])


@some("all_reduce", "later", "recv")
def test_the_late_rank_is_shown_before_the_deadline(how: str) -> None:
    with cluster_of(2, 2) as cluster:
        found = cluster.run(sit, how)
        shown = cluster.stderr(0)
    assert re.search(
        r"phalanx: worker 0 waits for worker 1 at \S*test_waits\.py:\d+ in \S+\. "
        r"Late: worker 1 in phase 'step'(?: for \d+ seconds)? "
        r"at \S*test_waits\.py:\d+ in until_failure\.",
        shown,
    ), shown
    assert re.search(r"worker 1 .* until_failure +\d", shown), "the table"
    for kind, text, _ in found:
        assert kind == "DeadlineExceededError"
        assert re.match(r"worker 0 waited for 2 seconds.* at \S*test_waits\.py:\d+ in ", text), text
        assert re.search(r"Late: worker 1 .*in until_failure", text)


def groups_of_others() -> tuple[str, str, float]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    c.all_reduce(ONE)
    if rank == 2:
        return outcome(until_failure)
    group = c.new_group([0, 2] if rank == 0 else [0, 1])
    return outcome(lambda: c.all_reduce(ONE, group=group))


def test_ranks_of_different_groups_are_named_with_what_they_wait_for() -> None:
    with cluster_of(3, 2) as cluster:
        found = cluster.run(groups_of_others)
    for kind, text, _ in found:
        assert kind == "DeadlineExceededError"
        assert re.search(r"Late: worker 2 \(.*in until_failure", text), text
        assert not re.search(r"Late: .*worker 0", text)
        first, second = re.findall(r"^  (worker \d waits for worker \d in all_reduce.*)$", text, re.M)
        assert first.startswith("worker 0 waits for worker 2 in all_reduce")
        assert second.startswith("worker 1 waits for worker 0 in all_reduce")
        assert "test_waits.py:" in first


# -- different calls ------------------------------------------------------------------------------


def extra_call(how: str) -> tuple[str, str, float]:
    s = px.MultiWorkerMirroredStrategy()
    c, rank = px.comm, px.comm.get_rank()
    step = px.function(
        lambda x: s.run(lambda y: px.get_replica_context().all_reduce("sum", y), args=(x,))  # type: ignore[union-attr]
    )
    c.all_reduce(ONE)
    for _ in range(3):
        step(jnp.ones(2))

    def go_on() -> None:
        if rank == 1:
            if how == "recv":
                c.recv(ONE, 0)
            else:
                c.all_reduce(ONE)
        for _ in range(5):
            step(jnp.ones(2))

    return outcome(go_on)


@some("all_reduce", "recv")
def test_an_extra_call_while_the_others_are_in_a_step_is_a_mismatch(how: str) -> None:
    with cluster_of(2, 60) as cluster:
        found = cluster.run(extra_call, how)
    for kind, text, _ in found:
        assert kind == "CollectiveMismatchError", text
        assert re.search(
            r"worker 0 waits for worker 1 in the compiled function .*test_waits\.py:\d+", text
        )
        assert re.search(rf"worker 1 waits for worker 0 in {how}.* at \S*test_waits\.py:\d+", text)


# -- ends that come too early -----------------------------------------------------------------------


def end_early(how: str) -> tuple[str, str, float]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    for _ in range(3):
        c.all_reduce(ONE)
    if rank == 1:
        from phalanx.job import connection

        c.send(ONE, 0)
        connection.connected().disconnect()
        return "", "", time.time()
    c.recv(ONE, 1)
    calls = {
        "all_reduce": lambda: c.all_reduce(ONE),
        "first": lambda: c.all_reduce(ONE, group=c.new_group([0, 1])),
        "recv": lambda: c.recv(ONE, 1),
    }
    kind, text, seconds = outcome(calls[how])
    return kind, text, seconds


@some("all_reduce", "first", "recv")
def test_a_rank_that_ends_early_is_known_at_once(how: str) -> None:
    with cluster_of(2, 60) as cluster:
        kind, text, _ = cluster.run(end_early, how)[0]
    assert kind == "WorkerLostError", text
    assert re.match(r"worker 1 .*finished while worker 0 still communicates, at \S*test_waits.py", text)


# -- receivers that do not take what is sent --------------------------------------------------------


def send_much() -> tuple[str, str, float]:
    px.comm.init()
    c = px.comm
    if c.get_rank() == 1:
        c.recv(ONE, 0)
        print("ready", flush=True)
        return outcome(until_failure)
    c.send(ONE, 1)

    def go_on() -> None:
        while True:
            c.send(np.zeros(1 << 20, np.float32), 1, tag=1)

    return outcome(go_on)


def test_a_send_to_a_frozen_rank_has_a_deadline() -> None:
    with cluster_of(2, 2) as cluster:
        run = cluster.start(send_much)
        cluster.wait(lambda: "ready" in cluster.stdout(1), 30.0)
        cluster.stop(1)
        cluster.wait(lambda: 0 in run.replies, 30.0)
        cluster.cont(1)
        kind, text, _ = run.results(timeout=30.0)[0].value
        shown = cluster.stderr(0)
    assert kind == "DeadlineExceededError"
    assert "in send to rank 1 at " in text
    assert "Late: worker 1" in text
    assert "phalanx: worker 0 waits for worker 1 at " in shown


def test_a_worker_that_owes_a_message_computes_and_does_not_wait() -> None:
    """So it is the one that is late, and no deadlock is proved."""
    status = WorkerStatus()
    wait = PeerWait(status, "recv", "here", lambda: [1])
    with wait, wait.blocking():
        later = wait.since + 60
        assert status.long_peer_waits(later) == [wait]
        status.promised[7] = "send to rank 1"
        assert status.long_peer_waits(later) == []
        with status.keeping(7):
            pass
        assert status.long_peer_waits(later) == [wait]
        assert wait.since == status.kept  # the receiver has a while to go on
