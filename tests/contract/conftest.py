"""The contract suite runs every rule over every strategy and every executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import pytest

import phalanx as px
from tests.parameter_server.jobs import Job


def _cpus(n: int) -> list[str]:
    return [f"CPU:{i}" for i in range(n)]


STRATEGIES: dict[str, Callable[[], px.Strategy]] = {
    "default": px.get_strategy,
    "one_device": lambda: px.OneDeviceStrategy("CPU:1"),
    "mirrored_1": lambda: px.MirroredStrategy(_cpus(1)),
    "mirrored_2": lambda: px.MirroredStrategy(_cpus(2)),
    "mirrored_3": lambda: px.MirroredStrategy(_cpus(3)),
    "mirrored_4": lambda: px.MirroredStrategy(_cpus(4)),
    "mirrored_4_one_device_reduction": lambda: px.MirroredStrategy(
        _cpus(4), cross_device_ops=px.ReductionToOneDevice()
    ),
    "central_storage_1": lambda: px.CentralStorageStrategy(_cpus(1)),
    "central_storage_3": lambda: px.CentralStorageStrategy(_cpus(3), "CPU:0"),
    "auto_parallel_4": lambda: px.AutoParallelStrategy(devices=_cpus(4)),
    "parameter_server_1": lambda: Job(2).strategy,
    "parameter_server_2": lambda: Job(2, compute_devices=_cpus(2)).strategy,
}


class EagerExecutor:
    """Runs a step as `Strategy.run` does outside of compiled code."""

    name = "eager"

    def run(self, strategy: px.Strategy, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return strategy.run(fn, args=args)


class CompiledExecutor:
    """Runs a step inside `px.function`."""

    name = "compiled"

    def run(self, strategy: px.Strategy, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return px.function(lambda *args: strategy.run(fn, args=args))(*args)


EXECUTORS: dict[str, Callable[[], EagerExecutor | CompiledExecutor]] = {
    "eager": EagerExecutor,
    "compiled": CompiledExecutor,
}


@dataclass
class World:
    """One strategy under one executor, with shorthands for what rules are about."""

    strategy: px.Strategy
    executor: EagerExecutor | CompiledExecutor

    @property
    def n(self) -> int:
        return self.strategy.num_replicas_in_sync

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self.executor.run(self.strategy, fn, args)

    def local(self, value: Any) -> tuple[Any, ...]:
        """The components; a plain value stands for itself on every replica."""
        results = self.strategy.experimental_local_results(value)
        return results if len(results) == self.n else results * self.n

    def values(self, make: Callable[[int], Any]) -> Any:
        """A distributed value, made from the replica index."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: jnp.asarray(make(context.replica_id_in_sync_group))
        )

    def variable(self, value: Any, **kwargs: Any) -> px.Variable:
        with self.strategy.scope():
            return px.Variable(value, **kwargs)

    def copies(self, variable: px.Variable) -> list[Any]:
        return [v.numpy().tolist() for v in variable.values]

    def count(self, variable: px.Variable) -> int:
        """How many copies a variable has."""
        return len(variable.values)


MANY = ["mirrored_2", "mirrored_4", "mirrored_4_one_device_reduction", "central_storage_3"]
MANY += ["parameter_server_2"]
COPIED = [name for name in STRATEGIES if name.startswith("mirrored")]
READING = [name for name in STRATEGIES if not name.startswith("parameter_server")]
NAMED = [name for name in STRATEGIES if name != "default"]


def _worlds(names: Iterable[str]) -> list[tuple[str, str]]:
    return [(strategy, executor) for strategy in names for executor in EXECUTORS]


def _make(request: pytest.FixtureRequest) -> World:
    strategy, executor = request.param
    return World(STRATEGIES[strategy](), EXECUTORS[executor]())


@pytest.fixture(params=_worlds(STRATEGIES), ids="-".join)
def world(request: pytest.FixtureRequest) -> World:
    """Every strategy."""
    return _make(request)


@pytest.fixture(params=[(name, "eager") for name in STRATEGIES], ids="-".join)
def eager(request: pytest.FixtureRequest) -> World:
    """Every strategy, for rules about Python code that runs once per replica."""
    return _make(request)


@pytest.fixture(params=_worlds(READING), ids="-".join)
def reading(request: pytest.FixtureRequest) -> World:
    """Strategies under which the program itself reads input; with parameter servers workers do."""
    return _make(request)


@pytest.fixture(params=_worlds(MANY), ids="-".join)
def many(request: pytest.FixtureRequest) -> World:
    """Strategies with several replicas."""
    return _make(request)


@pytest.fixture(params=_worlds(COPIED), ids="-".join)
def copied(request: pytest.FixtureRequest) -> World:
    """Strategies whose variables have a copy on each replica."""
    return _make(request)


@pytest.fixture(params=_worlds(NAMED), ids="-".join)
def named(request: pytest.FixtureRequest) -> World:
    """Every strategy but the default one."""
    return _make(request)
