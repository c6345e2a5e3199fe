"""Collectives next to, and inside of, a strategy over several workers."""

from __future__ import annotations

from typing import Any

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
    with px.testing.MultiProcess(workers=2, devices=devices) as cluster:
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
