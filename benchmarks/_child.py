"""The children's side of the conversation with the parent (see `_harness.py`).

Only NumPy is needed here, because the children live in different environments.

A child writes one JSON object per line: first its versions, when it is ready, then one answer per
command. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


class Parent:
    """The parent, told the versions of the libraries that are measured; iterate for its commands."""

    def __init__(self, versions: dict[str, str]) -> None:
        # Libraries may print; the pipe to the parent is for answers only.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.say(versions={**versions, "NumPy": np.__version__, "Python": platform.python_version()})

    def say(self, **answer: Any) -> None:
        """Write an answer."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, sys.stdin)


def phalanx_versions() -> dict[str, str]:
    """For children that measure Phalanx."""
    from importlib.metadata import version

    return {"Phalanx": version("phalanx"), "JAX": version("jax")}


def phalanx_strategy(replicas: int) -> Any:
    """A `MirroredStrategy` on as many logical CPU devices."""
    import phalanx as px

    px.config.ensure_cpu_devices(replicas)
    return px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def _most_held() -> float:
    """The most memory that this process ever had, libraries included, in MB."""
    import resource

    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def serve(
    versions: dict[str, str],
    reset: Callable[[], None],
    step: Callable[[int], Any],
    finish: Callable[[Any], float],
) -> None:
    """Answer commands ``{"steps": n}``: train for n steps, starting from the initial parameters.

    Args:
        versions: of the libraries that are measured.
        reset: gives the variables their initial values again; not timed.
        step: starts training step number i of a round and returns its result.
        finish: waits for everything that was started and returns the loss of the last step.
    """
    parent = Parent(versions)
    for command in parent:
        reset()
        result = None
        started = time.perf_counter()
        for i in range(command["steps"]):
            result = step(i)
        loss = finish(result)
        seconds = time.perf_counter() - started
        parent.say(seconds=seconds, loss=loss, megabytes=_most_held())
