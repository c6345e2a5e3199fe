"""``phalanx bench hardware``: how fast devices and their links are, for the search of plans."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from phalanx.cli.arguments import positive
from phalanx.parallel.hardware import Hardware, Measurements, fit
from phalanx.parallel.hardware_files import save_hardware
from phalanx.runtime import devices as machine
from phalanx.runtime.placement import REPLICA_AXIS, replica_mesh

__all__ = ["add_hardware_parser"]

_WIDTHS = (256, 512, 1024)
_BYTES = (1 << 20, 1 << 22, 1 << 24)
_MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
_IN_A_ROW = 8
_DTYPES = ("float32", "bfloat16")


def add_hardware_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``phalanx bench hardware`` to the command line."""
    parser = kinds.add_parser("hardware", help="devices and links, for phalanx plan")
    parser.add_argument("--devices", type=positive, default=2, help="that exchange (default: 2)")
    parser.add_argument("--rounds", type=positive, default=5, help="the best counts (default: 5)")
    parser.add_argument("--name", default="measured", help="what to call it (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures, for phalanx plan --hardware")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Measure, fit and print."""
    machine.set_cpu_device_count(options.devices)
    hardware = fit(measure(options.name, jax.devices()[: options.devices], options.rounds))
    print(text(hardware))
    if options.json:
        save_hardware(hardware, options.json)
    return 0


def measure(name: str, devices: Sequence[jax.Device], rounds: int) -> Measurements:
    """Times of matrix products, copies and all-reduces on some devices."""
    platform = devices[0].platform
    flops = {dtype: [_product(w, dtype, tuple(devices), rounds) for w in _WIDTHS] for dtype in _DTYPES}
    copies = [_copy(size, tuple(devices), rounds) for size in _BYTES]
    sums = [_all_reduce(size, tuple(devices), rounds) for size in _MESSAGES]
    options = {"reduce_scatter": platform != "cpu"}
    memory = float(_memory(devices[0])) / (len(devices) if platform == "cpu" else 1)
    ring = platform != "cpu"
    return Measurements(name, flops, copies, sums, len(devices), memory, options, ring)


def _product(
    width: int, dtype: str, devices: tuple[jax.Device, ...], rounds: int
) -> tuple[float, float]:
    x = jnp.ones((len(devices), width, width), dtype)
    return 2.0 * width**3, _on_all(lambda x: x @ x, x, devices, rounds)


def _copy(size: int, devices: tuple[jax.Device, ...], rounds: int) -> tuple[float, float]:
    x = jnp.zeros((len(devices), size // 4), jnp.float32)
    return 2.0 * size, _on_all(lambda x: x + 1, x, devices, rounds)  # read and written


def _all_reduce(size: int, devices: tuple[jax.Device, ...], rounds: int) -> tuple[float, float]:
    x = jnp.zeros((len(devices), size // 4), jnp.float32)

    def sums(x: Any) -> Any:  # one after the other, as in a step, without the time to start a program
        for _ in range(_IN_A_ROW):
            x = jax.lax.psum(x, REPLICA_AXIS) / len(devices)
        return x

    one, many = (
        _on_all(function, x, devices, rounds)
        for function in (lambda x: jax.lax.psum(x, REPLICA_AXIS), sums)
    )
    return float(size), max((many - one) / (_IN_A_ROW - 1), many / (2 * _IN_A_ROW))


def _on_all(
    function: Callable[[Any], Any], x: Any, devices: tuple[jax.Device, ...], rounds: int
) -> float:
    """The seconds in which all devices compute, each with its row, at the same time as in a step.

    Logical CPU devices share the cores, so one of them alone would be faster.
    """
    mesh, split = replica_mesh(devices), PartitionSpec(REPLICA_AXIS)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, split))
    return best(jax.jit(mapped), placed, rounds)


def best(program: Callable[[Any], Any], x: Any, rounds: int) -> float:
    """The seconds of the fastest of some rounds; the first compiles, and does not count."""
    jax.block_until_ready(program(x))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(program(x))
        times.append(time.perf_counter() - start)
    return min(times)


def _memory(device: jax.Device) -> int:
    known = device.memory_stats() or {}
    if "bytes_limit" in known:
        return int(known["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def text(hardware: Hardware) -> str:
    """The figures as lines."""
    device = hardware.device
    rates = [f"{dtype} {rate / 1e9:.4g} GFLOP/s" for dtype, rate in device.flops.items()]
    lines = [
        f"{hardware.name}: matrix products {', '.join(rates)}",
        f"  memory {device.memory / 1e9:.3g} GB per device, {device.bandwidth / 1e9:.3g} GB/s",
        f"  link alpha {hardware.inner.alpha * 1e6:.3g} µs, "
        f"beta {hardware.inner.beta * 1e9:.3g} ns per byte"
        + (f" ({1e-9 / hardware.inner.beta:.3g} GB/s)" if hardware.inner.beta else ""),
    ]
    return "\n".join(lines)
