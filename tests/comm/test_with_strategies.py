"""Collectives next to, and inside of, a strategy over several workers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px


def mixed() -> dict[str, Any]:
    strategy = px.MultiWorkerMirroredStrategy()
    c = px.comm
    rank = c.get_rank()
    found: dict[str, Any] = {"size": c.get_world_size(), "ready": c.is_initialized()}

    def step(x: Any) -> Any:
        me = c.get_rank()
        total, _ = c.all_reduce(x + me, "max")
        everyone, _ = c.all_gather_into_tensor(jnp.reshape(me, (1,)))
        moved, _ = c.all_to_all_single(jnp.arange(float(strategy.num_replicas_in_sync)) + 10.0 * me)
        return total, everyone, moved

    compiled = px.function(lambda x: strategy.run(step, args=(x,)))
    with strategy.scope():
        v = px.Variable(jnp.zeros(2000))
    # Programs of both kinds are launched without waiting, and use the same connections.
    sums = []
    handles = []
    for i in range(20):
        handles.append(c.all_reduce(np.full(2000, i + rank, np.float32), async_op=True))
        sums.append(strategy.reduce("sum", strategy.run(lambda: v + 1.0), axis=None))
        compiled(jnp.float32(i))
    found["sums"] = [float(s[0]) for s in sums]
    found["reduced"] = [float(x[-1]) for x, _ in handles]
    for name, run in (("eager", lambda x: strategy.run(step, args=(x,))), ("compiled", compiled)):
        local = strategy.experimental_local_results(run(jnp.float32(1)))
        found[name] = [[np.asarray(x).tolist() for x in part] for part in local]
    return found


@pytest.mark.parametrize("devices", [1, 2])  # with one, both kinds of programs have the same devices
def test_strategies_and_collectives_take_turns(devices: int) -> None:
    count = 2 * devices
    with px.testing.MultiProcess(workers=2, devices=devices, preload=["phalanx"]) as cluster:
        results = cluster.run(mixed, timeout=120)
    for rank, found in enumerate(results):
        assert (found["size"], found["ready"]) == (2, True)
        assert found["sums"] == [float(count)] * 20
        assert found["reduced"] == [2.0 * i + 1 for i in range(20)]
        for name in ("eager", "compiled"):
            for local, (total, everyone, moved) in enumerate(found[name]):
                me = devices * rank + local
                assert total == count
                assert everyone == list(range(count))
                assert moved == [10.0 * i + me for i in range(count)]


def between_replicas_of_workers() -> dict[str, Any]:
    """Everything that replicas do, where the replicas are those of two workers."""
    strategy = px.MultiWorkerMirroredStrategy()
    c, count = px.comm, strategy.num_replicas_in_sync
    found: dict[int, Any] = {}

    def step() -> None:
        rank = int(c.get_rank())
        inner = c.Group("inner", (2, 1))  # one of each worker
        parts, _ = c.all_gather(np.arange(rank))
        uneven, _ = c.all_to_all_single(np.full(count, rank), None, [count] + [0] * (count - 1))
        c.isend(jnp.float32(rank), (rank + 1) % count)
        ring = c.recv(jnp.float32(0), (rank - 1) % count)
        _, handle = c.all_reduce(np.array(rank * 2.0), "sum", inner, async_op=True)
        everyone = c.all_gather_object({"rank": rank})
        items = ["from three"] if rank == 3 else [None]
        c.broadcast_object_list(items, 3)
        gradient = jax.grad(lambda x: jnp.sum(c.all_gather_into_tensor(x**2)[0] ** 2))(
            jnp.ones(1) * rank
        )
        total, _ = c.all_reduce(jnp.float32(rank))
        mine, _ = c.all_reduce(
            jnp.float32(rank), "sum", c.Group("mine", (rank // 2 * 2, rank // 2 * 2 + 1))
        )
        c.barrier()
        found[rank] = {
            "parts": [len(p) for p in parts],
            "uneven": uneven.tolist(),
            "ring": float(ring),
            "pair": None if handle is None else float(handle.result()),
            "objects": [o["rank"] for o in everyone or []] + items,
            "gradient": float(gradient[0]),
            "total": float(total),
            "mine": float(mine),
            "local": (c.get_local_rank(), c.get_local_rank_size()),
        }

    strategy.run(step)
    return found


def test_eager_replicas_of_several_workers() -> None:
    with px.testing.MultiProcess(workers=2, devices=2, preload=["phalanx"]) as cluster:
        first, second = cluster.run(between_replicas_of_workers, timeout=120)
    assert (list(first), list(second)) == ([0, 1], [2, 3])
    for rank, found in {**first, **second}.items():
        assert found["parts"] == [0, 1, 2, 3]
        assert found["uneven"] == ([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 if rank == 0 else [])
        assert found["ring"] == (rank - 1) % 4
        assert found["pair"] == (6.0 if rank in (1, 2) else None)
        assert found["objects"] == [0, 1, 2, 3, "from three"]
        assert found["gradient"] == 16.0 * rank**3
        assert found["total"] == 6.0
        assert found["mine"] == (1.0 if rank < 2 else 5.0)
        assert found["local"] == (rank, 4)
