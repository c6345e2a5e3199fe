"""Messages between two ranks: send, recv, and several of them at once.

A message waits at its receiver until it is asked for, so that a send never waits for the receive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.comm import groups, replica_messages
from phalanx.comm.calls import Call, Outcome, as_array, begin, kind
from phalanx.comm.channels import LateError, Notice
from phalanx.comm.handles import Handle, PendingArray
from phalanx.comm.in_place import check_buffer, filled, write
from phalanx.comm.mailbox import Message
from phalanx.comm.operations import GroupLike
from phalanx.core.deadlines import worker_deadline
from phalanx.core.errors import InvalidTypeError, InvalidValueError
from phalanx.core.showing import shown

_LARGEST_TAG = 1 << 63


def isend(tensor: Any, dst: int, group: GroupLike = None, tag: int = 0) -> Handle | None:
    """Send an array to rank `dst` without waiting; returns the handle.

    Args:
        tensor: the array; it may be changed afterwards.
        dst: the receiver, as a rank in the world. Where replicas are compiled all of them send, so it
            is computed from `get_rank`, or a list with a rank or None for each rank of the group. Such
            lists do in replicas that run eagerly as well.
        group: a group that both are members of; messages of different groups do not meet.
        tag: messages with different tags do not meet.
    """
    x = as_array(tensor)
    context = groups.replica()
    if context is not None:
        return replica_messages.isend(context, x, dst, group, tag)
    call = _begin("send", group, tag, dst, "dst", x)
    if call is None:
        return None
    world, topic = groups.world(), _topic(call, tag)
    data = np.array(x)
    about = {"dtype": jnp.dtype(x.dtype).name, "shape": list(x.shape), "site": call.site}

    wait = world.wait_for_receiver(dst, call.site)

    def run() -> None:
        try:
            world.check()
            assert world.mailbox is not None
            with wait:
                world.mailbox.post(dst, topic, about, data.reshape(-1).view(np.uint8))
        except Exception as error:
            cause = world.explain(error, Notice(wait.what, call.site))
            cause.add_note(f"In send, launched at {call.site}.")
            raise cause from error

    future = world.lane(("send", dst)).submit(run)
    return Handle(future, call.site, world.check, wait=wait.blocking)


def send(tensor: Any, dst: int, group: GroupLike = None, tag: int = 0) -> None:
    """Send an array to rank `dst`; returns when it is on its way. See `isend`."""
    handle = isend(tensor, dst, group, tag)
    if handle is not None:
        handle.result()


def irecv(tensor: Any, src: int | None = None, group: GroupLike = None, tag: int = 0) -> Outcome:
    """Begin to receive an array; returns an array that waits when it is used, and the handle.

    Args:
        tensor: anything with the shape and dtype of what will come; it is left as it is.
        src: the sender, as a rank in the world; None takes the first message from any. In replicas as
            `dst` of `isend`; one for which the list has None gets `tensor` back.
        group: as the sender gave it.
        tag: as the sender gave it.
    """
    handle = _receive(tensor, src, group, tag)
    return (None, None) if handle is None else (PendingArray(handle), handle)


def recv(tensor: Any, src: int | None = None, group: GroupLike = None, tag: int = 0) -> Any:
    """Receive an array, and return it. See `irecv`."""
    handle = _receive(tensor, src, group, tag)
    return None if handle is None else handle.result()


def irecv_(tensor: Any, src: int | None = None, group: GroupLike = None, tag: int = 0) -> Handle | None:
    """Begin to receive into a buffer. See `irecv`; the handle's `source_rank` says who sent it."""
    check_buffer(tensor)
    handle = _receive(tensor, src, group, tag)
    return filled((None, handle), lambda out: write(tensor, out), True)


def recv_(tensor: Any, src: int | None = None, group: GroupLike = None, tag: int = 0) -> int | None:
    """Receive into a buffer; returns the rank of the sender. See `irecv`."""
    handle = irecv_(tensor, src, group, tag)
    return None if handle is None else handle.source_rank()


class P2POp:
    """One message of `batch_isend_irecv`.

    Args:
        op: `isend`, `irecv` or `irecv_`, or their names.
        tensor: the array to send; the shape and dtype of what will come, or the buffer.
        peer: the other rank.
        group: a group that both are members of.
        tag: messages with different tags do not meet.
    """

    def __init__(
        self,
        op: Callable[..., Any] | str,
        tensor: Any,
        peer: int,
        group: GroupLike = None,
        tag: int = 0,
    ) -> None:
        known: dict[str, Callable[..., Any]] = {"isend": isend, "irecv": irecv, "irecv_": irecv_}
        found = known.get(op) if isinstance(op, str) else op
        if found not in known.values():
            raise InvalidValueError(
                f"op must be px.comm.isend, px.comm.irecv or px.comm.irecv_. Received: {shown(op)}"
            )
        self.op, self.tensor, self.peer, self.group, self.tag = found, tensor, peer, group, tag


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Handle]:
    """Begin several sends and receives; returns their handles in the same order.

    The `result` of a receive's handle is the array.
    """
    if not isinstance(p2p_op_list, Sequence) or not p2p_op_list:
        raise InvalidValueError(
            f"p2p_op_list must be a list of at least one P2POp. Received: {shown(p2p_op_list)}"
        )
    if not all(isinstance(p, P2POp) for p in p2p_op_list):
        raise InvalidTypeError(f"p2p_op_list must be a list of P2POp. Received: {shown(p2p_op_list)}")
    handles: list[Handle] = []
    for p in p2p_op_list:
        outcome = p.op(p.tensor, p.peer, p.group, p.tag)  # type: ignore[misc]
        handle = outcome[1] if isinstance(outcome, tuple) else outcome
        if handle is not None:
            handles.append(handle)
    return handles


# -- inside ----------------------------------------------------------------------------------------


def _begin(name: str, group: GroupLike, tag: Any, peer: Any, what: str, x: Any) -> Call | None:
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise InvalidTypeError(f"tag must be a whole number. Received: {shown(tag)}")
    if abs(tag) >= _LARGEST_TAG:
        raise InvalidValueError(f"tag must be less than {_LARGEST_TAG}. Received: {shown(tag)}")
    if peer is not None:
        groups.check_rank(peer, what, groups.find(group))
    call = begin(name, group, True, [x])
    if call is not None and peer == groups.world().rank:
        raise InvalidValueError(f"{what} must be another rank than this process. Received: {peer}")
    if call is not None and len(call.group) == 1:
        raise InvalidValueError(f"{name} needs a group of at least two. Received: {shown(call.group)}")
    return call


def _topic(call: Call, tag: int) -> str:
    return f"message {call.group.name} {tag}"


def _receive(tensor: Any, src: int | None, group: GroupLike, tag: int) -> Handle | None:
    template = as_array(tensor)
    context = groups.replica()
    if context is not None:
        return replica_messages.irecv(context, template, src, group, tag)
    call = _begin("recv", group, tag, src, "src", template)
    if call is None:
        return None
    world = groups.world()
    assert world.mailbox is not None
    came = world.mailbox.expect(_topic(call, tag), src)
    future: Future[Any] = Future()
    sources: list[int] = []
    wanted = kind(template)

    def take(done: Future[Message]) -> None:
        try:
            message = done.result()
            sources.append(message.source)
            dtype, shape = jnp.dtype(message.about["dtype"]), tuple(message.about["shape"])
            if (dtype, shape) != (jnp.dtype(template.dtype), tuple(template.shape)):
                sent = f"{dtype.name}[{','.join(map(str, shape))}]"
                text = (
                    f"rank {world.rank} receives {wanted} at {call.site}, but rank {message.source} "
                    f"sent {sent} at {message.about['site']}. Shapes and dtypes must be the same."
                )
                future.set_exception(world.fail("mismatch", text))
                return
            data = message.data.view(dtype).reshape(shape)
            future.set_result(data if isinstance(template, np.ndarray) else jnp.asarray(data))
        except Exception as error:  # noqa: BLE001 - the future has it
            future.set_exception(error)

    came.add_done_callback(lambda done: world.lane(("receive",)).submit(lambda: take(done)))
    end = time.monotonic() + worker_deadline()
    others = [r for r in call.group.ranks if r != world.rank] if src is None else [src]

    def check() -> None:
        world.check()
        if time.monotonic() > end and not wait_for_futures([came], 0).done:
            raise world.explain(LateError(others), Notice("recv", call.site))

    @contextmanager
    def waiting() -> Iterator[None]:
        if src is None:  # one of them is enough
            with world.wait_for_any(others, call.site):
                yield
            return
        wait = world.wait_for_message(src, call.site)
        with wait, wait.blocking():
            yield

    return Handle(future, call.site, check, lambda: sources[0], waiting)
