"""Plays fault schedules: a job of real processes, faults at their moments, and its history."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.coordinator.fault_tasks import SERVERS, Plan, notes_in

import phalanx as px
from phalanx.testing.faults.history import CoordinatorRestarted, Happened, History
from phalanx.testing.faults.proxies import Proxies
from phalanx.testing.faults.schedules import Fault, Schedule, random_schedule

WORKERS = 3
DEADLINE = 90.0  # seconds without an event of a schedule
STARTED = 30.0  # seconds for a process
CHIEF = "chief 0"
NETWORK = ("cut", "delay", "lose_answers", "deliver_late")


def tasks_with_faults(*, chief: bool) -> dict[str, list[str]]:
    """The tasks, and what may happen to each of them."""
    found = {f"worker {i}": ["kill", "freeze", "isolate", *NETWORK] for i in range(WORKERS)}
    found |= {f"ps {i}": ["kill", "freeze", *NETWORK] for i in range(SERVERS)}
    return found | ({CHIEF: ["kill", "freeze"]} if chief else {})


def schedule_of(seed: int, plan: Plan) -> Schedule:
    """The faults that follow from a seed."""
    raises = any(step.raises for wave in plan.waves for step in wave)
    tasks = tasks_with_faults(chief=not raises)
    return random_schedule(seed, tasks, len(plan.waves))


def _be_a_task(*args: Any) -> None:
    """Processes get this function; they import the rest themselves."""
    from tests.coordinator.fault_tasks import task

    task(*args)


class Player:
    """A job of processes that plays one schedule after the other.

    Args:
        folder: for files.
        forgetful: whether servers forget which closures they have applied.
    """

    def __init__(self, folder: Path, *, forgetful: bool = False) -> None:
        self._home, self._forgetful = folder, forgetful
        self._plays = itertools.count()
        self._is_spoilt = False
        self.counts: Counter[str] = Counter()
        """How many faults have happened, and what tasks have done because of them."""
        self._start(folder)

    def _start(self, folder: Path) -> None:
        self._folder = folder
        self._notes = folder / "notes"
        self._listener = socket.socket(socket.AF_UNIX)
        control = str(folder / "control")
        self._listener.bind(control)
        self._listener.listen()
        self._listener.settimeout(STARTED)
        self._cluster = px.testing.MultiProcess(
            WORKERS,
            ps=SERVERS,
            chief=True,
            preload=["phalanx", "tests.coordinator.fault_tasks"],
            env={"PHALANX_STATE": str(folder / "state")},
        )
        self._cluster.__enter__()
        names = [CHIEF]
        names += [f"{kind} {i}" for kind, n in (("worker", WORKERS), ("ps", SERVERS)) for i in range(n)]
        self._index = {name: i for i, name in enumerate(names)}
        addresses = {name: self._cluster._tasks[i].address for name, i in self._index.items()}
        self._proxies = Proxies({n: a for n, a in addresses.items() if n != CHIEF})
        self._cluster.start(_be_a_task, control, str(self._notes), self._forgetful)
        self._chief: Connection | None = self._accept()

    def close(self) -> None:
        """End all processes."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._listener.close)
            stack.callback(self._cluster.close)
            stack.callback(self._kill_all)
            stack.callback(self._proxies.close)

    def _kill_all(self) -> None:
        for index in self._index.values():
            if self._cluster.alive(index):
                self._cluster.cont(index)
                self._cluster.kill(index)

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self) -> Connection:
        sock, _ = self._listener.accept()
        return Connection(sock.detach())

    def play(self, plan: Plan, schedule: Schedule) -> History:
        """Run a program while the faults of a schedule happen."""
        number = next(self._plays)
        if self._is_spoilt:  # what a play has left that did not come to its end is no part of this one
            self.close()
            folder = self._home / f"from-{number}"
            folder.mkdir()
            self._start(folder)
        self._is_spoilt = True
        history = _Play(self, plan, schedule, self._folder / f"play-{number}").run()
        self._is_spoilt = False
        return history


class _Play:
    """One schedule, while it is played."""

    def __init__(self, player: Player, plan: Plan, schedule: Schedule, folder: Path) -> None:
        self._player, self._plan, self._schedule, self._folder = player, plan, schedule, folder
        folder.mkdir()
        self._history = History()
        self._cluster, self._proxies = player._cluster, player._proxies
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._run = -1
        self._waves: set[int] = set()  # whose faults have happened
        self._down: set[str] = set()  # tasks that are dead or frozen
        self._is_over = False
        self._error = ""
        self._heard = time.monotonic()

    def run(self) -> History:
        """Play it."""
        seen = len(notes_in(self._player._notes))
        self._begin()
        while not self._is_over or self._todo:
            now = time.monotonic()
            end = self._heard + DEADLINE
            assert now < end, f"{self._state()}\n{self._stacks()}"
            while self._todo and self._todo[0][0] <= now:
                heapq.heappop(self._todo)[2]()
            if self._is_over and not self._todo:
                break
            left = max(0.0, min(end, self._todo[0][0] if self._todo else end) - time.monotonic())
            self._listen(left)
        for note in notes_in(self._player._notes)[seen:]:
            self._history.add(note)
        assert not self._error, f"{self._error}\n{self._state()}"
        return self._history

    def _state(self) -> str:
        return (
            f"{self._schedule}\n{self._plan.options}, checkpoints {self._plan.checkpoints}, "
            f"run {self._run}, waves {self._waves}, down {self._down}; the last event is "
            f"{self._history.events[-1:]}"
        )

    def _stacks(self) -> str:
        found = self._cluster.stacks(list(self._player._index.values()))
        return "\n\n".join(f"{i}: {text}" for i, text in found.items())

    # -- the coordinator -------------------------------------------------------------------------

    def _begin(self) -> None:
        """Let the coordinator begin, or begin again from its latest checkpoint."""
        self._run += 1
        kept = [int(f.name) for f in self._folder.iterdir() if f.name.isdigit()]
        cluster: dict[str, list[str]] = {"worker": [], "ps": []}
        for name, address in self._proxies.addresses.items():
            cluster[name.split()[0]].append(address)
        last = max(kept, default=-1)
        if self._run:
            size = len(self._plan.waves[0])
            self._history.add(CoordinatorRestarted(self._run, (last + 1) * size))
        order = self._run, self._plan, cluster, str(self._folder), last
        assert self._player._chief is not None
        self._player._chief.send(order)

    def _listen(self, seconds: float) -> None:
        """Hear what the coordinator says, until it is time for something else."""
        chief = self._player._chief
        if chief is None:
            select_nothing(seconds)
            return
        try:
            if chief.poll(seconds):
                self._take(chief.recv())
        except (EOFError, ConnectionResetError):
            assert CHIEF in self._down, f"the coordinator died: {self._state()}"
            self._player._chief = None

    def _take(self, event: Any) -> None:
        self._heard = time.monotonic()
        if not isinstance(event, tuple):
            self._history.add(event)
        elif event[0] == "wave":
            faults = [] if event[1] in self._waves else self._schedule.of(event[1])
            self._waves.add(event[1])
            now = time.monotonic()
            for fault in faults:
                self._at(now + fault.after, partial(self._inject, fault))
            self._at(
                now + max((f.after for f in faults), default=0.0),
                partial(self._go_on, self._run, event[1]),
            )
        elif event[0] == "report":
            for what, count in event[1].items():
                self._player.counts[what] += count
        else:
            self._is_over = True
            self._error = " ".join(event[1:])

    def _go_on(self, run: int, wave: int) -> None:
        """There are no more faults in a wave."""
        if self._player._chief is not None and run == self._run:
            with contextlib.suppress(BrokenPipeError):  # it was killed
                self._player._chief.send(wave)

    # -- faults ----------------------------------------------------------------------------------

    def _at(self, moment: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._todo, (moment, next(self._numbers), call))

    def _inject(self, fault: Fault) -> None:
        kind, name, seconds = fault.kind, fault.task, fault.seconds
        index = self._player._index[name]
        if name in self._down or (self._is_over and name == CHIEF):
            return  # it has a fault already, or there is nothing left to disturb
        self._player.counts[fault.kind] += 1
        begun = time.monotonic()
        if kind in NETWORK:
            cut = getattr(self._proxies, kind)
            cut(name) if kind == "cut" else cut(name, seconds)
            return
        self._down.add(name)
        if kind == "kill":
            self._cluster.kill(index)
            self._at(begun + seconds, lambda: self._restart(fault, begun))
            return
        self._cluster.stop(index)
        if kind == "isolate":
            self._proxies.cut(name)
        self._at(begun + seconds, lambda: self._continue(fault, begun))

    def _restart(self, fault: Fault, begun: float) -> None:
        self._note(fault, begun)
        self._cluster.restart(self._player._index[fault.task])
        if fault.task == CHIEF:
            while self._player._chief is not None:
                self._listen(0.0)
            self._player._chief = self._player._accept()
            self._begin()
        self._down.discard(fault.task)

    def _continue(self, fault: Fault, begun: float) -> None:
        self._note(fault, begun)
        self._cluster.cont(self._player._index[fault.task])
        self._down.discard(fault.task)

    def _note(self, fault: Fault, begun: float) -> None:
        self._history.add(Happened(fault.kind, fault.task, begun, time.monotonic()))


def select_nothing(seconds: float) -> None:
    """There is nobody to listen to until then."""
    select.select([], [], [], seconds)
