"""Meshes: the ways to arrange a number of devices in up to three axes, and the links along each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from phalanx.errors import InvalidValueError

AXIS_NAMES = ("x", "y", "z")
"""The names of the axes of meshes that the search makes, from the outermost to the innermost."""

MAX_AXES = len(AXIS_NAMES)


@dataclass(frozen=True)
class Link:
    """What it costs to send a message to a neighbour.

    Args:
        alpha: the seconds that each message takes, however short it is.
        beta: the seconds per byte.
        ring: whether collectives go round a ring, message by message. Devices that share memory, as
            those of one CPU do, exchange all at once: then the number of devices hardly counts.
    """

    alpha: float
    beta: float
    ring: bool = True

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0):
            raise InvalidValueError(
                "A link takes some time, not less than none. "
                f"Received: alpha={self.alpha}, beta={self.beta}."
            )


@dataclass(frozen=True)
class Topology:
    """Devices on hosts: links within a host, and slower ones between hosts.

    The devices are numbered host by host.

    Args:
        hosts: the number of hosts.
        devices_per_host: the number of devices on each of them.
        inner: the link between devices of one host.
        outer: the link between devices of different hosts, for each device.
    """

    hosts: int
    devices_per_host: int
    inner: Link
    outer: Link

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices_per_host < 1:
            raise InvalidValueError(
                "A topology has at least one host with one device. "
                f"Received: hosts={self.hosts}, devices_per_host={self.devices_per_host}."
            )

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.hosts * self.devices_per_host

    def link(self, stride: int, size: int) -> Link:
        """The link that bounds a ring of `size` devices whose numbers are `stride` apart."""
        if size == 1 or self.devices_per_host % (stride * size) == 0:
            return self.inner
        return self.outer  # the slowest link of the ring


@dataclass(frozen=True)
class DeviceMesh:
    """Devices arranged in axes, and the links along them.

    Args:
        names: the name of each axis, from the outermost to the innermost.
        sizes: the number of devices along each axis.
        links: the link along each axis.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.sizes) == len(self.links) or len(set(self.names)) < len(
            self.names
        ):
            raise InvalidValueError(
                "Each axis of a mesh has a name of its own, a size and a link. "
                f"Received: names={self.names}, sizes={self.sizes}, links={self.links}."
            )
        if len(self.names) > MAX_AXES or min(self.sizes, default=1) < 1:
            raise InvalidValueError(
                f"The search knows meshes of up to {MAX_AXES} axes, each of at least one device. "
                f"Received: sizes={self.sizes}."
            )

    @property
    def size(self) -> int:
        """The number of devices."""
        return prod(self.sizes)

    def without_single(self) -> DeviceMesh:
        """The same devices, without axes of one device."""
        used = [i for i, size in enumerate(self.sizes) if size > 1]
        return DeviceMesh(
            tuple(self.names[i] for i in used),
            tuple(self.sizes[i] for i in used),
            tuple(self.links[i] for i in used),
        )

    def __str__(self) -> str:
        axes = [f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True)]
        return " \u00d7 ".join(axes) or "one device"


def factorisations(count: int, most: int = MAX_AXES) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write `count` as a product of at most `most` factors above one.

    >>> sorted(factorisations(12, 2))
    [(2, 6), (3, 4), (4, 3), (6, 2), (12,)]
    """
    if count == 1:
        yield ()
        return
    if most < 1:
        return
    for first in range(2, count + 1):
        if count % first == 0:
            for rest in factorisations(count // first, most - 1):
                yield (first, *rest)


def mesh_of(topology: Topology, sizes: Sequence[int], names: Sequence[str] = AXIS_NAMES) -> DeviceMesh:
    """The mesh with axes of these sizes over the devices of a topology, in their order."""
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    links = tuple(topology.link(stride, size) for stride, size in zip(strides, sizes, strict=True))
    return DeviceMesh(tuple(names[: len(sizes)]), tuple(sizes), links)


def meshes(topology: Topology, most: int = MAX_AXES) -> list[DeviceMesh]:
    """Every mesh over the devices of a topology, in one order of its axes."""
    found: dict[Any, DeviceMesh] = {}
    for sizes in factorisations(topology.size, most):
        mesh = mesh_of(topology, sizes)
        axes = zip(mesh.sizes, mesh.links, strict=True)
        kinds = sorted((n, link.alpha, link.beta, link.ring) for n, link in axes)
        found.setdefault(tuple(kinds), mesh)
    return sorted(found.values(), key=lambda mesh: (len(mesh.sizes), mesh.sizes))
