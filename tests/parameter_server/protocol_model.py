"""All that can happen to one closure: every order of messages, deaths, cuts and mistaken losses.

Servers are real stores. Workers, the coordinator and the connections are modelled: a worker may die at
any point, and of what it has sent any beginning may arrive. A connection may break: what has no answer
is sent again, and what was on its way may arrive as well, later. The coordinator may believe a worker
lost that goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from phalanx.parameter_server.recovery import verdict
from phalanx.parameter_server.requests import Token, Update, VariableDefinition
from phalanx.parameter_server.store import Outcome, Store, Trace

SERVERS = 2
CLOSURE = 4  # whose home is server 0
VARIABLE = VariableDefinition(0, "v", (), "int32", 0)
ADD = [Update(VARIABLE, "assign_add", np.ones((), np.int32))]

PROGRAMS = {
    "several servers": [("stage", (0, 1)), ("commit", (0, 1))],
    "one server": [("push", (0,))],
    "arbiter": [("stage", (1,)), ("push", (0,)), ("commit", (1,))],
}
"""What an attempt sends to which servers; the next phase begins when all have answered."""


class Kept(NamedTuple):
    """What a store knows of the closure, and how often it has changed its variable."""

    applied: int = -1
    staged: frozenset[int] = frozenset()
    fences: frozenset[int] = frozenset()
    times: int = 0


class Worker(NamedTuple):
    """An attempt: how far it is, and whose answers it waits for."""

    state: str = "idle"  # running, done, refused, dead
    phase: int = -1
    waiting: frozenset[int] = frozenset()


class Recovery(NamedTuple):
    """What the coordinator does about an attempt."""

    state: str = "running"  # asking, deciding, over
    answers: tuple[Any, ...] = ()


@dataclass(frozen=True)
class World:
    """Everything at one moment. Queues are by attempt and server."""

    servers: tuple[Kept, ...]
    workers: tuple[Worker, ...]
    recoveries: tuple[Recovery, ...]
    requests: tuple[tuple[tuple[str, ...], ...], ...]
    ghosts: tuple[tuple[tuple[str, ...], ...], ...]
    replies: tuple[tuple[tuple[Outcome, ...], ...], ...]
    inquiries: tuple[tuple[tuple[str, int], ...], ...]  # from the coordinator, by server
    findings: tuple[tuple[tuple[int, Any], ...], ...]  # to the coordinator
    cuts: int
    is_done: bool = False


class ByAttempt(Store):
    """A store that knows the attempts that it has applied, but not that they are of one closure."""

    def _may(self, token: Token) -> Outcome | None:
        outcome = super()._may(token)
        is_other = outcome is Outcome.REFUSED and token.attempt not in self.fences.get(
            token.closure, ()
        )
        return None if is_other else outcome


class _Unfenced:
    def inquire(self, token: Token) -> tuple[Trace, bytes]:
        found = super().inquire(token)  # type: ignore[misc]
        self.fences.clear()  # type: ignore[attr-defined]
        return found  # type: ignore[no-any-return]


class Unfenced(_Unfenced, Store):
    """A store with the flaw: an inquiry does not fence."""


class UnfencedByAttempt(_Unfenced, ByAttempt):
    """The same flaw, where nothing else is in the way."""


class Forgetful(Store):
    """A store with another flaw: it does not know what it has applied."""

    def _may(self, token: Token) -> Outcome | None:
        return None


def violations(
    program: str, store: type[Store] = Store, attempts: int = 2, together: int = 1, cuts: int = 1
) -> tuple[int, list[str]]:
    """How many states there are, and what is wrong in some of them.

    Args:
        program: what attempts do.
        store: of the servers.
        attempts: how often the closure is tried; the last one does not die.
        together: how many of them begin at the same time.
        cuts: how many connections break.
    """
    act = lru_cache(None)(lambda kept, kind, attempt: _act(store, kept, kind, attempt))
    model = _Model(PROGRAMS[program], act, attempts, program == "arbiter")
    start = model.start(together, cuts)
    seen, todo, wrong = {start}, deque([start]), []
    while todo:
        world = todo.popleft()
        found = list(model.steps(world))
        wrong += model.check(world, is_end=not found)
        for following in found:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return len(seen), wrong


def _act(kind_of_store: type[Store], kept: Kept, kind: str, attempt: int) -> tuple[Kept, Any]:
    """Let a real store do something."""
    store = kind_of_store()
    store.create(VARIABLE, np.array(kept.times, np.int32))
    if kept.applied >= 0:
        store.applied[CLOSURE] = kept.applied
    if kept.fences:
        store.fences[CLOSURE] = set(kept.fences)
    for staged in kept.staged:
        store.staged[Token(CLOSURE, staged)] = (store.checked(ADD), b"")
    token = Token(CLOSURE, attempt)
    answer: Any
    if kind in ("push", "stage"):
        answer = getattr(store, kind)(token, ADD)
    elif kind in ("commit", "drop"):
        answer = getattr(store, kind)(token)
    elif kind == "inquire":
        answer = store.inquire(token)
    else:
        answer = store.decide(token, kind == "keep")
    after = Kept(
        store.applied.get(CLOSURE, -1),
        frozenset(t.attempt for t in store.staged),
        frozenset(store.fences.get(CLOSURE, ())),
        int(store.held(0).value),
    )
    return after, answer


def _put(row: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*row[:i], value, *row[i + 1 :])


def _put2(table: tuple[Any, ...], i: int, j: int, value: Any) -> tuple[Any, ...]:
    return _put(table, i, _put(table[i], j, value))


class _Model:
    def __init__(self, program: list[Any], act: Any, attempts: int, arbiter: bool) -> None:
        self.program, self.act, self.attempts = program, act, attempts
        self.home = 0 if arbiter else None
        self.concerned = {server for _, servers in program for server in servers}

    def start(self, together: int, cuts: int) -> World:
        table = ((((),) * SERVERS),) * self.attempts
        world = World(
            servers=(Kept(),) * SERVERS,
            workers=(Worker(),) * self.attempts,
            recoveries=(Recovery(),) * self.attempts,
            requests=table,
            ghosts=table,
            replies=table,
            inquiries=((),) * SERVERS,
            findings=((),) * SERVERS,
            cuts=cuts,
        )
        for attempt in range(together):
            world = self._next_phase(world, attempt)
        return world

    def check(self, world: World, is_end: bool) -> list[str]:
        wrong = [f"applied twice: {world}" for kept in world.servers if kept.times > 1]
        counts = [world.servers[server].times for server in self.concerned]
        if world.is_done and counts != [1] * len(counts):
            wrong.append(f"done, but applied {counts}: {world}")
        if is_end and not world.is_done:
            wrong.append(f"never done: {world}")
        return wrong

    def steps(self, world: World) -> Iterator[World]:
        """All that can happen next."""
        for attempt in range(self.attempts):
            yield from self._steps_of(world, attempt)
        for server in range(SERVERS):
            yield from self._inquire(world, server)

    def _steps_of(self, world: World, attempt: int) -> Iterator[World]:
        worker = world.workers[attempt]
        is_last = attempt == self.attempts - 1
        if worker.state == "running" and not is_last:
            yield replace(world, workers=_put(world.workers, attempt, worker._replace(state="dead")))
        for server in range(SERVERS):
            yield from self._deliver(world, attempt, server)
            yield from self._answer(world, attempt, server)
        if world.is_done or world.recoveries[attempt].state != "running":
            return
        if worker.state == "done":  # it tells the coordinator
            yield replace(world, is_done=True)
        if worker.state == "refused" and self.home is not None:  # another attempt counts, or is fenced
            yield self._over(world, attempt)
        if worker.state != "idle" and not is_last:  # it is believed lost, rightly or not
            asked = tuple((*queue, ("inquire", attempt)) for queue in world.inquiries)
            recoveries = _put(world.recoveries, attempt, Recovery("asking"))
            yield replace(world, inquiries=asked, recoveries=recoveries)

    def _deliver(self, world: World, attempt: int, server: int) -> Iterator[World]:
        """What a worker has sent arrives, is lost, or arrives later."""
        worker = world.workers[attempt]
        for name in ("requests", "ghosts"):
            table = getattr(world, name)
            queue = table[attempt][server]
            if not queue:
                continue
            kept, reply = self.act(world.servers[server], queue[0], attempt)
            after = replace(
                world,
                servers=_put(world.servers, server, kept),
                **{name: _put2(table, attempt, server, queue[1:])},
            )
            if name == "requests" and worker.state != "dead":
                replies = (*world.replies[attempt][server], reply)
                after = replace(after, replies=_put2(world.replies, attempt, server, replies))
            yield after
            if name == "ghosts" or worker.state == "dead":
                yield replace(world, **{name: _put2(table, attempt, server, ())})
        if world.cuts and worker.state == "running" and server in worker.waiting:
            again = (self.program[worker.phase][0],)
            yield replace(
                world,
                requests=_put2(world.requests, attempt, server, again),
                ghosts=_put2(world.ghosts, attempt, server, world.requests[attempt][server]),
                replies=_put2(world.replies, attempt, server, ()),
                cuts=world.cuts - 1,
            )

    def _answer(self, world: World, attempt: int, server: int) -> Iterator[World]:
        """A worker gets an answer."""
        worker, queue = world.workers[attempt], world.replies[attempt][server]
        if not queue or worker.state == "dead":
            return
        world = replace(world, replies=_put2(world.replies, attempt, server, queue[1:]))
        if worker.state != "running":
            yield world
        elif queue[0] is Outcome.REFUSED:
            yield self._refused(world, attempt)
        else:
            worker = worker._replace(waiting=worker.waiting - {server})
            world = replace(world, workers=_put(world.workers, attempt, worker))
            yield world if worker.waiting else self._next_phase(world, attempt)

    def _refused(self, world: World, attempt: int) -> World:
        worker = world.workers[attempt]
        requests = world.requests
        if self.program[worker.phase][0] != "commit":
            for kind, servers in self.program:
                for server in servers if kind == "stage" else ():
                    queue = (*requests[attempt][server], "drop")
                    requests = _put2(requests, attempt, server, queue)
        worker = worker._replace(state="refused")
        return replace(world, requests=requests, workers=_put(world.workers, attempt, worker))

    def _next_phase(self, world: World, attempt: int) -> World:
        phase = world.workers[attempt].phase + 1
        if phase == len(self.program):
            worker = world.workers[attempt]._replace(state="done")
            return replace(world, workers=_put(world.workers, attempt, worker))
        kind, servers = self.program[phase]
        worker = Worker("running", phase, frozenset(servers))
        requests = world.requests
        for server in servers:
            queue = (*requests[attempt][server], kind)
            requests = _put2(requests, attempt, server, queue)
        return replace(world, workers=_put(world.workers, attempt, worker), requests=requests)

    # -- the coordinator -------------------------------------------------------------------------

    def _inquire(self, world: World, server: int) -> Iterator[World]:
        queue = world.inquiries[server]
        if queue:
            kind, attempt = queue[0]
            kept, answer = self.act(world.servers[server], kind, attempt)
            yield replace(
                world,
                servers=_put(world.servers, server, kept),
                inquiries=_put(world.inquiries, server, queue[1:]),
                findings=_put(world.findings, server, (*world.findings[server], (attempt, answer))),
            )
        if world.findings[server]:
            (attempt, answer), *rest = world.findings[server]
            world = replace(world, findings=_put(world.findings, server, tuple(rest)))
            yield self._found(world, attempt, server, answer)

    def _found(self, world: World, attempt: int, server: int, answer: Any) -> World:
        state, answers = world.recoveries[attempt]
        answers = tuple(sorted((*answers, (server, answer)), key=lambda found: found[0]))
        recovery = Recovery(state, answers)
        world = replace(world, recoveries=_put(world.recoveries, attempt, recovery))
        if len(answers) < SERVERS:
            return world
        if state == "asking":
            settled = verdict([found for _, found in answers], self.home)
            kind = "keep" if settled.committed else "forget"
            asked = tuple((*queue, (kind, attempt)) for queue in world.inquiries)
            recovery = Recovery(f"deciding {kind}")
            return replace(world, inquiries=asked, recoveries=_put(world.recoveries, attempt, recovery))
        if state == "deciding keep":
            recoveries = _put(world.recoveries, attempt, Recovery("over"))
            return replace(world, is_done=True, recoveries=recoveries)
        return self._over(world, attempt)

    def _over(self, world: World, attempt: int) -> World:
        """An attempt does not count; if no other is under way, the next begins."""
        world = replace(world, recoveries=_put(world.recoveries, attempt, Recovery("over")))
        under_way = [
            i
            for i in range(self.attempts)
            if world.workers[i].state != "idle" and world.recoveries[i].state != "over"
        ]
        idle = [i for i in range(self.attempts) if world.workers[i].state == "idle"]
        if under_way or not idle or world.is_done:
            return world
        return self._next_phase(world, idle[0])
