"""What the children of `eager.py` share: the problem, and the conversation with the parent.

Only NumPy is needed here, because the children live in different environments.

A child writes one JSON object per line: first its versions, when it is ready, then one answer per
command. A command ``{"steps": n}`` trains for n steps, starting from the initial parameters. The child
ends when its standard input does.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = (784, 64, 64, 10)
GLOBAL_BATCH = 64
BATCHES = 8
LEARNING_RATE = 0.002
"""Small on purpose: where rounding flips a ReLU a gradient jumps, and losses drift apart with it."""


def initial_parameters() -> list[np.ndarray]:
    """Weights and biases, layer by layer; the same in every child."""
    rng = np.random.default_rng(0)
    parameters = []
    for fan_in, fan_out in itertools.pairwise(SIZES):
        weights = rng.standard_normal((fan_in, fan_out)) * np.sqrt(2 / fan_in)
        parameters += [weights.astype(np.float32), np.zeros(fan_out, np.float32)]
    return parameters


def batches(replicas: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Global batches, each cut into one part per replica: inputs and one-hot labels."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(BATCHES):
        x = rng.standard_normal((GLOBAL_BATCH, SIZES[0])).astype(np.float32)
        y = np.eye(SIZES[-1], dtype=np.float32)[rng.integers(0, SIZES[-1], GLOBAL_BATCH)]
        parts = zip(np.array_split(x, replicas), np.array_split(y, replicas), strict=True)
        made.append(list(parts))
    return made


def serve(
    versions: dict[str, str],
    reset: Callable[[], None],
    step: Callable[[int], Any],
    finish: Callable[[Any], float],
) -> None:
    """Answer the parent's commands until it closes the pipe.

    Args:
        versions: of the libraries that are measured.
        reset: gives the variables their initial values again; not timed.
        step: starts training step number i of a round and returns its result.
        finish: waits for everything that was started and returns the loss of the last step.
    """
    # Libraries may print; the pipe to the parent is for answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say(versions={**versions, "NumPy": np.__version__, "Python": platform.python_version()})
    for line in sys.stdin:
        count = json.loads(line)["steps"]
        reset()
        result = None
        started = time.perf_counter()
        for i in range(count):
            result = step(i)
        loss = finish(result)
        say(seconds=time.perf_counter() - started, loss=loss)
