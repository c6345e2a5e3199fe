"""What the processes of a job do while faults happen to them; see `fault_player`."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import phalanx as px
from phalanx.coordinator import dispatcher
from phalanx.coordinator.cluster_coordinator import ClusterCoordinator
from phalanx.parameter_server import store
from phalanx.testing.faults.history import (
    ClosureEnded,
    ClosureRaised,
    ClosureSubmitted,
    Named,
    ServersAtEnd,
    ServersRead,
)

SERVERS = 2
LEAST, AT_ONCE = 30, 60  # closures of a wave, after its faults and at a time


@dataclass(frozen=True)
class Step:
    """A closure that adds its mark to variables on some servers.

    Args:
        closure: its number, and the place of its mark.
        servers: where it leaves its mark.
        reads: whether it looks at all marks before.
        raises: whether it raises an error afterwards.
        needs: the closure whose value it needs, if any.
    """

    closure: int
    servers: tuple[int, ...]
    reads: bool = True
    raises: bool = False
    needs: int | None = None


@dataclass(frozen=True)
class Plan:
    """What a coordinator does: waves of closures, each followed by a join.

    Args:
        waves: the closures.
        size: how many closures there are at most.
        checkpoints: the waves with a checkpoint in their middle.
        options: of the strategy.
    """

    waves: tuple[tuple[Step, ...], ...]
    size: int
    checkpoints: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


def random_plan(seed: int, waves: int = 3, closures: int = 300) -> Plan:
    """A program that follows from a seed."""
    rng = random.Random(f"closures {seed}")
    fails = seed % 4 == 1
    places: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1), (0, 1), (0, 1))
    made, number = [], 0
    for _ in range(waves):
        wave: list[Step] = []
        for _ in range(closures):
            earlier = [s.closure for s in wave if not s.raises]
            needs = rng.choice(earlier) if earlier and rng.random() < 0.1 and not fails else None
            raises = fails and rng.random() < 0.02
            reads = needs is not None or rng.random() < 0.5
            wave.append(Step(number, rng.choice(places), reads, raises, needs))
            number += 1
        made.append(tuple(wave))
    options = {
        "durability": "log",
        "max_staleness": (None, 0, 2)[seed % 3],
        "backup_workers": 1 if seed % 2 else 0,
        "window": rng.choice((1, 4, 32)),
    }
    checkpoints = () if fails else tuple(w for w in range(waves) if rng.random() < 0.5)
    return Plan(tuple(made), number, checkpoints, tuple(options.items()))


# -- all tasks --------------------------------------------------------------------------------------


class Notes(logging.Handler):
    """Appends the warnings of a process to a file."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.WARNING)
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().replace("ps task", "ps")
        line = json.dumps([time.monotonic(), text])
        os.write(self._file, line.encode() + b"\n")


def notes_in(path: Path) -> list[Named]:
    """The warnings of all processes."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Named(*json.loads(line)) for line in lines]


def task(control: str, notes: str, forgetful: bool = False) -> None:
    """Be a task of the job, until the process is killed.

    Args:
        control: where the player waits for the coordinator.
        notes: where to note warnings.
        forgetful: whether servers forget which closures they have applied.
    """
    logger = logging.getLogger("phalanx")
    logger.addHandler(Notes(notes))
    logger.propagate = False
    # Let servers forget closures all the time, not only after a thousand.
    dispatcher._REMEMBERED = 8
    store._FEW = 4
    if forgetful:
        store.Store._take = _take_and_forget  # type: ignore[method-assign]
    about = json.loads(os.environ["TF_CONFIG"])
    kind, index = about["task"]["type"], about["task"]["index"]
    if kind == "chief":
        coordinate(control)
    else:
        px.Server(about["cluster"], job_name=kind, task_index=index).join()


_take = store.Store._take


def _take_and_forget(self: Any, token: Any, updates: Any, value: bytes) -> None:
    _take(self, token, updates, value)
    self.applied.pop(token.closure, None)


# -- workers ----------------------------------------------------------------------------------------

_local = threading.local()


def stamp() -> np.ndarray[Any, Any]:
    """Who reads, which of its reads this is, and when: called where a closure begins."""
    if not hasattr(_local, "reader"):
        _local.reader, _local.order = random.SystemRandom().getrandbits(31), 0
    _local.order += 1
    now = time.monotonic()
    return np.array([_local.reader, _local.order, int(now), int(now % 1 * 1e6)], np.int32)


class Stamp:
    """An argument that becomes a stamp on the worker, each time that it arrives at one."""

    def __reduce__(self) -> Any:
        return stamp, ()


def step_function(
    marks: Any, later: Any, servers: tuple[int, ...], reads: bool, raises: int | None
) -> px.Function:
    def step(closure: Any, stamp: Any, needed: Any = None) -> Any:
        seen = [jnp.asarray(m.read_value()) for m in marks] if reads else []
        for server in servers:
            size = marks[server].shape[0]
            marks[server].assign_add((jnp.arange(size) == closure).astype(np.int32))
            later[server].assign_add(jnp.ones(size, np.int32))
            zero = px.IndexedSlices(jnp.zeros(1, np.int32), jnp.reshape(closure, (1,)))
            later[server].scatter_update(zero)
        if raises is not None:
            raise ValueError(f"this is the failure of closure {raises}")
        return closure, stamp, seen

    return px.function(step)


# -- the coordinator --------------------------------------------------------------------------------


def coordinate(control: str) -> None:
    """Do what the player says."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(control)
    player = Connection(sock.detach())
    while True:
        order = player.recv()
        if order is None:
            return
        try:
            Program(player, *order).play()
        except Exception as error:  # noqa: BLE001 - told to the test
            player.send(("error", f"{type(error).__name__}: {error}"))


class Program:
    """One run of a coordinator.

    Args:
        player: hears of what happens.
        run: its number.
        plan: what to do.
        cluster: the addresses of the tasks.
        folder: for checkpoints.
        restored: the wave whose checkpoint to begin with, or -1.
    """

    def __init__(
        self,
        player: Connection,
        run: int,
        plan: Plan,
        cluster: dict[str, list[str]],
        folder: str,
        restored: int,
    ) -> None:
        self._player, self._run, self._plan, self._restored = player, run, plan, restored
        self._folder = Path(folder)
        options = px.experimental.ParameterServerOptions(
            worker_timeout=40.0, server_timeout=30.0, **dict(plan.options)
        )
        resolver = px.cluster_resolver.SimpleClusterResolver(px.train.ClusterSpec(cluster))
        self._strategy = px.ParameterServerStrategy(resolver, options=options)
        zeros = np.zeros(plan.size, np.int32)
        with self._strategy.scope():
            self._marks = [px.Variable(zeros) for _ in range(SERVERS)]
            self._later = [px.Variable(zeros) for _ in range(SERVERS)]
        self._reads = 0
        self._functions: dict[Any, px.Function] = {}

    def play(self) -> None:
        """Schedule everything, and tell the player."""
        checkpoint = None if self._restored < 0 else self._folder / str(self._restored)
        coordinator = ClusterCoordinator(self._strategy, restore_from=checkpoint)
        try:
            if checkpoint is not None:
                self._restore(coordinator)
            for number in range(self._restored + 1, len(self._plan.waves)):
                self._wave(coordinator, number)
                self._player.send(self._view())
            later = tuple(tuple(v.numpy().tolist()) for v in self._later)
            effects = tuple(tuple(v.numpy().tolist()) for v in self._marks)
            self._player.send(ServersAtEnd(time.monotonic(), effects, later))
            self._player.send(("report", self._counts(coordinator)))
        finally:
            coordinator.close()
            self._strategy.close()  # else its watch would ask servers of later programs for this run
        self._player.send(("end",))

    def _counts(self, coordinator: ClusterCoordinator) -> dict[str, int]:
        """What was done because of faults."""
        servers = self._strategy.extended.connect().status()
        told = {what: sum(s[what] for s in servers) for what in ("duplicates", "refused")}
        return {**told, "retried": coordinator.report()["retried"]}

    def _restore(self, coordinator: ClusterCoordinator) -> None:
        coordinator.join()
        for value in coordinator.restored:
            found = value.fetch()
            self._player.send(self._done(int(found[0]), found))
        self._player.send(self._view())

    def _wave(self, coordinator: ClusterCoordinator, number: int) -> None:
        """Schedule closures until the player has no more faults for this wave, and join."""
        steps, values = self._plan.waves[number], dict[int, Any]()
        self._player.send(("wave", number))
        left = None  # how many closures there will be after the last fault
        for i, step in enumerate(steps):
            if left is None and self._player.poll():
                assert self._player.recv() == number
                left = LEAST
            if left is not None:
                left -= 1
                if left < 0:
                    break
            if i >= AT_ONCE and i % 2:
                self._end_oldest(values)
            self._submit(coordinator, step, values)
        if number in self._plan.checkpoints:
            coordinator.checkpoint(self._folder / str(number))
        if left is None:
            assert self._player.recv() == number
        try:
            coordinator.join()
        except ValueError as error:
            self._raised(error)
        while values:
            self._end_oldest(values)

    def _submit(self, coordinator: ClusterCoordinator, step: Step, values: dict[int, Any]) -> None:
        needs = () if step.needs is None or step.needs not in values else (step.needs,)
        self._player.send(ClosureSubmitted(self._run, step.closure, step.servers, needs))
        args = (np.int32(step.closure), Stamp(), *(values[n] for n in needs))
        try:
            values[step.closure] = coordinator.schedule(self._function(step), args=args)
        except ValueError as error:
            self._raised(error)
            self._player.send(self._ended(step.closure, "cancelled"))

    def _end_oldest(self, values: dict[int, Any]) -> None:
        closure = next(iter(values), None)
        if closure is not None:
            self._player.send(self._outcome(closure, values.pop(closure)))

    def _function(self, step: Step) -> px.Function:
        key = step.closure if step.raises else (step.servers, step.reads)
        if key not in self._functions:
            raises = step.closure if step.raises else None
            made = step_function(self._marks, self._later, step.servers, step.reads, raises)
            self._functions[key] = made
        return self._functions[key]

    def _raised(self, error: BaseException) -> None:
        self._player.send(ClosureRaised(self._run, int(str(error).split()[-1])))

    def _outcome(self, closure: int, value: Any) -> ClosureEnded:
        try:
            found = value.fetch()
        except px.errors.CancelledError:
            return self._ended(closure, "cancelled")
        except ValueError:
            return self._ended(closure, "failed")
        return self._done(closure, found)

    def _done(self, closure: int, found: Any) -> ClosureEnded:
        if not found[2]:
            return self._ended(closure, "done")
        reader, order, seconds, micro = np.asarray(found[1]).tolist()
        seen = tuple(frozenset(np.flatnonzero(np.asarray(s)).tolist()) for s in found[2])
        view = ServersRead(self._run, f"worker session {reader}", order, seconds + micro / 1e6, seen)
        return self._ended(closure, "done", view)

    def _ended(self, closure: int, outcome: str, view: ServersRead | None = None) -> ClosureEnded:
        return ClosureEnded(self._run, closure, time.monotonic(), outcome, view)

    def _view(self) -> ServersRead:
        self._reads += 1
        begun = time.monotonic()
        seen = tuple(frozenset(np.flatnonzero(v.numpy()).tolist()) for v in self._marks)
        return ServersRead(self._run, "the coordinator", self._reads, begun, seen)
