"""A connection in an event loop: messages in, messages out."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.errors import PhalanxError, UnavailableError
from phalanx.net.event_loop import ENDED, READ, WRITE, EventLoop
from phalanx.net.framing import Decoder, Limits, Message, SendQueue, encode

_log = logging.getLogger(__name__)

_MOST = 1 << 20  # bytes of one call of the system
_LARGEST_BACKLOG = 32 << 20  # bytes that may wait for a peer that does not read


def flush(sock: socket.socket, queue: SendQueue) -> None:
    """Send what a socket that does not block takes."""
    try:
        while queue:
            views = queue.views(_MOST)
            queue.sent(sock.send(views[0]) if len(views) == 1 else sock.sendmsg(views))
    except BlockingIOError:
        pass


class Connection:
    """A socket of which both ends have proved themselves. All of it is for the loop's thread.

    Args:
        loop: waits for the socket.
        sock: belongs to the connection from now on.
        on_message: called with each message; if it raises, the connection is closed for that error.
        on_close: called once when the connection has closed, with why: None if the peer closed it.
        limits: how large messages may be.
        decoder: if memory for buffers shall come from elsewhere.
        backlog: bytes that may wait for a peer that does not read; then it is closed.
        waits: whether it is not closed then, but nothing more of it is read until it reads.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        on_message: Callable[[Message], None],
        on_close: Callable[[Exception | None], None] = lambda _: None,
        *,
        limits: Limits = Limits(),  # noqa: B008 - cannot be changed
        decoder: Decoder | None = None,
        backlog: int = _LARGEST_BACKLOG,
        waits: bool = False,
    ) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._loop, self._limits, self._backlog, self._waits = loop, limits, backlog, waits
        self._on_message, self._on_close = on_message, on_close
        self._decoder = decoder or Decoder(limits)
        self._queue = SendQueue()
        self._is_receiving = False
        self.is_closed = False
        self._mask = READ  # what the loop waits for
        loop.watch(sock, READ, self._on_ready)

    def send(self, fields: Mapping[str, Any], buffers: Sequence[Any] = (), number: int = 0) -> None:
        """Send a message; buffers must stay as they are until they are sent."""
        self.push(encode(Message(fields, buffers, number), self._limits))

    def push(self, pieces: Sequence[memoryview]) -> None:
        """Send a message that was encoded."""
        if self.is_closed:
            return
        self._queue.extend(pieces)
        if not self._is_receiving:  # else what answers several messages is sent at once
            self._flush()

    def close(self, error: Exception | None = None) -> None:
        """Close the connection, for a reason."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._is_receiving:
            with contextlib.suppress(OSError):
                flush(self.socket, self._queue)
        self._loop.forget(self.socket)
        self.socket.close()
        self._on_close(error)

    def _flush(self) -> None:
        try:
            flush(self.socket, self._queue)
        except OSError as error:
            self.close(error)
            return
        reads = self._queue.size <= self._backlog
        if not reads and not self._waits:
            self.close(UnavailableError("The peer does not read what it is sent."))
            return
        mask = (READ if reads else 0) | (WRITE if self._queue else 0)
        if mask != self._mask:
            self._mask = mask
            self._loop.watch(self.socket, mask, self._on_ready)

    def _on_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush()
        if mask & (READ | ENDED) and not self.is_closed:
            self._receive()

    def _receive(self) -> None:
        decoder = self._decoder
        try:
            count = self.socket.recv_into(decoder.buffer())
            if not count:
                self.close()
                return
            decoder.received(count)
            self._is_receiving = True
            while (message := decoder.next()) is not None:
                self._on_message(message)
                if self.is_closed:
                    return
            self._is_receiving = False
            if self._queue:
                self._flush()
        except BlockingIOError:
            return
        except (OSError, PhalanxError) as error:
            self.close(error)
        except Exception as error:  # noqa: BLE001 - the other connections must go on
            _log.exception("A message could not be handled")
            self.close(error)
