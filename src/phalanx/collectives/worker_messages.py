"""Messages between workers, which wait at their receiver until they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait as wait_for_futures
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.collectives import groups
from phalanx.collectives.channels import LateError, Notice
from phalanx.collectives.groups import Group
from phalanx.collectives.handles import Handle
from phalanx.collectives.mismatches import different_arrays
from phalanx.collectives.table import kind, kind_text
from phalanx.collectives.worker_calls import WorkerCall, begin
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.job.hub.worker_status import PeerWait
from phalanx.runtime.deadlines import worker_deadline
from phalanx.runtime.formatting import shown
from phalanx.runtime.futures import settle

_LARGEST_TAG = 1 << 63


def isend(
    x: Any,
    dst: int,
    group: Group | str | None,
    tag: int,
    read: Callable[[Any], np.ndarray[Any, Any]] | None = None,
) -> Handle | None:
    """Send an array to another worker without waiting; it may be changed afterwards.

    Args:
        x: the array.
        dst: who gets it.
        group: of both workers.
        tag: what the receiver asks for.
        read: waits until the array is computed, in the thread that sends, and returns it as it is on
            the host. The array must not be changed, nor its memory be given away, before it is sent.
    """
    call = _begin("send", group, tag, dst, "dst", x)
    if call is None:
        return None
    world, topic = groups.world(), _topic(call, tag)
    data = x if read is not None else np.array(x)
    about = {"dtype": jnp.dtype(x.dtype).name, "shape": list(x.shape), "site": call.site}

    assert world.mailbox is not None
    mailbox = world.mailbox
    wait = PeerWait(world.status, f"send to rank {dst}", call.site, lambda: [dst])
    wait.moved = lambda: mailbox.moved.get(dst, 0.0)
    status = world.status
    if read is not None:
        status.promised[id(wait)] = wait.what

    def run() -> None:
        try:
            with status.keeping(id(wait)):
                world.check()
                content = data if read is None else read(data)
            with wait:
                mailbox.post(dst, topic, about, content.reshape(-1).view(np.uint8))
        except Exception as error:
            cause = world.explain(error, Notice(wait.what, call.site))
            cause.add_note(f"In send, launched at {call.site}.")
            raise cause from error

    future = world.queue(("send", dst)).submit(run)
    return Handle(future, call.site, world.check, wait=wait.blocking)


def _begin(
    name: str, group: Group | str | None, tag: Any, peer: Any, what: str, x: Any
) -> WorkerCall | None:
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


def _topic(call: WorkerCall, tag: int) -> str:
    return f"message {call.group.name} {tag}"


def irecv(template: Any, src: int | None, group: Group | str | None, tag: int) -> Handle | None:
    """Begin to receive an array like `template` from another worker, or from any."""
    call = _begin("recv", group, tag, src, "src", template)
    if call is None:
        return None
    world = groups.world()
    assert world.mailbox is not None
    received = world.mailbox.received
    came = world.mailbox.expect(_topic(call, tag), src)
    future: Future[Any] = Future()
    sources: list[int] = []
    wanted = kind(template)

    def taken() -> Any:
        message = came.result()
        sources.append(message.source)
        dtype, shape = jnp.dtype(message.about["dtype"]), tuple(message.about["shape"])
        if (dtype, shape) != (jnp.dtype(template.dtype), tuple(template.shape)):
            sender, sent, sent_at = message.source, kind_text(dtype, shape), message.about["site"]
            text = different_arrays(
                f"rank {world.rank}", wanted, call.site, f"rank {sender}", sent, sent_at
            )
            raise world.fail("mismatch", text)
        data = message.data.view(dtype).reshape(shape)
        return data if isinstance(template, np.ndarray) else jnp.asarray(data)

    if came.done():  # it was here before it was asked for
        settle(future, taken)
    else:
        queue = world.queue(("receive",))
        came.add_done_callback(lambda _: queue.submit(lambda: settle(future, taken)))
    end = time.monotonic() + worker_deadline()
    others = [r for r in call.group.ranks if r != world.rank] if src is None else [src]

    def check() -> None:
        world.check()
        if time.monotonic() > end and not wait_for_futures([came], 0).done:
            raise world.explain(LateError(others), Notice("recv", call.site))

    @contextmanager
    def waiting() -> Iterator[None]:
        if src is None:  # one of them is enough
            with PeerWait(world.status, "recv from any rank", call.site, lambda: others):
                yield
            return
        channel, number = f"to {world.rank}", lambda: received.get(src, 0) + 1
        wait = PeerWait(world.status, "recv", call.site, lambda: others, channel, number)
        with wait, wait.blocking():
            yield

    return Handle(future, call.site, check, lambda: sources[0], waiting)
