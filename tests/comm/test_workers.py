"""Collectives between workers: groups, handles, conventions, and what is refused."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px


def ranks() -> dict[str, Any]:
    px.comm.init()
    c = px.comm
    group = c.create_group("ends", [2, 0])
    found = {
        "initialized": c.is_initialized(),
        "rank": c.get_rank(),
        "sizes": [c.get_world_size(), c.get_group_size(c.WORLD_COMM_GROUP), c.get_group_size("ends")],
        "in group": [c.get_rank("ends"), c.get_world_size(group), c.get_local_rank(group)],
        "local": [c.get_local_rank(), c.get_local_rank_size()],
        "translated": [
            c.get_world_rank_from_group_rank(group, 0),
            c.get_group_rank_from_world_rank(0, "ends"),
        ],
        "members": c.get_process_group_ranks(group),
    }
    c.destroy_group(group)
    with pytest.raises(px.errors.NotFoundError, match="no such group"):
        c.get_rank(group)
    return found


def test_ranks_and_groups(trio: px.testing.MultiProcess) -> None:
    found = trio.run(ranks)
    assert [f["rank"] for f in found] == [0, 1, 2]
    assert all(f["initialized"] for f in found)
    assert [f["sizes"] for f in found] == [[3, 3, 2]] * 3
    assert [f["in group"] for f in found] == [[1, 2, 1], [-1, -1, -1], [0, 2, 0]]
    assert [f["local"] for f in found] == [[i, 3] for i in range(3)]
    assert [f["translated"] for f in found] == [[2, 1]] * 3
    assert [f["members"] for f in found] == [[2, 0]] * 3


def subsets() -> list[Any]:
    """Members alone call; others go on. The order of the group's ranks counts."""
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    results: list[Any] = []
    if rank != 1:
        group = c.new_group([2, 0])
        results.append(c.all_reduce(np.float32([rank]), group=group)[0].tolist())
        results.append(c.all_gather_into_tensor(np.array([rank]), group)[0].tolist())
        results.append(c.broadcast(np.array([rank]), 0, group)[0].tolist())
        results.append(c.scatter_tensor(np.arange(2) + rank, 2, group)[0].tolist())
    else:
        group = c.new_group([2, 0])
        results.append(c.all_reduce(np.float32([rank]), group=group))
        results.append(c.all_reduce_(np.float32([rank]), group=group, async_op=True))
        alone = c.new_group([1])
        results.append(c.all_reduce(np.float32([rank]), group=alone)[0].tolist())
    results.append(c.all_reduce(jnp.float32(rank))[0].item())
    return results


def test_members_alone_need_to_call(trio: px.testing.MultiProcess) -> None:
    first, second, third = trio.run(subsets)
    assert first == [[2.0], [2, 0], [0], [3], 3.0]
    assert second == [(None, None), None, [1.0], 3.0]
    assert third == [[2.0], [2, 0], [0], [2], 3.0]


def handles() -> dict[str, Any]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    found: dict[str, Any] = {}
    gate = np.zeros(1, np.float32)
    # Nobody sends yet, so the receive cannot be done, and the caller goes on.
    out, early = c.irecv(gate, (rank + 1) % 3, tag=9)
    found["early"] = early.is_completed()
    with pytest.raises(px.errors.DeadlineExceededError, match=r"test_workers\.py"):
        early.wait(timeout=0.05)
    launched = [c.all_reduce(np.float32([i + rank]), async_op=True) for i in range(20)]
    sums = [0.0] * 20

    def take(numbers: list[int]) -> None:
        for i in numbers:
            launched[i][1].wait()
            sums[i] = float(launched[i][0][0])

    order = random.Random(rank).sample(range(20), 20)
    threads = [threading.Thread(target=take, args=(order[k::2],)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found["sums"] = sums
    c.isend(gate + rank, (rank - 1) % 3, tag=9)
    found["late"] = float(np.asarray(out)[0])
    found["source"] = early.source_rank()
    c.all_reduce(np.float32([1]), async_op=True)  # nobody holds its handle
    heard: list[Any] = []
    buffer = np.float32([rank])
    handle = c.all_reduce_(buffer, "max", async_op=True)
    assert handle is not None
    handle.get_future().add_done_callback(lambda f: heard.append(f.exception()))

    async def later() -> Any:
        x, second = c.all_reduce(buffer * 0 + 1, async_op=True)
        await handle
        return (await second).tolist() + (x + 1).tolist()

    found["awaited"] = asyncio.run(later())
    found["again"] = [handle.wait(), handle.wait(), handle.exception(), buffer.tolist(), heard]
    weights = px.Variable(np.float32([1, rank]))
    c.all_reduce_(weights, "sum")
    found["variable"] = np.asarray(weights).tolist()
    many, _ = c.all_reduce_coalesced([np.float32([rank]), np.arange(2), jnp.ones((2, 2))])
    found["coalesced"] = [np.asarray(m).tolist() for m in many]
    return found


def test_handles(trio: px.testing.MultiProcess) -> None:
    for rank, found in enumerate(trio.run(handles)):
        assert found["early"] is False
        assert found["sums"] == [3.0 * i + 3 for i in range(20)]
        assert (found["late"], found["source"]) == ((rank + 1) % 3, (rank + 1) % 3)
        assert found["awaited"] == [3.0, 4.0]
        assert found["again"] == [True, True, None, [2.0], [None]]
        assert found["variable"] == [3.0, 3.0]
        assert found["coalesced"] == [[3.0], [0, 3], [[3.0, 3.0], [3.0, 3.0]]]


def refusals() -> int:
    """All of these are found out by one rank alone; nothing is sent, and the next call works."""
    px.comm.init()
    c, x = px.comm, np.arange(4.0)
    if c.get_rank() == 0:
        wrong: list[tuple[type[Exception], str, Any]] = [
            (ValueError, "one of the ranks", lambda: c.broadcast(x, 7)),
            (ValueError, "one of the ranks", lambda: c.send(x, 7)),
            (ValueError, "another rank", lambda: c.send(x, 0)),
            (ValueError, "each rank once", lambda: c.new_group([0, 0])),
            (ValueError, "one of the ranks", lambda: c.new_group([0, 9])),
            (ValueError, "at least one rank", lambda: c.new_group([])),
            (ValueError, "divisible by the 3", lambda: c.reduce_scatter_tensor(x)),
            (ValueError, "divisible by the 3", lambda: c.all_to_all_single(x)),
            (ValueError, "add up to 4", lambda: c.all_to_all_single(x, None, [1, 1, 1])),
            (ValueError, "3 split sizes", lambda: c.all_to_all_single(x, None, [2, 2])),
            (ValueError, "list of 3 arrays", lambda: c.all_to_all([x, x])),
            (ValueError, "one dtype", lambda: c.all_to_all([x, x, np.arange(4)])),
            (ValueError, "must have the shape", lambda: c.all_gather_into_tensor_(x, x)),
            (ValueError, "input's dtype", lambda: c.all_gather_into_tensor_(np.arange(12), x)),
            (ValueError, "list of 3 buffers", lambda: c.all_gather_([x], x)),
            (ValueError, "reduction must be one of", lambda: c.all_reduce(x, "median")),
            (ValueError, "needs a factor", lambda: c.all_reduce(x, c.ReduceOp.PREMUL_SUM)),
            (ValueError, "isend", lambda: c.P2POp("send", x, 1)),
            (ValueError, "at least one P2POp", lambda: c.batch_isend_irecv([])),
            (ValueError, "world cannot be destroyed", lambda: c.destroy_group(c.WORLD_COMM_GROUP)),
            (TypeError, "bool, integer", lambda: c.all_reduce(x, "band")),
            (TypeError, "must be an array", lambda: c.all_reduce([1.0])),
            (TypeError, "True or False", lambda: c.all_reduce(x, async_op=1)),
            (TypeError, "cannot be written", lambda: c.all_reduce_(jnp.ones(2))),
            (LookupError, "no such group", lambda: c.all_reduce(x, group="nobody")),
            (TypeError, "must be a Group", lambda: c.all_reduce(x, group=3)),
        ]
        for kind, text, call in wrong:
            with pytest.raises(kind, match=text):
                call()
    return int(c.all_reduce(np.array([1]))[0][0])


def test_what_is_wrong_is_refused_before_anything_is_sent(trio: px.testing.MultiProcess) -> None:
    assert trio.run(refusals) == [3, 3, 3]


# -- many at once --------------------------------------------------------------------------------------

GROUPS = [(0, 1), (1, 2), (2, 0), (0, 1, 2)]


def crowded(count: int) -> dict[str, list[float]]:
    """A thread for each group, with many operations in flight, and messages in between."""
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    found: dict[str, list[float]] = {}

    def work(members: tuple[int, ...]) -> None:
        group = c.create_group("crowd " + "-".join(map(str, members)), members)
        rng = random.Random(str(members))
        sums: list[Any] = []
        for i in range(count):
            x = np.full(rng.choice([1, 100, 5000, 300_000]), 10.0 * i + rank)
            if rng.random() < 0.7:
                sums.append(c.all_reduce(x, group=group, async_op=True)[0])
            else:
                sums.append(c.all_reduce(x, group=group)[0])
            if rng.random() < 0.3:
                after = members[(members.index(rank) + 1) % len(members)]
                c.isend(x[:1], after, group, tag=i)
                before = members[members.index(rank) - 1]
                sums.append(c.irecv(x[:1], before, group, tag=i)[0])
        order = random.Random(rank).sample(range(len(sums)), len(sums))
        last = {i: float(np.asarray(sums[i])[-1]) for i in order}
        found[str(members)] = [last[i] for i in range(len(sums))]

    threads = [threading.Thread(target=work, args=(g,)) for g in GROUPS if rank in g]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return found


def crowd_model(members: tuple[int, ...], rank: int, count: int) -> list[float]:
    rng, sums = random.Random(str(members)), []
    for i in range(count):
        rng.choice([1, 100, 5000, 300_000])
        rng.random()
        sums.append(10.0 * i * len(members) + sum(members))
        if rng.random() < 0.3:
            sums.append(10.0 * i + members[members.index(rank) - 1])
    return sums


def test_many_operations_in_flight_over_groups_that_overlap(trio: px.testing.MultiProcess) -> None:
    for rank, found in enumerate(trio.run(crowded, 40)):
        wanted = {str(g): crowd_model(g, rank, 40) for g in GROUPS if rank in g}
        assert found == wanted


def in_callbacks() -> list[Any]:
    px.comm.init()
    c = px.comm
    found: list[Any] = []
    done = threading.Event()
    _, handle = c.all_reduce(np.float32([1]), async_op=True)

    def waits(_: Any) -> None:
        try:
            c.all_reduce(np.float32([1]))
        except px.errors.ContextError as error:
            found.append("async_op=True" in str(error))
        found.append(c.all_reduce(np.float32([2]), async_op=True)[1])
        done.set()

    handle.get_future().add_done_callback(waits)
    assert done.wait(30)
    return [x if isinstance(x, bool) else x.result().tolist() for x in found]


def test_callbacks_may_launch_but_not_wait(trio: px.testing.MultiProcess) -> None:
    for found in trio.run(in_callbacks):
        # The callback runs in the lane's thread, or here if the operation was quicker than this line.
        assert found in ([True, [6.0]], [[6.0]])


# -- what is compared ----------------------------------------------------------------------------------


def notices() -> list[str]:
    """What calls tell the other ranks that must be the same."""
    px.comm.init()
    c, x = px.comm, np.ones(6, np.float32)
    from phalanx.collectives import worker_calls

    said: list[str] = []
    plain = worker_calls.Notice

    def noted(same: str, *rest: Any) -> Any:
        said.append(same)
        return plain(same, *rest)

    worker_calls.Notice = noted  # type: ignore[misc, assignment]
    try:
        c.all_reduce(x)
        c.all_reduce(x, "max")
        c.all_reduce(x, c.premul_sum(2.0))
        c.all_reduce(x, c.premul_sum(3.0))
        c.all_reduce(x[:3])
        c.all_reduce(x.reshape(2, 3))
        c.all_reduce(x.astype(np.int32))
        c.all_reduce(x, group=c.create_group("one", [0, 1, 2]))
        c.all_reduce(x, group=c.create_group("two", [0, 1, 2]))
        c.destroy_group("two")
        c.all_reduce(x, group=c.create_group("two", [2, 1, 0]))
        c.reduce(x, 0)
        c.reduce(x, 1)
        c.reduce(x, 1, "max")
        c.broadcast(x, 0)
        c.broadcast(x, 1)
        c.broadcast(x[:2], 1)
        c.all_gather(x)
        c.all_gather(x.astype(np.float64))
        c.all_gather_into_tensor(x)
        c.gather(x, 0)
        c.gather(x, 1)
        c.gather_into_tensor(x, 1)
        c.scatter([x] * 3 if c.get_rank() == 0 else None, 0)
        c.scatter([x] * 3 if c.get_rank() == 1 else None, 1)
        c.scatter_tensor(x, 0)
        c.reduce_scatter([x] * 3)
        c.reduce_scatter([x[:2]] * 3)
        c.reduce_scatter_tensor(x)
        c.reduce_scatter_tensor(x, "max")
        c.all_to_all([x] * 3)
        c.all_to_all_single(x)
        c.all_to_all_single(x.reshape(3, 2))
        c.all_reduce_coalesced([x, x[:1]])
        c.all_reduce_coalesced([x[:1], x])
        c.barrier()
    finally:
        worker_calls.Notice = plain  # type: ignore[misc]
    return said


def test_whatever_must_fit_is_compared(trio: px.testing.MultiProcess) -> None:
    first, *others = trio.run(notices)
    assert all(found == first for found in others)
    assert len(set(first)) == 35


# -- between devices -----------------------------------------------------------------------------------


def between_devices() -> list[Any]:
    """The route of accelerators, on devices that are CPUs."""
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    x = jnp.arange(4.0) + rank
    buffer = np.float32([1, rank])
    c.all_reduce_(buffer)
    found = [
        c.all_reduce(x)[0],
        c.all_reduce(np.arange(3) + rank, "max", async_op=True)[0],
        buffer,
        c.all_gather(x[: rank + 1])[0][1],
        c.broadcast(x, 1)[0],
        c.all_to_all_single(x, None, [1 + rank, 3 - rank])[0],
        c.scatter([x[:1], x] if rank == 0 else None)[0],
        c.reduce_scatter_tensor(x)[0],
    ]
    from phalanx.collectives.groups import world

    assert not world().is_on_host
    with pytest.raises(px.errors.CollectiveMismatchError, match=r"float64\[2\](?s:.)*float64\[3\]"):
        c.all_reduce(np.zeros(2 + rank))
    return [np.asarray(f).tolist() for f in found]


def test_arrays_of_accelerators_stay_there() -> None:
    with px.testing.MultiProcess(
        2, preload=["phalanx"], env={"PHALANX_COMM_ROUTE": "devices"}
    ) as cluster:
        first, second = cluster.run(between_devices)
    shared = [[1, 3, 5, 7], [1, 2, 3], [2, 1], [1, 2], [1, 2, 3, 4]]
    assert first == [*shared, [0, 1, 2], [0], [1, 3]]
    assert second == [*shared, [1, 2, 3, 3, 4], [0, 1, 2, 3], [5, 7]]
