"""Commits that belong to no closure, settled by any task while their own one is dead or slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

from phalanx.parameter_server import wire
from phalanx.parameter_server.local import LocalServers
from phalanx.parameter_server.own_tokens import TokenLine
from phalanx.parameter_server.recovery import verdict
from phalanx.parameter_server.requests import Commit, Token, Update
from phalanx.parameter_server.store import Outcome, Store
from phalanx.parameter_server.wire import Kind
from tests.parameter_server.jobs import Job
from tests.parameter_server.protocol_model import Kept, Unfenced, _act
from tests.parameter_server.running import SECONDS, add, connections, running, value_of, variable

SERVERS = (0, 1)

Steps = Generator[tuple[str, int, int], Any, Any]
"""What a task asks for: kind, server and attempt; it gets the answer."""


def commit() -> Steps:
    """What `ServersHome` does; returns whether it believes that its updates count."""
    for attempt in range(2):
        answers = []
        for kind in ("stage", "commit"):
            if Outcome.REFUSED not in answers:
                answers = []
                for server in SERVERS:
                    answers.append((yield kind, server, attempt))
        if Outcome.REFUSED not in answers:
            return True
        if (yield from settle(attempt)):
            return True
    return False


def settle(attempt: int = 0) -> Steps:
    """What `ServerConnections.settle` does."""
    found = []
    for server in SERVERS:
        found.append((yield "inquire", server, attempt))
    committed = verdict(found, None).committed
    for server in SERVERS:
        yield "keep" if committed else "forget", server, attempt
    return committed


LAST = [partial(settle, attempt) for attempt in range(2)]
"""What another task does at the end, for each attempt."""


def advanced(make: Callable[[], Steps], answers: Sequence[Any]) -> tuple[Any, Any]:
    """What a task asks for after these answers, or what it returns."""
    task = make()
    try:
        asked = next(task)
        for answer in answers:
            asked = task.send(answer)
    except StopIteration as end:
        return None, end.value
    return asked, None


def violations(store: type[Store]) -> tuple[int, list[Any]]:
    """All orders of a commit and of two tasks that settle it, with a death at any point."""
    act = lru_cache(None)(lambda kept, kind, attempt: _act(store, kept, kind, attempt))
    look = lru_cache(None)(advanced)
    tasks = (commit, settle, settle)
    start: Any = ((Kept(),) * 2, ((),) * 3, True)
    seen, todo, wrong = {start}, [start], []

    def ask(servers: Any, asked: Any) -> tuple[Any, Any]:
        kind, server, attempt = asked
        kept, answer = act(servers[server], kind, attempt)
        return (*servers[:server], kept, *servers[server + 1 :]), answer

    def check(servers: Any, is_alive: bool, believes: bool) -> None:
        for attempt in range(2) if not is_alive else ():  # as a task that is left will do
            answers: tuple[Any, ...] = ()
            while (asked := look(LAST[attempt], answers)[0]) is not None:
                servers, answer = ask(servers, asked)
                answers = (*answers, answer)
        times = [kept.times for kept in servers]
        allowed = [[1, 1]] if believes else [[0, 0], [1, 1]]
        if times not in allowed:
            wrong.append((servers, is_alive, believes))

    while todo:
        servers, histories, is_alive = todo.pop()
        following = []
        for i, task in enumerate(tasks):
            asked, result = look(task, histories[i])
            if i == 0 and asked is None:
                check(servers, True, result)
            if asked is None or (i == 0 and not is_alive):
                continue
            after, answer = ask(servers, asked)
            history = (*histories[i], answer)
            following.append((after, (*histories[:i], history, *histories[i + 1 :]), is_alive))
        if is_alive and look(commit, histories[0])[0] is not None:
            following.append((servers, histories, False))
        if not is_alive:
            check(servers, False, False)
        for world in following:
            if world not in seen:
                seen.add(world)
                todo.append(world)
    return len(seen), wrong


def test_a_commit_counts_once_on_all_servers_in_all_orders() -> None:
    count, wrong = violations(Store)
    assert count > 500
    assert not wrong


def test_without_the_fence_some_would_be_half_done() -> None:
    assert violations(Unfenced)[1]


class Impatient(LocalServers):
    """Servers whose attempts are settled by another task, at a moment that the test chooses."""

    def __init__(self, moment: str) -> None:
        super().__init__(2)
        self._moment = moment
        self.attempts: list[int] = []

    def push(self, token: Token, updates: Sequence[Update], value: bytes = b"") -> Commit:
        self.attempts.append(token.attempt)
        if token.attempt:
            return super().push(token, updates, value)
        if self._moment == "before":
            self.settle([token])
            return super().push(token, updates, value)
        super().push(token, updates, value)  # and another task has settled it while its answer came
        return Commit(False)


@pytest.mark.parametrize(("moment", "attempts"), [("before", [0, 1]), ("after", [0])])
def test_a_task_that_was_taken_for_lost_makes_its_updates_once(
    moment: str, attempts: list[int]
) -> None:
    job = Job(2)
    servers = Impatient(moment)
    job.use(servers)
    v = job.variable(np.zeros(3, np.float32))
    w = job.variable(np.zeros(3, np.float32))

    def add() -> None:
        v.assign_add(np.ones(3, np.float32))
        w.assign_add(np.ones(3, np.float32))

    add()
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([1.0] * 3, [1.0] * 3)
    assert servers.attempts == attempts * 2


@pytest.mark.parametrize("committed", [0, 1])
def test_no_reader_sees_half_of_a_commit_whose_task_is_gone(
    committed: int, caplog: pytest.LogCaptureFixture
) -> None:
    variables = [variable(i, server=i) for i in SERVERS]
    with running(len(SERVERS)) as servers, connections(servers) as reader:
        for v in variables:
            reader.create(v, np.zeros((), np.float32))
        task = connections(servers, reader.run)  # type: ignore[attr-defined]
        token = TokenLine().take()
        for i in SERVERS:
            task._call(i, wire.push(Kind.STAGE, token, [add(variables[i])]))
        assert value_of(reader, variables[1]) == 0.0, "its task lives, and is not disturbed"
        assert not caplog.messages
        for i in SERVERS[:committed]:
            assert task._call(i, [wire.about(Kind.COMMIT, token)]) == [b"\x00"]
        task.close()
        give_up = time.monotonic() + SECONDS
        while not reader.status()[1]["doubtful"]:  # as soon as the server hears of the end
            assert time.monotonic() < give_up
        assert [value_of(reader, v) for v in variables] == [float(committed)] * 2
        assert ["dropped", "made"][committed] in caplog.text
        assert not any(status["doubtful"] for status in reader.status())
