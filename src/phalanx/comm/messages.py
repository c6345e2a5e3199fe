"""Messages between two ranks: send, recv, and several of them at once.

A message waits at its receiver until it is asked for, so that a send never waits for the receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phalanx.collectives import groups, replica_messages, worker_messages
from phalanx.collectives.handles import Handle, Outcome, PendingArray
from phalanx.collectives.perform import GroupLike
from phalanx.collectives.table import as_array
from phalanx.comm.in_place import check_buffer, filled, write
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


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
    return worker_messages.isend(x, dst, group, tag)


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
        found = known.get(op) if isinstance(op, str) else getattr(op, "usual_function", op)
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


def _receive(tensor: Any, src: int | None, group: GroupLike, tag: int) -> Handle | None:
    template = as_array(tensor)
    context = groups.replica()
    if context is not None:
        return replica_messages.irecv(context, template, src, group, tag)
    return worker_messages.irecv(template, src, group, tag)
