"""Messages between replicas that run eagerly.

A letter waits at its receiver until it is asked for. What is being differentiated leaves as its value;
its gradient comes back when the replica that sent it has received something as well, because only then
does the sender's own result depend on the exchange.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.comm import office
from phalanx.comm.calls import kind, like, snapshot
from phalanx.comm.groups import Group
from phalanx.comm.handles import Handle, finished
from phalanx.comm.office import Pending, rank_of
from phalanx.comm.replicas_eager import OwnHandle, ReplicaHandle
from phalanx.core import compat
from phalanx.core.callsite import call_site
from phalanx.core.collective_calls import differentiably
from phalanx.core.errors import CollectiveMismatchError, ContextError, InvalidValueError
from phalanx.core.placement import place as placed
from phalanx.core.replica_context import Rendezvous, ReplicaContext, Wait
from phalanx.execution.eager import EagerRun


@dataclass
class _Letter:
    source: int
    x: Any
    number: int
    site: str
    is_differentiated: bool


@dataclass
class _Expected:
    source: int | None
    receive: Callable[[_Letter], None]


@dataclass
class _Tie:
    """What a replica has sent while it was differentiating, until it receives something."""

    sent: list[tuple[Any, int]] = field(default_factory=list)
    token: Any = None


class _Boxes:
    """The letters of one run, of this process's replicas."""

    def __init__(self) -> None:
        self.letters: dict[Any, list[_Letter]] = {}
        self.expected: dict[Any, list[_Expected]] = {}
        self.ties: dict[int, _Tie] = {}
        self.numbers = 0

    def post(self, key: Any, letter: _Letter) -> None:
        """Give a letter to whoever expects it, or keep it."""
        waiting = self.expected.get(key, [])
        for expected in waiting:
            if expected.source in (None, letter.source):
                waiting.remove(expected)
                expected.receive(letter)
                return
        self.letters.setdefault(key, []).append(letter)

    def expect(self, key: Any, expected: _Expected) -> None:
        """Take a letter that is here, or the next that comes."""
        here = self.letters.get(key, [])
        for letter in here:
            if expected.source in (None, letter.source):
                here.remove(letter)
                expected.receive(letter)
                return
        self.expected.setdefault(key, []).append(expected)


_boxes: weakref.WeakKeyDictionary[Rendezvous, _Boxes] = weakref.WeakKeyDictionary()


def _boxes_of(context: ReplicaContext) -> _Boxes:
    return _boxes.setdefault(context.run, _Boxes())


def isend(context: ReplicaContext, x: Any, dst: int, group: Group, tag: int) -> Handle:
    """Send an array to another replica."""
    boxes, me = _boxes_of(context), rank_of(context)
    follows = _is_differentiated(context, x)
    value = snapshot(compat.primal_value(x) if follows else x, True)
    if not office.is_here(context, dst):
        return _send_outside(context, value, dst, group, tag, follows)
    boxes.numbers += 1
    if follows:
        boxes.ties.setdefault(me, _Tie()).sent.append((x, boxes.numbers))
    key = (group.name, group.ranks, dst, tag)
    boxes.post(key, _Letter(me, value, boxes.numbers, _site(), follows))
    return finished()


def irecv(context: ReplicaContext, template: Any, src: int | None, group: Group, tag: int) -> Handle:
    """Begin to receive an array from another replica, or from any."""
    me = rank_of(context)
    if src is None and not all(office.is_here(context, r) for r in group.ranks):
        raise InvalidValueError(
            "Replicas of several workers receive from one that is named. Received: src=None"
        )
    if src is not None and not office.is_here(context, src):
        return _receive_outside(context, template, src, group, tag)
    future: Future[Any] = Future()
    came: list[_Letter] = []
    wanted, device, site = kind(template), context.device, _site()

    def receive(letter: _Letter) -> None:
        came.append(letter)
        if kind(letter.x) != wanted:
            future.set_exception(
                CollectiveMismatchError(
                    f"Replica {me} receives {wanted} at {site}, but replica {letter.source} sent "
                    f"{kind(letter.x)} at {letter.site}. Shapes and dtypes must be the same."
                )
            )
            return
        with jax.enable_x64(True):
            x = letter.x if isinstance(letter.x, np.ndarray) else placed(letter.x, device)
            if isinstance(template, np.ndarray):
                future.set_result(like(template, x))
            else:
                future.set_result(placed(x, device))

    _boxes_of(context).expect((group.name, group.ranks, me, tag), _Expected(src, receive))
    missing = lambda: [r for r in group.ranks if r != me] if src is None else [src]  # noqa: E731
    pending = Pending(context, future, site, "a message", lambda: None, missing)
    return _LetterHandle(pending, came)


class _LetterHandle(ReplicaHandle):
    """The handle of a receive."""

    def __init__(self, pending: Pending, came: list[_Letter]) -> None:
        super().__init__(pending, lambda: came[0].source)
        self._came = came
        self._tied: list[Any] = []

    def result(self, timeout: float | None = None) -> Any:
        """See `Handle.result`."""
        x = super().result(timeout)
        if not self._tied:
            self._tied.append(_tied(self._pending.context, x, self._came[0]))
        return self._tied[0]


def _site() -> str:
    return str(call_site(until=EagerRun._call.__code__))


# -- gradients -----------------------------------------------------------------------------------


def _is_differentiated(context: ReplicaContext, x: Any) -> bool:
    """Whether this replica differentiates, of its own accord, with respect to `x`."""
    real = jnp.issubdtype(x.dtype, jnp.inexact)
    return compat.is_tracer(x) and real and not context.under_outer_trace


def _tied(context: ReplicaContext, x: Any, letter: _Letter) -> Any:
    """A letter's array, as a function of what this replica has sent before."""
    if context.under_outer_trace:
        return x
    boxes, me = _boxes_of(context), rank_of(context)
    tie = boxes.ties.pop(me, _Tie())
    here = compat.current_trace()
    sent = [(s, number) for s, number in tie.sent if compat.belongs_to(s, here)]
    token = [tie.token] if tie.token is not None and compat.belongs_to(tie.token, here) else []
    if not letter.is_differentiated:
        boxes.ties[me] = tie
        return x
    if not sent and not token:
        raise ContextError(
            f"Replica {letter.source} differentiates what it sent at {letter.site}, but the gradient "
            f"can come back only if replica {me}, inside of the function that it differentiates, sends "
            "before it receives. Let every replica do both, compile the step with px.function, or "
            "send jax.lax.stop_gradient(x) outside of the differentiated function."
        )
    call = _Back(context, jnp.asarray(x), letter, [number for _, number in sent], bool(token))
    out, new = differentiably(call, [s for s, _ in sent] + token)
    boxes.ties[me] = _Tie([], new)
    return out


class _Back:
    """The way back of gradients: those of what came go to the sender, those of what was sent come."""

    def __init__(
        self, context: ReplicaContext, x: jax.Array, letter: _Letter, sent: list[int], token: bool
    ) -> None:
        self.context = context
        self._x, self._letter, self._sent, self._token = x, letter, sent, token

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
        boxes, me = _boxes_of(self.context), rank_of(self.context)
        back = _Letter(me, cotangents[0], self._letter.number, _site(), False)
        boxes.post(("gradient", self._letter.number), back)
        results = []
        for number in self._sent:
            future: Future[Any] = Future()
            boxes.expect(
                ("gradient", number),
                _Expected(None, lambda letter, f=future: f.set_result(letter.x)),  # type: ignore[misc]
            )
            pending = Pending(
                self.context, future, _site(), "the gradient of a message", lambda: None, list
            )
            results.append(placed(pending.wait(), self.context.device))
        return results + ([cotangents[1]] if self._token else [])


# -- replicas of other workers -------------------------------------------------------------------


def _way(context: ReplicaContext, src: int, dst: int, group: Group) -> Group:
    ranks = (office.process_of(context, src), office.process_of(context, dst))
    return Group(f"replica {src} to {dst} in {group.name} {group.ranks}", ranks)


def _send_outside(
    context: ReplicaContext, x: Any, dst: int, group: Group, tag: int, follows: bool
) -> Handle:
    from phalanx.comm import messages

    if follows:
        raise ContextError(
            "Gradients of messages to another worker need compiled replicas: use px.function, or "
            "all_to_all in place of messages."
        )
    way = _way(context, rank_of(context), dst, group)
    with office.outside_of_replicas(context):
        handle = messages.isend(np.asarray(x), way.ranks[1], way, tag)
    assert handle is not None
    return handle


def _receive_outside(
    context: ReplicaContext, template: Any, src: int, group: Group, tag: int
) -> Handle:
    from phalanx.comm import messages

    way = _way(context, src, rank_of(context), group)
    empty = np.zeros(template.shape, template.dtype)
    with office.outside_of_replicas(context):
        _, handle = messages.irecv(empty, way.ranks[0], way, tag)
    assert handle is not None
    return _OutsideHandle(context, handle, template, src)


class _OutsideHandle(OwnHandle):
    """The handle of a message from a replica of another worker."""

    def __init__(self, context: ReplicaContext, handle: Handle, template: Any, src: int) -> None:
        super().__init__(handle.get_future(), "", None, lambda: src)
        self._context, self._handle, self._template = context, handle, template

    def result(self, timeout: float | None = None) -> Any:
        """See `Handle.result`."""
        del timeout
        look = lambda: office.look_at(self._handle)  # noqa: E731
        self._context.wait_until(Wait(self._handle.is_completed, "a message of a worker", look))
        x = self._handle.result()
        return x if isinstance(self._template, np.ndarray) else placed(x, self._context.device)
