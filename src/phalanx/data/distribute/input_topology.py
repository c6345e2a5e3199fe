"""Where input goes: the workers, replicas and devices of a strategy."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from phalanx.runtime.devices import default_device
from phalanx.runtime.placement import Span
from phalanx.runtime.shared_numbers import SharedCount

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy


def _alone(name: str, value: Any, given_up: threading.Event | None = None) -> list[Any]:
    del name, given_up
    return [value]


_serials = SharedCount()


@dataclass(frozen=True)
class InputTopology:
    """The workers and replicas of a strategy as input sees them, and which worker this is."""

    strategy: Strategy
    replica_devices: tuple[jax.Device | None, ...]  # of this worker; None for JAX's default device
    workers: int = 1  # how many workers read input
    worker: int = 0  # which of them this is
    exchange: Callable[..., list[Any]] = _alone  # see `StrategyExtended._exchange`
    span: Span | None = None  # the devices of all workers' replicas, if there are several workers
    serial: int = 0  # the number of the input, which is the same on all workers
    place: Callable[[int, Any], Any] | None = None  # puts the leaf of this number on devices by itself

    @staticmethod
    def of(strategy: Strategy) -> InputTopology:
        """Where the input of this process goes."""
        extended = strategy.extended
        workers, worker = extended._input_worker
        return InputTopology(
            strategy,
            extended._replica_devices,
            workers,
            worker,
            extended._exchange,
            extended._span,
            _serials.next(),
            extended._input_place(),
        )

    def alone_as(self, worker: int) -> InputTopology:
        """What another worker has, in this process and without meeting others."""
        return InputTopology(self.strategy, self.replica_devices, self.workers, worker)

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
        return int(self.exchange("seed", secrets.randbits(63))[0])
