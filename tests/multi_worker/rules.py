"""Runs the contract suite's rules inside the workers of a cluster.

A rule is a function that takes a `World`. In a cluster every worker runs it, with a world that looks at
the replicas of all workers: what each worker has is put together before a rule compares it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

import phalanx as px
from tests.contract.conftest import EXECUTORS, World

MODULES = ("communication", "input", "running", "training", "variables")

NOT_FOR_WORKERS = {
    "test_the_policy_makes_no_difference": "makes its own strategy",
    "test_merge_call_runs_once_for_all_and_answers_each": "adds up all replicas' values in one process",
    "test_replicas_take_turns_in_order": "one log of all replicas' turns",
    "test_an_exception_of_any_replica_reaches_the_caller": "an exception on one worker ends the job",
    "test_no_thread_is_left_behind": "an exception on one worker ends the job",
    "test_different_shapes_cannot_be_reduced_element_by_element": "on workers that ends the job",
    "test_the_gradient_of_a_run": "workers refuse to differentiate around a run; see test_training",
}
"""Rules that do not hold between workers, or look at all replicas from one process, and why."""

ONLY_EAGER = {
    "test_all_gather_of_uneven_parts": "parts of different sizes, made by hand, are different programs",
    "test_training_equals_one_device": "the same; test_input does it with a dataset",
}
"""Rules that a compiled program keeps on one worker only, and why."""


class ClusterWorld(World):
    """A world that spans workers: components and copies of all of them, in the order of replicas."""

    def everywhere(self, mine: Any) -> list[Any]:
        """What each worker has, put together through files; by rank."""
        connection = self.strategy.extended._connection  # type: ignore[attr-defined]
        name = f"phalanx-{connection.member.address}-{len(_exchanges)}"
        _exchanges.append(name)
        place = Path(tempfile.gettempdir())
        own = place / f"{name}-{connection.rank}"
        own.write_bytes(pickle.dumps(jax.tree.map(_on_host, mine)))
        connection.member.exchange("contract", None)
        try:
            files = [place / f"{name}-{i}" for i in range(connection.size)]
            return [pickle.loads(file.read_bytes()) for file in files]
        finally:
            connection.member.exchange("contract", None)
            own.unlink()

    def local(self, value: Any) -> tuple[Any, ...]:
        here = self.strategy.experimental_local_results(value)
        count = len(self.strategy.extended.worker_devices)
        here = here if len(here) == count else here * count
        return tuple(itertools.chain(*self.everywhere(here)))

    def copies(self, variable: px.Variable) -> list[Any]:
        return list(itertools.chain(*self.everywhere(super().copies(variable))))

    def count(self, variable: px.Variable) -> int:
        return sum(self.everywhere(len(variable.values)))


_exchanges: list[str] = []


def _on_host(x: Any) -> Any:
    return jax.device_get(x) if isinstance(x, jax.Array) else x


def rules(all_arguments: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """All rules as (module, function, arguments), for each executor."""
    for module in MODULES:
        name = f"tests.contract.test_{module}"
        for function, rule in vars(importlib.import_module(name)).items():
            if not function.startswith("test_") or function in NOT_FOR_WORKERS:
                continue
            kind = next(iter(inspect.signature(rule).parameters))
            only_eager = kind == "eager" or function in ONLY_EAGER
            for arguments in itertools.islice(_parameters(rule), None if all_arguments else 1):
                for executor in ["eager"] if only_eager else EXECUTORS:
                    yield name, function, {**arguments, kind: executor}


def _parameters(rule: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    marks = [m.args for m in getattr(rule, "pytestmark", ()) if m.name == "parametrize"]
    for values in itertools.product(*(values for _, values in marks)):
        yield dict(zip((name for name, _ in marks), values, strict=True))


@functools.cache
def strategy() -> px.MultiWorkerMirroredStrategy:
    """The strategy of this worker."""
    return px.MultiWorkerMirroredStrategy()


def check(module: str, function: str, arguments: dict[str, Any]) -> None:
    """Run one rule on this worker."""
    kind = next(k for k, v in arguments.items() if isinstance(v, str) and v in EXECUTORS)
    world = ClusterWorld(strategy(), EXECUTORS[arguments[kind]]())
    getattr(importlib.import_module(module), function)(**{**arguments, kind: world})
