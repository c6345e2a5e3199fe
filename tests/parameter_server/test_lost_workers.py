"""Workers that die, or are believed dead, at any point of a commit, over real connections."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from phalanx.parameter_server.client import ServerConnections
from phalanx.parameter_server.requests import Commit, Token
from phalanx.parameter_server.server_link import ServerLink
from phalanx.parameter_server.store import Store, Trace
from tests.parameter_server.running import RunningServer, add, connections, running, value_of, variable

COUNTERS = [variable(i, server=i) for i in range(3)]
BIG = variable(3, (200, 200), server=0)


class Death(BaseException):
    """The worker stops here."""


class Mortal:
    """Lets a worker stop after so many requests, or waits for answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for name in ("ask", "answer", "flush"):
            monkeypatch.setattr(ServerLink, name, self._counted(getattr(ServerLink, name)))

    def _counted(self, method: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            if self.left == 0:
                self.left = -1
                if method.__name__ == "ask":
                    args[0].pending.append(args[1:3])  # it is late
                raise Death
            self.left -= self.left > 0
            return method(*args, **options)

        return counted


class Job:
    """A coordinator that loses workers, and runs their closures again."""

    def __init__(self, servers: list[RunningServer], mortal: Mortal, seed: int, arbiter: bool) -> None:
        self.servers, self.mortal, self.random = servers, mortal, random.Random(seed)
        self.arbiter = arbiter
        self.chief = connections(servers, arbiter=arbiter)
        for v in (*COUNTERS, BIG):
            self.chief.create(v, np.zeros(v.shape, np.float32))
        self.expected = dict.fromkeys(range(4), 0)
        self.zombies: list[ServerConnections] = []
        self.worker = self._new_worker()
        self.in_doubt = self.committed = 0

    def _new_worker(self) -> ServerConnections:
        return connections(self.servers, self.chief.run, arbiter=self.arbiter)  # type: ignore[attr-defined]

    def run(self, closure: int) -> None:
        variables = self.random.sample([*COUNTERS, BIG], self.random.randrange(1, 5))
        for v in variables:
            self.expected[v.id] += 1
        for attempt in range(20):
            if self._try(Token(closure, attempt), [add(v) for v in variables]):
                return
            self._bury()
        raise AssertionError(f"closure {closure} is never done")

    def _try(self, token: Token, updates: list[Any]) -> bool:
        """An attempt; whether it counts."""
        if self.random.random() < 0.4:
            self.mortal.left = self.random.randrange(20)
        try:
            commit = self.worker.push(token, updates, b"%d" % token.closure)
            self.mortal.left = -1
            assert commit == Commit(True)
            return True
        except Death:
            self.mortal.left = -1
        self.in_doubt += 1
        settled = self.chief.settle([token])[token]
        if settled.committed:
            assert settled.value == b"%d" % token.closure
            self.committed += 1
            self._bury()
        return settled.committed

    def _bury(self) -> None:
        """The worker is gone, or goes on later as if nothing had happened."""
        if self.random.random() < 0.5:
            self.zombies.append(self.worker)
        else:
            self.worker.close()
        self.worker = self._new_worker()
        if self.zombies and self.random.random() < 0.5:
            self._go_on(self.zombies.pop(0))

    def _go_on(self, zombie: ServerConnections) -> None:
        for link in zombie._links:
            link._lose()  # so that everything without an answer is sent again
        zombie.collect(wait=True)
        zombie.close()

    def check(self) -> None:
        for zombie in self.zombies:
            self._go_on(zombie)
        found = {v.id: value_of(self.chief, v) for v in COUNTERS}
        found[3] = float(np.unique(np.asarray(value_of(self.chief, BIG))).item())
        assert found == self.expected

    def close(self) -> None:
        for found in (self.chief, self.worker, *self.zombies):
            found.close()


def closures(seed: int, count: int, arbiter: bool, monkeypatch: pytest.MonkeyPatch) -> Job:
    with running(3) as servers:
        job = Job(servers, Mortal(monkeypatch), seed, arbiter)
        try:
            for closure in range(count):
                job.run(closure)
            job.check()
        finally:
            job.close()
    return job


@pytest.mark.parametrize("arbiter", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_closure_counts_once(seed: int, arbiter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = closures(seed, 60, arbiter, monkeypatch)
    assert job.in_doubt > job.committed > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 23))
def test_every_closure_counts_once_in_long_runs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    closures(seed, 1000, seed % 2 == 0, monkeypatch)


@pytest.mark.parametrize("flaw", ["no fence", "no memory"])
def test_a_flaw_of_servers_is_found(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if flaw == "no fence":
        inquire = Store.inquire

        def unfenced(store: Store, token: Token) -> tuple[Trace, bytes]:
            found = inquire(store, token)
            store.fences.clear()
            return found

        monkeypatch.setattr(Store, "inquire", unfenced)
    else:
        monkeypatch.setattr(Store, "_may", lambda store, token: None)
    with pytest.raises(AssertionError):
        closures(0, 300, False, monkeypatch)
