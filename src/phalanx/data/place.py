"""Where input goes: the workers, replicas and devices of a strategy."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from phalanx.core.extended import default_device

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Place:
    """One worker of a strategy, as input sees it.

    Args:
        strategy: whose input it is.
        replica_devices: the devices of this worker's replicas; None stands for JAX's default device.
        workers: how many workers read input.
        worker: which of them this is.
        any_worker: whether a flag is set on any worker; all of them ask together.
        same_on_workers: the first worker's number; all of them ask together.
    """

    strategy: Strategy
    replica_devices: tuple[jax.Device | None, ...]
    workers: int = 1
    worker: int = 0
    any_worker: Callable[[bool], bool] = _as_it_is
    same_on_workers: Callable[[int], int] = _as_it_is

    @staticmethod
    def of(strategy: Strategy) -> Place:
        """Where the input of this process goes."""
        extended = strategy.extended
        workers, worker = extended._input_worker
        return Place(
            strategy,
            extended._replica_devices,
            workers,
            worker,
            extended._any_worker,
            extended._same_on_workers,
        )

    def alone_as(self, worker: int) -> Place:
        """Another worker's place, in this process and without meeting anybody."""
        return Place(self.strategy, self.replica_devices, self.workers, worker)

    @property
    def replicas(self) -> int:
        """How many replicas this worker has."""
        return len(self.replica_devices)

    @property
    def wraps(self) -> bool:
        """Whether elements are `PerReplica` values; with a single replica they are plain."""
        return self.workers > 1 or self.replicas > 1

    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each replica, now."""
        return tuple(default_device() if d is None else d for d in self.replica_devices)

    def shared_seed(self) -> int:
        """A root seed on which all workers agree: they must shuffle alike."""
        return self.same_on_workers(secrets.randbits(63))
