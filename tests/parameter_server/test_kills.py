"""Servers that are killed in the middle of everything, and come back with all they acknowledged."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import optax
import pytest

from phalanx.parameter_server.client import ServerConnections
from phalanx.parameter_server.durability import Durability
from phalanx.parameter_server.requests import (
    Commit,
    OptimizerDefinition,
    Read,
    Token,
    Update,
)
from tests.parameter_server.running import KEY, add, value_of, variable

COUNTERS = [variable(0, server=0), variable(1, server=1)]
TABLE = variable(2, (200, 200), "float32", 1)
STATE = variable(3, (4,), "float32", 0)


class Processes:
    """Two servers, each in a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._running: list[subprocess.Popen[str]] = []
        self.addresses: list[str] = []
        for _ in range(2):
            self._running.append(self._start(len(self._running), "127.0.0.1:0"))
        for process in self._running:
            assert process.stdout is not None
            self.addresses.append(process.stdout.readline().strip())

    def _start(self, server: int, address: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.parameter_server.server_process", address]
        process = subprocess.Popen(
            [*command, str(self._folder / str(server))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._started.append(process)
        return process

    def kill(self, server: int) -> None:
        """Kill a server, and start it again without waiting for it."""
        self._running[server].kill()
        self._running[server].wait(20)
        self._running[server] = self._start(server, self.addresses[server])

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate(timeout=20)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.close()


def push_and_kill(processes: Processes, closures: int, kills: int, seed: int) -> None:
    rng, below = random.Random(seed), 0
    moments = {rng.randrange(closures): i % 2 for i in range(kills)}
    durability = Durability("log", limit=4 << 20)
    with ServerConnections(
        processes.addresses, KEY, "run", begin=True, durability=durability, timeout=60.0
    ) as servers:
        for v in (*COUNTERS, TABLE, STATE):
            servers.create(v, np.zeros(v.shape, np.float32))
        servers.define_optimizer(
            OptimizerDefinition(1, cloudpickle.dumps(optax.sgd(1.0, momentum=0.5)))
        )
        done: dict[int, Commit] = {}
        for closure in range(closures):
            updates = [add(v) for v in COUNTERS]
            updates += [add(TABLE), Update(STATE, "apply", np.ones(4, np.float32), None, 1)]
            chosen = updates if closure % 2 else updates[:1]
            note = partial(done.__setitem__, closure)
            servers.push_later(Token(closure), chosen, b"", note)
            if closure in moments:
                processes.kill(moments[closure])
                assert value_of(servers, COUNTERS[0]) == closure + 1.0
            while below in done:
                below += 1
            servers.forget(below)
        servers.collect(wait=True)
        assert done == dict.fromkeys(range(closures), Commit(True))
        assert value_of(servers, COUNTERS[0]) == closures
        assert value_of(servers, COUNTERS[1]) == closures // 2
        assert (servers.pull([Read(TABLE)])[0] == closures // 2).all()
        momentum, value = 0.0, 0.0
        for _ in range(closures // 2):
            momentum = 0.5 * momentum + 1.0
            value -= momentum
        np.testing.assert_allclose(servers.pull([Read(STATE)])[0], [value] * 4, 1e-5)


def test_nothing_is_lost_or_done_twice(processes: Processes) -> None:
    push_and_kill(processes, closures=200, kills=2, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_done_twice_by_many_kills(processes: Processes, seed: int) -> None:
    push_and_kill(processes, closures=3000, kills=12, seed=seed)
