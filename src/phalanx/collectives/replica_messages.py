"""Messages between replicas: messages where they run eagerly, permutations where they are compiled."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from phalanx.collectives import eager_messages, groups
from phalanx.collectives.compiled_replicas import CompiledReplicas
from phalanx.collectives.group_rendezvous import rank_of
from phalanx.collectives.groups import Group
from phalanx.collectives.handles import Handle, LazyHandle, finished
from phalanx.collectives.perform import check_replicas
from phalanx.collectives.table import kind
from phalanx.core.replica_context import (
    ReplicaContext,
    Wait,
    is_compiled,
    require_known_values,
    wait_until,
)
from phalanx.errors import CollectiveMismatchError, InvalidTypeError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import REPLICA_AXIS

Peer = Any
"""A rank, an array that is computed from the rank, or for each rank of the group a rank or None."""


def isend(context: ReplicaContext, x: Any, dst: Peer, group: Any, tag: int) -> Handle | None:
    """Send from a replica. See `messages.isend`."""
    found = _checked(context, group, tag)
    if is_compiled(context):
        return _mail(context, found, tag).send(x, _table(dst, found, "dst"), dst)
    me = rank_of(context)
    if me not in found.ranks:
        return None
    to = _one(dst, found, me, "dst")
    return finished() if to is None else eager_messages.isend(context, x, to, found, tag)


def irecv(context: ReplicaContext, x: Any, src: Peer, group: Any, tag: int) -> Handle | None:
    """Receive in a replica. See `messages.irecv`."""
    found = _checked(context, group, tag)
    if is_compiled(context):
        return _mail(context, found, tag).receive(x, _table(src, found, "src"), src)
    me = rank_of(context)
    if me not in found.ranks:
        return None
    sender = None if src is None else _one(src, found, me, "src")
    if sender is None and src is not None:
        return finished(x)
    return eager_messages.irecv(context, x, sender, found, tag)


def _checked(context: ReplicaContext, group: Any, tag: Any) -> Group:
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise InvalidTypeError(f"tag must be a whole number. Received: {shown(tag)}")
    found = check_replicas(groups.find(group))
    if len(found) == 1:
        raise InvalidValueError(f"A message needs a group of at least two. Received: {shown(found)}")
    require_known_values(context, "A message")
    return found


def _one(peer: Peer, group: Group, me: int, what: str) -> int | None:
    """The peer of one replica that runs eagerly."""
    if _is_table(peer):
        place = _table(peer, group, what)[group.ranks.index(me)]  # type: ignore[index]
        return None if place is None else group.ranks[place]
    if isinstance(peer, jax.Array | np.ndarray | np.generic) and not peer.ndim:
        peer = int(compat.primal_value(peer))
    groups.check_rank(peer, what, group)
    if peer == me:
        raise InvalidValueError(f"{what} must be another rank than this replica. Received: {peer}")
    return int(peer)


def _is_table(peer: Peer) -> bool:
    return isinstance(peer, Sequence) and not isinstance(peer, str)


def _table(peer: Peer, group: Group, what: str) -> list[int | None] | None:
    """For each place the place of its peer, if that is known; None if the program computes it."""
    if not _is_table(peer):
        return None
    places = [None if p is None else groups.check_rank(p, what, group) for p in peer]
    real = [p for p in places if p is not None]
    if (
        len(places) != len(group)
        or len(set(real)) < len(real)
        or any(i == p for i, p in enumerate(places))
    ):
        raise InvalidValueError(
            f"{what} as a list has for each of the {len(group)} ranks of the group another rank, each "
            f"at most once, or None. Received: {list(peer)}"
        )
    return places


# -- compiled ----------------------------------------------------------------------------------


@dataclass
class _Message:
    """One half of a message of all replicas: what is sent, or the shape of what is expected."""

    x: Any
    table: list[int | None] | None
    peer: Peer
    future: Future[Any] = field(default_factory=Future)


class _Mail:
    """The messages of one group and tag while a program is traced, in order."""

    def __init__(self, context: ReplicaContext, group: Group) -> None:
        self._context, self._group = context, group
        self._sent: list[_Message] = []
        self._expected: list[_Message] = []

    def send(self, x: Any, table: list[int | None] | None, dst: Peer) -> Handle:
        """All replicas send; whom to is a table, or computed."""
        self._require_many(dst, table, "dst")
        self._sent.append(_Message(jnp.asarray(x), table, dst))
        self._match()
        return finished()

    def receive(self, x: Any, table: list[int | None] | None, src: Peer) -> Handle:
        """All replicas receive."""
        if src is not None:
            self._require_many(src, table, "src")
        message = _Message(jnp.asarray(x), table, src)
        self._expected.append(message)
        self._match()
        future = message.future

        def get(_: float | None) -> Any:
            wait_until(self._context, Wait(future.done, "a message"))
            return future.result()

        return LazyHandle(future, get, source=lambda: src)

    def _match(self) -> None:
        while self._sent and self._expected:
            sent, expected = self._sent.pop(0), self._expected.pop(0)
            if kind(sent.x) != kind(expected.x):
                raise CollectiveMismatchError(
                    f"Replicas receive {kind(expected.x)}, but send {kind(sent.x)}. Shapes and dtypes "
                    "must be the same."
                )
            expected.future.set_result(self._moved(sent, expected))

    def _moved(self, sent: _Message, expected: _Message) -> Any:
        count, ranks = len(self._group), self._group.ranks
        replicas = CompiledReplicas(self._context, self._group, "recv")
        pairs = _pairs(sent.table, expected.table, count)
        if pairs is not None:
            moved = lax.ppermute(sent.x, REPLICA_AXIS, [(ranks[a], ranks[b]) for a, b in pairs])
            gets = {ranks[b] for _, b in pairs}
            total = self._context.num_replicas_in_sync
            if len(gets) == total:
                return moved
            here = jnp.asarray([r in gets for r in range(total)])[
                self._context.replica_id_in_sync_group
            ]
            return jnp.where(here, moved, expected.x)
        rows = replicas.rows(sent.x)
        if expected.peer is None:
            receivers = replicas.rows(jnp.asarray(sent.peer))
            place = jnp.argmax(receivers == self._context.replica_id_in_sync_group)
        else:
            places = [ranks.index(r) if r in ranks else 0 for r in range(max(ranks) + 1)]
            place = jnp.asarray(places)[expected.peer]
        return replicas.or_own(jnp.take(rows, place, axis=0), expected.x)

    def _require_many(self, peer: Peer, table: Any, what: str) -> None:
        computed = isinstance(peer, jax.Array) and not peer.ndim and compat.is_tracer(peer)
        if table is None and not computed:
            raise InvalidValueError(
                f"Where replicas are compiled, all of them make the call, so {what} is computed from "
                "px.comm.get_rank(), or a list that has for each rank of the group the other one or "
                f"None. Received: {shown(peer)}"
            )


def _pairs(
    sent: list[int | None] | None, expected: list[int | None] | None, count: int
) -> list[tuple[int, int]] | None:
    """Who sends to whom, if that is known."""
    if sent is not None:
        pairs = [(a, b) for a, b in enumerate(sent) if b is not None]
        if expected is not None and sorted(pairs) != sorted(
            (a, b) for b, a in enumerate(expected) if a is not None
        ):
            raise CollectiveMismatchError(
                f"The lists of senders and receivers do not fit. Received: dst={sent}, src={expected}"
            )
        return pairs
    if expected is not None:
        return [(a, b) for b, a in enumerate(expected) if a is not None]
    return [(0, 1), (1, 0)] if count == 2 else None


_mails: weakref.WeakKeyDictionary[ReplicaContext, dict[Any, _Mail]] = weakref.WeakKeyDictionary()


def _mail(context: ReplicaContext, group: Group, tag: int) -> _Mail:
    known = _mails.setdefault(context, {})
    key = (compat.current_trace(), group.name, group.ranks, tag)
    return known.setdefault(key, _Mail(context, group))
