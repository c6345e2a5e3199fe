"""What the options of the context say of gradients: how they travel, and what each device keeps.

They are the same mechanisms that optimizers of `px.train` use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.collectives.packing import leaving_packs
from phalanx.core.reduction import ReduceOp
from phalanx.parallel.options import AUTO_MODES, ParallelOptions
from phalanx.train.gradient_communication import GradientCommunication
from phalanx.train.sharding import OptimizerSharding

__all__ = [
    "Share",
    "combination",
    "communication_of",
    "compiler_options",
    "norms_to",
    "sharding_of",
]

DEVICE = "all gradients"
"""In place of a name: the norm of all gradients of a device together."""


def communication_of(options: ParallelOptions) -> GradientCommunication:
    """How gradients, and parameters in slices, travel.

    The mode "auto" of `comm_fusion` is what was measured to be fastest: small arrays together.

    >>> communication_of(ParallelOptions()).float32
    True
    """
    given = options.comm_fusion
    chosen = {
        name: value for name, value in given.items() if name == "openstate" or value["mode"] != "auto"
    }
    return GradientCommunication.from_options(
        chosen,
        options.all_reduce_fusion_config,
        options.gradient_fp32_sync or options.force_fp32_communication,
        norms_to(options),
    )


_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}


def compiler_options(options: ParallelOptions, platform: str) -> dict[str, Any] | None:
    """What tells XLA to pack as `comm_fusion` wants it; None if it may choose.

    In ``data_parallel`` and ``hybrid_parallel`` the program has the packs, which XLA would join. In the
    other modes XLA makes them: GPUs know a size for each kind; on CPU devices it packs all or nothing.

    >>> apart = ParallelOptions(all_reduce_fusion_config=(1,))
    >>> compiler_options(apart, "cpu"), compiler_options(ParallelOptions(), "cpu")
    ({'xla_disable_hlo_passes': 'cpu-all-reduce-combiner'}, None)
    """
    fusion, indices = options.comm_fusion, options.all_reduce_fusion_config
    if not fusion["openstate"]:
        return leaving_packs(platform)
    chosen = [kind for kind in _KINDS if fusion[kind]["mode"] != "auto"]
    if not chosen and not indices:
        return None
    if platform == "cpu" and "allreduce" not in chosen and not indices:
        return None  # it packs nothing else
    found = leaving_packs(platform)
    if platform != "gpu" or options.parallel_mode not in AUTO_MODES:
        return found
    names = {kind: f"xla_gpu_{name}_combine_threshold_bytes" for kind, name in _KINDS.items()}
    sizes = {kind: fusion[kind]["config"] << 20 for kind in chosen if fusion[kind]["mode"] == "size"}
    if indices:
        sizes["allreduce"] = 0
    return {names[kind]: size for kind, size in sizes.items()}


def sharding_of(options: ParallelOptions) -> OptimizerSharding | None:
    """What a parallel optimizer divides; None if there is none.

    >>> sharding_of(ParallelOptions(enable_parallel_optimizer=True)).number
    1
    """
    if not options.enable_parallel_optimizer:
        return None
    level = options.optimizer_level or "level1"
    return OptimizerSharding(
        level,
        options.parallel_optimizer_threshold,
        options.optimizer_weight_shard_size,
        regather=level == "level3",
        accumulate=bool(options.gradient_accumulation_shard),
    )


def combination(options: ParallelOptions) -> ReduceOp:
    """How gradients of parts of a batch are combined."""
    return ReduceOp.MEAN if options.gradients_mean else ReduceOp.SUM


@dataclass(frozen=True)
class Share:
    """One device's part of a batch that devices cannot share evenly.

    Args:
        rows: the examples that it has.
        total: those of all devices.
        devices: how many there are.
    """

    rows: int
    total: int
    devices: int

    def weighted(self, op: ReduceOp, x: Any) -> Any:
        """What the device brings to a sum, or to a mean, in which each example counts the same.

        >>> [float(Share(n, 4, 2).weighted(ReduceOp.MEAN, jnp.float32(6))) for n in (3, 1, 0)]
        [9.0, 3.0, 0.0]
        """
        if not self.rows:
            return jnp.zeros_like(x)
        if op is not ReduceOp.MEAN or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        return x * (self.rows * self.devices / self.total)


def norms_to(options: ParallelOptions) -> Callable[[str, int, float], None] | None:
    """Who is told the norms of local gradients; None if they are not told.

    They are printed, or added to a file of each device in the folder `dump_local_norm_path`.
    """
    if not options.dump_local_norm and not options.dump_device_local_norm:
        return None
    folder = options.dump_local_norm_path
    if not folder:
        return _print
    lock = threading.Lock()
    Path(folder).mkdir(parents=True, exist_ok=True)

    def save(name: str, device: int, norm: float) -> None:
        line = f"{name}\t{np.float32(norm)!s}\n"
        with lock, Path(folder, f"rank_{device}_local_norm.txt").open("a") as file:
            file.write(line)

    return save


def _print(name: str, device: int, norm: float) -> None:
    print(f"local norm of {name} on device {device}: {norm:.6g}", flush=True)
