"""Schedules of faults: who does what wrong, where and when; and the program that plays one.

The program trains: it reads input, runs a step that changes a variable on all workers, and meets the
others in px.comm. After every step each weight is the number of steps times the number of workers, so
what a survivor finds in its variable tells which steps it holds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import phalanx as px
from tests.multi_worker.faults import leave, me, say

PLACES = {
    "kill": ("input", "step", "comm", "between"),
    "freeze": ("input", "step", "comm", "between"),
    "raise": ("input", "step", "comm", "between"),
    "hang": ("input", "step", "comm", "between"),
    "early": ("comm", "between"),
    "mismatch": ("comm", "between"),
}
"""The faults, and the places at which each of them can happen."""

EXPECTED = {
    "kill": "WorkerLostError",
    "freeze": "DeadlineExceededError",
    "raise": "WorkerFailedError",
    "hang": "DeadlineExceededError",
    "early": "WorkerLostError",
    "mismatch": "CollectiveMismatchError",
}
"""What the survivors raise."""

LASTING = ("freeze", "hang")
"""Faults that nobody can tell from a slow worker before the deadline."""


@dataclass(frozen=True)
class Schedule:
    """One fault: `guilty` does it in step `step`, at `place`, in compiled steps or in eager ones."""

    seed: int
    workers: int
    guilty: int
    fault: str
    place: str
    step: int
    compiled: bool


def schedule(seed: int) -> Schedule:
    """The schedule of a seed; all faults come in turn."""
    choice = random.Random(seed)
    fault = list(PLACES)[seed % len(PLACES)]
    workers = choice.choice((2, 2, 3, 4))
    return Schedule(
        seed,
        workers,
        choice.randrange(workers),
        fault,
        choice.choice(PLACES[fault]),
        choice.choice((0, 1, 2, 5)),
        choice.random() < 0.5,
    )


@dataclass(frozen=True)
class Survivor:
    """How the program ended on one worker: what it raised, when, and what its variable holds.

    `held` is the weights after the failure, `before` and `after` those around the step in which it
    was; `held` is a text that says so if the variable cannot be read.
    """

    kind: str
    text: str
    when: float
    held: str
    before: str
    after: str


def digest(weights: Any) -> str:
    """Weights as text."""
    return repr(np.asarray(weights).tolist())


def play(plan: Schedule) -> Survivor | None:
    """Train until the fault has done its work."""
    s = px.MultiWorkerMirroredStrategy()
    over = threading.Event()
    with s.scope():
        weights = px.Variable(jnp.zeros(4), aggregation=px.VariableAggregation.SUM)
    program = _Program(plan, s, weights, over)
    try:
        program.train()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        over.set()
        when = time.time()
        if plan.guilty == me() and plan.fault == "raise":
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
        done, size = program.done, plan.workers
        around = [digest(np.full(4, k * size, np.float32)) for k in (done, done + 1)]
        return Survivor(type(error).__name__, str(error), when, _held(weights), *around)
    if plan.guilty == me() and plan.fault == "early":
        leave()
        os._exit(0)
    return None


def _held(weights: Any) -> str:
    try:
        return digest(weights)
    except Exception as error:  # noqa: BLE001 - that is what is asked
        return f"cannot be read: {type(error).__name__}: {error}"


class _Program:
    def __init__(
        self, plan: Schedule, s: px.Strategy, weights: px.Variable, over: threading.Event
    ) -> None:
        self.plan, self.s, self.weights, self.over = plan, s, weights, over
        self.done = 0
        self._count = 0
        self._step = px.function(self._run) if plan.compiled else self._run

    def train(self) -> None:
        dataset = px.data.Dataset.from_generator(self._batches, output_types=np.float32)
        for x in self.s.distribute_datasets_from_function(lambda c: dataset.batch(1)):
            if self._is_due("between", self.done):
                self._misbehave()
                if self.plan.fault == "early":
                    return
            self._step(x)
            self.done += 1
            if self._is_due("comm", self.done - 1):
                self._misbehave()
                if self.plan.fault == "early":
                    return
            px.comm.all_reduce(np.ones(2, np.float32))

    def _batches(self) -> Iterator[Any]:
        for i in range(10**6):
            if self._is_due("input", i):
                self._misbehave()
            yield np.ones(4, np.float32)

    def _run(self, x: Any) -> None:
        def on_replica(x: Any) -> None:
            if self._is_due("step", self.done):  # a compiled step is traced in the first only
                self._misbehave()
            self.weights.assign_add(x[0])

        self.s.run(on_replica, args=(x,))

    def _is_due(self, place: str, step: int) -> bool:
        plan = self.plan
        if me() != plan.guilty or place != plan.place:
            return False
        return step == (0 if place == "step" and plan.compiled else plan.step)

    def _misbehave(self) -> None:
        say(f"fault {time.time()}")
        fault = self.plan.fault
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "raise":
            raise KeyError("a fault of its own")
        elif fault == "hang":
            member = self.s.extended._connection.member  # type: ignore[attr-defined]
            while member.failure is None:
                self.over.wait(0.1)
        elif fault == "early":
            return
        elif self.plan.place == "comm":
            px.comm.broadcast(np.ones(3, np.float32))
        else:
            value = self.s.experimental_distribute_values_from_function(lambda c: jnp.ones(3))
            self.s.reduce("sum", value, axis=None)
