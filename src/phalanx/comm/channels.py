"""One operation after another between the members of a group, over a connection for each pair.

Every operation begins with a notice from each member to each other: what must be the same for all,
where it was called, and a value. Data follow at once, in the same stream, so comparing costs no round
trip. Nobody finishes an operation before it has seen that the notices of all members are the same.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

_HEADER = struct.Struct("!4sIIII")
_MARK = b"plx1"
_LOOK = 100  # milliseconds between looks at whether the job has failed
_LAST_WORDS = 1.0  # seconds that the notices of others are waited for when one differs
_STAGE = 16 << 10  # bytes that are read ahead of knowing where they belong
_MOST = 1 << 20  # bytes per call of the system, so that sending, receiving and reducing take turns
_MOST_BUFFERS = 32
_LONGEST_NOTICE = 64 << 20

_IN, _OUT = select.POLLIN, select.POLLOUT
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Notice(NamedTuple):
    """What a member says of the operation that it has come to.

    Args:
        same: what must be the same for all members, in words.
        site: where it was called.
        value: what may differ, as JSON has it.
    """

    same: str
    site: str
    value: Any = None


class LinkLostError(ConnectionResetError):
    """The connection to a member has ended, and so has probably the member."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"connection closed by rank {rank}")
        self.rank = rank


class LateError(Exception):
    """Some members have not come, or have stopped, until the deadline."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class DifferentError(Exception):
    """The members have come to different operations."""

    def __init__(self, notices: dict[int, Notice]) -> None:
        super().__init__(notices)
        self.notices = notices


class InterruptedChannelError(Exception):
    """The operation before this one was interrupted, so nobody knows what comes next."""


class _Link:
    """A connection, with what has been read from it and not been used."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._stage = memoryview(bytearray(_STAGE))
        self._start = self._stop = 0

    def take_notice(self) -> tuple[int, bytes, bytes, bytes] | None:
        """The number and the parts of a notice, once all of it is there."""
        if self._stop - self._start < _HEADER.size:
            return None
        mark, number, *lengths = _HEADER.unpack_from(self._stage, self._start)
        size = _HEADER.size + sum(lengths)
        if mark != _MARK or size > _LONGEST_NOTICE:
            raise InterruptedChannelError
        if self._stop - self._start < size:
            self._make_room(size)
            return None
        at = self._start + _HEADER.size
        self._start += size
        parts = []
        for length in lengths:
            parts.append(bytes(self._stage[at : at + length]))
            at += length
        return number, parts[0], parts[1], parts[2]

    def _make_room(self, size: int) -> None:
        if self._start + size > len(self._stage):
            held = bytes(self._stage[self._start : self._stop])
            self._stage = memoryview(bytearray(max(size, _STAGE)))
            self._stage[: len(held)] = held
            self._start, self._stop = 0, len(held)

    def fill(self) -> bool:
        """Read ahead; returns whether anything came."""
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._stop == len(self._stage):
            self._make_room(len(self._stage) + 1 - self._start)
        count = self.sock.recv_into(self._stage[self._stop :])
        self._stop += count
        return count > 0

    def read(self, into: memoryview) -> int:
        """Bytes for a buffer: what was read ahead, else what is there; 0 at the end."""
        held = self._stop - self._start
        if not held:
            return self.sock.recv_into(into[:_MOST])
        count = min(held, len(into))
        into[:count] = self._stage[self._start : self._start + count]
        self._start += count
        return count

    @property
    def holds(self) -> bool:
        """Whether something was read ahead."""
        return self._stop > self._start


class Channel:
    """The connections between the members of a group, for one operation at a time.

    Args:
        rank: this worker.
        sockets: the connection to each other member.
        check: raises if the job has failed.
    """

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], check: Callable[[], None]
    ) -> None:
        self.rank, self.check = rank, check
        self.links = {r: _Link(s) for r, s in sockets.items()}
        self.ranks = {link.sock.fileno(): r for r, link in self.links.items()}
        self.number = 0
        self._transfer: Transfer | None = None
        self.under_way = False
        """Whether an operation was begun that has not been declared finished."""

    def begin(self, notice: Notice, seconds: float) -> Transfer:
        """Begin an operation: the notice goes out before everything else."""
        if self.under_way:
            raise InterruptedChannelError
        self.under_way = True
        self.number = (self.number + 1) % (1 << 32)
        self._transfer = Transfer(self, notice, seconds)
        return self._transfer

    def more(self, seconds: float) -> Transfer:
        """Go on with an operation for which all members have been heard."""
        self._transfer = Transfer(self, None, seconds)
        return self._transfer

    def finish(self) -> None:
        """The operation is over, and the next may begin."""
        self._transfer = None
        self.under_way = False

    def missing(self) -> list[int]:
        """The members that are waited for at the moment; may be called by any thread."""
        transfer = self._transfer
        return [] if transfer is None else transfer.behind()

    def count(self) -> int:
        """How many operations there have been; may be called by any thread."""
        return self.number

    def moved(self) -> float:
        """When something last moved; may be called by any thread."""
        transfer = self._transfer
        return 0.0 if transfer is None else transfer.moved


class Transfer:
    """What is sent to, and received from, the other members of a channel at the same time.

    Args:
        channel: the connections.
        notice: what is told to all members first, and compared with what they tell.
        seconds: how long to wait for their notices, and for something to move afterwards.
    """

    def __init__(self, channel: Channel, notice: Notice | None, seconds: float) -> None:
        self._channel, self._links, self._seconds = channel, channel.links, seconds
        self._poll = select.poll()
        self._masks = dict.fromkeys(self._links, 0)
        self._out: dict[int, deque[memoryview]] = {r: deque() for r in self._links}
        self._in: dict[int, deque[tuple[memoryview, Callable[[], None] | None]]]
        self._in = {r: deque() for r in self._links}
        self._heard: Callable[[int], None] | None = None
        self.notices: dict[int, Notice] = {}
        self._unheard = set() if notice is None else set(self._links)
        self._differs = False
        self._end = self.moved = 0.0
        if notice is not None:
            self.notices[channel.rank] = notice
            self._same = notice.same.encode()
            value = b"" if notice.value is None else json.dumps(notice.value).encode()
            site = notice.site.encode()
            lengths = len(self._same), len(site), len(value)
            header = _HEADER.pack(_MARK, channel.number, *lengths) + self._same + site + value
            for queue in self._out.values():
                queue.append(memoryview(header))

    def send(self, rank: int, data: memoryview) -> None:
        """Send bytes after those before; the memory must stay as it is until the end."""
        if len(data):
            self._out[rank].append(data)

    def expect(self, rank: int, into: memoryview, then: Callable[[], None] | None = None) -> None:
        """Receive bytes after those before; `then` is called when they are all there."""
        if len(into):
            self._in[rank].append((into, then))
        elif then is not None:
            then()

    def run(self, heard: Callable[[int], None] | None = None) -> None:
        """Move everything.

        Args:
            heard: called with a rank when its notice is there; may expect what follows it.
        """
        self._heard = heard
        self.moved = time.monotonic()
        self._end = self.moved + self._seconds
        for rank in self._links:
            self._push(rank)
            self._use_held(rank)
        try:
            while self._wants():
                self._step()
        finally:
            self._heard = None  # it knows this transfer

    def _wants(self) -> bool:
        """Say what is waited for; returns whether there is anything."""
        while any(link.holds and self._in[rank] for rank, link in self._links.items()):
            for rank in self._links:  # what was expected only after it had been read
                self._use_held(rank)
        wanted = False
        for rank, link in self._links.items():
            reads = rank in self._unheard or self._in[rank]
            mask = (_IN if reads else 0) | (_OUT if self._out[rank] else 0)
            if mask != self._masks[rank]:
                self._masks[rank] = mask
                if mask:
                    self._poll.register(link.sock, mask)
                else:
                    self._poll.unregister(link.sock)
            wanted = wanted or bool(mask)
        if self._differs and (not self._unheard or time.monotonic() > self._end):
            raise DifferentError(self.notices)
        return wanted

    def _step(self) -> None:
        events = self._poll.poll(_LOOK)
        for descriptor, event in events:
            rank = self._channel.ranks[descriptor]
            if event & (_IN | _ENDED) and self._masks[rank] & _IN:
                self._pull(rank)
            if event & (_OUT | _ENDED) and self._masks[rank] & _OUT:
                self._push(rank)
        if events and not self._unheard and not self._differs:
            self.moved = time.monotonic()
            self._end = self.moved + self._seconds
        elif not events:
            self._channel.check()
            if time.monotonic() > self._end and not self._differs:
                raise LateError(self.behind())

    def behind(self) -> list[int]:
        """The members that are waited for; [] when everything has moved."""
        if self._unheard:
            return sorted(self._unheard)
        return sorted({r for r, q in self._in.items() if q} or {r for r, q in self._out.items() if q})

    # -- one connection --------------------------------------------------------------------------

    def _push(self, rank: int) -> None:
        queue, sock = self._out[rank], self._links[rank].sock
        if not queue:
            return
        try:
            if len(queue) == 1 or len(queue[0]) >= _MOST:
                count = sock.send(queue[0][:_MOST])
            else:
                count = sock.sendmsg([b[:_MOST] for b in _up_to(queue, _MOST)])
        except BlockingIOError:
            return
        except OSError as error:
            if not self._differs:
                raise LinkLostError(rank) from error
            queue.clear()
            return
        while count:
            if count >= len(queue[0]):
                count -= len(queue.popleft())
            else:
                queue[0] = queue[0][count:]
                count = 0

    def _pull(self, rank: int) -> None:
        link = self._links[rank]
        cause: OSError | None = None
        try:
            came = link.fill() if rank in self._unheard else self._read(rank, link)
        except BlockingIOError:
            return
        except OSError as error:
            came, cause = False, error
        if not came:
            if not self._differs:
                raise LinkLostError(rank) from cause
            self._unheard.discard(rank)  # it has nothing more to say
            self._in[rank].clear()
            return
        self._use_held(rank)

    def _use_held(self, rank: int) -> None:
        """Go as far as what was read ahead reaches."""
        link = self._links[rank]
        if rank in self._unheard:
            found = link.take_notice()
            if found is None:
                return
            self._hear(rank, *found)
        while link.holds and self._in[rank]:
            self._read(rank, link)

    def _hear(self, rank: int, number: int, same: bytes, site: bytes, value: bytes) -> None:
        said = json.loads(value) if value else None
        self.notices[rank] = Notice(same.decode(), site.decode(), said)
        self._unheard.discard(rank)
        if same != self._same or number != self._channel.number or self._differs:
            if not self._differs:
                self._differs = True
                self._end = time.monotonic() + _LAST_WORDS
            for queue in self._in.values():
                queue.clear()  # none of it can be used
        elif self._heard is not None:
            self._heard(rank)

    def _read(self, rank: int, link: _Link) -> bool:
        queue = self._in[rank]
        view, then = queue[0]
        count = link.read(view)
        if count == len(view):
            queue.popleft()
            if then is not None:
                then()
        else:
            queue[0] = (view[count:], then)
        return count > 0


def _up_to(queue: deque[memoryview], most: int) -> list[memoryview]:
    """The first buffers of a queue, of about so many bytes; only the last may be too long."""
    chosen, size = [], 0
    for buffer in islice(queue, _MOST_BUFFERS):
        chosen.append(buffer)
        size += len(buffer)
        if size >= most:
            break
    return chosen
