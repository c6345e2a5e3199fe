"""Messages between replicas that run eagerly.

A message waits at its receiver until it is asked for. What is being differentiated leaves as its value;
its gradient comes back when the replica that sent it has received something as well, because only then
does the sender's own result depend on the exchange.
"""

from __future__ import annotations

import functools
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.collectives import group_rendezvous, worker_messages
from phalanx.collectives.eager_replicas import replica_handle, snapshot
from phalanx.collectives.group_rendezvous import PendingResult, rank_of
from phalanx.collectives.groups import Group
from phalanx.collectives.handles import Handle, OwnHandle, finished
from phalanx.collectives.inbox import Inbox
from phalanx.collectives.mismatches import different_arrays
from phalanx.collectives.table import kind, like
from phalanx.core.collective_calls import differentiably
from phalanx.core.replica_context import (
    Rendezvous,
    ReplicaContext,
    Wait,
    is_transformed,
    replica_device,
    run_of,
    wait_until,
)
from phalanx.errors import CollectiveMismatchError, ContextError, InvalidValueError
from phalanx.execution.eager import site_in_replica
from phalanx.runtime import compat
from phalanx.runtime.futures import settle
from phalanx.runtime.placement import place as placed


@dataclass
class _Message:
    source: int
    x: Any
    number: int
    site: str
    is_differentiated: bool


@dataclass
class _Tie:
    """What a replica has sent while it was differentiating, until it receives something."""

    sent: list[tuple[Any, int]] = field(default_factory=list)
    token: Any = None


class _Mailboxes:
    """The messages of one run, of this process's replicas."""

    def __init__(self) -> None:
        self.inbox: Inbox[_Message] = Inbox()
        self.ties: dict[int, _Tie] = {}
        self.numbers = 0


_mailboxes: weakref.WeakKeyDictionary[Rendezvous, _Mailboxes] = weakref.WeakKeyDictionary()


def _mailboxes_of(context: ReplicaContext) -> _Mailboxes:
    return _mailboxes.setdefault(run_of(context), _Mailboxes())


def isend(context: ReplicaContext, x: Any, dst: int, group: Group, tag: int) -> Handle:
    """Send an array to another replica."""
    boxes, me = _mailboxes_of(context), rank_of(context)
    follows = _is_differentiated(context, x)
    value = snapshot(compat.primal_value(x) if follows else x)
    if not group_rendezvous.is_here(context, dst):
        return _send_outside(context, value, dst, group, tag, follows)
    boxes.numbers += 1
    if follows:
        boxes.ties.setdefault(me, _Tie()).sent.append((x, boxes.numbers))
    key = (group.name, group.ranks, dst, tag)
    boxes.inbox.put(key, _Message(me, value, boxes.numbers, _site(), follows))
    return finished()


def irecv(context: ReplicaContext, template: Any, src: int | None, group: Group, tag: int) -> Handle:
    """Begin to receive an array from another replica, or from any."""
    me = rank_of(context)
    if src is None and not all(group_rendezvous.is_here(context, r) for r in group.ranks):
        raise InvalidValueError(
            "Replicas of several workers receive from one that is named. Received: src=None"
        )
    if src is not None and not group_rendezvous.is_here(context, src):
        return _receive_outside(context, template, src, group, tag)
    came = _mailboxes_of(context).inbox.take((group.name, group.ranks, me, tag), src)
    future: Future[Any] = Future()
    wanted, device, site = kind(template), replica_device(context), _site()

    def received() -> Any:
        message = came.result()
        if kind(message.x) != wanted:
            who, sender = f"replica {me}", f"replica {message.source}"
            raise CollectiveMismatchError(
                different_arrays(who, wanted, site, sender, kind(message.x), message.site)
            )
        with jax.enable_x64(True):
            x = message.x if isinstance(message.x, np.ndarray) else placed(message.x, device)
            return like(template, x) if isinstance(template, np.ndarray) else placed(x, device)

    came.add_done_callback(lambda _: settle(future, received))
    missing = lambda: [r for r in group.ranks if r != me] if src is None else [src]  # noqa: E731
    pending = PendingResult(context, future, site, "a message", lambda: None, missing)
    get = functools.cache(lambda: _tied(context, pending.wait(), came.result()))
    return replica_handle(pending, get, lambda: came.result().source)


def _site() -> str:
    return str(site_in_replica())


# -- gradients -----------------------------------------------------------------------------------


def _is_differentiated(context: ReplicaContext, x: Any) -> bool:
    """Whether this replica differentiates, of its own accord, with respect to `x`."""
    real = jnp.issubdtype(x.dtype, jnp.inexact)
    return compat.is_tracer(x) and real and not is_transformed(context)


def _tied(context: ReplicaContext, x: Any, message: _Message) -> Any:
    """A message's array, as a function of what this replica has sent before."""
    if is_transformed(context):
        return x
    boxes, me = _mailboxes_of(context), rank_of(context)
    tie = boxes.ties.pop(me, _Tie())
    here = compat.current_trace()
    sent = [(s, number) for s, number in tie.sent if compat.belongs_to(s, here)]
    token = [tie.token] if tie.token is not None and compat.belongs_to(tie.token, here) else []
    if not message.is_differentiated:
        boxes.ties[me] = tie
        return x
    if not sent and not token:
        raise ContextError(
            f"Replica {message.source} differentiates what it sent at {message.site}, but the gradient "
            f"can come back only if replica {me}, inside the function that it differentiates, sends "
            "before it receives. Let every replica do both, compile the step with px.function, or "
            "send jax.lax.stop_gradient(x) outside of the differentiated function."
        )
    call = _Back(context, jnp.asarray(x), message, [number for _, number in sent], bool(token))
    out, new = differentiably(call, [s for s, _ in sent] + token)
    boxes.ties[me] = _Tie([], new)
    return out


class _Back:
    """The way back of gradients: those of what came go to the sender, those of what was sent come."""

    def __init__(
        self, context: ReplicaContext, x: jax.Array, message: _Message, sent: list[int], token: bool
    ) -> None:
        self.context = context
        self._x, self._message, self._sent, self._token = x, message, sent, token

    def forward(self, xs: list[Any]) -> list[Any]:
        """What came, and something that the next receive depends on."""
        del xs
        return [self._x, jnp.zeros(())]

    def backward(self, cotangents: list[Any]) -> list[Any]:
        """The gradients of what was sent."""
        if any(compat.is_tracer(c) for c in cotangents):
            raise ContextError(
                "Gradients of gradients of messages need compiled replicas: use px.function, or "
                "all_to_all in place of messages."
            )
        boxes, me = _mailboxes_of(self.context), rank_of(self.context)
        back = _Message(me, cotangents[0], self._message.number, _site(), False)
        boxes.inbox.put(("gradient", self._message.number), back)
        results = []
        for number in self._sent:
            future = boxes.inbox.take(("gradient", number))
            what = "the gradient of a message"
            pending = PendingResult(self.context, future, _site(), what, lambda: None, list)
            results.append(placed(pending.wait().x, replica_device(self.context)))
        return results + ([cotangents[1]] if self._token else [])


# -- replicas of other workers -------------------------------------------------------------------


def _way(context: ReplicaContext, src: int, dst: int, group: Group) -> Group:
    ranks = (group_rendezvous.process_of(context, src), group_rendezvous.process_of(context, dst))
    return Group(f"replica {src} to {dst} in {group.name} {group.ranks}", ranks)


def _send_outside(
    context: ReplicaContext, x: Any, dst: int, group: Group, tag: int, follows: bool
) -> Handle:
    if follows:
        raise ContextError(
            "Gradients of messages to another worker need compiled replicas: use px.function, or "
            "all_to_all in place of messages."
        )
    way = _way(context, rank_of(context), dst, group)
    with group_rendezvous.outside_of_replicas(context):
        handle = worker_messages.isend(np.asarray(x), way.ranks[1], way, tag)
    assert handle is not None
    return handle


def _receive_outside(
    context: ReplicaContext, template: Any, src: int, group: Group, tag: int
) -> Handle:
    way = _way(context, src, rank_of(context), group)
    empty = np.zeros(template.shape, template.dtype)
    with group_rendezvous.outside_of_replicas(context):
        handle = worker_messages.irecv(empty, way.ranks[0], way, tag)
    assert handle is not None

    def get(_: float | None) -> Any:
        look = lambda: group_rendezvous.look_at(handle)  # noqa: E731
        wait_until(context, Wait(handle.is_completed, "a message of a worker", look))
        x = handle.result()
        return x if isinstance(template, np.ndarray) else placed(x, replica_device(context))

    return OwnHandle(handle.get_future(), get, source=lambda: src)
