"""Hardware: how fast devices compute and how fast their links are; shipped figures, and fitted ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from phalanx.errors import InvalidValueError, NotFoundError
from phalanx.parallel.mesh import Link, Topology


@dataclass(frozen=True)
class Device:
    """How fast one device computes.

    Args:
        flops: floating-point operations per second of matrix products, by the name of the dtype.
        bandwidth: bytes per second to and from its memory.
        memory: its memory, in bytes.
        efficiency: the part of `flops` that real programs reach.
    """

    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    efficiency: float = 0.5

    def rate(self, dtype: str) -> float:
        """Operations per second for a dtype; the slowest known rate for dtypes that are not listed."""
        known = self.flops.get(dtype)
        return (min(self.flops.values()) if known is None else known) * self.efficiency


@dataclass(frozen=True)
class Hardware:
    """A kind of machine.

    Args:
        name: what it is called in plans.
        device: one of its devices.
        inner: the link between devices of one host.
        outer: the link between hosts, for each device.
        devices_per_host: how many devices a host has; None if all are on one.
        reduce_scatter: whether XLA turns a sum that is cut afterwards into one reduce-scatter. On CPU
            it reduces everything and throws parts away.
        all_to_all: whether a tensor may be cut along another dim by one all-to-all.
    """

    name: str
    device: Device
    inner: Link
    outer: Link
    devices_per_host: int | None = None
    reduce_scatter: bool = True
    all_to_all: bool = True

    def topology(self, devices: int) -> Topology:
        """This many devices of this kind, on as few hosts as possible."""
        here = min(self.devices_per_host or devices, devices)
        if devices % here:
            raise InvalidValueError(
                f"Each host has {here} devices, and each must be full. Received: {devices} devices. "
                "Give a px.parallel.Topology to describe other clusters."
            )
        return Topology(devices // here, here, self.inner, self.outer)

    def replace(self, **changes: Any) -> Hardware:
        """This hardware with some of its figures changed."""
        return replace(self, **changes)


def _rates(**flops: float) -> Mapping[str, float]:
    return MappingProxyType(flops)


PROFILES: Mapping[str, Hardware] = MappingProxyType(
    {
        # NVIDIA A100 datasheet (80 GB SXM): 312 TFLOPS bfloat16, 156 TFLOPS TF32, 2039 GB/s. NVLink 3:
        # 600 GB/s in both directions together, 300 GB/s in each. DGX A100 user guide: one 200 Gb/s HDR
        # port per GPU.
        "A100": Hardware(
            "A100",
            Device(_rates(bfloat16=312e12, float16=312e12, float32=156e12), 2.039e12, 80e9),
            Link(3e-6, 1 / 240e9),
            Link(10e-6, 1 / 22e9),
            8,
        ),
        # NVIDIA H100 datasheet (SXM5): 989 TFLOPS bfloat16 without sparsity, 495 TFLOPS TF32, 3.35
        # TB/s. NVLink 4: 900 GB/s in both directions together. DGX H100 user guide: one 400 Gb/s NDR
        # port per GPU.
        "H100": Hardware(
            "H100",
            Device(_rates(bfloat16=989e12, float16=989e12, float32=495e12), 3.35e12, 80e9),
            Link(3e-6, 1 / 360e9),
            Link(10e-6, 1 / 45e9),
            8,
        ),
        # Google Cloud documentation, TPU v5p: 459 TFLOPS bfloat16 per chip, 95 GB HBM at 2765 GB/s,
        # 4800 Gb/s of interconnect per chip over six links, so 100 GB/s along one axis of the torus in
        # each direction. Matrix products of float32 take three passes of bfloat16.
        "TPU v5p": Hardware(
            "TPU v5p",
            Device(_rates(bfloat16=459e12, float32=153e12), 2.765e12, 95e9),
            Link(1e-6, 1 / 90e9),
            Link(1e-6, 1 / 90e9),
        ),
        # Google Cloud documentation, TPU v5e: 197 TFLOPS bfloat16 per chip, 16 GB HBM at 819 GB/s, 1600
        # Gb/s of interconnect per chip over four links, so 50 GB/s along one axis in each direction.
        "TPU v5e": Hardware(
            "TPU v5e",
            Device(_rates(bfloat16=197e12, float32=66e12), 8.19e11, 16e9),
            Link(1e-6, 1 / 45e9),
            Link(1e-6, 1 / 45e9),
        ),
        # Logical devices of one CPU share its cores and its memory. The figures are of the order that
        # two cores of a server reach; measure a machine to have its own.
        "CPU": Hardware(
            "CPU",
            Device(_rates(float32=1e11, float64=5e10, bfloat16=2e10), 1e10, 16e9),
            Link(5e-5, 1 / 1e9, ring=False),
            Link(2e-4, 1 / 5e8),
            reduce_scatter=False,
        ),
    }
)
"""The hardware that ships with Phalanx, with its makers' rates; `Device.efficiency` lowers them."""


def topology_of(devices: Sequence[Any], hardware: Hardware) -> Topology:
    """How devices are connected: within a process by the inner link, between processes by the outer.

    Processes that have different numbers of them, or are not in order, are taken for one host.
    """
    counts = Counter(device.process_index for device in devices)
    order = [device.process_index for device in devices]
    if len(counts) > 1 and len(set(counts.values())) == 1 and order == sorted(order):
        return Topology(len(counts), len(devices) // len(counts), hardware.inner, hardware.outer)
    return hardware.topology(len(devices))


def profile(name: str) -> Hardware:
    """The shipped hardware of this name, in any case.

    >>> profile("h100").device.memory
    80000000000.0
    """
    for known, hardware in PROFILES.items():
        if known.lower() == name.lower():
            return hardware
    raise NotFoundError(f"There are profiles for {', '.join(PROFILES)}. Received: {name!r}.")


def fit_link(sizes: Sequence[float], seconds: Sequence[float], *, messages: float = 1) -> Link:
    """The link that explains measured times best, by least squares on relative errors.

    Args:
        sizes: the bytes that each device sent.
        seconds: how long it took.
        messages: how many messages one after the other each measurement has; ``2 * (n - 1)`` for an
            all-reduce among `n` devices.
    """
    alpha, beta = _line(sizes, seconds)
    return Link(alpha / messages, beta)


def fit_rate(work: Sequence[float], seconds: Sequence[float]) -> float:
    """The operations or bytes per second that explain measured times best, besides a fixed overhead."""
    _, per_unit = _line(work, seconds)
    if per_unit <= 0:
        raise InvalidValueError(
            "Larger work must take longer. Measure again, with larger sizes. "
            f"Received: work={list(work)}, seconds={list(seconds)}."
        )
    return 1 / per_unit


@dataclass(frozen=True)
class Measurements:
    """Times measured on a machine, from which `fit` makes its hardware.

    Args:
        name: what to call it.
        flops: by dtype, pairs of (operations, seconds) of matrix products.
        copies: pairs of (bytes, seconds) of copies in the memory of one device.
        all_reduces: pairs of (bytes, seconds) of all-reduces among `devices` devices.
        devices: how many devices took part.
        memory: the memory of one device, in bytes.
        options: what else `Hardware` takes.
        ring: whether devices send messages round a ring; see `Link`.
    """

    name: str
    flops: Mapping[str, Sequence[tuple[float, float]]]
    copies: Sequence[tuple[float, float]]
    all_reduces: Sequence[tuple[float, float]]
    devices: int
    memory: float
    options: Mapping[str, Any] = field(default_factory=dict)
    ring: bool = True


def fit(measured: Measurements) -> Hardware:
    """The hardware that explains measured times best."""
    rates = {dtype: fit_rate(*_columns(pairs)) for dtype, pairs in measured.flops.items()}
    device = Device(_rates(**rates), fit_rate(*_columns(measured.copies)), measured.memory, 1.0)
    n = measured.devices
    if n < 2:
        raise InvalidValueError(f"An all-reduce needs two devices to be measured. Received: {n}.")
    sizes, seconds = _columns(measured.all_reduces)
    sent = [2 * (n - 1) / n * size for size in sizes]
    if measured.ring:
        link = fit_link(sent, seconds, messages=2 * (n - 1))
    else:
        link = replace(fit_link(sizes, seconds), ring=False)
    return Hardware(measured.name, device, link, link, **measured.options)


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Offset and slope, neither below zero, that explain `ys` best, relative to their size."""
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    if len(x) != len(y) or len(x) < 2 or not (y > 0).all():
        raise InvalidValueError(
            "A fit needs at least two sizes, each with a time above zero. "
            f"Received: {list(xs)} and {list(ys)}."
        )
    both = np.stack([1 / y, x / y], axis=1)
    (offset, slope), *_ = np.linalg.lstsq(both, np.ones_like(y), rcond=None)
    if offset < 0:
        offset, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    elif slope < 0:
        offset, slope = float((1 / y).sum() / ((1 / y) ** 2).sum()), 0.0
    return float(offset), float(slope)
