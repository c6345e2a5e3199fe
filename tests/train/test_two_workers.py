"""What only one of several workers does, and what all of them do with torch's names."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np

import phalanx as px


def on_worker(folder: str) -> dict[str, Any]:
    import phalanx.comm.torch as dist

    strategy = px.MultiWorkerMirroredStrategy()
    with strategy.scope():
        mean = px.metrics.Mean()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"rank": rank, "size": size}

    mean.update_state([1.0, 5.0])  # outside of replicas: once, although both workers say it
    strategy.run(lambda: mean.update_state(px.get_replica_context().replica_id_in_sync_group * 1.0))
    found["mean"] = [float(v.numpy()) for v in mean.variables]

    with px.summary.create_file_writer(folder).as_default(step=1):
        px.summary.scalar("rank", rank)
        strategy.run(
            lambda: px.summary.scalar("replica", px.get_replica_context().replica_id_in_sync_group)
        )

    x = np.float32([rank + 1.0, 10.0])
    work = dist.all_reduce(x, op=dist.ReduceOp.SUM, async_op=True)
    work.wait()
    found["sum"] = x.tolist()
    parts = [np.zeros(1, np.int32) for _ in range(size)]
    dist.all_gather(parts, np.int32([rank]))
    found["gathered"] = [p.tolist() for p in parts]
    whole = np.zeros(size, np.int32)
    dist.all_gather_into_tensor(whole, np.int32([rank + 5]))
    found["joined"] = whole.tolist()
    y = np.float32([rank])
    dist.broadcast(y, src=1)
    found["broadcast"] = y.tolist()
    z = np.float32([rank + 1.0])
    dist.reduce(z, dst=0, op=dist.ReduceOp.MAX)
    found["reduced"] = z.tolist()
    mine = np.zeros(1, np.float32)
    dist.scatter(mine, [np.float32([7.0]), np.float32([8.0])] if rank == 0 else None, src=0)
    found["scattered"] = mine.tolist()
    lists = [np.zeros(1, np.float32) for _ in range(size)] if rank == 1 else None
    dist.gather(np.float32([rank * 2.0]), lists, dst=1)
    found["at_one"] = None if lists is None else [p.tolist() for p in lists]
    part = np.zeros(1, np.float32)
    dist.reduce_scatter(part, [np.float32([1.0 + rank]), np.float32([3.0])])
    found["part"] = part.tolist()
    part = np.zeros(1, np.float32)
    dist.reduce_scatter_tensor(part, np.float32([1.0, 2.0]))
    found["tensor_part"] = part.tolist()
    outs = [np.zeros(1, np.float32) for _ in range(size)]
    dist.all_to_all(outs, [np.float32([10.0 * rank + i]) for i in range(size)])
    found["exchanged"] = [o.tolist() for o in outs]
    out = np.zeros(2, np.float32)
    dist.all_to_all_single(out, np.float32([rank * 2.0, rank * 2.0 + 1]))
    found["exchanged_parts"] = out.tolist()
    if rank == 0:
        dist.send(np.float32([3.5]), dst=1, tag=4)
        dist.isend(np.float32([4.5]), dst=1).wait()
    else:
        got, later = np.zeros(1, np.float32), np.zeros(1, np.float32)
        found["source"] = dist.recv(got, src=0, tag=4)
        dist.irecv(later, src=0).wait()
        found["received"] = [*got.tolist(), *later.tolist()]
    alone = dist.new_group([1])
    found["alone"] = (dist.get_rank(alone), dist.get_world_size(alone))
    dist.barrier()
    return found


def test_one_worker_counts_and_writes_and_torch_names_work() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with px.testing.MultiProcess(workers=2, devices=2) as cluster:
            zero, one = cluster.run(on_worker, folder, timeout=120)
        assert len(os.listdir(folder)) == 1
        (name,) = os.listdir(folder)
        assert len(list(px.data.TFRecordDataset(os.path.join(folder, name)))) == 3  # and the version
    assert (zero["rank"], one["rank"], zero["size"]) == (0, 1, 2)
    for found in (zero, one):
        assert found["mean"] == [6.0 + 0 + 1 + 2 + 3, 2.0 + 4]
        assert found["sum"] == [3.0, 20.0]
        assert found["gathered"] == [[0], [1]]
        assert found["joined"] == [5, 6]
        assert found["broadcast"] == [1.0]
    assert (zero["reduced"], one["reduced"]) == ([2.0], [2.0])
    assert (zero["scattered"], one["scattered"]) == ([7.0], [8.0])
    assert (zero["at_one"], one["at_one"]) == (None, [[0.0], [2.0]])
    assert (zero["part"], one["part"]) == ([3.0], [6.0])
    assert (zero["tensor_part"], one["tensor_part"]) == ([2.0], [4.0])
    assert (zero["exchanged"], one["exchanged"]) == ([[0.0], [10.0]], [[1.0], [11.0]])
    assert (zero["exchanged_parts"], one["exchanged_parts"]) == ([0.0, 2.0], [1.0, 3.0])
    assert (one["source"], one["received"]) == (0, [3.5, 4.5])
    assert (zero["alone"], one["alone"]) == ((-1, -1), (0, 1))


def test_torch_names_in_replicas() -> None:
    import phalanx.comm.torch as dist

    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = px.Variable(
            jnp.zeros(2),
            synchronization=px.VariableSynchronization.ON_READ,
            aggregation=px.VariableAggregation.SUM,
        )

    def step() -> None:
        v.assign(jnp.ones(2) * (dist.get_rank() + 1))
        dist.all_reduce(v)

    strategy.run(step)
    assert [x.numpy().tolist() for x in v.values] == [[3.0, 3.0]] * 2
    px.function(lambda: strategy.run(step))()
    assert [x.numpy().tolist() for x in v.values] == [[3.0, 3.0]] * 2
