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


# -- random programs against a model -----------------------------------------------------------------

KINDS = ["all_reduce", "broadcast", "all_gather", "all_to_all_single", "reduce_scatter_tensor", "ring"]


def program(seed: int, length: int) -> list[tuple[str, tuple[int, ...], bool, Any]]:
    """What all ranks do: the operation, the group, whether it is asynchronous, and a parameter."""
    rng = random.Random(seed)
    steps = []
    for _ in range(length):
        members = tuple(rng.sample(range(3), rng.choice([2, 3])))
        kind = rng.choice(KINDS)
        parameter: Any = rng.choice(["sum", "max", "prod"]) if "reduce" in kind else None
        if kind == "broadcast":
            parameter = rng.choice(members)
        if kind == "all_to_all_single":
            parameter = [[rng.choice([0, 1, 2]) for _ in members] for _ in members]
        steps.append((kind, members, rng.random() < 0.5, parameter))
    return steps


def operand(kind: str, step: int, rank: int, members: tuple[int, ...], parameter: Any) -> Any:
    me, length = members.index(rank), len(members)
    if kind == "all_to_all_single":
        length = sum(parameter[me])
    if kind == "all_gather":
        length = me + 1
    return np.arange(length, dtype=np.int64) + step + 2 * rank + 1


def play(steps: list[tuple[str, tuple[int, ...], bool, Any]]) -> list[Any]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    results: list[Any] = []
    for i, (kind, members, async_op, parameter) in enumerate(steps):
        if rank not in members:
            continue
        group = c.create_group("-".join(map(str, members)), members)
        x = operand(kind, i, rank, members, parameter)
        if kind == "ring":
            peers = [members[(members.index(rank) + k) % len(members)] for k in (1, -1)]
            c.isend(x, peers[0], group)
            out = c.irecv(x, peers[1], group)[0] if async_op else c.recv(x, peers[1], group)
        elif kind == "all_to_all_single":
            inputs = parameter[members.index(rank)]
            out, _ = c.all_to_all_single(x, None, inputs, group, async_op)
        elif parameter is not None:
            out, _ = getattr(c, kind)(x, parameter, group, async_op)
        else:
            out, _ = getattr(c, kind)(x, group, async_op)
        results.append(out)
        x[...] = -1  # the operation has taken its own copy
    return [
        [p.tolist() for p in r]
        if len(r) and hasattr(r[0], "shape") and r[0].ndim
        else np.asarray(r).tolist()
        for r in results
    ]


def model(steps: list[tuple[str, tuple[int, ...], bool, Any]], rank: int) -> list[Any]:
    functions = {"sum": np.sum, "max": np.max, "prod": np.prod}
    results: list[Any] = []
    for i, (kind, members, _, parameter) in enumerate(steps):
        if rank not in members:
            continue
        xs = [operand(kind, i, r, members, parameter) for r in members]
        me = members.index(rank)
        if kind == "all_reduce":
            results.append(functions[parameter](np.stack(xs), axis=0).tolist())
        elif kind == "reduce_scatter_tensor":
            results.append([functions[parameter](np.stack(xs), axis=0).tolist()[me]])
        elif kind == "broadcast":
            results.append(xs[members.index(parameter)].tolist())
        elif kind == "all_gather":
            results.append([x.tolist() for x in xs])
        elif kind == "ring":
            results.append(xs[me - 1].tolist())
        else:
            parts = [np.split(x, np.cumsum(s)[:-1])[me] for x, s in zip(xs, parameter, strict=True)]
            results.append(np.concatenate(parts).tolist())
    return results


def test_random_programs(trio: px.testing.MultiProcess) -> None:
    steps = [step for seed in range(3) for step in program(seed, 15)]
    assert trio.run(play, steps, timeout=120) == [model(steps, rank) for rank in range(3)]
