"""The processes that `pipeline.py` compares: one library, one schedule, and one rank of it.

``python _pipeline_ranks.py '{"variant": "phalanx", ...}'`` talks with the parent like any child (see
`_child.serve`). A step is the loss of a batch and its gradients; nothing is updated.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from _child import phalanx_versions, serve

LAYERS, MICRO_BATCHES = 8, 8


@dataclass(frozen=True)
class Rank:
    """One process, and what it does.

    Args:
        variant: "phalanx", "workers" (Phalanx with a process per stage), "scan" or "torch".
        schedule: its name in Phalanx.
        stages: how many.
        chunks: per stage.
        width: of the layers.
        rows: of a batch.
        rank: the number of this process.
        addresses: of all processes, where there are several.
    """

    variant: str
    schedule: str
    stages: int
    chunks: int
    width: int
    rows: int
    rank: int = 0
    addresses: tuple[str, ...] = ()


def data(rank: Rank) -> tuple[list[Any], Any, Any]:
    r = np.random.default_rng(0)
    shape = (rank.width, rank.width)
    weights = [np.asarray(r.normal(size=shape) / np.sqrt(rank.width), "float32") for _ in range(LAYERS)]
    x, target = (np.asarray(r.normal(size=(rank.rows, rank.width)), "float32") for _ in range(2))
    return weights, x, target


def phalanx(rank: Rank, workers: bool) -> None:
    import jax
    import jax.numpy as jnp

    import phalanx as px

    if workers:
        from phalanx.cluster.resolvers import SimpleClusterResolver
        from phalanx.cluster.spec import ClusterSpec

        spec = ClusterSpec({"worker": list(rank.addresses)})
        px.comm.init(SimpleClusterResolver(spec, task_type="worker", task_id=rank.rank))
        devices = ["CPU:0"]
    else:
        px.config.ensure_cpu_devices(rank.stages)
        devices = [f"CPU:{i}" for i in range(rank.stages)]

    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    parts = rank.stages * rank.chunks
    each = LAYERS // parts
    weights, x, target = data(rank)
    pipe = px.parallel.pipeline(
        px.parallel.split([layer] * LAYERS, parts),
        rank.schedule,
        MICRO_BATCHES,
        loss=lambda y, t: jnp.mean((y - t) ** 2),
        chunks=rank.chunks,
        devices=devices,
        workers=workers,
    )
    params = pipe.place([weights[i * each : (i + 1) * each] for i in range(parts)])

    def step(_: int) -> Any:
        return pipe.value_and_grad(params, x, target)

    def finish(result: Any) -> float:
        arrays = [a for a in jax.tree.leaves(result) if isinstance(a, jax.Array)]
        jax.block_until_ready(arrays)
        return float(result[0])

    finish(step(0))
    assert pipe.peak_live == tuple(pipe.schedule.peak_live[i] for i in pipe.stages)
    serve(phalanx_versions(), lambda: None, step, finish)


def scan(rank: Rank) -> None:
    """GPipe by hand: one program, a tick per round of a loop, activations passed around a ring."""
    os.environ["JAX_NUM_CPU_DEVICES"] = str(rank.stages)
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    weights, x, target = data(rank)
    stages, each = rank.stages, LAYERS // rank.stages
    mesh = Mesh(np.asarray(jax.devices()[:stages]), ("stage",))
    stacked = np.stack(weights).reshape(stages, each, rank.width, rank.width)
    micro = x.reshape(MICRO_BATCHES, -1, rank.width)
    goal = target.reshape(MICRO_BATCHES, -1, rank.width)
    ring = [(i, (i + 1) % stages) for i in range(stages)]

    def local(w: Any, micro: Any, goal: Any) -> Any:
        me = lax.axis_index("stage")

        def tick(carry: Any, t: Any) -> Any:
            given = jnp.where(me == 0, micro[jnp.clip(t, 0, MICRO_BATCHES - 1)], carry)
            out = given
            for i in range(each):
                out = jnp.tanh(out @ w[0, i])
            return lax.ppermute(out, "stage", ring), out

        ticks = jnp.arange(MICRO_BATCHES + stages - 1)
        _, outs = lax.scan(tick, jnp.zeros_like(micro[0]), ticks)
        last = outs[stages - 1 :]
        return lax.psum(jnp.where(me == stages - 1, jnp.mean((last - goal) ** 2), 0.0), "stage")

    divided = jax.shard_map(
        local, mesh=mesh, in_specs=(P("stage"), P(), P()), out_specs=P(), check_vma=False
    )
    program = jax.jit(jax.value_and_grad(divided))
    placed = jax.device_put(stacked, NamedSharding(mesh, P("stage")))
    whole = [jax.device_put(a, NamedSharding(mesh, P())) for a in (micro, goal)]

    def step(_: int) -> Any:
        return jax.block_until_ready(program(placed, *whole))

    step(0)
    serve({"JAX": jax.__version__}, lambda: None, step, lambda result: float(result[0]))


def torch_pipelining(rank: Rank) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    host, port = rank.addresses[0].split(":")
    dist.init_process_group("gloo", f"tcp://{host}:{port}", rank=rank.rank, world_size=rank.stages)
    weights, x, target = (data(rank)[0], *map(torch.tensor, data(rank)[1:]))
    parts = rank.stages * rank.chunks
    each = LAYERS // parts

    class Part(torch.nn.Module):
        def __init__(self, position: int) -> None:
            super().__init__()
            own = weights[position * each : (position + 1) * each]
            self.ws = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(w)) for w in own])

        def forward(self, x: Any) -> Any:
            for w in self.ws:
                x = torch.tanh(x @ w)
            return x

    mine = [rank.rank + c * rank.stages for c in range(rank.chunks)]
    modules = [Part(p) for p in mine]
    cpu = torch.device("cpu")
    held = [pipelining.PipelineStage(m, p, parts, cpu) for m, p in zip(modules, mine, strict=True)]
    kinds = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
    }
    stages: Any = held if rank.chunks > 1 else held[0]
    schedule = kinds[rank.schedule](stages, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)

    def step(_: int) -> float:
        for module in modules:
            module.zero_grad()
        losses: list[Any] = []
        given = (x,) if rank.rank == 0 else ()
        if rank.rank == rank.stages - 1:
            schedule.step(*given, target=target, losses=losses)
            return float(torch.stack(losses).mean())
        schedule.step(*given)
        return 0.0

    def finish(loss: float) -> float:
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return float(total)

    finish(step(0))
    serve({"torch": torch.__version__}, lambda: None, step, finish)


if __name__ == "__main__":
    given = Rank(**json.loads(sys.argv[1]))
    if given.variant == "torch":
        torch_pipelining(given)
    elif given.variant == "scan":
        scan(given)
    else:
        phalanx(given, given.variant == "workers")
