"""The processes that `collectives.py` compares: one rank of one library.

``python _collectives_ranks.py '{"library": "phalanx", "rank": 0, "addresses": [...]}'`` answers
commands, one JSON object per line, until its standard input ends. All ranks get the same at once.

1. ``{"op": ..., "form": ..., "bytes": n, "steps": k}``: seconds for k operations, and a number of the
   first one's result.
2. ``{"overlap": n}``: seconds of an all-reduce of n bytes, of a computation of about that length, of
   both at once; and of a pause of that length, alone and with an all-reduce.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from _child import Parent, phalanx_versions

Operation = tuple[Callable[[], Any], Callable[[Any], float]]
"""Runs an operation once; a number of its result."""

OVERLAP_ROUNDS = 7


def given(rank: int, count: int) -> np.ndarray:
    """The array of a rank: numbers whose sums are exact."""
    return (np.arange(count) % 1000 + rank).astype(np.float32)


# -- Phalanx -----------------------------------------------------------------------------------------


class Phalanx:
    """`px.comm` between workers."""

    def __init__(self, rank: int, addresses: list[str]) -> None:
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        os.environ["JAX_NUM_CPU_DEVICES"] = "1"
        import phalanx as px

        px.comm.init()
        self._comm, self._rank, self._ranks = px.comm, rank, len(addresses)
        self.versions = phalanx_versions()

    def barrier(self) -> None:
        """Meet the others."""
        self._comm.barrier()

    def make(self, op: str, form: str, nbytes: int) -> Operation:
        """An operation on arrays of JAX, on NumPy arrays, or into NumPy buffers."""
        c, n = self._comm, self._ranks
        x: Any = given(self._rank, nbytes // 4)
        last = lambda result: float(np.asarray(result).reshape(-1)[-1])  # noqa: E731
        if form != "in place":
            if form == "JAX arrays":
                import jax

                x = jax.device_put(x)
            part = x[: x.shape[0] // n]
            functional = {
                "all_reduce": lambda: c.all_reduce(x)[0],
                "all_gather": lambda: c.all_gather_into_tensor(part)[0],
                "broadcast": lambda: c.broadcast(x)[0],
                "all_to_all": lambda: c.all_to_all_single(x)[0],
                "reduce_scatter": lambda: c.reduce_scatter_tensor(x)[0],
            }
            return functional[op], last
        part, out = x[: x.size // n].copy(), np.empty_like(x)
        piece = np.empty_like(part)
        in_place = {
            "all_reduce": (lambda: c.all_reduce_(x), x),
            "all_gather": (lambda: c.all_gather_into_tensor_(out, part), out),
            "broadcast": (lambda: c.broadcast_(x), x),
            "all_to_all": (lambda: c.all_to_all_single_(out, x), out),
            "reduce_scatter": (lambda: c.reduce_scatter_tensor_(piece, x), piece),
        }
        run, result = in_place[op]
        return run, lambda _: last(result)

    def overlap(self, nbytes: int) -> dict[str, Any]:
        """How an all-reduce in flight and a jitted computation get along."""
        import jax
        import jax.numpy as jnp

        x = given(self._rank, nbytes // 4)
        product = jax.jit(lambda a, b: a @ b)
        a = jnp.ones((256, 256), jnp.float32)

        def reduce() -> None:
            self._comm.all_reduce_(x)

        def compute(count: int) -> None:
            y = a
            for _ in range(count):
                y = product(a, y)
            y.block_until_ready()

        def with_transfer(other: Callable[[], None]) -> None:
            handle = self._comm.all_reduce_(x, async_op=True)
            other()
            handle.wait()

        compute(2)
        reduce()
        length = statistics.median(self._time(reduce)[0] for _ in range(OVERLAP_ROUNDS))
        one = statistics.median(self._time(lambda: compute(20))[0] for _ in range(OVERLAP_ROUNDS)) / 20
        numbers = self._comm.all_reduce(np.array([length / one, length]), "max")[0]
        count, pause = max(1, round(float(numbers[0]))), float(numbers[1])
        parts: dict[str, Callable[[], None]] = {
            "transfer": reduce,
            "computation": lambda: compute(count),
            "both": lambda: with_transfer(lambda: compute(count)),
            "pause": lambda: time.sleep(pause),
            "transfer in a pause": lambda: with_transfer(lambda: time.sleep(pause)),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
        for _ in range(OVERLAP_ROUNDS):
            for name, part in parts.items():
                found[name].append(self._time(part))
        return {
            name: [statistics.median(t[i] for t in times) for i in (0, 1)]
            for name, times in found.items()
        }

    def _time(self, run: Callable[[], None]) -> tuple[float, float]:
        """Seconds on the clock, and seconds that processors computed for this process."""
        self._comm.barrier()
        start, used = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - start, time.process_time() - used


# -- torch -------------------------------------------------------------------------------------------


class Torch:
    """`torch.distributed` with gloo."""

    def __init__(self, rank: int, addresses: list[str]) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
        )
        self._torch, self._distributed = torch, distributed
        self._rank, self._ranks = rank, len(addresses)
        self.versions = {"torch": torch.__version__.split("+")[0]}

    def barrier(self) -> None:
        """Meet the others."""
        self._distributed.barrier()

    def make(self, op: str, form: str, nbytes: int) -> Operation:
        """An operation; all of them write into tensors."""
        assert form == "in place"
        d = self._distributed
        x = self._torch.from_numpy(given(self._rank, nbytes // 4))
        part, out = x[: len(x) // self._ranks].clone(), self._torch.empty_like(x)
        piece = self._torch.empty_like(part)
        pieces = list(out.chunk(self._ranks))
        known = {
            "all_reduce": (lambda: d.all_reduce(x), x),
            "all_gather": (lambda: d.all_gather(pieces, part), out),
            "broadcast": (lambda: d.broadcast(x, 0), x),
            "all_to_all": (lambda: d.all_to_all_single(out, x), out),
            "reduce_scatter": (lambda: d.reduce_scatter_tensor(piece, x), piece),
        }
        run, result = known[op]
        return run, lambda _: float(result[-1])


# -- the conversation ----------------------------------------------------------------------------------


def main() -> None:
    options = json.loads(sys.argv[1])
    kinds: dict[str, type[Phalanx] | type[Torch]] = {"phalanx": Phalanx, "torch": Torch}
    library = kinds[options["library"]](options["rank"], options["addresses"])
    parent = Parent(library.versions)
    for command in parent:
        if "overlap" in command:
            assert isinstance(library, Phalanx)
            parent.say(overlap=library.overlap(command["overlap"]))
            continue
        run, number = library.make(command["op"], command["form"], command["bytes"])
        first = number(run())
        library.barrier()
        start = time.perf_counter()
        for _ in range(command["steps"]):
            run()
        parent.say(seconds=time.perf_counter() - start, number=first)


if __name__ == "__main__":
    main()
