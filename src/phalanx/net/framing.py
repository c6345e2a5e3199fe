"""Messages as bytes: JSON fields and raw buffers, of bounded sizes. No sockets in here.

A frame has a prefix (a mark, a number, the length of the fields and the count of buffers), the sizes
of the buffers, the fields as a JSON object, and the buffers. No fields at all take no bytes.

Buffers are not copied on their way out, and large ones are received where they stay.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from phalanx.errors import InvalidValueError, UnavailableError
from phalanx.runtime.formatting import shown

_MARK = b"plx2"
_PREFIX = struct.Struct("!4sIII")
_SMALLEST = _PREFIX.size
_SIZE = 8  # bytes of the size of a buffer
_LONGEST_NUMBER = 100  # digits; then it can still become a number with a fraction
_SMALL = 48 << 10  # bytes of a message that are copied out of the stage at once
_STAGE = 64 << 10  # bytes that are read ahead of knowing where they belong
JOINED = 48 << 10
"""Bytes of buffers that are cheaper to copy than to send on their own."""
_MOST_BUFFERS = 32  # of one call of the system


class ProtocolError(UnavailableError):
    """What came over a connection is not what a member of the job would send."""


class Message(NamedTuple):
    """What one end of a connection tells the other."""

    fields: Mapping[str, Any]  # what JSON has: finite numbers, texts, lists and dicts
    buffers: Sequence[Any] = ()  # raw bytes
    number: int = 0  # of a request and its answer, or of an operation; 0 if there is none


class Limits(NamedTuple):
    """How large messages may be."""

    fields: int = 8 << 20  # bytes of the fields
    buffers: int = 0  # bytes of all buffers together
    most: int = 0  # how many buffers there may be


def encode(message: Message, limits: Limits) -> list[memoryview]:
    r"""A message as pieces of bytes, to be sent one after another.

    >>> [bytes(piece) for piece in encode(Message({"a": 1}, number=3), Limits())]
    [b'plx2\x00\x00\x00\x03\x00\x00\x00\x07\x00\x00\x00\x00{"a":1}']
    """
    fields, buffers, number = message
    body = _body(fields) if fields else b""
    views = [b if type(b) is bytes else _flat(b) for b in buffers]
    sizes = list(map(len, views))
    count, total = len(sizes), sum(sizes)
    if len(body) > limits.fields or total > limits.buffers or count > limits.most:
        raise InvalidValueError(
            f"Values that workers exchange must be small, at most {limits.fields} bytes, with at most "
            f"{limits.most} buffers of {limits.buffers} bytes. "
            f"Received: {len(body)} bytes and {count} buffers of {total} bytes"
        )
    head = _PREFIX.pack(_MARK, number, len(body), count)
    if count:
        head += _sizes(count).pack(*sizes)
    if total <= JOINED:
        return [memoryview(b"".join((head, body, *views)))]
    return [memoryview(head + body), *(memoryview(v) for v in views if len(v))]


def renumbered(frame: bytes, number: int) -> bytes:
    """The bytes of a message with another number."""
    return b"".join((_MARK, number.to_bytes(4, "big"), frame[8:]))


@functools.lru_cache(maxsize=256)
def _sizes(count: int) -> struct.Struct:
    """How the sizes of so many buffers are packed."""
    return struct.Struct(f"!{count}Q")


def _flat(buffer: Any) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _body(fields: Mapping[str, Any]) -> bytes:
    try:
        return _ENCODER.encode(fields).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(
            "Values that workers exchange must be small and plain: finite numbers, texts, lists and "
            f"dicts, as JSON has them. Received: {shown(fields)}"
        ) from error


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields that a peer has sent as JSON."""
    try:
        fields = _DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"A peer sent a message that is no JSON: {body[:80]!r}") from error
    if not isinstance(fields, dict):
        raise ProtocolError(f"A peer sent a message that is no JSON object: {body[:80]!r}")
    return fields


def _whole(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number that is not finite: {text:.40}")
    return number


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_finite)


def _allocate(size: int) -> memoryview:
    return memoryview(bytearray(size))


class Decoder:
    """Bytes in, messages out.

    Put bytes into `buffer`, say with `received` how many, and take messages with `next` until there
    are none. Anything wrong raises `ProtocolError`; the connection must then be closed.

    A protocol may agree that bytes without a frame follow a message: `read` takes those.

    Args:
        limits: how large messages may be.
        allocate: gives memory for a buffer of so many bytes.

    >>> decoder = Decoder(Limits())
    >>> data = bytes(encode(Message({"a": 1}), Limits())[0])
    >>> decoder.buffer()[: len(data)] = data
    >>> decoder.received(len(data))
    >>> decoder.next(), decoder.next()
    (Message(fields={'a': 1}, buffers=[], number=0), None)
    """

    def __init__(self, limits: Limits, allocate: Callable[[int], memoryview] = _allocate) -> None:
        self._limits, self._allocate = limits, allocate
        self._start = self._stop = 0
        self._new_stage(_STAGE)
        self._message: Message | None = None  # whose buffers are not full yet
        self._rooms: deque[memoryview] = deque()
        self._is_direct = False

    @property
    def holds(self) -> bool:
        """Whether something was read ahead."""
        return self._stop > self._start

    def buffer(self) -> memoryview:
        """Where the next bytes of the peer belong."""
        self._is_direct = False
        if self._start == self._stop:
            if self._rooms and len(self._rooms[0]) >= _STAGE:
                self._is_direct = True
                return self._rooms[0]
            if len(self._stage) > _STAGE:
                self._new_stage(_STAGE)
            self._start = self._stop = 0
        elif self._stop == len(self._stage):
            self._make_room(self._stop - self._start + _STAGE)
        return self._stage[self._stop :]

    def received(self, count: int) -> None:
        """So many bytes were put into what `buffer` gave last."""
        if self._is_direct:
            self._is_direct = False
            self._rooms[0] = self._rooms[0][count:]
        else:
            self._stop += count

    def put(self, data: memoryview) -> None:
        """Take bytes of the peer that were received elsewhere."""
        while len(data):
            room = self.buffer()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self.received(count)
            data = data[count:]

    def next(self) -> Message | None:
        """The next message, once all of it is there."""
        if self._message is None:
            if self._stop - self._start < _SMALLEST:
                return None
            self._message = self._head()
            if self._message is None:
                return None
        rooms = self._rooms
        while rooms:
            room = rooms[0]
            count = self.read(room)
            if count < len(room):
                rooms[0] = room[count:]
                return None
            rooms.popleft()
        message, self._message = self._message, None
        return message

    def skip(self, frame: bytes | bytearray) -> bool:
        """Skip the next message if it has exactly these bytes; returns whether it has."""
        stop = self._start + len(frame)
        if self._message or self._stop < stop or not self._memory.startswith(frame, self._start):
            return False
        self._start = stop
        return True

    def take(self, frame: bytes | bytearray, into: memoryview) -> bool:
        """Skip a message and fill a buffer with what follows it, if all of it was read ahead.

        Returns:
            Whether it was. If not, nothing is taken.
        """
        if self._stop - self._start < len(frame) + len(into) or not self.skip(frame):
            return False
        self.read(into)
        return True

    def give_back(self, count: int) -> None:
        """Hold so many bytes again that were taken last."""
        self._start -= count

    def read(self, into: memoryview) -> int:
        """Fill a buffer with what was read ahead; returns how many bytes there were."""
        start = self._start
        count = min(self._stop - start, len(into))
        if count:
            into[:count] = self._stage[start : start + count]
            self._start = start + count
        return count

    def _head(self) -> Message | None:
        """A message whose buffers are still to be filled, once everything before them is there."""
        held = self._stop - self._start
        mark, number, length, count = _PREFIX.unpack_from(self._stage, self._start)
        limits = self._limits
        if mark != _MARK:
            raise ProtocolError("A peer sent what does not begin as a message.")
        if length > limits.fields or count > limits.most:
            raise ProtocolError(
                f"A peer announced a message of {length} bytes and {count} buffers, which is too long."
            )
        size = _PREFIX.size + count * _SIZE + length
        if held < size:
            self._make_room(size)
            return None
        at = self._start + _PREFIX.size
        sizes, total = (), 0
        if count:
            sizes = _sizes(count).unpack_from(self._stage, at)
            total = sum(sizes)
            if total > limits.buffers:
                raise ProtocolError(f"A peer announced buffers of {total} bytes, which is too long.")
            if total <= _SMALL and held < size + total <= _STAGE:  # the rest is about to come
                self._make_room(size + total)
                return None
            at += count * _SIZE
        fields = fields_of(bytes(self._stage[at : at + length])) if length else {}
        self._start = at + length
        if not count:
            return Message(fields, [], number)
        is_here = total <= _SMALL and held >= size + total
        return Message(fields, self._taken(sizes) if is_here else self._open(sizes, total), number)

    def _open(self, sizes: Sequence[int], total: int) -> list[memoryview]:
        """Memory for buffers, most of which are still to come."""
        try:
            buffers = [self._allocate(size) for size in sizes]
        except MemoryError:
            raise ProtocolError(
                f"A peer announced buffers of {total} bytes, for which there is no memory."
            ) from None
        self._rooms.extend(b for b in buffers if len(b))
        return buffers

    def _taken(self, sizes: Sequence[int]) -> list[memoryview]:
        """Buffers that were read ahead, copied."""
        memory, start, buffers = self._memory, self._start, []
        for size in sizes:
            buffers.append(memoryview(memory[start : start + size]))
            start += size
        self._start = start
        return buffers

    def _make_room(self, size: int) -> None:
        """Let so many bytes follow each other in the stage from what is held on."""
        held = self._stage[self._start : self._stop]
        if self._start + size > len(self._stage):
            self._new_stage(max(size, _STAGE))
            self._stage[: len(held)] = held
            self._stop = len(held)

    def _new_stage(self, size: int) -> None:
        self._memory = bytearray(size)
        self._stage = memoryview(self._memory)
        self._start = self._stop = 0


class SendQueue:
    """Bytes on their way out, which are not copied; the memory must stay as it is until they are sent.

    >>> queue = SendQueue()
    >>> queue.extend([memoryview(b"one"), memoryview(b"two")])
    >>> queue.sent(4)
    >>> [bytes(view) for view in queue.views(100)], queue.size
    ([b'wo'], 2)
    """

    def __init__(self) -> None:
        self._views: deque[memoryview] = deque()
        self.size = 0
        """How many bytes wait."""

    def __bool__(self) -> bool:
        return bool(self._views)

    def append(self, view: memoryview) -> None:
        """Send bytes after those before."""
        if len(view):
            self._views.append(view)
            self.size += len(view)

    def extend(self, views: Iterable[memoryview]) -> None:
        """Send several pieces one after another."""
        for view in views:
            self.append(view)

    def views(self, most: int) -> list[memoryview]:
        """What comes first, about so many bytes: none of the pieces is longer than that."""
        if self.size <= most and len(self._views) <= _MOST_BUFFERS:
            return list(self._views)
        chosen, size = [], 0
        for view in islice(self._views, _MOST_BUFFERS):
            chosen.append(view if len(view) <= most else view[:most])
            size += len(view)
            if size >= most:
                break
        return chosen

    def sent(self, count: int) -> None:
        """So many bytes are on their way."""
        views = self._views
        if count == self.size:
            self.clear()
            return
        self.size -= count
        while count:
            first = len(views[0])
            if count < first:
                views[0] = views[0][count:]
                return
            views.popleft()
            count -= first

    def clear(self) -> None:
        """Forget everything."""
        self._views.clear()
        self.size = 0
