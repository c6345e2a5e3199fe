"""Jobs with parameter servers and workers in this process, for tests of what coordinates them."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import phalanx as px
from phalanx.job.launch.ports import PortReservation

TIMEOUT = 60.0  # seconds within which everything happens, on a busy machine too


class Job:
    """Servers and workers as threads of this process, and a coordinator.

    Args:
        workers: how many there are.
        servers: how many there are.
        start: whether the tasks are there from the beginning.
        options: of the strategy.
    """

    def __init__(
        self, workers: int = 2, servers: int = 1, *, start: bool = True, **options: Any
    ) -> None:
        with PortReservation(workers + servers) as reservation:
            addresses = [f"localhost:{port}" for port in reservation.ports]
        self.cluster = {"worker": addresses[:workers], "ps": addresses[workers:]}
        self.tasks: dict[tuple[str, int], px.Server] = {}
        self._strategies: list[px.ParameterServerStrategy] = []
        if start:
            for kind in ("ps", "worker"):
                for index in range(len(self.cluster[kind])):
                    self.start(kind, index)
        self.strategy = self.new_strategy(**options)
        self._coordinators: list[px.coordinator.ClusterCoordinator] = []

    def new_strategy(self, **options: Any) -> px.ParameterServerStrategy:
        options = {"worker_timeout": TIMEOUT, "server_timeout": 10.0, **options}
        spec = px.train.ClusterSpec(self.cluster)
        resolver = px.cluster_resolver.SimpleClusterResolver(spec)
        given = px.experimental.ParameterServerOptions(**options)
        self._strategies.append(px.ParameterServerStrategy(resolver, options=given))
        return self._strategies[-1]

    def start(self, kind: str, index: int) -> None:
        self.tasks[kind, index] = px.Server(self.cluster, job_name=kind, task_index=index)

    def stop(self, kind: str, index: int) -> None:
        self.tasks.pop((kind, index)).stop()

    @property
    def coordinator(self) -> px.coordinator.ClusterCoordinator:
        return self.coordinate(self.strategy)

    def coordinate(self, strategy: Any, **kwargs: Any) -> px.coordinator.ClusterCoordinator:
        found = px.coordinator.ClusterCoordinator(strategy, **kwargs)
        if found not in self._coordinators:
            self._coordinators.append(found)
        return found

    def variable(self, *args: Any, **kwargs: Any) -> Any:
        with self.strategy.scope():
            return px.Variable(*args, **kwargs)

    def close(self) -> None:
        Gate.open_all()
        coordinated = [coordinator.strategy for coordinator in self._coordinators]
        for coordinator in self._coordinators:
            coordinator.close()
        for strategy in {id(s): s for s in [*self._strategies, *coordinated]}.values():
            strategy.close()
        for task in self.tasks.values():
            task.stop()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Gate:
    """A place in scheduled functions at which they stop until the test lets them go on.

    Workers of a `Job` are threads of this process, so functions find the gates of the test by name.
    """

    _all: ClassVar[dict[str, Gate]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Condition()
        self.arrived = self.left = 0
        self._is_open = False
        Gate._all[name] = self

    @staticmethod
    def named(name: str) -> Gate:
        return Gate._all[name]

    @staticmethod
    def open_all() -> None:
        for gate in Gate._all.values():
            gate.open()
        Gate._all.clear()

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            self._lock.notify_all()

    def wait_for(self, count: int = 1) -> None:
        """Wait until so many functions have arrived."""
        with self._lock:
            assert self._lock.wait_for(lambda: self.arrived >= count, TIMEOUT), (
                f"{self.arrived} arrived"
            )

    def wait_for_left(self, count: int) -> None:
        """Wait until so many functions have gone on."""
        with self._lock:
            assert self._lock.wait_for(lambda: self.left >= count, TIMEOUT), f"{self.left} have left"

    def pass_through(self, only_first: bool = False) -> None:
        with self._lock:
            self.arrived += 1
            self._lock.notify_all()
            if self.arrived == 1 or not only_first:
                assert self._lock.wait_for(lambda: self._is_open, TIMEOUT), "the gate stays closed"
            self.left += 1
            self._lock.notify_all()


class Held:
    """An argument that holds the first worker which unpickles it, until a gate is open."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __reduce__(self) -> Any:
        return arrive, (self._gate.name,)


def arrive(name: str) -> str:
    Gate.named(name).pass_through(only_first=True)
    return "held"
