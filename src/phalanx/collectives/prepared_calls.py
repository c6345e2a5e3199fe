"""Small calls between workers that are made again and again, prepared.

The first call of a signature (the operation, the reduction, dtype, shape, group and line) goes the
general way: its arguments are checked, and words are made for what the members must agree on. What
was found is kept for the next call of the same signature, which sends the kept notice with the number
of the call and its data, receives as much from each other member, and compares. So all calls are
compared, prepared or not, and members need not agree on which of theirs are prepared.

A prepared call handles only what is as expected. If a member is late, tells something else or is gone,
the general way goes on where the prepared call has stopped: with its deadline, errors and interrupts.
"""

from __future__ import annotations

import struct
import sys
from _thread import get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx.collectives import groups
from phalanx.collectives.channels import Channel, MemberLink
from phalanx.collectives.groups import Group
from phalanx.collectives.reductions import Array, reduce_into, ufunc_of
from phalanx.collectives.table import Request
from phalanx.collectives.worker_calls import WorkerCall
from phalanx.collectives.workers_on_host import given, is_at_once
from phalanx.collectives.world import World
from phalanx.core.reduction import ReduceOp
from phalanx.runtime.call_site import describe, users_frame
from phalanx.runtime.interrupts import uninterrupted

NAMES = frozenset({"all_reduce", "barrier"})
"""The operations whose calls are prepared."""

_LARGEST = 32 << 10  # bytes of an array; what is larger comes in several pieces
_MOST = 256  # signatures; a program has few that are called often
_PATIENCE = 20  # milliseconds that a prepared call waits for a member
_NUMBER = struct.Struct("!I")
_WAS_HELD = -1  # all that a member sent had been read ahead
_NUMBER_AT = 4  # where a notice has the number of the operation

Key = tuple[Any, ...]


class Signature(NamedTuple):
    """What tells calls apart, and the user's line."""

    key: Key
    frame: FrameType


NOT_DONE = object()
"""What a prepared call gives that must go the general way."""


def signature(name: str, group: Any, x: Any, op: Any, out: Any) -> Signature | None:
    """The signature of a call of `px.comm`; None if such calls are never prepared."""
    if type(op) is ReduceOp:
        op = id(op)  # cheaper to find, and there is one object of each
    elif op is not None and type(op) is not str:
        return None
    kind = None
    if x is not None:
        if type(x) is not np.ndarray and not isinstance(x, jax.Array):
            return None
        kind = (type(x), x.dtype, x.shape)
    if out is not None and out is not x:
        return None
    frame = users_frame(sys._getframe(3))
    if frame is None:
        return None
    members = None if group is None else groups.find(group)
    # Code objects are slow to compare. What is kept keeps them, so that no other has their address.
    key = (name, members, kind, op, out is None, id(frame.f_code), frame.f_lasti)
    return Signature(key, frame)


def attempt(signed: Signature, x: Any, out: Any) -> Any:
    """The result of a call whose signature is prepared; NOT_DONE if it must go the general way."""
    world = groups.world()
    prepared = world.prepared.get(signed.key)
    return NOT_DONE if prepared is None else prepared.run(x, out)


def keep(signed: Signature, group: Group, request: Request) -> None:
    """Prepare for more calls like one that went well."""
    world, x = groups.world(), request.x
    rank, count = world.rank, len(group)
    nbytes = 0 if x is None else x.nbytes
    is_small = nbytes <= _LARGEST and is_at_once(nbytes, count)
    if count == 1 or rank not in group.ranks or not world.is_on_host or not is_small:
        return
    if x is not None and not x.dtype.isnative:
        return
    channel = world.channels.get(group.members)
    if channel is None:
        return
    if len(world.prepared) >= _MOST:
        world.prepared.clear()
    call = WorkerCall(
        request.operation.name, group, group.ranks.index(rank), False, describe(signed.frame)
    )
    world.prepared[signed.key] = PreparedCall(world, channel, call, request, signed.frame.f_code)


class PreparedCall:
    """A call of `px.comm` that is made again and again."""

    def __init__(
        self, world: World, channel: Channel, call: WorkerCall, request: Request, code: CodeType
    ) -> None:
        self._world, self._channel, self._call, self._code = world, channel, call, code
        self._queue = world.queue(call.group.members)
        self._operation, self._op, self._ranks = request.operation, request.op, request.ranks
        x = request.x
        self._shape: Any = None if x is None else x.shape
        self._dtype: Any = None if x is None else x.dtype
        self._head = bytearray(channel.frame(call.notice(request)))
        self._size = len(self._head) + (0 if x is None else x.nbytes)
        self._links = tuple(channel.links.values())
        self._rows: dict[int, Array] = {}
        self._rooms: list[list[Any]] = []  # for the notice of each member, and for its array
        for link in self._links:
            room: list[Any] = [bytearray(len(self._head))]
            if x is not None:
                self._rows[link.rank] = row = np.empty(x.shape, x.dtype)
                room.append(row.reshape(-1).view(np.uint8))
            self._rooms.append(room)
        self._ufunc = None
        if x is not None and len(self._ranks) == 2:
            self._ufunc = ufunc_of(self._op, x.dtype)
            self._other = next(iter(self._rows.values()))
        self._is_first = call.me == 0

    def run(self, x: Any, out: Any) -> Any:
        """The result of another call; NOT_DONE if nothing was done."""
        data = None if x is None else np.asarray(x)
        if data is not None and not data.flags.c_contiguous:
            return NOT_DONE
        # An interrupt in the middle would leave the connections in the middle of something.
        with uninterrupted():
            if not self._queue.enter():
                return NOT_DONE
            try:
                if self._world.has_failed or self._channel.under_way:
                    return NOT_DONE
                self._world.status.threads.add(get_ident())
                if self._swap(data):
                    return self._finish(x, data, out)
                return self._go_on(x, out)
            finally:
                self._queue.leave()

    def _swap(self, data: Array | None) -> bool:
        """Send to, and receive from, all members; returns whether everything is as expected.

        If it is not, the links have what the general way needs to go on.
        """
        channel, head, size, links = self._channel, self._head, self._size, self._links
        _NUMBER.pack_into(head, _NUMBER_AT, channel.count_one())
        pieces: tuple[Any, ...] = (head,) if data is None else (head, data.reshape(-1).view(np.uint8))
        is_expected = True
        for link in links:
            try:
                link.ahead = link.sock.sendmsg(pieces)
            except OSError:  # it is full, or closed
                is_expected = False
            is_expected = is_expected and link.ahead == size
        came: list[tuple[MemberLink, list[Any], int]] = []
        if is_expected:
            for link, into in zip(links, self._rooms, strict=True):
                if link.decoder.holds:  # the general way reads ahead
                    is_expected = link.decoder.take(head, memoryview(into[-1])[: size - len(head)])
                    count = _WAS_HELD if is_expected else 0
                else:
                    count = _receive(link, into)
                    is_expected = count == size and into[0] == head
                came.append((link, into, count))
                if not is_expected:
                    break
        if is_expected:
            for link in links:
                link.ahead = 0
            channel.finish()
            return True
        for link, into, count in came:
            if count == _WAS_HELD:
                link.decoder.give_back(size)
            else:
                link.decoder.put(memoryview(b"".join(into))[:count])
        return False

    def _finish(self, x: Any, data: Array | None, out: Any) -> Any:
        if data is None:
            return None
        # A device copies what is so small, which costs less than to use it in its place.
        result: Array = np.empty(self._shape, self._dtype) if out is None else out
        if self._ufunc is not None:
            if self._is_first:
                self._ufunc(data, self._other, result)
            else:
                self._ufunc(self._other, data, result)
        else:
            rows = [self._rows.get(rank, data) for rank in self._ranks]
            reduce_into(self._op, rows, result)
        return given(x, result, out)

    def _go_on(self, x: Any, out: Any) -> Any:
        """Go on in the general way with what was begun."""
        request = Request(self._operation, self._ranks, x, self._op, out=out, me=self._call.me)
        self._channel.is_ahead = True
        try:
            return self._call.go_on(request)
        finally:
            self._channel.is_ahead = False


def _receive(link: MemberLink, into: list[Any]) -> int:
    """Receive bytes into some buffers; returns how many have come, 0 if none does for a moment."""
    sock = link.sock
    try:
        try:
            return sock.recvmsg_into(into)[0]
        except BlockingIOError:
            return sock.recvmsg_into(into)[0] if link.readable.poll(_PATIENCE) else 0
    except OSError:  # what is wrong, the general way will find
        return 0
