"""Replicas that run eagerly have everything that workers have: ranks are the replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px

c = px.comm


def ranks(count: int, fn: Any) -> list[Any]:
    """What `fn(rank)` gives on each replica; anything, not only arrays."""
    found: dict[int, Any] = {}

    def step() -> None:
        rank = int(c.get_rank())
        found[rank] = fn(rank)

    px.MirroredStrategy([f"CPU:{i}" for i in range(count)]).run(step)
    return [found[r] for r in range(count)]


def test_uneven_parts_of_jax_arrays() -> None:
    def program(rank: int) -> Any:
        x = jnp.arange(3.0) + 10 * rank
        single, _ = c.all_to_all_single(x, None, [1 + rank, 2 - rank])
        nothing, _ = c.all_to_all_single(x, [3 * rank] * 2, [0, 3])
        many, _ = c.all_gather(jnp.full((rank, 2), rank))
        parts, _ = c.all_to_all([jnp.full(i + rank, rank) for i in range(2)])
        mine, _ = c.reduce_scatter([jnp.ones(i + 1) for i in range(2)])
        one, _ = c.scatter([jnp.zeros(2), jnp.ones(5)] if rank == 0 else None)
        return [np.asarray(v).tolist() for v in (single, nothing, *many, *parts, mine, one)]

    first, second = ranks(2, program)
    assert first == [[0.0, 10.0, 11.0], [], [], [[1, 1]], [], [1], [2.0], [0.0, 0.0]]
    assert second[:3] == [[1.0, 2.0, 12.0], [0.0, 1.0, 2.0, 10.0, 11.0, 12.0], []]
    assert second[3:] == [[[1, 1]], [0], [1, 1], [2.0, 2.0], [1.0] * 5]
    with pytest.raises(px.errors.CollectiveMismatchError, match=r"expects parts .* but they send"):
        ranks(2, lambda r: c.all_to_all_single(jnp.ones(2), [2, 0], [1, 1]))


def test_objects_are_everybodys_own() -> None:
    shared = {"values": [1]}

    def program(rank: int) -> Any:
        everyone = c.all_gather_object({"rank": rank, **shared})
        everyone[0]["values"].append(rank)
        items: list[Any] = [shared, "x"] if rank == 1 else [None, None]
        c.broadcast_object_list(items, 1)
        items[0]["values"].append(5)
        mine = c.scatter_object_list([["a"], ["b"]] if rank == 0 else None)
        return everyone, items, mine, c.gather_object(rank, 1)

    first, second = ranks(2, program)
    assert first[0][0] == {"rank": 0, "values": [1, 0]}
    assert second[0][0] == {"rank": 0, "values": [1, 1]}
    assert first[1] == second[1] == [{"values": [1, 5]}, "x"]
    assert shared == {"values": [1]}
    assert (first[2], second[2]) == (["a"], ["b"])
    assert (first[3], second[3]) == (None, [0, 1])
    compiled = px.function(px.MirroredStrategy(["CPU:0", "CPU:1"]).run)
    with pytest.raises(px.errors.ContextError, match="objects that are known"):
        compiled(lambda: c.all_gather_object(1))


def test_members_alone_call_the_operations_of_a_group() -> None:
    def program(rank: int) -> Any:
        odd = c.new_group([1, 3]) if rank % 2 else c.new_group([2, 0])
        assert c.get_world_size(c.Group("first", (0,))) == (1 if rank == 0 else -1)
        total, _ = c.all_reduce(jnp.float32(rank), "sum", odd)
        pairs, _ = c.all_gather(np.array([rank]), odd)
        again = c.new_group([1, 3]) if rank % 2 else c.new_group([2, 0])
        assert again.name != odd.name
        c.destroy_group(again)
        alone, _ = c.all_reduce(np.float64(rank), "avg", c.Group("me", (rank,)))
        return float(total), [int(p[0]) for p in pairs], c.get_rank(odd), float(alone)

    assert ranks(4, program) == [
        (2.0, [2, 0], 1, 0.0),
        (4.0, [1, 3], 0, 1.0),
        (2.0, [2, 0], 0, 2.0),
        (4.0, [1, 3], 1, 3.0),
    ]


def test_handles_wait_without_order() -> None:
    def program(rank: int) -> Any:
        called: list[Any] = []
        pairs = [c.Group("a", (0, 1)), c.Group("b", (1, 0))]
        handles = []
        for group in pairs if rank == 0 else pairs[::-1]:  # no deadlock: launched, not waited for
            out, handle = c.all_reduce(jnp.full(3, rank + 1.0), "max", group, async_op=True)
            assert handle is not None
            handles.append((group.name, out, handle))
        done = [h.is_completed() for _, _, h in handles]
        handles[0][2].get_future().add_done_callback(lambda f: called.append(f.result()))
        for _, out, handle in handles[::-1]:
            assert handle.wait(5.0)
            assert handle.exception() is None
            assert handle.result().tolist() == [2.0] * 3 == out.value.tolist()
        buffer = np.zeros(2)
        work = c.all_gather_into_tensor_(buffer, np.array([rank + 0.5]), async_op=True)
        assert work is not None
        work.wait()
        barrier = c.barrier(async_op=True)
        assert barrier.wait()
        c.barrier(timeout=3.0)
        return done, len(called), buffer.tolist(), (out + 1).tolist()

    first, second = ranks(2, program)
    assert first == ([False, False], 1, [0.5, 1.5], [3.0] * 3)
    assert second == ([True, True], 1, [0.5, 1.5], [3.0] * 3)


def test_buffers_of_numpy_keep_their_dtype() -> None:
    def program(rank: int) -> Any:
        x = np.array([2**40 + rank, 1e-200], np.float64)
        c.all_reduce_(x, "max")
        whole = [np.int64(2**60 + rank), np.int64(1)]
        both = [np.array(w) for w in whole]
        c.all_reduce_coalesced_(both)
        outs = [np.zeros(1, np.int8) for _ in range(2)] if rank == 1 else None
        c.gather_(np.array([rank], np.int8), outs, 1)
        part = np.zeros(1)
        c.scatter_(part, [np.ones(1), np.full(1, 3.0)] if rank == 1 else None, 1)
        return x.tolist(), [int(b) for b in both], outs, part[0]

    first, second = ranks(2, program)
    assert first[:2] == second[:2] == ([2.0**40 + 1, 1e-200], [2**61 + 1, 2])
    assert first[2] is None
    assert [int(o[0]) for o in second[2]] == [0, 1]
    assert (first[3], second[3]) == (1.0, 3.0)
    compiled = px.function(px.MirroredStrategy(["CPU:0", "CPU:1"]).run)
    with pytest.raises(TypeError, match=r"must be a px.Variable"):
        compiled(lambda: c.all_reduce_(np.ones(2)))


def test_replicas_that_disagree_are_named() -> None:
    with pytest.raises(px.errors.CollectiveMismatchError, match=r"float32\[2\](?s:.)*float32\[3\]"):
        ranks(2, lambda r: c.all_reduce(jnp.ones(2 + r)))
    with pytest.raises(px.errors.CollectiveMismatchError, match=r"SUM(?s:.)*MAX"):
        ranks(2, lambda r: c.all_reduce(jnp.ones(2), ["sum", "max"][r]))
    with pytest.raises(px.errors.CollectiveMismatchError, match=r"from 0(?s:.)*from 1"):
        ranks(2, lambda r: c.broadcast(np.ones(2), r))
    with pytest.raises(px.errors.MergeMismatchError, match=r"wait for each other.*barrier.*returned"):
        ranks(2, lambda r: c.barrier() if r == 0 else None)
    with pytest.raises(px.errors.MergeMismatchError, match="wait for each other"):
        ranks(2, lambda r: c.barrier() if r else px.get_replica_context().all_reduce("sum", 1.0))
    with pytest.raises(ValueError, match="the ranks are the 2 replicas"):
        ranks(2, lambda r: c.all_reduce(np.ones(1), "sum", c.Group("x", (0, 5))))
    with pytest.raises(px.errors.ContextError, match="staging a program"):
        ranks(2, lambda r: jax.jit(lambda x: c.all_reduce(x)[0])(jnp.ones(2)))
    with pytest.raises(ValueError, match="must give a list of 2 arrays"):
        ranks(2, lambda r: c.scatter(None))


def test_uneven_parts_are_refused_where_replicas_are_compiled() -> None:
    compiled = px.function(px.MirroredStrategy(["CPU:0", "CPU:1"]).run)
    for call in (
        lambda: c.all_to_all_single(jnp.ones(4), None, [1, 3]),
        lambda: c.all_to_all_single(jnp.ones(4), [1, 3]),
        lambda: c.all_to_all([jnp.ones(1), jnp.ones(2)]),
        lambda: c.reduce_scatter([jnp.ones(1), jnp.ones(2)]),
        lambda: c.scatter([jnp.ones(1), jnp.ones(2)]),
    ):
        with pytest.raises(ValueError, match=r"one shape stands for all.*Pad the parts"):
            compiled(call)
    with pytest.raises(ValueError, match="all give a list"):
        compiled(lambda: c.scatter(None))
    even = compiled(lambda: c.all_to_all_single(jnp.arange(4.0), [2, 2], [2, 2])[0])
    assert [v.tolist() for v in even.values] == [[0, 1, 0, 1], [2, 3, 2, 3]]
