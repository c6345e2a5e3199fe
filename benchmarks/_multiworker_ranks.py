"""The processes that `multiworker.py` compares: one worker of one library.

``python _multiworker_ranks.py '{"variant": "phalanx", ...}'`` is one rank. It first writes a line of
JSON with the times at which it came to certain points of its start, then talks with the parent like any
child (see `_child.serve`). All ranks of a group get the same commands at the same time.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEGUN = time.monotonic()  # the clock of the whole machine, so that the parent can compare

import numpy as np  # noqa: E402 - after the first look at the clock

import _mlp  # noqa: E402
from _child import phalanx_versions, serve  # noqa: E402


@dataclass(frozen=True)
class Rank:
    """One worker, and what it does.

    Args:
        variant: which library.
        task: "step", "all-reduce" (in a compiled function), "reduce" (outside of it), "with and
            without" (steps) or "ledger".
        number: the width of the MLP, the bytes of an array, or how many calls.
        rank: the number of this worker.
        addresses: of all workers.
        devices: per worker.
    """

    variant: str
    task: str
    number: int
    rank: int
    addresses: tuple[str, ...]
    devices: int = 1

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.addresses)

    @property
    def replicas(self) -> int:
        """How many all workers have together."""
        return self.workers * self.devices

    def command(self) -> list[str]:
        """The arguments for Python that start this rank."""
        return [str(Path(__file__)), json.dumps(asdict(self))]

    @property
    def config(self) -> str:
        """TF_CONFIG, which Phalanx and TensorFlow read."""
        task = {"type": "worker", "index": self.rank}
        return json.dumps({"cluster": {"worker": self.addresses}, "task": task})


class Marks:
    """When a rank came to certain points of its start."""

    def __init__(self) -> None:
        self._times = {"process": BEGUN}

    def set(self, name: str) -> None:
        self._times[name] = time.monotonic()

    def say(self) -> None:
        print(json.dumps({"marks": self._times}), flush=True)


# -- the libraries -------------------------------------------------------------------------------


def phalanx_rank(rank: Rank, marks: Marks) -> None:
    os.environ["TF_CONFIG"] = rank.config
    os.environ["JAX_NUM_CPU_DEVICES"] = str(rank.devices)
    import jax  # noqa: F401 - to see what it takes

    marks.set("JAX")
    import phalanx as px

    marks.set("library")
    strategy = px.MultiWorkerMirroredStrategy()
    marks.set("joined")
    marks.say()
    if rank.task == "step":
        _mlp.serve_phalanx(_mlp.Problem(rank.number, rank.replicas), strategy)
    elif rank.task == "with and without":
        phalanx_with_and_without(strategy, _mlp.Problem(rank.number, rank.replicas))
    elif rank.task == "ledger":
        phalanx_ledger(rank.number)
    else:
        phalanx_all_reduce(strategy, rank.number, compiled=rank.task == "all-reduce")


def phalanx_all_reduce(strategy: Any, nbytes: int, compiled: bool) -> None:
    import jax
    import jax.numpy as jnp

    import phalanx as px

    value = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.full(nbytes // 4, context.replica_id_in_sync_group + 1.0)
    )

    def all_reduce(x: jax.Array) -> Any:
        return px.get_replica_context().all_reduce("sum", x)

    run = px.function(lambda x: strategy.run(all_reduce, args=(x,)))

    def reduced() -> Sequence[jax.Array]:
        if compiled:
            return strategy.experimental_local_results(run(value))
        return [strategy.reduce("sum", value, axis=None)]

    serve_reductions(
        phalanx_versions(),
        lambda: jax.block_until_ready(reduced()),
        lambda copies: float(copies[-1][0]),
    )


def hand_rank(rank: Rank, marks: Marks) -> None:
    os.environ["PJRT_NPROC"] = str(max(os.cpu_count() or 1, 2 * rank.devices))
    os.environ["JAX_NUM_CPU_DEVICES"] = str(rank.devices)
    import jax

    marks.set("JAX")
    marks.set("library")
    jax.distributed.initialize(rank.addresses[0], rank.workers, rank.rank)
    jax.devices()
    marks.set("joined")
    marks.say()
    if rank.task == "step":
        _mlp.serve_hand(_mlp.Problem(rank.number, rank.replicas))
    else:
        hand_all_reduce(rank.number)


def hand_all_reduce(nbytes: int) -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("replica",))
    split, whole = PartitionSpec("replica"), PartitionSpec()
    count = nbytes // 4
    rows = np.repeat(np.arange(1.0, mesh.size + 1.0, dtype=np.float32), count)
    value = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, split), lambda i: rows[i])
    reduced = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "replica"), mesh=mesh, in_specs=split, out_specs=whole)
    )
    serve_reductions(
        {"JAX": jax.__version__},
        lambda: reduced(value).block_until_ready(),
        lambda total: float(total.addressable_shards[0].data[0]),
    )


def tensorflow_rank(rank: Rank, marks: Marks) -> None:
    os.environ["TF_CONFIG"] = rank.config
    import tensorflow as tf

    marks.set("library")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    marks.set("joined")
    marks.say()
    if rank.task == "step":
        _mlp.serve_tensorflow(_mlp.Problem(rank.number, rank.replicas), strategy)
    else:
        tensorflow_all_reduce(strategy, rank)


def tensorflow_all_reduce(strategy: Any, rank: Rank) -> None:
    import tensorflow as tf

    def own(_: Any) -> tf.Tensor:
        with tf.device(strategy.extended.worker_devices[0]):
            return tf.fill([rank.number // 4], rank.rank + 1.0)

    value = strategy.experimental_distribute_values_from_function(own)

    def all_reduce(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        # An argument has no device, without which TensorFlow refuses to reduce.
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(x))

    @tf.function
    def run(x: tf.Tensor) -> tf.Tensor:
        return strategy.run(all_reduce, args=(x,))

    def reduced() -> tf.Tensor:
        total = run(value)
        total[0].numpy()  # wait
        return total

    serve_reductions({"TensorFlow": tf.__version__}, reduced, lambda total: float(total[0]))


def torch_rank(rank: Rank, marks: Marks) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    import torch
    from torch import distributed

    marks.set("library")
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{rank.addresses[0]}",
        rank=rank.rank,
        world_size=rank.workers,
    )
    marks.set("joined")
    marks.say()
    versions = {"torch": torch.__version__.split("+")[0]}
    if rank.task == "step":
        reset, one_step = _mlp.torch_training(_mlp.Problem(rank.number, rank.replicas), rank.rank)
        _mlp.serve_steps(versions, reset, one_step, float)
        return
    torch.set_num_threads(1)
    value = torch.full((rank.number // 4,), rank.rank + 1.0)
    kept = value.clone()

    def reduced() -> torch.Tensor:
        distributed.all_reduce(value)
        return value

    def refill() -> None:
        value.copy_(kept)
        distributed.barrier()

    # In place: after many steps the numbers are infinite, which costs nothing.
    serve(versions, refill, lambda _: reduced(), lambda total: min(float(total[0]), 1e30))


def serve_reductions(
    versions: dict[str, str], reduced: Callable[[], Any], first_number: Callable[[Any], float]
) -> None:
    """Answer the parent; each step is a reduction that has finished when it returns."""

    def reset() -> None:
        reduced()

    serve(versions, reset, lambda _: reduced(), first_number)


# -- what comparing and watching cost ---------------------------------------------------------------


def phalanx_with_and_without(strategy: Any, problem: _mlp.Problem) -> None:
    """Training in which every second round leaves out the comparing of programs."""
    from phalanx.job import shared_programs

    ledger, rounds = shared_programs.ledger(), itertools.count()

    def switch() -> None:
        shared_programs.use_ledger(None if next(rounds) % 2 else ledger)

    _mlp.serve_phalanx(problem, strategy, before_round=switch)


def phalanx_ledger(calls: int) -> None:
    """Dispatch a program that does nothing; writes the medians in microseconds with and without."""
    import jax.numpy as jnp

    from phalanx.execution.throttle import THROTTLE
    from phalanx.job.shared_programs import SharedProgram

    token = jnp.zeros(1).block_until_ready()
    with_shared: list[float] = []
    without: list[float] = []
    begin, before = time.perf_counter(), thread_seconds()
    while len(without) < calls:
        for times in (with_shared, without):
            for _ in range(100):
                start = time.perf_counter_ns()
                shared = SharedProgram("nothing", "nothing", ()) if times is with_shared else None
                THROTTLE.dispatch(lambda: (None, token), shared=shared)
                times.append((time.perf_counter_ns() - start) / 1e3)
    seconds, computed = time.perf_counter() - begin, thread_seconds() - before
    answer = {
        "with": statistics.median(with_shared),
        "without": statistics.median(without),
        "threads": 1e6 * computed / seconds,
    }
    print(json.dumps(answer), flush=True)
    sys.stdin.read()  # the others may not have finished


def thread_seconds() -> float:
    """The time that Phalanx's own threads have computed."""
    total = 0
    for thread in threading.enumerate():
        if thread.name.startswith("phalanx"):
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            total += int(stat.split()[0])
    return total / 1e9


def main() -> None:
    given = json.loads(sys.argv[1])
    rank = Rank(**given | {"addresses": tuple(given["addresses"])})
    mains = {
        "phalanx": phalanx_rank,
        "hand": hand_rank,
        "tensorflow": tensorflow_rank,
        "torch": torch_rank,
    }
    mains[rank.variant](rank, Marks())


if __name__ == "__main__":
    main()
