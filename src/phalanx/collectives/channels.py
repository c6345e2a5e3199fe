"""One operation after another between the members of a group, over a connection for each pair.

Every operation begins with a notice from each member to each other: what must be the same for all,
where it was called, and a value. Data follow at once, in the same stream, so comparing costs no round
trip. No member finishes an operation before it has seen that all notices are the same.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from phalanx.net.event_loop import ENDED, READ, WRITE, Poller
from phalanx.net.framing import (
    Decoder,
    Limits,
    Message,
    ProtocolError,
    SendQueue,
    encode,
    renumbered,
)

_LIMITS = Limits(fields=64 << 20, buffers=64 << 20, most=2)
_LOOK = 0.1  # seconds between looks at whether the job has failed
_LAST_WORDS = 1.0  # seconds that the notices of others are waited for when one differs
_MOST = 1 << 20  # bytes per call of the system, so that sending, receiving and reducing take turns


class Notice(NamedTuple):
    """What a member says of the operation that it has come to."""

    same: str  # what must be the same for all members, in words
    site: str  # where it was called
    value: Any = None  # what may differ, as JSON has it


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
    """The operation before this one was interrupted, so it is not known what comes next."""


class MemberLink:
    """The connection to a member, and what is on its way."""

    __slots__ = ("ahead", "decoder", "incoming", "mask", "out", "rank", "readable", "sock")

    def __init__(self, rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.rank, self.sock = rank, sock
        self.decoder = Decoder(_LIMITS)
        self.out = SendQueue()
        self.incoming: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self.mask = 0  # what the poller waits for
        self.ahead = 0  # bytes of the next transfer that were sent before it
        self.readable = select.poll()
        self.readable.register(sock, select.POLLIN)

    def read(self) -> int:
        """Read bytes that are expected: what was read ahead, else what is there; 0 at the end."""
        view, then = self.incoming[0]
        if self.decoder.holds:
            count = self.decoder.read(view)
        else:
            count = self.sock.recv_into(view if len(view) <= _MOST else view[:_MOST])
        if count == len(view):
            self.incoming.popleft()
            if then is not None:
                then()
        else:
            self.incoming[0] = (view[count:], then)
        return count


class Channel:
    """The connections between the members of a group, for one operation at a time."""

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], check: Callable[[], None]
    ) -> None:
        self.rank, self.check = rank, check
        self.links = {r: MemberLink(r, s) for r, s in sockets.items()}
        self.by_descriptor = {link.sock.fileno(): link for link in self.links.values()}
        self.poller = Poller()
        self.number = 0
        self._transfer: Transfer | None = None
        self._last: tuple[Notice, bytes] | None = None
        self.under_way = False
        """Whether an operation was begun that has not been declared finished."""
        self.is_ahead = False
        """Whether `begin` goes on with an operation that `count_one` has begun."""

    def begin(self, notice: Notice, seconds: float) -> Transfer:
        """Begin an operation: the notice goes out before everything else."""
        if not self.is_ahead:
            self.count_one()
        self.is_ahead = False
        self._transfer = Transfer(self, notice, seconds)
        return self._transfer

    def count_one(self) -> int:
        """The number of an operation that begins."""
        if self.under_way:
            raise InterruptedChannelError
        self.under_way = True
        self.number = number = (self.number + 1) % (1 << 32)
        return number

    def frame(self, notice: Notice) -> bytes:
        """What is told to all members; most operations are called again and again."""
        if self._last is not None and self._last[0] == notice:
            return renumbered(self._last[1], self.number)
        value = {} if notice.value is None else {"value": notice.value}
        message = Message(value, [notice.same.encode(), notice.site.encode()], self.number)
        frame = b"".join(encode(message, _LIMITS))
        self._last = (notice, frame) if notice.value is None else None
        return frame

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

    `seconds` is how long to wait for the notices of the others, and for something to move afterwards.
    """

    def __init__(self, channel: Channel, notice: Notice | None, seconds: float) -> None:
        self._channel, self._links, self._seconds = channel, channel.links, seconds
        self._heard: Callable[[int], None] | None = None
        self.notices: dict[int, Notice] = {}
        self._unheard: set[int] = set()
        self._differs = False
        self._end = self.moved = 0.0
        if notice is not None:
            self._own = self.notices[channel.rank] = notice
            self._unheard.update(self._links)
            self._frame = channel.frame(notice)
            for link in self._links.values():
                link.out.append(memoryview(self._frame))

    def send(self, rank: int, data: memoryview) -> None:
        """Send bytes after those before; the memory must stay as it is until the end."""
        self._links[rank].out.append(data)

    def expect(self, rank: int, into: memoryview, then: Callable[[], None] | None = None) -> None:
        """Receive bytes after those before; `then` is called when they are all there."""
        if len(into):
            self._links[rank].incoming.append((into, then))
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
        links = self._links.values()
        for link in links:
            if link.ahead:
                link.out.sent(link.ahead)
                link.ahead = 0
            if link.out:
                self._push(link)
        for link in links:
            if link.decoder.holds:
                self._use_held(link)
            elif len(links) == 1 and self._reads(link):
                self._pull(link)  # it may be there already: that costs less than to ask
        try:
            while self._wants():
                self._step()
        finally:
            self._heard = None  # it knows this transfer

    def _reads(self, link: MemberLink) -> bool:
        return bool(link.incoming) or link.rank in self._unheard

    def _wants(self) -> bool:
        """Say what is waited for; returns whether there is anything."""
        links = self._links.values()
        is_used = True
        while is_used:
            is_used = False
            for link in links:  # what was expected only after it had been read
                if link.incoming and link.decoder.holds:
                    self._use_held(link)
                    is_used = True
        wanted = 0
        for link in links:
            mask = (READ if self._reads(link) else 0) | (WRITE if link.out else 0)
            wanted |= mask
            # Whether it can be read stays asked for, as most operations need that.
            mask |= link.mask & READ
            if mask != link.mask:
                self._watch(link, mask)
        if self._differs and (not self._unheard or time.monotonic() > self._end):
            raise DifferentError(self.notices)
        return wanted != 0

    def _watch(self, link: MemberLink, mask: int) -> None:
        try:
            self._channel.poller.watch(link.sock.fileno(), mask)
        except (OSError, ValueError) as error:  # it was closed
            raise LinkLostError(link.rank) from error
        link.mask = mask

    def _step(self) -> None:
        events = self._channel.poller.wait(_LOOK)
        for descriptor, event in events:
            link = self._channel.by_descriptor[descriptor]
            if event & (READ | ENDED):
                if self._reads(link):
                    self._pull(link)
                else:
                    self._watch(link, WRITE if link.out else 0)
            if event & (WRITE | ENDED) and link.out:
                self._push(link)
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
        links = self._links.values()
        return sorted([x.rank for x in links if x.incoming] or [x.rank for x in links if x.out])

    # -- one connection --------------------------------------------------------------------------

    def _push(self, link: MemberLink) -> None:
        try:
            link.out.sent(link.sock.sendmsg(link.out.views(_MOST)))
        except BlockingIOError:
            return
        except OSError as error:
            if not self._differs:
                raise LinkLostError(link.rank) from error
            link.out.clear()

    def _pull(self, link: MemberLink) -> None:
        cause: OSError | None = None
        try:
            if link.rank in self._unheard:
                count = link.sock.recv_into(link.decoder.buffer())
                link.decoder.received(count)
            else:
                count = link.read()
        except BlockingIOError:
            return
        except OSError as error:
            count, cause = 0, error
        if not count:
            if not self._differs:
                raise LinkLostError(link.rank) from cause
            self._unheard.discard(link.rank)  # it has nothing more to say
            link.incoming.clear()
            return
        self._use_held(link)

    def _use_held(self, link: MemberLink) -> None:
        """Go as far as what was read ahead reaches."""
        if link.rank in self._unheard and not self._hear(link):
            return
        while link.incoming and link.decoder.holds:
            link.read()

    def _hear(self, link: MemberLink) -> bool:
        """Compare what a member says with the own notice; returns whether it is all there."""
        if link.decoder.skip(self._frame):
            notice, is_same = self._own, True
        else:
            try:
                message = link.decoder.next()
                if message is None:
                    return False
                same, site = (str(text, "utf-8") for text in message.buffers)
            except (ProtocolError, ValueError) as error:
                raise InterruptedChannelError from error
            notice = Notice(same, site, message.fields.get("value"))
            is_same = same == self._own.same and message.number == self._channel.number
        self.notices[link.rank] = notice
        self._unheard.discard(link.rank)
        if not is_same or self._differs:
            if not self._differs:
                self._differs = True
                self._end = time.monotonic() + _LAST_WORDS
            for other in self._links.values():
                other.incoming.clear()  # none of it can be used
        elif self._heard is not None:
            self._heard(link.rank)
        return True
