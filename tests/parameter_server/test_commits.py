"""Updates that travel with the reads of the next closure, and count later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from phalanx.parameter_server.recovery import verdict
from phalanx.parameter_server.requests import Commit, Read, Token
from phalanx.parameter_server.store import Outcome, Store
from tests.parameter_server.running import RunningServer, add, connections, running, value_of, variable

V, W = variable(0), variable(1, server=1)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[RunningServer]]:
    with running(2) as servers:
        yield servers


@pytest.fixture
def tasks(pair: list[RunningServer]) -> Iterator[tuple[Any, Any]]:
    with connections(pair) as chief:
        for v in (V, W):
            chief.create(v, np.zeros((), np.float32))
        with connections(pair, chief.run) as worker:  # type: ignore[attr-defined]
            yield chief, worker


def test_a_task_sees_its_updates_before_they_count(tasks: tuple[Any, Any]) -> None:
    chief, worker = tasks
    done: list[Commit] = []
    worker.push_later(Token(0), [add(V), add(W)], b"", done.append, hold=True)
    assert value_of(worker, V) == 1.0
    assert value_of(chief, V) == value_of(chief, W) == 0.0
    assert not done
    assert worker.is_ahead
    worker.collect(wait=True)
    assert done == [Commit(True)]
    assert value_of(chief, V) == value_of(chief, W) == 1.0
    assert not worker.is_ahead


def test_a_closure_takes_one_message_to_each_server(tasks: tuple[Any, Any]) -> None:
    _, worker = tasks
    done: list[Commit] = []

    def run(closures: range) -> None:
        for closure in closures:
            assert [x.tolist() for x in worker.pull([Read(V), Read(W)])] == [closure, closure]
            worker.push_later(Token(closure), [add(V), add(W)], b"", done.append, hold=True)

    run(range(3))
    before = [link._number for link in worker._links]
    run(range(3, 23))
    assert [link._number - n for link, n in zip(worker._links, before, strict=True)] == [20, 20]
    worker.collect(wait=True)
    assert done == [Commit(True)] * 23


def test_what_was_read_must_count(tasks: tuple[Any, Any]) -> None:
    """The worker is believed lost after it has read its own updates, and before they count."""
    chief, worker = tasks
    done: list[Commit] = []
    worker.push_later(Token(0), [add(V), add(W)], b"", done.append, hold=True)
    assert value_of(worker, V) == 1.0
    worker.push_later(Token(1), [], b"", done.append)  # it has only read
    assert not chief.settle([Token(0)])[Token(0)].committed
    worker.push_later(Token(2), [add(W)], b"", done.append)
    worker.push_later(Token(3), [add(V), add(W)], b"", done.append)
    worker.collect(wait=True)
    assert done == [Commit(False)] * 3 + [Commit(True)], "the last one has read nothing since"
    assert value_of(chief, V) == value_of(chief, W) == 1.0
    assert [s["staged"] for s in chief.status()] == [0, 0]


def test_what_is_refused_is_read_again(tasks: tuple[Any, Any]) -> None:
    chief, worker = tasks
    done: list[Commit] = []
    worker.push_later(Token(0), [add(V), add(W)], b"", done.append, hold=True)
    chief.settle([Token(0)])
    assert value_of(worker, V) == 0.0
    worker.push_later(Token(1), [add(V)], b"", done.append)
    worker.collect(wait=True)
    assert done == [Commit(False), Commit(True)]


# -- all orders of messages ------------------------------------------------------------------------

FIRST, SECOND = Token(0), Token(1)  # which concern servers 0 and 2, and server 1


class _World:
    """Three servers; a worker of two closures; a coordinator that takes the worker for lost."""

    def __init__(self, waits: bool) -> None:
        self.stores = [Store() for _ in range(3)]
        for i, store in enumerate(self.stores):
            store.create(variable(i, server=i), np.zeros((), np.float32))
        self.waits = waits
        self.committed: list[bool] = []  # the answers to the commits of the first closure
        self.is_pushed = False
        self.left = {0, 2}  # servers to which its commit is on the way
        self.found: dict[int, Any] = {}
        for i in self.left:
            self.stores[i].stage(FIRST, [add(variable(i, server=i))])

    def steps(self) -> list[Callable[[_World], None]]:
        steps: list[Callable[[_World], None]] = []
        steps += [lambda w, i=i: w.commit(i) for i in self.left]  # type: ignore[misc]
        if not self.is_pushed and (any(self.committed) or not self.waits):
            steps.append(lambda w: w.push())
        steps += [lambda w, i=i: w.inquire(i) for i in range(3) if i not in self.found]  # type: ignore[misc]
        return steps

    def commit(self, i: int) -> None:
        self.left.remove(i)
        self.committed.append(self.stores[i].commit(FIRST) is Outcome.DONE)

    def push(self) -> None:
        self.is_pushed = True
        self.stores[1].push(SECOND, [add(variable(1, server=1))])

    def inquire(self, i: int) -> None:
        self.found[i] = [self.stores[i].inquire(token) for token in (FIRST, SECOND)]
        if len(self.found) == 3:
            for k, token in enumerate((FIRST, SECOND)):
                counts = verdict([self.found[j][k] for j in range(3)], None).committed
                for store in self.stores:
                    store.decide(token, counts)

    @property
    def is_wrong(self) -> bool:
        """Whether the second closure counts although what it has read does not."""
        first, second, third = (bool(s.held(i).value) for i, s in enumerate(self.stores))
        return first != third or (second and not first)


def _ends(world: _World) -> Iterator[_World]:
    steps = world.steps()
    if not steps:
        yield world
    for step in steps:
        following = copy.deepcopy(world)
        step(following)
        yield from _ends(following)


def test_no_closure_counts_that_has_read_what_does_not() -> None:
    assert not any(world.is_wrong for world in _ends(_World(waits=True)))


def test_without_waiting_for_the_first_commit_one_does() -> None:
    assert any(world.is_wrong for world in _ends(_World(waits=False)))
