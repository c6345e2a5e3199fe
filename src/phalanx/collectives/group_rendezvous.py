"""Where replicas of one run that are eager leave things for each other.

Each operation of a group is a meeting: its members bring something, the last to come hands out the
results. One replica runs at a time, so nothing here needs a lock. Members in other processes are met by
the workers' collectives.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from phalanx.collectives import groups, worker_calls
from phalanx.collectives.groups import Group
from phalanx.collectives.handles import Handle
from phalanx.collectives.mismatches import different_operations
from phalanx.collectives.table import Request
from phalanx.core import context as ctx
from phalanx.core.replica_context import (
    Rendezvous,
    ReplicaContext,
    Wait,
    index_of,
    replica_device,
    run_of,
    wait_until,
)
from phalanx.errors import CollectiveMismatchError, DeadlineExceededError
from phalanx.execution.eager import site_in_replica
from phalanx.runtime.futures import settle

_LOOK = 0.05  # seconds to wait for other processes before looking around


@dataclass
class Contribution:
    """What a member brings to a meeting.

    `same` is the operation and what else must be the same for all, as text.
    """

    same: str
    value: Any
    site: str


@dataclass
class Meeting:
    """One operation of a group, until all its members of this process have their results."""

    brought: dict[int, Contribution] = field(default_factory=dict)
    finish: dict[int, Callable[[], None]] = field(default_factory=dict)
    once: dict[str, Any] = field(default_factory=dict)
    others: Handle | None = None

    def shared(self, name: str, compute: Callable[[], Any]) -> Any:
        """Something that is computed once for all members of this process."""
        if name not in self.once:
            self.once[name] = compute()
        return self.once[name]


class GroupRendezvous:
    """The meetings of one run."""

    def __init__(self) -> None:
        self._meetings: dict[Any, Meeting] = {}
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any) -> int:
        """How often this was asked for a key, from 0."""
        self._numbers[key] = self._numbers.get(key, -1) + 1
        return self._numbers[key]

    def meet(
        self,
        context: ReplicaContext,
        group: Group,
        same: str,
        value: Any,
        take: Callable[[Meeting], Any],
    ) -> PendingResult:
        """Come to the group's next meeting.

        `take` makes this member's result of what all have brought, as soon as they have.
        """
        rank = rank_of(context)
        key = (group.name, group.ranks, self.number((group.name, group.ranks, rank)))
        meeting = self._meetings.setdefault(key, Meeting())
        mine = Contribution(same, value, str(site_in_replica()))
        check_same(meeting.brought, rank, mine)
        meeting.brought[rank] = mine
        future: Future[Any] = Future()
        device = replica_device(context)

        def finish() -> None:
            with jax.default_device(device), jax.enable_x64(True):
                settle(future, lambda: take(meeting))

        meeting.finish[rank] = finish
        here = [r for r in group.ranks if is_here(context, r)]
        if len(meeting.brought) == len(here):
            if len(here) < len(group):
                meeting.others = _ask_others(context, group, meeting)
            else:
                self._close(key)

        def look() -> None:
            if meeting.others is not None and key in self._meetings and meeting.others.is_completed():
                _add_others(meeting)
                self._close(key)

        missing = lambda: [r for r in group.ranks if r not in meeting.brought]  # noqa: E731
        return PendingResult(context, future, mine.site, same, look, missing, meeting)

    def _close(self, key: Any) -> None:
        meeting = self._meetings.pop(key)
        for finish in meeting.finish.values():
            finish()


@dataclass
class PendingResult:
    """A result that a replica waits for."""

    context: ReplicaContext
    future: Future[Any]
    site: str
    what: str
    look: Callable[[], None]
    missing: Callable[[], list[int]]
    meeting: Meeting | None = None

    def done(self) -> bool:
        """Whether it is there."""
        if not self.future.done():
            self.look()
        return self.future.done()

    def wait(self) -> Any:
        """Let the other replicas go on until it is there."""
        if not self.done():
            outside = self.meeting is not None and any(
                not is_here(self.context, r) for r in self.missing()
            )
            look = self._look_outside if outside else None
            what = f"{self.what} with the replicas {self.missing()}"
            wait_until(self.context, Wait(self.done, what, look))
        return self.future.result()

    def _look_outside(self) -> None:
        others = self.meeting.others if self.meeting is not None else None
        if others is not None:
            look_at(others)


def look_at(handle: Handle) -> None:
    """Wait a moment for an operation of workers; raises if the job has failed."""
    try:
        handle.result(_LOOK)
    except DeadlineExceededError:
        if handle.is_completed():
            raise


def check_same(brought: dict[int, Contribution], rank: int, mine: Contribution) -> None:
    """Require that a member comes for the same as those that are here."""
    for other, theirs in brought.items():
        if theirs.same != mine.same:
            both = sorted([(other, theirs), (rank, mine)], key=lambda one: one[0])
            said = {f"replica {r}": (b.same, b.site) for r, b in both}
            raise CollectiveMismatchError(different_operations(said))


# -- replicas of several processes -------------------------------------------------------------


def rank_of(context: ReplicaContext) -> int:
    """The rank of a replica that runs eagerly."""
    return index_of(context) + context.strategy.extended._first_replica


def process_of(context: ReplicaContext, rank: int) -> int:
    """The worker that runs a replica of several workers."""
    return rank // (context.num_replicas_in_sync // groups.world().size)


def is_here(context: ReplicaContext, rank: int) -> bool:
    """Whether this process runs a replica."""
    if context.strategy.extended._span is None:
        return True
    return process_of(context, rank) == groups.world().rank


def outside_of_replicas(context: ReplicaContext) -> Any:
    """Where the workers, not the replicas, are the ranks."""
    return ctx.push(ctx.Mode(context.strategy))


def processes_of(context: ReplicaContext, group: Group) -> Group:
    """The group of the workers that run the members of a group."""
    ranks = sorted({process_of(context, r) for r in group.ranks})
    return Group(f"workers of the replicas of {group.name} {group.ranks}", tuple(ranks))


def _ask_others(context: ReplicaContext, group: Group, meeting: Meeting) -> Handle:
    """Bring what this process has to the workers' meeting, and begin to wait for the rest."""
    known = {
        r: Contribution(b.same, jax.tree.map(np.asarray, b.value), b.site)
        for r, b in meeting.brought.items()
    }
    data = np.frombuffer(pickle.dumps(known), np.uint8)
    with outside_of_replicas(context):
        members = processes_of(context, group)
        request = Request.of("all_gather", members.ranks, data)
        _, handle = worker_calls.perform(request, members, async_op=True)
    assert handle is not None
    return handle


def _add_others(meeting: Meeting) -> None:
    assert meeting.others is not None
    for data in meeting.others.result():
        for rank, theirs in pickle.loads(np.asarray(data).tobytes()).items():
            if rank not in meeting.brought:
                check_same(meeting.brought, rank, theirs)
                meeting.brought[rank] = theirs


_rendezvous: weakref.WeakKeyDictionary[Rendezvous, GroupRendezvous] = weakref.WeakKeyDictionary()


def rendezvous_of(context: ReplicaContext) -> GroupRendezvous:
    """The rendezvous of a replica's run."""
    return _rendezvous.setdefault(run_of(context), GroupRendezvous())
