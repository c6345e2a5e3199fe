"""What only one of several workers does, and what all of them do with torch's names."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import phalanx as px


def on_worker(folder: str) -> dict[str, Any]:
    import phalanx.comm.torch as dist

    strategy = px.MultiWorkerMirroredStrategy()
    with strategy.scope():
        mean = px.metrics.Mean()
        counter = px.Variable(
            np.int32(0),
            trainable=False,
            synchronization=px.VariableSynchronization.ON_READ,
            aggregation=px.VariableAggregation.SUM,
        )
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"rank": rank, "size": size}

    mean.update_state([1.0, 5.0])  # outside of replicas: once, although both workers say it
    strategy.run(lambda: mean.update_state(px.get_replica_context().replica_id_in_sync_group * 1.0))
    counter.load_state(np.int32(7))  # as a checkpoint gives it
    found["counter"] = (
        int(counter),
        [int(copy) for copy in strategy.experimental_local_results(counter)],
    )
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
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    lists = [None] * size if rank == 0 else None
    dist.gather_object(rank * 3, lists, dst=0)
    found["objects_at_zero"] = lists
    got_object = [None]
    dist.scatter_object_list(got_object, ["a", "b"] if rank == 1 else None, src=1)
    found["object"] = got_object
    alone = dist.new_group([1])
    found["alone"] = (dist.get_rank(alone), dist.get_world_size(alone))
    dist.barrier()
    found |= profiled_and_compared(folder + "-profile", rank)
    found["slow_inside"] = steps_that_wait_inside(strategy, rank)
    return found


def profiled_and_compared(folder: str, rank: int) -> dict[str, Any]:
    """A trace of both workers, and bars of which one is late at each meeting."""
    with px.profile(folder) as recorded:
        px.comm.all_reduce(np.float32([rank]))
        jnp.arange(100.0).sum().block_until_ready()
    console = Console(file=io.StringIO(), force_terminal=False)
    with px.train.Progress(6, compare=2, console=console) as bar:
        for step in range(6):
            if rank == 1 and step % 2 == 1:
                threading.Event().wait(0.3)  # what slow input would do
            bar.update(loss=1.0)
    return {"trace": str(recorded.path), "slow": bar.slow, "text": bar.text}


def steps_that_wait_inside(strategy: px.Strategy, rank: int) -> str:
    """Who is late where the workers wait for each other in each step, and so not at the meetings."""
    one = px.function(lambda: strategy.run(lambda: px.get_replica_context().all_reduce("sum", 1.0)))
    one()
    with px.train.Progress(6, compare=2, console=Console(file=io.StringIO())) as bar:
        for _ in range(6):
            if rank == 1:
                threading.Event().wait(0.1)
            one()
            bar.update()
    return bar.slow


def test_one_worker_counts_and_writes_and_torch_names_work() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with px.testing.MultiProcess(workers=2, devices=2) as cluster:
            zero, one = cluster.run(on_worker, folder, timeout=120)
        check_trace(zero["trace"])
        shutil.rmtree(folder + "-profile")
        assert len(os.listdir(folder)) == 1
        (name,) = os.listdir(folder)
        assert len(list(px.data.TFRecordDataset(os.path.join(folder, name)))) == 3  # and the version
    assert (zero["rank"], one["rank"], zero["size"]) == (0, 1, 2)
    assert (zero["counter"], one["counter"]) == ((7, [2, 2]), (7, [2, 1]))
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
    assert zero["objects"] == one["objects"] == [{"rank": 0}, {"rank": 1}]
    assert (zero["objects_at_zero"], one["objects_at_zero"]) == ([0, 3], None)
    assert (zero["object"], one["object"]) == (["a"], ["b"])
    assert zero["slow"].startswith("worker 1 is late by 0.")
    assert zero["slow"] in zero["text"]
    assert zero["slow_inside"].startswith("worker 1 is late by 0.")
    assert one["text"] == ""  # one worker has a bar
    assert (zero["alone"], one["alone"]) == ((-1, -1), (0, 1))


def check_trace(path: str) -> None:
    """Chrome's format: a process per worker, named threads, complete events on one clock."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "worker 0", 2: "worker 1"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    timed = [e for e in events if e["ph"] != "M"]
    assert {(e["pid"], e["tid"]) for e in timed} <= threads
    assert all(isinstance(e["ts"], float | int) and e.get("dur", 0) >= 0 for e in timed)
    assert {e["pid"] for e in timed} == {1, 2}
    begins = sorted(e["ts"] for e in timed if e["name"] == "px.profile begins")
    assert len(begins) == 2
    assert begins[0] == 0.0
    assert begins[1] < 60e6


def test_a_profile_of_code_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), px.profile(tmp_path) as recorded:
        raise ZeroDivisionError
    with gzip.open(recorded.path, "rt") as file:
        assert json.load(file)["traceEvents"]
    with (
        px.profile(tmp_path / "again"),
        pytest.raises(RuntimeError, match="one profiler"),
        px.profile(tmp_path / "twice"),
    ):
        pass
    with pytest.raises(TypeError, match="folder"), px.profile(3):  # type: ignore[arg-type]
        pass


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
